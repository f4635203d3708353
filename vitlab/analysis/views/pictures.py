"""Images without classes, for networks whose training data is not available."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitlab.data.base import ImageData
from vitlab.data.files.decode import decode
from vitlab.data.files.sets import Statistics

Transform = Callable[[Image.Image], Tensor]


class PreparedPictures(ImageData):
    """Replaces a data set when there is only a function that prepares images.

    Args:
        transform: Maps a PIL image to a normalized ``(C, H, W)``.
        img_size: Height and width of what it makes.
        in_chans: Number of its channels.

    Example:
        >>> data = PreparedPictures(lambda image: torch.tensor([[[image.getpixel((0, 0)) / 255 - 0.5]]]), (1, 1), 1)
        >>> data.statistics()  # what black and white become tells how pixels are normalized
        ((0.5,), (1.0,))
    """

    def __init__(self, transform: Transform, img_size: tuple[int, int], in_chans: int) -> None:
        super().__init__(None, in_chans, [], img_size=list(img_size))
        self.transform, self.targets = transform, {"kind": "none"}

    def eval_transform(self, image: Image.Image) -> Tensor:
        """Map one image to a normalized ``(C, H, W)``."""
        return self.transform(image.convert(self.decoding.mode))

    def statistics(self) -> Statistics:
        """Return the mean and standard deviation that the function takes from each channel's pixels in [0, 1]."""
        if self._statistics is None:
            h, w = self.img_size
            sizes = (max(w, 8), max(h, 8))
            low, high = (
                self.eval_transform(Image.new(self.decoding.mode, sizes, color)).flatten(1).mean(dim=1).double()
                for color in ("black", "white")
            )
            std = 1 / (high - low)
            mean = [round(float(value), 6) for value in -low * std]
            self._statistics = tuple(mean), tuple(round(float(value), 6) for value in std)
        return self._statistics


def as_tensor(pictures: Tensor | Sequence[Any], data: ImageData) -> Tensor:
    """Return images or image files as normalized ``(B, C, H, W)``; tensors are returned unchanged."""
    if isinstance(pictures, Tensor):
        return pictures
    images = [decode(str(p), data.decoding) if isinstance(p, str | Path) else p for p in pictures]
    return torch.stack([data.eval_transform(image) for image in images])
