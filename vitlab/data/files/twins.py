"""Find duplicates and near-duplicates: across splits, and under different labels."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitlab.data.files.sets import FileImages, Images
from vitlab.data.files.splits import SplitName

Pairs = list[list[str]]  # of images, each named by split and path or number
_SHOWN = 20
_NEAR = 12  # largest number of different bits, of 256
_CHUNK = 4096  # images compared at once
_BUCKET = 256  # a row of 16 bits shared by more images is ignored


def twins(splits: Mapping[SplitName, Images]) -> dict[str, Any]:
    """Count duplicates, contradicting labels and near-duplicates, and list some pairs of each.

    Of more than can be listed, pairs of a training and a test image come first, of which a run warns.
    """
    found = {
        "duplicates": duplicates(splits),
        "contradictions": contradictions(splits),
        "near_duplicates": near_duplicates(splits),
    }
    return {name: len(pairs) for name, pairs in found.items()} | {f"first_{k}": _some(v) for k, v in found.items()}


def _some(pairs: Pairs) -> Pairs:
    """Return the pairs that are listed."""
    if len(pairs) <= _SHOWN:
        return pairs
    return sorted(pairs, key=lambda pair: [name.partition(":")[0] for name in pair] != ["train", "test"])[:_SHOWN]


def duplicates(splits: Mapping[SplitName, Images]) -> Pairs:
    """Return pairs of images with the same content in different splits."""
    return _alike_but(splits, lambda split, label: split)


def contradictions(splits: Mapping[SplitName, Images]) -> Pairs:
    """Return pairs of images with the same content under different labels."""
    return _alike_but(splits, lambda split, label: str(label))  # text: a target that is not given, NaN, equals nothing


def _alike_but(splits: Mapping[SplitName, Images], mark: Callable[[SplitName, Any], str]) -> Pairs:
    """Return pairs of images with the same content whose marks, of split and label, differ from the first's."""
    seen: dict[bytes, tuple[str, str]] = {}
    pairs: Pairs = []
    for split, images in splits.items():
        for i, (digest, label) in enumerate(zip(images.digests, images.labels.tolist(), strict=True)):
            mine = mark(split, label), name_of(split, images, i)
            first = seen.setdefault(digest, mine)
            if first[0] != mine[0]:
                pairs.append([first[1], mine[1]])
    return pairs


def near_duplicates(splits: Mapping[SplitName, Images]) -> Pairs:
    """Return pairs of files in different splits that differ but look the same, by their difference hashes.

    Images smaller than the 16 x 17 pixels of a hash are left out: different ones have the same hash.
    """
    pairs: Pairs = []
    files = [(name, _hashed(images)) for name, images in splits.items() if isinstance(images, FileImages)]
    for k, (name, images) in enumerate(files):
        for earlier, others in files[:k]:
            for i, j in near(others.known["look"], images.known["look"]):
                if others.digests[i] != images.digests[j]:
                    pairs.append([name_of(earlier, others, i), name_of(name, images, j)])
    return pairs


def _hashed(images: FileImages) -> FileImages:
    large = (images.known["size"] >= (16, 17)).all(1)
    return images if large.all() else images.take(np.flatnonzero(large))


def near(first: NDArray[np.uint64], second: NDArray[np.uint64]) -> list[tuple[int, int]]:
    """Return the pairs among ``(N, 4)`` and ``(M, 4)`` hashes of 256 bits that differ in few bits.

    Hashes that differ in fewer than 16 bits share at least one of their 16 rows of 16 bits, by which they are found.
    Images without structure, in which half the rows are empty, are left out.

    >>> a, b = np.random.default_rng(0).integers(0, 2**63, (2, 3, 4)).astype(np.uint64)
    >>> b[2] = a[1] ^ np.uint64(5)
    >>> near(a, b)
    [(1, 2)]
    """
    rows, others = (np.ascontiguousarray(x).view(np.uint16).reshape(len(x), 16) for x in (first, second))
    structured = (rows != 0).sum(1) > 8
    found: set[tuple[int, int]] = set()
    for k in range(16):
        usable = np.flatnonzero(structured & (rows[:, k] != 0))
        order = usable[np.argsort(rows[usable, k], kind="stable")]
        for chunk in range(0, len(others), _CHUNK):
            keys, wanted = rows[order, k], others[chunk : chunk + _CHUNK, k]
            start, end = np.searchsorted(keys, wanted, "left"), np.searchsorted(keys, wanted, "right")
            count = np.where(end - start <= _BUCKET, end - start, 0)
            j = np.repeat(np.arange(len(wanted)), count) + chunk
            i = order[np.arange(len(j)) + np.repeat(start - np.cumsum(count) + count, count)]
            bits = np.bitwise_count(first[i] ^ second[j]).sum(1)
            found |= set(zip(i[bits <= _NEAR].tolist(), j[bits <= _NEAR].tolist(), strict=True))
    return sorted(found)


def name_of(split: str, images: Images, index: int) -> str:
    """Return the name of an image for messages: its split, and its path or number."""
    return f"{split}: {images.files[index] if isinstance(images, FileImages) else f'number {index}'}"
