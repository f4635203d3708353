"""Images that keep their aspect ratio: sizes in whole patches, and batches with a fixed number of patches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitlab.data.loading.transforms import Interpolation, RandomCropFlip, Size, resampling, to_image

_NAME = "data.native_patch"


class Tokens(NamedTuple):
    """The number of patches of each image of a split, and the largest number that an image can have."""

    counts: NDArray[np.int64]
    most: int

    def starts(self, indices: NDArray[np.int64], images: int) -> list[int]:
        """Return the start of each batch of ``indices``, and the end; a batch fits into ``images`` largest images.

        >>> Tokens(np.array([4, 1, 1, 3, 2]), most=4).starts(np.array([0, 1, 2, 3, 4]), images=1)
        [0, 1, 3, 4, 5]
        """
        ends, starts = np.cumsum(self.counts[indices]), [0]
        while starts[-1] < len(indices):
            used = ends[starts[-1] - 1] if starts[-1] else 0
            starts.append(int(np.searchsorted(ends, used + images * self.most, side="right")))
        return starts

    def steps(self, images: int) -> int:
        """Return the smallest number of such batches, over all orders."""
        return -(-int(self.counts.sum()) // (images * self.most))


class OwnRatio:
    """Sizes of images in whole patches, at most as many as ``img_size`` has, the nearest of each side.

    Images are not enlarged by more than half a patch a side, or to one patch.

    Args:
        patch: Side of a patch, in pixels.
        img_size: Height and width of an image with the most patches, in pixels.
        interpolation: How images are resized.

    >>> own = OwnRatio(16, (224, 224), "bicubic")
    >>> own.grid((480, 640)), own.grid((40, 100)), own.grid((100, 40))
    ((12, 16), (2, 6), (6, 2))
    """

    def __init__(self, patch: int, img_size: Size, interpolation: Interpolation) -> None:
        if patch < 1 or img_size[0] % patch or img_size[1] % patch:
            raise ValueError(f"`{_NAME}` must divide `data.img_size`, got {patch} and {list(img_size)}")
        self.patch, self.interpolation = patch, interpolation
        self.most = (img_size[0] // patch) * (img_size[1] // patch)

    def __str__(self) -> str:
        return f"at their own aspect ratio, up to {self.most} patches of {self.patch}x{self.patch}"

    def grid(self, size: Sequence[int]) -> tuple[int, int]:
        """Return rows and columns of the patches of an image of this height and width."""
        height, width = size[0] / self.patch, size[1] / self.patch
        scale = min(1.0, (self.most / (height * width)) ** 0.5)
        h, w = (max(1, round(side * scale)) for side in (height, width))
        while h * w > self.most:  # both were rounded up, or one is 1
            h, w = (h - 1, w) if (h * width > w * height and h > 1) or w == 1 else (h, w - 1)
        return h, w

    def tokens(self, sizes: NDArray[np.int32]) -> Tokens:
        """Return the numbers of patches of images of ``(N, 2)`` heights and widths."""
        return Tokens(np.array([h * w for h, w in map(self.grid, sizes.tolist())], dtype=np.int64), self.most)

    def size(self, size: Sequence[int]) -> Size:
        """Return the resized height and width of an image of this height and width, in pixels."""
        h, w = self.grid(size)
        return h * self.patch, w * self.patch

    def __call__(self, image: Image.Image, seed: int = 0) -> Image.Image:
        """Resize a whole image; the seed is not used."""
        return image.resize(self.size((image.height, image.width))[::-1], resampling(self.interpolation))


class OwnRatioCropFlip:
    """Resize a random crop of an image to the size of the whole image, and mirror it with probability 1/2.

    Args:
        own_ratio: The sizes.
        scale: Smallest share of the image's area in the crop.
    """

    def __init__(self, own_ratio: OwnRatio, scale: float) -> None:
        self.own_ratio, self.scale = own_ratio, scale

    def __call__(self, image: Image.Image, seed: int) -> Image.Image:
        return to_image(self.cut(np.asarray(image), seed))

    def cut(self, pixels: np.ndarray, seed: int) -> Tensor:
        """Map uint8 ``(H, W)`` or ``(H, W, C)`` to ``(C, h, w)``; only the crop is read."""
        size = self.own_ratio.size(pixels.shape[:2])
        return RandomCropFlip(size, self.scale, self.own_ratio.interpolation).cut(pixels, seed)


def check_own_ratio(patch: int | None, native_size: Size | None, others: dict[str, Any]) -> None:
    """Refuse images of one size, and options that do not work with `data.native_patch`."""
    if patch is None:
        return
    if native_size:
        raise ValueError(f"`{_NAME}` is for images of different sizes, and these all have {list(native_size)}")
    if given := [f"`data.{name}`" for name, is_given in others.items() if is_given]:
        raise ValueError(f"`{_NAME}` packs each image once, whole or cropped: leave out {', '.join(given)}")
