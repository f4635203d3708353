"""Labelled images as a data set has them, before augmentation."""

import hashlib
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vitlab.data.splits import Indices, split_hash


class TensorImages:
    """Labelled images in memory.

    Args:
        images: ``(N, C, H, W)`` uint8.
        labels: ``(N,)`` classes.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def ids(self) -> list[bytes]:
        """The identity of each image: a digest of its pixels."""
        return [hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in self.images.numpy()]

    @property
    def split_hash(self) -> str:
        """16 hex digits that name this set of labelled images."""
        return split_hash(self.ids, self.labels.numpy())

    def take(self, indices: Indices) -> "TensorImages":
        """Return the images at ``indices`` as a set of their own."""
        index = torch.from_numpy(indices)
        taken = TensorImages(self.images[index], self.labels[index])
        if "ids" in self.__dict__:
            taken.__dict__["ids"] = [self.ids[i] for i in indices.tolist()]
        return taken

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and standard deviation of each channel over all pixels, of values in [0, 1]."""
        total = np.zeros((2, self.images.shape[1]))
        for chunk in self.images.split(1024):
            values = chunk.double().div(255).transpose(0, 1).flatten(1)  # (C, n H W)
            total += torch.stack([values.sum(1), values.square().sum(1)]).numpy()
        mean, square = total / (self.images[:, 0].numel() or 1)
        std = np.sqrt(np.maximum(square - mean**2, 0.0))
        return tuple(mean.tolist()), tuple(np.where(std > 1e-6, std, 1.0).tolist())
