"""The digits that ship with scikit-learn."""

from typing import Unpack

import torch

from vitlab.data.arguments import DataArgs
from vitlab.data.base import ImageData, Part
from vitlab.data.files.sets import TensorImages


class Digits(ImageData):
    """1,797 handwritten digits of 8 x 8 pixels and 17 grey levels, Alpaydin and Kaynak 1998 (UCI 80).

    Args:
        **data: Passed to :class:`ImageData`.

    Example:
        >>> data = Digits(batch_size=64)
        >>> data.setup("fit")
        >>> images, labels = next(iter(data.train_dataloader()))[:2]
        >>> images.shape, images.dtype
        (torch.Size([64, 1, 8, 8]), torch.uint8)
    """

    def __init__(self, **data: Unpack[DataArgs]) -> None:
        super().__init__(native_size=(8, 8), in_chans=1, class_names=[str(digit) for digit in range(10)], **data)

    def read(self, part: Part) -> TensorImages:
        """Return all images."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        pixels = torch.from_numpy(images).reshape(-1, 1, 8, 8).mul(255 / 16).round().to(torch.uint8)
        return TensorImages(pixels, torch.from_numpy(labels).long())
