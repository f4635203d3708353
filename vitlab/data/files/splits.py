"""Assign samples to splits: stratified by class, ranked by a hash of each sample's identity."""

import hashlib
import json
import os
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from vitlab.ranges import check_ranges

SplitName = Literal["train", "val", "test"]
SPLIT_NAMES: tuple[SplitName, ...] = get_args(SplitName)
Indices = NDArray[np.int64]


class SplitRule:
    """Divide samples into three disjoint splits whose class counts differ from the exact share by less than one.

    Within a class, samples are ranked by a hash of (seed, identity); the first are the test split, the next the
    validation split. A new sample therefore moves at most one or two others across each cut.

    Args:
        test_share: Share of all images for the test split, if none is given.
        val_share: Share of the other images for the validation split.
        split_seed: Seed of the split.
        fold: k/n: validate on the k-th of n parts of the images outside the test split, instead of `val_share`. For a
            table also a value of its column of folds, whose rows then validate.
        subset: Share of the training split to train on; smaller subsets are contained in larger ones.
        split_file: JSON file with lists of indices or paths: train, val and, unless the data has a test split, test.
        even_folds: Whether folds are equally large; in an earlier vitlab all classes rounded up in the same folds.

    >>> ids = [str(i).encode() for i in range(10)]
    >>> {name: len(chosen) for name, chosen in SplitRule().indices(ids, np.zeros(10, int)).items()}
    {'train': 6, 'val': 2, 'test': 2}
    """

    def __init__(
        self,
        test_share: float = 0.2,
        val_share: float = 0.2,
        split_seed: int = 0,
        fold: str | int | None = None,  # text first, or a fold 00 of a table would be 0
        subset: float = 1.0,
        split_file: str | None = None,
        even_folds: bool = True,
    ) -> None:
        check_ranges("data", {"test_share": test_share, "val_share": val_share, "subset": subset})
        if split_file is not None and fold is not None:
            raise ValueError(f"`data.fold` and `data.split_file` exclude each other, got {fold!r} and {split_file!r}")
        self.test_share, self.val_share, self.subset = test_share, val_share, subset
        self.seed, self.file = split_seed, split_file
        self.fold, self.even_folds = _parse_fold(fold), even_folds

    def facts(self) -> dict[str, object]:
        """Return the settings that determine the splits, for the record of a run."""
        facts = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        if not (self.fold and self.even_folds):
            del facts["even_folds"]  # as ever
        return facts

    def why_empty(self, name: SplitName, has_test_split: bool) -> str:
        """Return what divided the images where a split has none, for messages."""
        if name == "test" and has_test_split:
            return ""
        if self.file is not None:
            return f": `data.split_file` {self.file} lists none under {name}"
        settings: dict[str, object] = {} if has_test_split else {"test_share": self.test_share}
        settings |= {"val_share": self.val_share} if self.fold is None else {"fold": "/".join(map(str, self.fold))}
        how = " and ".join(f"`data.{key}={value}`" for key, value in settings.items())
        return f": there are too few images, groups or times for {how}"

    def indices(
        self,
        ids: Sequence[bytes],
        labels: Indices,
        given_val: NDArray[np.bool_] | None = None,
        cut_test: bool = True,
        groups: Sequence[str] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> dict[SplitName, Indices]:
        """Return the sorted indices of each split.

        Args:
            ids: Identity of each sample.
            labels: Class of each sample.
            given_val: Which samples the data set itself uses for validation; `fold` and `split_file` override it.
            cut_test: Whether to cut off a test split; a data set may have its own.
            groups: Group of each sample; those of one group are in one split, unless validation is given.
            numbers: Number of each sample in `split_file`, such as its row in a table; default: its index.

        Raises:
            ValueError: `split_file` cannot be read, or divides a group.
        """
        if self.file is not None:
            lists = _read_lists(self.file, ids, cut_test, groups, range(len(ids)) if numbers is None else numbers)
            if self.subset < 1:
                own = lists["train"]
                lists["train"] = own[self._subset_of(_ranked_by_class([ids[i] for i in own], labels[own], self.seed))]
            return lists
        given = None if self.fold else given_val
        if groups is not None and given is None:
            names, labels, group_of = by_group(groups, labels)
            parts = self.indices(names, labels, None, cut_test)
            return {split: np.flatnonzero(np.isin(group_of, chosen)) for split, chosen in parts.items()}
        classes = _ranked_by_class(ids, labels, self.seed)
        test, rest = _cut(classes, self.test_share if cut_test else 0.0)
        if given is not None:
            val, train = [x[given[x]] for x in rest], [x[~given[x]] for x in rest]
        elif self.fold is not None:
            (k, n), val, train = self.fold, [], []
            for ranked, ends in zip(rest, self._fold_ends([len(ranked) for ranked in rest], n), strict=True):
                first, last = ends[k - 1], ends[k]
                val.append(ranked[first:last])
                train.append(np.concatenate([ranked[last:], ranked[:first]]))
        else:
            val, train = _cut(rest, self.val_share)
        empty = np.empty(0, dtype=np.int64)
        return {
            "train": self._subset_of(train),
            "val": np.sort(np.concatenate([empty, *val])),
            "test": np.sort(np.concatenate([empty, *test])),
        }

    def _fold_ends(self, counts: Sequence[int], n: int) -> list[Indices]:
        """Return, for each class, the ``(n + 1,)`` places in its ranking where folds begin and end.

        Folds differ by at most one sample within each class and in all: what a class has beyond a multiple of n goes to
        the folds that are smallest so far. Classes are taken in an order drawn by the seed.

        Args:
            counts: Number of samples of each class.
            n: Number of folds.
        """
        ends: list[Indices] = [np.arange(n + 1) * count // n for count in counts]
        names = [str(i).encode() for i in range(len(counts))]
        so_far = np.zeros(n, dtype=np.int64)
        for order in _ranked_by_class(names, np.zeros_like(counts), self.seed) if self.even_folds else ():
            for i in order:
                sizes = np.diff(ends[i])
                smallest = np.lexsort((-sizes, so_far))  # of equal ones, those where this class alone would round up
                sizes = np.full(n, counts[i] // n)
                sizes[smallest[: counts[i] % n]] += 1
                ends[i], so_far = np.append(0, sizes.cumsum()), so_far + sizes
        return ends

    def _subset_of(self, train: list[Indices]) -> Indices:
        """Return the sorted indices of the first samples of each class, ranked."""
        kept = [ranked[: self.kept_of(len(ranked))] for ranked in train]
        return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *kept]))

    def kept_of(self, count: int) -> int:
        """Return how many of ``count`` training samples `subset` keeps, rounded up."""
        return int(np.ceil(count * self.subset - 1e-9))


def by_group(
    groups: Sequence[str], labels: NDArray[np.int64]
) -> tuple[list[bytes], NDArray[np.int64], NDArray[np.int64]]:
    """Return the groups, the most common class of each, and the index of the group of each sample.

    >>> by_group(["a", "b", "a"], np.array([0, 1, 0]))
    ([b'a', b'b'], array([0, 1]), array([0, 1, 0]))
    """
    names, group_of = np.unique(groups, return_inverse=True)
    counts = np.zeros((len(names), labels.max() + 1), dtype=int)
    np.add.at(counts, (group_of, labels), 1)
    return [str(name).encode() for name in names], counts.argmax(axis=1), group_of


def by_time(times: Indices, rule: SplitRule, cut_test: bool = True) -> dict[SplitName, Indices]:
    """Return the sorted indices of each split, the latest samples in test, those before them in val.

    Samples of one time stay together: a cut is moved to the nearest change of time. Fold k of n trains on the first k
    of n + 1 parts of the samples outside the test split and validates on the next. A subset is the latest part.

    Args:
        times: Rank of each sample's time.
        rule: Shares, fold and subset.
        cut_test: Whether to cut off a test split.

    >>> {name: len(chosen) for name, chosen in by_time(np.arange(10), SplitRule()).items()}
    {'train': 6, 'val': 2, 'test': 2}
    """
    order = np.argsort(times, kind="stable")
    changes = np.append(np.flatnonzero(np.diff(times[order])) + 1, len(order))

    def cut(wanted: float, after: int, end: int) -> int:
        """Return the change between two places that is nearest to the wanted place; ``end`` if there is none."""
        inside = changes[(changes > after) & (changes < end)]
        return int(inside[np.abs(inside - wanted).argmin()]) if len(inside) else end

    end = len(order)
    if cut_test and rule.test_share == 1:
        end = 0
    elif cut_test:  # behind two times, of which val gets one, if there are three
        end = cut(end * (1 - rule.test_share), int(changes[0]) if len(changes) > 2 else 0, end)
    first, last = cut(end * (1 - rule.val_share), 0, end), end
    if rule.fold is not None and end:
        k, n = rule.fold
        last = cut(end * (k + 1) / (n + 1), 0, end + 1)
        first = cut(end * k / (n + 1), 0, last)
    start = first - rule.kept_of(first)
    parts: dict[SplitName, Indices] = {"train": order[start:first], "val": order[first:last], "test": order[end:]}
    return {name: np.sort(chosen) for name, chosen in parts.items()}


def split_hash(ids: Sequence[bytes], labels: Indices) -> str:
    """Return a hash of a set of labeled samples, independent of their order, as 16 hex digits."""
    total = 0
    for identity, label in zip(ids, labels.tolist(), strict=True):
        digest = hashlib.blake2b(identity + b"\0" + str(label).encode(), digest_size=8).digest()
        total += int.from_bytes(digest)
    return f"{total % 2**64:016x}"


def _parse_fold(fold: str | int | None) -> tuple[int, int] | None:
    if fold is None:
        return None
    k, slash, n = str(fold).partition("/")
    if not (slash and k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n) and int(n) >= 2):
        raise ValueError(f"`data.fold` must be k/n with 1 <= k <= n and n >= 2, such as 1/5, got {fold!r}")
    return int(k), int(n)


def _read_lists(
    file: str, ids: Sequence[bytes], with_test: bool, groups: Sequence[str] | None, numbers: Sequence[int]
) -> dict[SplitName, Indices]:
    try:
        lists = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"`data.split_file` must be a JSON object of lists, got {file}: {error}") from None
    if not isinstance(lists, dict) or not all(isinstance(chosen, list) for chosen in lists.values()):
        raise ValueError(f'`data.split_file` must be a JSON object of lists, {{"train": [...]}}, got {file}')
    if not {"train", "val"} <= lists.keys() <= {*SPLIT_NAMES}:
        raise ValueError(f"`data.split_file` must list train, val and, if any, test, got {sorted(lists)} in {file}")
    if lists.get("test") and not with_test:
        raise ValueError(f"`data.split_file` {file} lists test, and the data has a test split: leave out the list")
    meant: dict[object, list[int]] = {number: [i] for i, number in enumerate(numbers)}
    for i, identity in enumerate(ids):  # several rows of a table may have one path
        meant.setdefault(os.fsdecode(identity), []).append(i)
    indices: dict[SplitName, Indices] = {}
    for name in SPLIT_NAMES:
        unknown = [
            entry for entry in lists.get(name, []) if isinstance(entry, bool | list | dict) or entry not in meant
        ]
        if unknown:
            what = f"lists {unknown[0]!r} under {name}, which is not in the data"
            raise ValueError(f"`data.split_file` {file} {what} (without its own test split and rows left out)")
        indices[name] = np.array([i for entry in lists.get(name, []) for i in meant[entry]], dtype=np.int64)
    chosen = np.concatenate(list(indices.values()))
    if len(np.unique(chosen)) < len(chosen):
        raise ValueError(f"`data.split_file` {file} lists a sample twice: the splits must be disjoint")
    if groups is not None:
        entry_of = {name: {groups[i]: x for x in entries for i in meant[x]} for name, entries in lists.items()}
        _check_undivided(file, entry_of)
    return indices


def _check_undivided(file: str, listed: dict[str, dict[str, object]]) -> None:
    """Refuse lists that divide a group, given an entry of each group in each list."""
    for (name, mine), (other, theirs) in combinations(listed.items(), 2):
        for group in (group for group in mine if group in theirs):
            raise ValueError(
                f"`data.split_file` {file} lists {mine[group]!r} under {name} and {theirs[group]!r} under {other}, and "
                f"both are of {group}: list a group, or a video, under one of them"
            )


def _ranked_by_class(ids: Sequence[bytes], labels: Indices, seed: int) -> list[Indices]:
    key = str(seed).encode()
    digests = b"".join(hashlib.blake2b(identity, digest_size=8, key=key).digest() for identity in ids)
    ranks = np.frombuffer(digests, dtype=">u8")
    order = np.lexsort((ranks, labels))
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if len(order) else []


def _cut(classes: list[Indices], share: float) -> tuple[list[Indices], list[Indices]]:
    """Cut each class in two, so that the total of the first parts is the rounded share, and each nearly so."""
    exact = np.array([len(ranked) * share for ranked in classes])
    counts = np.floor(exact + 1e-9).astype(int)
    missing = int(exact.sum() + 0.5) - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1  # classes rounded down most
    pairs = zip(classes, counts, strict=True)
    first, second = zip(*(np.split(ranked, [count]) for ranked, count in pairs), strict=True) if classes else ((), ())
    return list(first), list(second)
