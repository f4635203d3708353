"""Images listed in rows, with targets."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from vitlab.data.arguments import TableArgs
from vitlab.data.base import Part
from vitlab.data.files.rows import Rows, distinct_folds
from vitlab.data.files.sets import FileImages, Images
from vitlab.data.files.splits import Indices, SplitName, by_time
from vitlab.data.loading.transforms import Size
from vitlab.data.photos import Photos, parts_among
from vitlab.data.record import RUN, check_target_names, trained_targets
from vitlab.tables import counted


class Listed(Photos):
    """Images in the order of a table, whose rows have targets and optionally split, group, weight and time.

    Args:
        rows: The rows.
        place: Name of the source, for messages.
        sizes: Height and width of a sample of the images.
        in_chans: Number of channels.
        arrays: Whether images are arrays of one shape, kept as floats in memory.
        split_by: Whether rows are divided by a hash, or by time, the latest for test.
        **photos: Passed to :class:`Photos`.

    Example:
        >>> from vitlab.data import Table
        >>> issubclass(Table, Listed)
        True
    """

    def __init__(
        self,
        rows: Rows,
        place: str,
        sizes: list[Size],
        in_chans: int,
        arrays: bool,
        split_by: Literal["hash", "time"],
        **photos: Unpack[TableArgs],
    ) -> None:
        self.table, self.arrays = rows, arrays
        parts = _parts(rows)
        part_called = {name: part for part, name in parts.items()}
        self.part_of = np.array([part_called[name] for name in rows.splits or ["train"] * len(rows.paths)])
        self.folds = rows.folds()
        self.named_fold = self._named_fold(photos.get("fold"))  # the value of the column of folds whose rows validate
        self.times = rows.times() if split_by == "time" else None
        self._check_divided_once(photos)
        if self.named_fold is not None:
            photos["fold"] = None  # it draws none
        if arrays:
            self._check_arrays(photos)
        super().__init__(
            place=place, parts=parts, class_names=rows.class_names, sizes=sizes,
            in_chans=in_chans, **photos,  # type: ignore[arg-type]
        )  # fmt: skip
        if not parts.get("test", "test").lower().startswith("test"):
            self.notes.append(
                f"the column {rows.columns['split']} names no test rows: those of {parts['test']} are the test split, "
                "and validation is a part of the others"
            )
        if self.named_fold is None and self.folds:
            known = ", ".join(distinct_folds(self.folds)[:12])
            self.notes.append(
                f"the column {rows.columns['fold']} ({known}) is not used: --data.fold=VALUE validates on its rows, "
                "and `vitlab cv` goes through all values of a Table or of Arrays"
            )
        self._check_together("in", self.part_of.tolist(), [True] * len(self.part_of))
        self.targets = self._facts(self._train_rows)
        if run := RUN.get():
            self._adopt_targets(run.targets)
        self.notes += [f"targets are {self._in_words()}, {rows.why}", *rows.notes]
        if rows.weights() is not None:
            self.notes.append(self._weights_note)

    @property
    def _weights_note(self) -> str:
        return f"rows are weighted in the training loss by the column {self.table.columns['weight']}"

    def note_unread_weights(self) -> None:
        """Say that the weights of the rows do not count, as in a task whose loss reads no targets."""
        unread = f"the column {self.table.columns.get('weight')} is not used: the loss reads no targets"
        self.notes = [unread if note == self._weights_note else note for note in self.notes]

    def targets_of(self, rows: Indices) -> Tensor:
        """Return ``(N,)`` classes, ``(N, K)`` labels, 0 or 1, or ``(N, T)`` numbers and numbers of classes."""
        if self.table.kind in ("number", "mixed"):
            return torch.from_numpy(self.table.values[rows])
        numbers = self.class_numbers()
        if self.table.kind == "class":
            return torch.tensor([numbers[self.table.names[i]] for i in rows], dtype=torch.int64)
        labels = torch.zeros(len(rows), self.num_classes, dtype=torch.uint8)
        for name, column in zip(self.table.names, torch.from_numpy(self.table.values[rows]).T, strict=True):
            labels[:, numbers[name]] |= column  # `class_map` may give several labels one name
        return labels

    def read(self, part: Part) -> Images:
        """Return the images of a part; `val` belongs to block 1."""
        rows = self._rows(part)
        return self.images_of(rows, self.targets_of(rows))

    def images_of(self, rows: Indices, targets: Tensor) -> Images:
        """Return the images of some rows."""
        raise NotImplementedError

    def indices(self, images: Images) -> dict[SplitName, Indices]:
        """Divide block 1 or all rows; groups stay together, and given splits are kept."""
        return self._division

    def split_rule(self) -> dict[str, Any]:
        """Return the settings that determine the splits, for the record of a run."""
        facts = self.rule.facts()
        if self.times is not None:
            return {**{name: value for name, value in facts.items() if name != "even_folds"}, "by": "time"}
        return facts if self.named_fold is None else {**facts, "named_fold": self.named_fold}

    def why_empty(self, name: SplitName) -> str:
        """Return what divided the rows where a split has none, for messages."""
        if self.named_fold is None or (name == "test" and self.has_test_split):
            return super().why_empty(name)
        return f": the column of folds divides all rows into training and validation, fold {self.named_fold}"

    def identity(self, path: str) -> bytes:
        """Return the identity that assigns a row to a split."""
        return path.encode()

    @cached_property
    def sample_weights(self) -> Tensor | None:  # type: ignore[override]
        """The ``(N,)`` weights of the training images in the loss, with mean 1."""
        if (weights := self.table.weights()) is None:
            return None
        self.build("train")
        rows = self._train_rows
        if isinstance(images := self.splits["train"], FileImages):  # without those that cannot be read
            left = {images.store.path(file) for file in images.files}
            rows = np.array([i for i in rows if images.store.path(self.table.paths[i]) in left])
        if not weights[rows].any():
            raise ValueError(f"{self.table.file}: no row of the training split has a weight above 0")
        return torch.from_numpy(weights[rows] / weights[rows].mean())

    @cached_property
    def _divided(self) -> Indices:
        """The rows to divide: all, or those outside a given test split."""
        return self._rows("train" if self.has_test_split else "all")

    @property
    def _train_rows(self) -> Indices:
        return self._divided[self._division["train"]]

    @cached_property
    def _division(self) -> dict[SplitName, Indices]:
        """The sorted indices of each split among these rows; cached, as identities may need all image files."""
        rows, cut_test = self._divided, not self.has_test_split
        if self.times is not None:
            return by_time(self.times[rows], self.rule, cut_test)
        given = self.part_of[rows] == "val" if "val" in self.parts else None
        if self.named_fold is not None:
            given, cut_test = np.array(self.folds)[rows] == self.named_fold, False
        ids = [self.identity(self.table.paths[i]) for i in rows]
        groups = None if self.table.groups is None else [self.table.groups[i] for i in rows]
        numbers = self.table.frame.index[rows].tolist()
        return self.rule.indices(ids, self._strata(rows), given, cut_test, groups, numbers)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the training run, the scale and the classes of its targets among it."""
        super().load_state_dict(state_dict)
        self._adopt_targets(state_dict.get("targets", {}))

    def adopt_classes(self, class_names: list[str]) -> None:
        """Use the class numbers of a trained run; one of an earlier version may call the class 01 of a table 1."""
        if self.table.kind == "class" and not {*self.class_names} <= {*class_names}:
            plain = [str(int(name)) if name.isdecimal() else name for name in self.table.names]
            if {*plain} <= {*class_names}:
                self.table.names, self.class_names = plain, sorted({*plain})
        super().adopt_classes(class_names)

    def _adopt_targets(self, known: dict[str, Any]) -> None:
        """Take the scale of numbers and the numbers of classes from a trained run, whose network answers in them."""
        mine = self.targets
        if known.get("kind") != mine["kind"] or mine["kind"] not in ("number", "mixed"):
            return
        check_target_names(mine["names"], known["names"])
        taken: dict[str, Any] = {name: known[name] for name in ("mean", "std", "classes", "present") if name in known}
        for k, (now, then) in enumerate(zip(mine.get("classes", []), known.get("classes", []), strict=True)):
            if bool(now) != bool(then) or {*now} - {*then}:
                what = f"the classes {', '.join(sorted({*now} - {*then}))}" if now and then else "another kind"
                raise ValueError(f"{self.table.file}: the column {mine['names'][k]} has {what}, unknown to the run")
            if now != then:
                numbers = np.array([then.index(name) for name in now] + [np.nan], dtype=np.float32)
                self.table.values[:, k] = numbers[np.nan_to_num(self.table.values[:, k], nan=-1).astype(int)]
                self.read_again()
        self.targets = {**mine, **taken}

    def _strata(self, rows: Indices) -> Indices:
        """Return the stratum of each row: its class, the first if it has several, or its rarest label."""
        if self.table.kind == "number":
            return np.zeros(len(rows), dtype=np.int64)
        if self.table.kind == "mixed":
            first = self.table.kinds.index("class")
            return np.nan_to_num(self.table.values[rows, first], nan=len(self.table.classes[first])).astype(np.int64)
        if self.table.kind == "class":
            return self.targets_of(rows).numpy()
        labels = self.table.values[rows]
        rarity = np.where(labels, labels.sum(0, dtype=np.int64), len(rows) + 1)
        return np.where(labels.any(1), rarity.argmin(1), labels.shape[1])

    def _rows(self, part: Part) -> Indices:
        if part == "all":
            return np.arange(len(self.table.paths))
        return np.flatnonzero((self.part_of == "test") == (part == "test"))

    def _facts(self, train: Indices) -> dict[str, Any]:
        if self.table.kind not in ("number", "mixed"):
            return {"kind": self.table.kind}
        chosen = self.table.values[train].astype(np.float64)
        if not len(train) or (trained_targets() or {}).get("kind") == self.table.kind:
            chosen = np.zeros((1, chosen.shape[1]))  # the scale is that of the run
        present = ~np.isnan(chosen)
        if len(absent := np.flatnonzero(~present.any(axis=0))):
            raise ValueError(f"{self.table.file}: no training row has a value of {self.table.targets[absent[0]]}")
        if present.all():
            mean, std = chosen.mean(axis=0), chosen.std(axis=0)
        else:
            mean, std = np.nanmean(chosen, axis=0), np.nanstd(chosen, axis=0)
        if self.table.kind == "mixed":
            classes = np.array([kind == "class" for kind in self.table.kinds])
            mean, std = np.where(classes, 0.0, mean), np.where(classes, 1.0, std)
        scale = {"mean": mean.tolist(), "std": np.where(std > 1e-7 * np.abs(mean), std, 1.0).tolist()}
        facts = {"kind": self.table.kind, "names": self.table.targets, **scale}
        if self.table.kind == "mixed":
            return {**facts, "classes": self.table.classes, "present": present.mean(axis=0).tolist()}
        return {**facts, "present": float(present.mean())} if np.isnan(self.table.values).any() else facts

    def _in_words(self) -> str:
        names = ", ".join(self.table.targets)
        match self.table.kind:
            case "number":
                return f"{counted(len(self.table.targets), 'number')} ({names})"
            case "class":
                return f"classes ({names})"
            case "mixed":
                kinds = [f"{len(found)} classes" if found else "a number" for found in self.table.classes]
                return ", ".join(f"{name} ({kind})" for name, kind in zip(self.table.targets, kinds, strict=True))
        return f"{len(self.table.names)} labels ({names}), of which an image may have several"

    def _check_arrays(self, photos: TableArgs) -> None:
        if photos.get("augment", "none") not in ("none", "crop-flip"):
            raise ValueError(f"`data.augment` must be none or crop-flip for arrays, got {photos['augment']}")
        if photos.get("crop_scale") is not None or photos.get("crop_pct") is not None:
            raise ValueError("`data.crop_scale` and `data.crop_pct` are for photos: arrays are shifted, not cropped")

    def _check_divided_once(self, photos: TableArgs) -> None:
        """Refuse two ways to divide the rows: one would be ignored."""
        by_time = self.times is not None
        ways = {
            f"`data.fold` {self.named_fold}": self.named_fold is not None,
            "`data.split_by: time`": by_time,
            "`data.split_file`": bool(photos.get("split_file")),
            f"the column {self.table.columns.get('split')}": by_time and "val" in self.part_of,
        }
        given = [way for way, is_given in ways.items() if is_given]
        if len(given) > 1:
            raise ValueError(
                f"{given[0]} divides the rows of {self.table.file}, and so does {given[1]}: leave one of them out"
            )

    def _named_fold(self, fold: str | int | None) -> str | None:
        """Return the value of the column of folds that `data.fold` names; None if it is k/n, or not given."""
        named, known = str(fold), {*(self.folds or ())}
        if fold is None or (named not in known and "/" in named):
            return None
        if named not in known and named.isdecimal():  # files of before may say 0 for 00
            same = [fold for fold in known if fold.isdecimal() and int(fold) == int(named)]
            named = same[0] if len(same) == 1 else named
        self._check_fold(named)
        return named

    def _check_fold(self, fold: str) -> None:
        file, column = self.table.file, self.table.columns.get("fold")
        if self.folds is None:
            raise ValueError(
                f"`data.fold` is {fold}, and {file} has no column of folds beside the targets (`data.fold_column` of a "
                "table); k/n, such as 1/5, draws folds"
            )
        if fold not in (known := distinct_folds(self.folds)):
            raise ValueError(f"`data.fold` is {fold}, and the column {column} of {file} has {', '.join(known[:20])}")
        inside = self.part_of != "test"
        if len(empty := np.flatnonzero(inside & (np.array(self.folds) == ""))):
            raise ValueError(
                f"{self.table.row(empty[0])}: the column {column} names no fold; only rows of the split test may do so"
            )
        self._check_together("in fold", self.folds, inside.tolist())

    def _check_together(self, where: str, values: Sequence[str], used: Sequence[bool]) -> None:
        """Refuse a group whose rows have different values of a column, such as folds."""
        first: dict[str, int] = {}
        for i, (group, value) in enumerate(zip(self.table.groups or [], values, strict=False)):
            if used[i] and values[j := first.setdefault(group, i)] != value:
                place = f"{self.table.row(i)}: the group {group} of the column {self.table.columns['group']}"
                raise ValueError(
                    f"{place} is {where} {value}, and in row {self.table.frame.index[j] + 1} {where} {values[j]}"
                )


def _parts(table: Rows) -> dict[str, str]:
    if table.splits is None:
        return {"train": "train"}
    names = sorted(set(table.splits))
    parts = parts_among(names)
    unknown = sorted(set(names) - set(parts.values()))
    if unknown or not ("train" in parts or RUN.get()):
        column, place = table.columns["split"], table.row(table.splits.index(unknown[0])) if unknown else table.file
        what = f"says {unknown[0]}" if unknown else "has no train"
        raise ValueError(f"{place}: the column {column} {what}: rows must be in train, val or test")
    return parts
