"""The arguments that data sets hand on, by name and type; a test holds them against the classes."""

from typing import Literal, Required, TypedDict

from vitlab.data.loading.transforms import Interpolation


class SplitArgs(TypedDict, total=False):
    """Arguments of every data set; see :class:`vitlab.data.base.ImageData`."""

    batch_size: int
    num_workers: int
    augment: str
    crop_scale: float
    repeats: int
    random_erasing: float
    mixup: float
    cutmix: float
    split_seed: int
    split_file: str | None
    fold: str | None
    subset: float
    interpolation: Interpolation


class OwnTestArgs(SplitArgs, total=False):
    """Arguments of a data set in memory that has a test split of its own."""

    img_size: int | list[int] | None
    crop_pct: float
    val_share: float


class DataArgs(OwnTestArgs, total=False):
    """Arguments of a data set in memory whose test split is cut off."""

    test_share: float


class CIFARArgs(OwnTestArgs, total=False):
    """Arguments of :class:`vitlab.data.cifar.CIFAR10`."""

    root: str
    download: bool


class PackedArgs(SplitArgs, total=False):
    """What :class:`vitlab.data.pack.Packed` hands on."""

    val_share: float
    test_share: float


class EncodedArgs(PackedArgs, total=False):
    """What :class:`vitlab.data.photos.Photos` hands on."""

    crop_pct: float


class PhotoArgs(EncodedArgs, total=False):
    """Arguments of photos of any size."""

    img_size: int | list[int]
    in_chans: Literal[1, 3]
    max_unreadable: int


class ImageNetArgs(SplitArgs, total=False):
    """What :class:`vitlab.data.image_folder.ImageNet` hands on."""

    root: Required[str]
    img_size: int | list[int]
    in_chans: Literal[1, 3]
    max_unreadable: int
    crop_pct: float
    test_share: float
