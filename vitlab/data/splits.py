"""Which sample belongs to which split: stratified by class, ranked by a hash of each sample's identity."""

import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SplitName = Literal["train", "val", "test"]
Indices = NDArray[np.int64]


def split(
    ids: Sequence[bytes],
    labels: Indices,
    test_share: float,
    val_share: float,
    fold: tuple[int, int] | None = None,
    subset: float = 1.0,
    seed: int = 0,
) -> dict[SplitName, Indices]:
    """Divide samples into three disjoint splits whose class counts differ from the exact share by less than one.

    Within a class the samples are ranked by a hash of (seed, identity) and the ranking is cut: first the test split,
    then the validation split. A new sample therefore moves at most one other sample of its class over each cut.

    Args:
        ids: Identity of each sample, such as its relative path or its bytes.
        labels: Class of each sample, in 0..K-1.
        test_share: Share of all samples in the test split; 0 where the test split is given by the data set.
        val_share: Share of the rest in the validation split.
        fold: (k, n): validate on part k (1..n) of n equal parts of what is not test, instead of ``val_share``.
        subset: Share of the training split to keep, at least one sample a class; smaller subsets lie in larger ones.
        seed: Another seed gives other splits.
    """
    parts: dict[SplitName, list[Indices]] = {"train": [], "val": [], "test": []}
    for ranked in _ranked_by_class(ids, labels, seed):
        test, rest = np.split(ranked, [_count(len(ranked), test_share)])
        if fold is None:
            first, last = 0, _count(len(rest), val_share)
        else:
            first, last = ((fold[0] - 1 + i) * len(rest) // fold[1] for i in (0, 1))
        train = np.concatenate([rest[last:], rest[:first]])
        parts["test"].append(test)
        parts["val"].append(rest[first:last])
        parts["train"].append(train[: int(np.ceil(len(train) * subset - 1e-9))])
    empty = np.empty(0, dtype=np.int64)
    return {name: np.sort(np.concatenate([empty, *chosen])) for name, chosen in parts.items()}


def split_hash(ids: Sequence[bytes], labels: Indices) -> str:
    """Return 16 hex digits that name a set of labelled samples, whatever their order."""
    total = 0
    for identity, label in zip(ids, labels.tolist(), strict=True):
        digest = hashlib.blake2b(identity + b"\0" + str(label).encode(), digest_size=8).digest()
        total += int.from_bytes(digest)
    return f"{total % 2**64:016x}"


def parse_fold(fold: str | None) -> tuple[int, int] | None:
    """Read ``"k/n"``, part k of n, as a pair of numbers."""
    if fold is None:
        return None
    k, slash, n = fold.partition("/")
    if not (slash and k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n) and int(n) >= 2):
        raise ValueError(f"`data.fold` must be k/n with 1 <= k <= n and n >= 2, such as 1/5, got {fold!r}")
    return int(k), int(n)


def _ranked_by_class(ids: Sequence[bytes], labels: Indices, seed: int) -> list[Indices]:
    key = str(seed).encode()
    ranks = np.array(
        [int.from_bytes(hashlib.blake2b(i, digest_size=8, key=key).digest()) for i in ids], dtype=np.uint64
    )
    order = np.lexsort((ranks, labels))
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if len(order) else []


def _count(n: int, share: float) -> int:
    return int(n * share + 0.5)
