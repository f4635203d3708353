"""Images of different sizes as one batch."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor


class PackedBatch:
    """Images of different sizes, cut into patches; networks take them in place of ``(B, C, H, W)``.

    Dehghani et al. 2023 (arXiv:2307.06304): the tokens of several images form one sequence.

    Args:
        patches: ``(T, C, p, p)`` patches of all images, one image after the other, each in raster order.
        grids: Rows and columns of the patches of each image.

    >>> images = PackedBatch.of([torch.rand(3, 32, 48), torch.rand(3, 64, 16)], patch=16)
    >>> images.patches.shape, images.grids, len(images)
    (torch.Size([10, 3, 16, 16]), [(2, 3), (4, 1)], 2)
    """

    def __init__(self, patches: Tensor, grids: Sequence[tuple[int, int]]) -> None:
        self.patches, self.grids = patches, list(grids)

    @classmethod
    def of(cls, images: Sequence[Tensor], patch: int) -> Self:
        """Return ``(C, H, W)`` images, sides multiples of ``patch`` pixels, as one batch."""
        cut = [image.unflatten(2, (-1, patch)).unflatten(1, (-1, patch)) for image in images]  # (C, h, p, w, p) each
        patches = torch.cat([image.permute(1, 3, 0, 2, 4).flatten(0, 1) for image in cut])
        return cls(patches, [(image.shape[1], image.shape[3]) for image in cut])

    def images(self) -> list[Tensor]:
        """Return the ``(C, H, W)`` images."""
        parts = self.patches.split([h * w for h, w in self.grids])
        maps = [part.unflatten(0, grid).permute(2, 0, 3, 1, 4) for part, grid in zip(parts, self.grids, strict=True)]
        return [x.flatten(3).flatten(1, 2) for x in maps]  # of (C, h, p, w, p)

    def __len__(self) -> int:
        return len(self.grids)

    def __getitem__(self, rows: Sequence[int]) -> Self:
        """Return the images of these numbers."""
        parts = self.patches.split([h * w for h, w in self.grids])
        return type(self)(torch.cat([parts[i] for i in rows]), [self.grids[i] for i in rows])

    def on(self, patches: Tensor) -> Self:
        """Return the same images with these values."""
        return type(self)(patches, self.grids)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the batch on another device or in another type, as ``Tensor.to`` does."""
        return self.on(self.patches.to(*args, **kwargs))

    def pin_memory(self) -> Self:
        """Return the batch in pinned memory."""
        return self.on(self.patches.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Mark the batch as used by a stream, as ``Tensor.record_stream`` does."""
        self.patches.record_stream(stream)

    @property
    def device(self) -> torch.device:
        """The device of the patches."""
        return self.patches.device
