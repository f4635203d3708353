"""Typed dictionaries of the data sets' arguments; a test compares them with the classes."""

from typing import Literal, TypedDict

from vitlab.data.files.decode import ColorProfile
from vitlab.data.loading.order import Sampling
from vitlab.data.loading.transforms import Augment, CropMode, Interpolation


class FixedTestRuleArgs(TypedDict, total=False):
    """Arguments of :class:`vitlab.data.files.splits.SplitRule` for data with a given test split."""

    split_seed: int
    split_file: str | None
    fold: str | int | None
    subset: float


class RuleArgs(FixedTestRuleArgs, total=False):
    """Arguments of :class:`vitlab.data.files.splits.SplitRule`."""

    val_share: float
    test_share: float


class FrameArgs(FixedTestRuleArgs, total=False):
    """Arguments of every data set that are passed on unread; see :class:`vitlab.data.base.ImageData`."""

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
    crop_mode: CropMode
    mean: list[float] | None
    std: list[float] | None
    value_range: list[float] | None
    max_pixels: int
    color_profile: ColorProfile


class EncodedArgs(FrameArgs, RuleArgs, total=False):
    """Arguments that :class:`vitlab.data.photos.Photos` passes on."""


class SizedArgs(FrameArgs, total=False):
    """Arguments of every data set, with the size of its images, and how they are cropped."""

    img_size: int | list[int] | None
    crop_scale: float | None
    crop_pct: float | None


class FixedTestArgs(SizedArgs, total=False):
    """Arguments of a data set in memory that has a test split of its own."""

    val_share: float


class DataArgs(FixedTestArgs, total=False):
    """Arguments of a data set in memory whose test split is cut off."""

    test_share: float


class TableArgs(DataArgs, total=False):
    """Arguments that :class:`vitlab.data.table.Table` passes on."""

    max_unreadable: int
    class_map: str | None


class PhotoArgs(TableArgs, total=False):
    """Arguments of photos of any size."""

    in_chans: Literal[1, 3]


class ImageNetArgs(SizedArgs, total=False):
    """What :class:`vitlab.data.imagenet.ImageNet` passes on: all but `val_share`, whose default is its own."""

    test_share: float
    max_unreadable: int
    class_map: str | None
    in_chans: Literal[1, 3]
