"""The rows of a table of images: paths, targets, and optional split, fold, group, weight and time."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from vitlab.data.files.walk import ALIKE, alike
from vitlab.ranges import check_word

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["class", "multilabel", "number"]
Declared = Kind | list[Kind] | None  # of all target columns, or of each
Missing = Literal["refuse", "drop", "mask"]
_LIKE_EMPTY = {"none", "na", "n/a", "nan", "null"}  # words with which other programs mark an empty cell


class Rows:
    """The rows of a table: paths and targets, and optional split, fold, group, weight and time.

    Args:
        file: Name of the table, for messages.
        table: The rows.
        targets: Columns to predict.
        columns: Column of each of split, fold, group, weight and time, which may be missing under its default name. A
            target column is none of them.
        kind: Kind of the targets, or a list with class or number for each column. None infers multilabel from lists and
            from several columns of 0 and 1, number from floats and other columns of numbers among several, and class
            otherwise. Several columns with classes among them are of the kind mixed.
        separator: Separator of the labels in a column of text.
        missing: What happens to empty targets: they are refused; drop leaves their rows out; mask leaves them out of
            loss and metrics, for several numbers or classes, and drops rows without any.
        trained: Facts about the targets of the run that the table is measured with; they decide what values leave open.
        paths: Columns of paths, of which the first names the row.

    >>> import pandas as pd
    >>> rows = Rows("a.csv", pd.DataFrame({"path": ["1", "2"], "cat": [0, 1], "dog": [1, 1]}), ["cat", "dog"], {})
    >>> rows.kind, rows.why, rows.names, rows.values.tolist()
    ('multilabel', 'by their values, 0 and 1', ['cat', 'dog'], [[0, 1], [1, 1]])
    """

    def __init__(
        self,
        file: str,
        table: "pd.DataFrame",
        targets: Sequence[str],
        columns: Mapping[str, str | None],
        kind: Declared = None,
        separator: str = ";",
        missing: Missing = "refuse",
        trained: Mapping[str, Any] | None = None,
        paths: Sequence[str] = ("path",),
    ) -> None:
        check_word("data.missing", missing, get_args(Missing))
        self.file, self.targets, self.missing, self.trained = file, list(targets), missing, trained
        self.columns: dict[str, str | None] = {"path": paths[0]}
        self.columns |= {part: name for part, name in columns.items() if name not in targets}
        self._check(table, paths, separator)
        self.notes: list[str] = []
        self.frame = table = table if missing == "refuse" else self._without_empty(table)
        cells = [table[name] for name in targets]
        self.kinds, self.why = (self._declared(kind), "as declared") if kind else self._of_run() or self._seen(cells)
        several = len(cells) > 1 and "class" in self.kinds
        self.kind: Kind | Literal["mixed"] = "mixed" if several else self.kinds[0]
        self.classes: list[list[str]] = [[] for _ in cells]  # of each column, if mixed; empty for numbers
        for column in (*(table[name] for name in paths), *map(self._column, ("split", "group", "weight"))):
            self._refuse_empty(column)
        self.paths, self.splits, self.groups = self._words("path") or [], self._words("split"), self._words("group")
        self._note_alike("groups", self.groups or [])
        self.names: list[str] = []  # of the labels, or the class of each row
        self._read(cells, separator)

    @property
    def class_names(self) -> list[str]:
        """The classes or labels; empty for numbers and for several columns with classes, which have their own."""
        return self.names if self.kind == "multilabel" else sorted(set(self.names))

    def folds(self) -> list[str] | None:
        """Return the fold of each row, or None; it is empty where the column is.

        >>> import pandas as pd
        >>> table = {"path": list("abc"), "y": [1.0, 2, 3], "fold": [0, 1, None]}
        >>> Rows("a.csv", pd.DataFrame(table), ["y"], {"fold": "fold"}).folds()
        ['0', '1', '']
        """
        column = self._column("fold")
        return None if column is None else fold_names(column)

    def weights(self) -> NDArray[np.float32] | None:
        """Return the weight of each row, or None."""
        if (column := self._column("weight")) is None:
            return None
        values = self._numbers(column)
        if values.min() < 0:
            wrong = int(values.argmin())
            raise ValueError(
                f"{self.row(wrong)}: the column {column.name} must hold no weight below 0, got {values[wrong]:g}"
            )
        if not values.any():
            raise ValueError(f"{self.file}: the column {column.name} must hold weights, some above 0")
        return values

    def times(self) -> NDArray[np.int64]:
        """Return the rank of each row's time; a group has its latest time, so that it is not divided.

        >>> import pandas as pd
        >>> days = {"path": list("abc"), "y": [1.0, 2, 3], "time": ["2024-02-01", "2023-01-05", "2024-03-09"]}
        >>> Rows("a.csv", pd.DataFrame(days), ["y"], {"time": "time"}).times()
        array([1, 0, 2])
        """
        import pandas as pd

        if (column := self._column("time")) is None:
            raise ValueError(
                "`data.split_by: time` needs a column of times beside the targets (`data.time_column` of a table), and "
                f"{self.file} has none"
            )
        self._refuse_empty(column)
        try:
            values = column if column.dtype.kind in "iufM" else pd.to_datetime(column, format="ISO8601", utc=True)
        except (TypeError, ValueError) as error:
            why = str(error).partition(". ")[0]  # without advice on arguments of pandas
            raise ValueError(
                f"{self.file}: the column {column.name} must hold numbers, or dates as 2024-03-09: {why}"
            ) from None
        if self.groups is not None:
            values = values.groupby(np.array(self.groups)).transform("max")
        return np.unique(values.to_numpy(), return_inverse=True)[1].astype(np.int64)

    def _check(self, table: "pd.DataFrame", paths: Sequence[str], separator: str) -> None:
        """Refuse a table without rows, or without a column that was named; default names of parts may be missing."""
        parts = {name: part for part, name in self.columns.items() if name not in (part, None)}
        parts = dict.fromkeys(paths, "path") | parts
        known = ", ".join(map(str, table))
        for name in (*parts, *self.targets):
            if name not in table:
                part = parts.get(name)
                way = f": name that of the {part} by --data.{part}_column" if part else ""
                way = ": columns stand apart by commas, those of a .tsv file by tabs" if table.shape[1] == 1 else way
                raise ValueError(f"{self.file} must have the column {name}; there are {known}{way}")
        if not self.targets:
            raise ValueError(f"{self.file} must have a column in `data.targets`; there are {known}")
        if twice := [name for k, name in enumerate(self.targets) if name in self.targets[:k]]:
            raise ValueError(f"`data.targets` names {twice[0]} twice")
        if not separator:
            raise ValueError("`data.label_separator` must not be empty")
        if not len(table):
            raise ValueError(f"{self.file} has no rows")

    def _read(self, cells: list["pd.Series"], separator: str) -> None:
        """Set ``names`` and, but for one column of classes, ``values`` from the columns of the targets."""
        if self.kind == "multilabel":
            self.names, self.values = self._labels(cells, separator)
            self._note_words(self.names)
            return
        masked = self.missing == "mask" and self.kind in ("number", "mixed")
        for column in [] if masked else cells:
            self._refuse_empty(column, target=True)
        if self.kind == "class":
            self.names = [str(value) for value in cells[0]]
            self._note_words(self.class_names)
            return
        kinds = zip(self.kinds, cells, strict=True)
        read = [self._classes(column) if kind == "class" else self._numbers(column, masked) for kind, column in kinds]
        self.values = np.stack(read, axis=1)
        self._note_words([name for names in self.classes for name in names])
        if masked and len(cells) > 1 and (left := int(np.isnan(self.values).sum())):
            self.notes.append(f"{left:,} empty targets do not count in loss and metrics (`data.missing: mask`)")

    def _column(self, part: str) -> "pd.Series | None":
        name = self.columns.get(part)
        return None if name is None else self.frame.get(name)

    def _words(self, part: str) -> list[str] | None:
        column = self._column(part)
        return None if column is None else [str(value) for value in column]

    def _note_alike(self, what: str, names: Sequence[str]) -> None:
        for first, second, *_ in alike(names)[:1]:
            self.notes.append(f"{first!r} and {second!r} count as two {what}, and {ALIKE}")

    def _note_words(self, names: list[str]) -> None:
        self._note_alike("classes", names)
        if words := [name for name in names if name.lower() in _LIKE_EMPTY]:
            self.notes.append(f"a cell with {' or '.join(words)} is of that class: only one without any text is empty")

    def _labels(self, cells: list["pd.Series"], separator: str) -> tuple[list[str], NDArray[np.uint8]]:
        if len(cells) > 1:
            for column in cells:
                self._refuse_empty(column, target=True)
            values = np.stack([self._numbers(column) for column in cells], axis=1)
            if not np.isin(values, (0, 1)).all():
                i, k = np.argwhere(~np.isin(values, (0, 1)))[0].tolist()
                raise ValueError(
                    f"{self.row(i)}: the column {self.targets[k]} of labels must hold 0 and 1, got {values[i, k]:g}"
                )
            return list(self.targets), values.astype(np.uint8)
        sets = [_set(cell, separator) for cell in cells[0]]
        names = sorted(set().union(*sets))
        if len(names) < (2 if self.trained is None else 1):
            one = f"one label, {names[0]}" if names else "no label"
            apart = f"labels stand apart by {separator!r}, the `label_separator` of a table"
            raise ValueError(f"{self.file}: the column {cells[0].name} has {one}; {apart}")
        return names, np.array([[name in found for name in names] for found in sets], dtype=np.uint8)

    def _without_empty(self, table: "pd.DataFrame") -> "pd.DataFrame":
        """Leave out rows with an empty target, or, for masks, with none but empty ones; whole numbers stay whole."""
        empty = table[self.targets].isna()
        dropped = (empty.all(axis=1) if self.missing == "mask" else empty.any(axis=1)).to_numpy()
        if dropped.all():
            raise ValueError(f"{self.file}: every row has an empty target among {', '.join(self.targets)}")
        if n := int(dropped.sum()):
            what = "without any target" if self.missing == "mask" else "with an empty target"
            self.notes.append(f"{n:,} of {len(table):,} rows {what} are left out (`data.missing: {self.missing}`)")
        table = table[~dropped].copy()
        for name in (name for name in self.targets if empty[name].any() and table[name].dtype.kind == "f"):
            if (table[name].dropna() % 1 == 0).all():  # pandas reads whole numbers with gaps as floats
                table[name] = table[name].astype("int64" if not table[name].isna().any() else "Int64")
        return table

    def _declared(self, kind: Kind | list[Kind]) -> list[Kind]:
        """Return the kind of each column as the user gave it."""
        if isinstance(kind, str):
            return [kind] * len(self.targets)
        if len(kind) != len(self.targets):
            raise ValueError(
                f"`data.target_type` must be one kind, or one for each of {', '.join(self.targets)}, got {kind}"
            )
        if len(kind) > 1 and (wrong := [one for one in kind if one not in ("class", "number")]):
            raise ValueError(f"`data.target_type` of several columns is class or number for each, got {wrong[0]}")
        return list(kind)

    def _of_run(self) -> tuple[list[Kind], str] | None:
        """Return the kind of each column in the run that the table is measured with; None if that does not say."""
        facts = self.trained or {}
        kind: Any = facts.get("kind")
        names = facts.get("names", self.targets if kind == "multilabel" else ["one class"])
        if kind is None or len(names) != len(self.targets):
            return None
        kinds: list[Kind] = ["class" if classes else "number" for classes in facts.get("classes", [])]
        return kinds or [kind] * len(names), "as in the run"

    def _seen(self, cells: list["pd.Series"]) -> tuple[list[Kind], str]:
        """Return the kind of each column by its values, and a note on how it was inferred."""
        several = len(cells) > 1
        if not several and _are_lists(cells[0]):
            return ["multilabel"], "by its lists"
        if several and all(_is_binary(column) for column in cells):
            return ["multilabel"] * len(cells), "by their values, 0 and 1"
        words = [self._has_words(column, several) for column in cells]
        if several:
            kinds: list[Kind] = ["class" if each else "number" for each in words]
            return kinds, "by their values" if any(words) else "by their number"
        return ["number" if cells[0].dtype.kind == "f" else "class"], f"by type {cells[0].dtype}"

    def _has_words(self, column: "pd.Series", several: bool) -> bool:
        """Return whether a column holds words; refuse one that holds numbers, too: fractions, or any among several."""
        import pandas as pd

        if column.dtype.kind in "biufM":
            return False
        if several and _are_lists(column):
            raise ValueError(f"{self.file}: the column {column.name} of lists must be the only one of `data.targets`")
        numbers = pd.to_numeric(column, errors="coerce").to_numpy(dtype="float64", na_value=np.nan)
        words = np.flatnonzero(np.isnan(numbers) & column.notna().to_numpy())
        others = np.flatnonzero(~np.isnan(numbers) & (several | (numbers % 1 != 0)))
        if len(words) and len(others):
            raise ValueError(
                f"{self.row(words[0])}: the column {column.name} holds {column.iloc[words[0]]!r}, and numbers such as "
                f"{column.iloc[others[0]]} in row {self.frame.index[others[0]] + 1}: correct it, or declare its kind "
                "by --data.target_type"
            )
        return len(words) > 0

    def _classes(self, column: "pd.Series") -> NDArray[np.float32]:
        """Return the number of each row's class, NaN where the cell is empty, and note the names of the classes."""
        there, k = column.notna().to_numpy(), self.targets.index(str(column.name))
        found, known = {str(value) for value in column[there]}, self._trained_classes(k)
        names = [*known, *sorted(found - {*known})]
        if len(names) < 2:
            raise ValueError(f"{self.file}: the column {column.name} has one class, {names[0] if names else 'none'}")
        numbers = {name: k for k, name in enumerate(names)}
        values = np.array([numbers.get(str(value), np.nan) for value in column], dtype=np.float32)
        self.classes[k] = names
        return np.where(there, values, np.float32(np.nan))

    def _trained_classes(self, column: int) -> list[str]:
        classes = (self.trained or {}).get("classes", [])
        return classes[column] if len(classes) == len(self.targets) else []

    def row(self, i: int) -> str:
        """Return a row's place in the table, for messages; the first one below the header is row 1.

        >>> import pandas as pd
        >>> Rows("a.csv", pd.DataFrame({"path": ["1", "2"], "y": [0.5, 1.5]}), ["y"], {}).row(1)
        'a.csv, row 2'
        """
        return f"{self.file}, row {self.frame.index[i] + 1}"

    def _refuse_empty(self, column: "pd.Series | None", target: bool = False) -> None:
        if column is not None and len(empty := np.flatnonzero(column.isna().to_numpy())):
            ways = (
                "; --data.missing=drop leaves such rows out of a table; mask leaves out the cell alone, among several "
                "numbers or classes (--data.target_type)"
            )
            raise ValueError(f"{self.row(empty[0])}: the column {column.name} is empty{ways if target else ''}")

    def _numbers(self, column: "pd.Series", masked: bool = False) -> NDArray[np.float32]:
        import pandas as pd

        exact = pd.to_numeric(column, errors="coerce").astype("float64").to_numpy(na_value=np.nan)
        found = exact.astype(np.float32)
        empty = column.isna().to_numpy()
        if len(wrong := np.flatnonzero(np.isnan(found) & ~empty)):
            cell = column.iloc[wrong[0]]
            raise ValueError(f"{self.row(wrong[0])}: the column {column.name} must hold numbers, got {cell!r}")
        if len(wrong := np.flatnonzero(~np.isfinite(found) & ~(empty & masked))):
            raise ValueError(f"{self.row(wrong[0])}: the column {column.name} is {column.iloc[wrong[0]]}, not finite")
        known, error = exact[~empty], abs(found - exact)[~empty].max(initial=0.0)
        if self.trained is None and error and np.ptp(known) and error > 0.01 * (spread := known.std()):
            raise ValueError(
                f"{self.file}: numbers have 32 bits, which rounds the column {column.name} by up to {error:.3g}, and "
                f"its standard deviation is {spread:.3g}: subtract {known.min():.10g} from it"
            )
        return found


def _is_binary(column: "pd.Series") -> bool:
    may_be = column.dtype.kind in "biu" or (column.isna().any() and not _are_lists(column))
    return may_be and bool(column.dropna().isin([0, 1]).all())


def _are_lists(column: "pd.Series") -> bool:
    return any(_is_list(cell) for cell in column.dropna().iloc[:1])


def _is_list(cell: Any) -> bool:
    return isinstance(cell, list | tuple | np.ndarray)


def _set(cell: Any, separator: str) -> set[str]:
    """Return the labels of a cell, a list or text; an empty cell has none.

    >>> sorted(_set(["cat", None], ";")), _set(None, ";"), sorted(_set("cat; dog", ";"))
    (['cat'], set(), ['cat', 'dog'])
    """
    import pandas as pd

    parts = cell if _is_list(cell) else [] if pd.isna(cell) else str(cell).split(separator)
    return {name for part in parts if not pd.isna(part) and (name := str(part).strip())}


def fold_names(column: "pd.Series") -> list[str]:
    """Return the cells of a column of folds as words; those that name no fold are empty.

    These are empty cells, -1, and null and ~, by which a command line names none. Programs write the
    whole numbers of a column with empty cells as 4.0.

    >>> import pandas as pd
    >>> fold_names(pd.Series([0.0, 4.0, None, -1])), fold_names(pd.Series(["a", "b", "NULL"]))
    (['0', '4', '', ''], ['a', 'b', ''])
    """
    values = ["" if empty else value for value, empty in zip(column.tolist(), column.isna(), strict=True)]
    names = [name.removesuffix(".0") if re.fullmatch(r"-?[0-9]+\.0", name := str(x)) else name for x in values]
    return ["" if name.lower() in ("-1", "null", "~") else name for name in names]


def distinct_folds(names: Sequence[str]) -> list[str]:
    """Return the folds in order, numbers by their size.

    >>> distinct_folds(["10", "9", "", "9"])
    ['9', '10']
    """
    return by_number({*names} - {""})


def by_number(names: Collection[str]) -> list[str]:
    """Return names in order, by their numbers if all are whole ones.

    >>> by_number({"1", "10", "9", "01"}), by_number({"1", "10", "9", "a"})
    (['01', '1', '9', '10'], ['1', '10', '9', 'a'])
    """
    return sorted(names, key=lambda name: (int(name), name)) if all(map(str.isdecimal, names)) else sorted(names)
