"""Sets of labeled images before augmentation: in memory, or in files."""

import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from vitlab.data.files.decode import Decoding, decode_bytes, reading
from vitlab.data.files.scan import Facts, scan
from vitlab.data.files.splits import Indices, split_hash
from vitlab.data.files.store import EachFile, Store
from vitlab.data.loading.transforms import to_image, to_tensor
from vitlab.ranges import check_ranges

Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel


class Images:
    """Labeled images before augmentation: what a data set reads, in memory or in files.

    >>> TensorImages(torch.zeros(1, 1, 2, 2), torch.zeros(1), [b"a"]).rows_hash
    '40f89e395b66422f'
    """

    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Return one image; an ImageError names a file that cannot be read."""
        raise NotImplementedError

    def pixels(self, index: int) -> np.ndarray:
        """Return one image as ``(H, W, C)`` or, gray, ``(H, W)``."""
        raise NotImplementedError

    def take(self, indices: Indices) -> "Images":
        """Return the images at ``indices`` as a set of their own."""
        raise NotImplementedError

    def statistics(self) -> Statistics:
        """Return mean and standard deviation of each channel over all pixels; uint8 counts as values in [0, 1]."""
        raise NotImplementedError

    def expect(self, indices: list[int]) -> None:
        """Announce the images that are read next, for prefetching."""
        return

    def scanned(self, num_workers: int) -> tuple["Images", dict[str, str]]:
        """Return the readable images, with facts about files, and the reason for each unreadable file, by its path."""
        return self, {}

    @property
    def names(self) -> list[str]:
        """The name of each image; empty if they have none."""
        return []

    @cached_property
    def digests(self) -> list[bytes]:
        """A digest of the content of each image."""
        raise NotImplementedError

    @cached_property
    def ids(self) -> list[bytes]:
        """The identity of each image, by which it is assigned to a split; a digest where it has none."""
        return self.digests

    @cached_property
    def split_hash(self) -> str:
        """A hash of this set of images, their labels and their content, whatever their order, as 16 hex digits."""
        return split_hash([i + d for i, d in zip(self.ids, self.digests, strict=True)], self.labels.numpy())

    @cached_property
    def rows_hash(self) -> str:
        """A hash of the identities in their order, as 16 hex digits."""
        return hashlib.blake2b(b"\0".join(self.ids), digest_size=8).hexdigest()


class TensorImages(Images):
    """Labeled images in memory.

    Args:
        images: ``(N, C, H, W)`` uint8, or float32 in any unit.
        labels: ``(N,)`` classes, ``(N, T)`` numbers, or ``(N, K)`` labels, 0 or 1.
        ids: Identity of each image; default: a digest of its pixels.

    >>> TensorImages(torch.full((5, 1, 8, 8), 255, dtype=torch.uint8), torch.zeros(5)).statistics()
    ((1.0,), (1.0,))
    """

    def __init__(self, images: Tensor, labels: Tensor, ids: list[bytes] | None = None) -> None:
        self.images = images
        self.labels = labels
        self.named = ids is not None
        if ids is not None:
            self.ids = ids

    @cached_property
    def digests(self) -> list[bytes]:
        """A digest of each image's pixels."""
        return [hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in self.images.numpy()]

    @property
    def names(self) -> list[str]:
        """The name of each image; empty if they have none."""
        return [os.fsdecode(identity) for identity in self.ids] if self.named else []

    def image(self, index: int) -> Image.Image:
        """Return one image."""
        return to_image(self.images[index])

    def pixels(self, index: int) -> np.ndarray:
        """Return one image as ``(H, W, C)``."""
        return self.images[index].permute(1, 2, 0).numpy()

    def take(self, indices: Indices) -> "TensorImages":
        """Return the images at ``indices`` as a set of their own."""
        index = torch.from_numpy(indices)
        ids = [self.ids[i] for i in indices] if self.named else None
        return TensorImages(self.images[index], self.labels[index], ids)

    def statistics(self) -> Statistics:
        """Return mean and standard deviation of each channel over all pixels; uint8 counts as values in [0, 1]."""
        total, scale, rounding = np.zeros((2, self.images.shape[1])), 255, 1e-6
        origin = torch.zeros(self.images.shape[1])
        if self.images.dtype != torch.uint8 and len(self):  # values may differ little beside their mean
            scale, rounding, origin = 1, 1e-7, self.images[:64].double().mean((0, 2, 3))
        for chunk in self.images.split(1024):
            values = chunk.double().div(scale).transpose(0, 1).flatten(1) - origin[:, None]  # (C, n H W)
            total += torch.stack([values.sum(1), values.square().sum(1)]).numpy()
        mean, square = total / max(self.images[:, 0].numel(), 1)
        return _mean_and_std(mean, square, rounding, origin.numpy())


class FileImages(Images):
    """Labeled image files, decoded on demand.

    Args:
        store: The store of the files.
        files: Name of each image in the store.
        labels: ``(N,)`` classes.
        how: How to decode a file.
        facts: Facts about each file, see :func:`vitlab.data.files.scan.scan`.

    >>> from pathlib import Path
    >>> from vitlab.data.files.store import Folder
    >>> FileImages(Folder(Path("photos")), ["cat/1.jpg"], torch.tensor([0]), Decoding()).ids
    [b'cat/1.jpg']
    """

    def __init__(
        self, store: Store, files: list[str], labels: Tensor, how: Decoding, facts: Facts | None = None
    ) -> None:
        self.store, self.files, self.labels, self.how, self.facts = store, files, labels, how, facts

    @cached_property
    def ids(self) -> list[bytes]:
        """The identity of each image."""
        return [self.store.identity(file) for file in self.files]

    @cached_property
    def digests(self) -> list[bytes]:
        """A digest of each file's bytes."""
        return [row.tobytes() for row in self.known["digest"]]

    @property
    def names(self) -> list[str]:
        """The name of each image in the store."""
        return self.files

    @property
    def known(self) -> Facts:
        """The facts about each file; the files must have been scanned."""
        assert self.facts is not None, "the files have not been scanned"
        return self.facts

    def image(self, index: int) -> Image.Image:
        """Return one image, as `decode_bytes` does; an ImageError names a file that cannot be read."""
        return self._decoded(self.files[index])

    def pixels(self, index: int) -> np.ndarray:
        """Return one image as uint8 ``(H, W, 3)`` or, gray, ``(H, W)``; without a copy if the store has it decoded."""
        stored = self._stored(self.files[index])
        fits = stored is not None and (stored.ndim == 2) == (self.how.mode == "L")
        return stored if stored is not None and fits else np.asarray(self.image(index))

    def _decoded(self, file: str) -> Image.Image:
        if (stored := self._stored(file)) is not None:
            return Image.fromarray(stored).convert(self.how.mode)
        return decode_bytes(self.store.load(file), self.store.path(file), self.how)

    def _as_tensor(self, file: str) -> Tensor:
        return to_tensor(self._decoded(file))

    def _stored(self, file: str) -> np.ndarray | None:
        with reading(self.store.path(file)):
            return self.store.pixels(file)

    def expect(self, indices: list[int]) -> None:
        """Announce the images that are read next, for prefetching."""
        self.store.expect([self.files[i] for i in indices])

    def take(self, indices: Indices) -> "FileImages":
        """Return the images at ``indices`` as a set of their own."""
        facts = None if self.facts is None else self.facts[indices]
        files = [self.files[i] for i in indices]
        return FileImages(self.store, files, self.labels[torch.from_numpy(indices)], self.how, facts)

    def scanned(self, num_workers: int) -> tuple["FileImages", dict[str, str]]:
        """Return the readable files with their facts, and the reason for each unreadable one, by its path."""
        if self.facts is not None:  # of a pack, whose unreadable files are known
            return self if self.facts["readable"].all() else self.take(np.flatnonzero(self.facts["readable"])), {}
        facts, reasons = scan(self.store, self.files, num_workers, self.how)
        readable = FileImages(self.store, self.files, self.labels, self.how, facts)
        why = {self.store.path(file): reason for file, reason in reasons.items()}
        return readable.take(np.flatnonzero(facts["readable"])), why

    def in_memory(self, num_workers: int) -> TensorImages:
        """Return the decoded images, which must have the same size."""
        photos = DataLoader(
            EachFile(self.store, self.files, self._as_tensor), batch_size=256,
            num_workers=num_workers if len(self) > 4096 else 0, generator=torch.Generator(),
        )  # fmt: skip
        return TensorImages(torch.cat(list(photos)), self.labels, self.ids)

    def statistics(self) -> Statistics:
        """Return mean and standard deviation of each channel for values in [0, 1]; every image has the same weight.

        A JPEG file whose shorter side has at least 448 pixels counts as it is decoded at a half, a quarter or an eighth
        of its size, with 224 pixels or more, which is nearer to what a network sees than the file. Of 113 photos of
        Caltech-101, tiled 3 x 3, the mean differs by at most 0.0003 from that of whole files, and the standard
        deviation is lower by 0.006; enlarged three times instead, by 0.0008.
        """
        channels = slice(0, 3) if self.how.mode == "RGB" else slice(3, 4)
        moments = self.known["moments"].astype(np.float64).mean(axis=0) if len(self) else np.zeros((2, 4))
        mean, square = moments[:, channels]
        return _mean_and_std(mean, square, rounding=5e-4)  # of the mean squares, which are float32, to the root


def summary(images: Images, num_classes: int) -> dict[str, Any]:
    """Return size and hash of a split, and the number of images of each class."""
    facts = {"n": len(images), "hash": images.split_hash}
    if images.labels.is_floating_point():
        return facts
    counts = (
        torch.bincount(images.labels, minlength=num_classes) if images.labels.ndim == 1 else images.labels.long().sum(0)
    )
    return {**facts, "class_counts": counts.tolist()}


def given_statistics(mean: Sequence[float] | None, std: Sequence[float] | None, in_chans: int) -> Statistics | None:
    """Return the mean and standard deviation that a user gave, or None; refuse one alone and wrong numbers.

    >>> given_statistics([0.5], [0.25], in_chans=1)
    ((0.5,), (0.25,))
    """
    if mean is None and std is None:
        return None
    if mean is None or std is None:
        raise ValueError(f"`data.mean` and `data.std` belong together: give `data.{'mean' if mean is None else 'std'}`")
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != in_chans:
            raise ValueError(f"`data.{name}` must have a value for each of {in_chans} channels, got {list(values)}")
    check_ranges("data", {"mean": list(mean), "std": list(std)})
    return tuple(mean), tuple(std)


def _mean_and_std(mean: np.ndarray, square: np.ndarray, rounding: float, origin: np.ndarray | float = 0) -> Statistics:
    """Return mean and standard deviation from moments about an origin; 1 where the latter is rounding of the mean."""
    std = np.sqrt(np.maximum(square - mean**2, 0.0))
    mean = mean + origin
    return tuple(mean.tolist()), tuple(np.where(std > rounding * np.abs(mean), std, 1.0).tolist())
