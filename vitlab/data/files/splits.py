"""Which sample belongs to which split: stratified by class, ranked by a hash of each sample's identity."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SplitName = Literal["train", "val", "test"]
Indices = NDArray[np.int64]


class SplitRule:
    """Divide samples into three disjoint splits whose class counts differ from the exact share by less than one.

    Within a class the samples are ranked by a hash of (seed, identity) and the ranking is cut: first the test split,
    then the validation split. A new sample therefore moves next to nothing: one or two others over each cut.

    Args:
        test_share: Share of all samples in the test split; None where the data set brings its own.
        val_share: Share of the rest in the validation split.
        seed: Another seed gives other splits.
        fold: k/n: validate on part k (1..n) of n equal parts of what is not test, instead of `val_share`.
        subset: Share of the training split to keep, at least one sample a class; smaller subsets lie in larger ones.
        file: JSON file with lists of indices or relative paths under train, val and test, used as they are.
    """

    def __init__(
        self,
        test_share: float | None,
        val_share: float,
        seed: int = 0,
        fold: str | None = None,
        subset: float = 1.0,
        file: str | None = None,
    ) -> None:
        if test_share is not None and not 0 < test_share < 1:
            raise ValueError(f"`data.test_share` must lie between 0 and 1, got {test_share}")
        if not 0 < val_share < 1:
            raise ValueError(f"`data.val_share` must lie between 0 and 1, got {val_share}")
        if not 0 < subset <= 1:
            raise ValueError(f"`data.subset` must be above 0 and at most 1, got {subset}")
        if file is not None and fold is not None:
            raise ValueError(f"`data.fold` and `data.split_file` exclude each other, got {fold!r} and {file!r}")
        self.test_share = 0.0 if test_share is None else test_share
        self.val_share, self.seed, self.subset = val_share, seed, subset
        self.fold = _parse_fold(fold)
        self.file = file

    def indices(
        self, ids: Sequence[bytes], labels: Indices, given_val: NDArray[np.bool_] | None = None
    ) -> dict[SplitName, Indices]:
        """Return the sorted indices of each split.

        Args:
            ids: Identity of each sample.
            labels: Class of each sample.
            given_val: Which samples the data set itself sets apart for validation; folds and lists overrule it.
        """
        if self.file is not None:
            return _read_lists(self.file, ids)
        given = None if self.fold else given_val
        classes = _ranked_by_class(ids, labels, self.seed)
        test, rest = _cut(classes, self.test_share)
        if given is not None:
            val, train = [x[given[x]] for x in rest], [x[~given[x]] for x in rest]
        elif self.fold is not None:
            (k, n), val, train = self.fold, [], []
            for ranked in rest:
                first, last = (k - 1) * len(ranked) // n, k * len(ranked) // n
                val.append(ranked[first:last])
                train.append(np.concatenate([ranked[last:], ranked[:first]]))
        else:
            val, train = _cut(rest, self.val_share)
        train = [ranked[: int(np.ceil(len(ranked) * self.subset - 1e-9))] for ranked in train]
        empty = np.empty(0, dtype=np.int64)
        return {
            "train": np.sort(np.concatenate([empty, *train])),
            "val": np.sort(np.concatenate([empty, *val])),
            "test": np.sort(np.concatenate([empty, *test])),
        }


def split_hash(ids: Sequence[bytes], labels: Indices) -> str:
    """Return 16 hex digits that name a set of labelled samples, whatever their order."""
    total = 0
    for identity, label in zip(ids, labels.tolist(), strict=True):
        digest = hashlib.blake2b(identity + b"\0" + str(label).encode(), digest_size=8).digest()
        total += int.from_bytes(digest)
    return f"{total % 2**64:016x}"


def _parse_fold(fold: str | None) -> tuple[int, int] | None:
    if fold is None:
        return None
    k, slash, n = fold.partition("/")
    if not (slash and k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n) and int(n) >= 2):
        raise ValueError(f"`data.fold` must be k/n with 1 <= k <= n and n >= 2, such as 1/5, got {fold!r}")
    return int(k), int(n)


def _read_lists(file: str, ids: Sequence[bytes]) -> dict[SplitName, Indices]:
    try:
        lists = json.loads(Path(file).read_text())
        assert isinstance(lists, dict) and all(isinstance(chosen, list) for chosen in lists.values())
    except (OSError, ValueError, AssertionError) as error:
        raise ValueError(f"`data.split_file` must be a JSON object of lists, got {file}: {error}") from None
    if not {"train", "val"} <= lists.keys() <= {"train", "val", "test"}:
        raise ValueError(f"`data.split_file` must list train, val and, if any, test, got {sorted(lists)} in {file}")
    number: dict[object, int] = {os.fsdecode(identity): i for i, identity in enumerate(ids)}
    number |= {i: i for i in range(len(ids))}
    indices: dict[SplitName, Indices] = {}
    for name in ("train", "val", "test"):
        unknown = [entry for entry in lists.get(name, []) if entry not in number]
        if unknown:
            raise ValueError(f"`data.split_file` {file} lists {unknown[0]!r} under {name}, which is not in the data")
        indices[name] = np.array([number[entry] for entry in lists.get(name, [])], dtype=np.int64)
    chosen = np.concatenate(list(indices.values()))
    if len(np.unique(chosen)) < len(chosen):
        raise ValueError(f"`data.split_file` {file} lists a sample twice: the splits must be disjoint")
    return indices


def _ranked_by_class(ids: Sequence[bytes], labels: Indices, seed: int) -> list[Indices]:
    key = str(seed).encode()
    digests = b"".join(hashlib.blake2b(identity, digest_size=8, key=key).digest() for identity in ids)
    ranks = np.frombuffer(digests, dtype=">u8")
    order = np.lexsort((ranks, labels))
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if len(order) else []


def _cut(classes: list[Indices], share: float) -> tuple[list[Indices], list[Indices]]:
    """Cut each class in two; the first parts have together the share asked for, rounded, and each of them nearly so."""
    exact = np.array([len(ranked) * share for ranked in classes])
    counts = np.floor(exact + 1e-9).astype(int)
    missing = int(exact.sum() + 0.5) - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1  # where most was cut off
    pairs = zip(classes, counts, strict=True)
    first, second = zip(*(np.split(ranked, [count]) for ranked, count in pairs), strict=True) if classes else ((), ())
    return list(first), list(second)
