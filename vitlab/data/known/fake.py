"""Random images, for tests and dry runs."""

from typing import Unpack

import torch

from vitlab.data.arguments import DataArgs
from vitlab.data.base import ImageData, Part
from vitlab.data.files.sets import TensorImages


class FakeData(ImageData):
    """Random images with random labels.

    Args:
        n: Number of images.
        native_size: Side of the square images, in pixels.
        in_chans: Number of channels, 1 or 3.
        num_classes: Number of classes K.
        **data: Passed to :class:`ImageData`.

    Example:
        >>> data = FakeData(n=20, native_size=8)
        >>> data.setup("fit")
        >>> {split: len(images) for split, images in data.splits.items()}
        {'train': 13, 'val': 3}
    """

    def __init__(
        self, n: int = 64, native_size: int = 32, in_chans: int = 3, num_classes: int = 10, **data: Unpack[DataArgs]
    ) -> None:
        names = [f"class {k}" for k in range(num_classes)]
        super().__init__(native_size=(native_size, native_size), in_chans=in_chans, class_names=names, **data)
        self.shape = (n, in_chans, native_size, native_size)

    def read(self, part: Part) -> TensorImages:
        """Return all images; every call returns the same."""
        rng = torch.Generator().manual_seed(0)
        images = torch.randint(256, self.shape, generator=rng, dtype=torch.uint8)
        return TensorImages(images, torch.arange(len(images)) % self.num_classes)
