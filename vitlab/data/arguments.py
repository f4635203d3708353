"""The arguments that data sets hand on, by name and type; a test holds them against the classes."""

from typing import Literal, TypedDict

from vitlab.data.loading.order import Sampling
from vitlab.data.loading.transforms import Augment, Interpolation


class OwnRuleArgs(TypedDict, total=False):
    """Arguments of :class:`vitlab.data.files.splits.SplitRule`, where the test split is given."""

    split_seed: int
    split_file: str | None
    fold: str | None
    subset: float


class RuleArgs(OwnRuleArgs, total=False):
    """Arguments of :class:`vitlab.data.files.splits.SplitRule`."""

    val_share: float
    test_share: float


class FrameArgs(OwnRuleArgs, total=False):
    """Arguments of every data set; see :class:`vitlab.data.base.ImageData`."""

    batch_size: int
    img_size_schedule: list[list[int]] | None
    native_patch: int | None
    num_workers: int
    augment: Augment
    sampling: Sampling
    repeats: int
    random_erasing: float
    mixup: float
    cutmix: float
    interpolation: Interpolation
    value_range: list[float] | None
    max_pixels: int


class OwnTestArgs(FrameArgs, total=False):
    """Arguments of a data set in memory that has a test split of its own."""

    img_size: int | list[int] | None
    crop_scale: float | None
    crop_pct: float | None
    val_share: float


class DataArgs(OwnTestArgs, total=False):
    """Arguments of a data set in memory whose test split is cut off."""

    test_share: float


class CIFARArgs(OwnTestArgs, total=False):
    """Arguments of :class:`vitlab.data.known.cifar.CIFAR10`."""

    root: str
    download: bool


class EncodedArgs(FrameArgs, total=False):
    """What :class:`vitlab.data.photos.Photos` hands on."""

    val_share: float
    test_share: float


class OwnPhotoArgs(FrameArgs, total=False):
    """Arguments of photos of any size."""

    img_size: int | list[int] | None
    in_chans: Literal[1, 3]
    max_unreadable: int
    class_map: str | None
    crop_scale: float | None
    crop_pct: float | None
    test_share: float


class TableArgs(EncodedArgs, total=False):
    """What :class:`vitlab.data.table.Table` hands on."""

    img_size: int | list[int] | None
    max_unreadable: int
    class_map: str | None
    crop_scale: float | None
    crop_pct: float | None


class PhotoArgs(OwnPhotoArgs, total=False):
    """Arguments of photos of any size, the share of validation included."""

    val_share: float
