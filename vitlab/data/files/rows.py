"""A table of images: where each lies, what is to be predicted of it, and where it belongs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["class", "number"]
_READERS = {".csv": "read_csv", ".tsv": "read_csv", ".parquet": "read_parquet"}


class Rows:
    """The rows of a CSV, TSV or Parquet file with a path, targets, and maybe a split and a group.

    Args:
        file: The table.
        path: Column of the paths, relative to the table's folder.
        targets: Columns of what is to be predicted.
        split: Column that says train, val or test; there need be none.
        group: Column of what must not be in two splits, such as a patient; there need be none.
        kind: What the targets are; None takes floats and several columns for numbers, anything else for classes.
    """

    def __init__(self, file: str, path: str, targets: Sequence[str], split: str, group: str, kind: Kind | None) -> None:
        self.file, self.targets = file, list(targets)
        table = _read(file)
        missing = [name for name in (path, *targets) if name not in table]
        if missing or not targets:
            wanted = f"the column {missing[0]}" if missing else "a column in `data.targets`"
            raise ValueError(f"{file} must have {wanted}; there are {', '.join(map(str, table))}")
        self._refuse_empty(table, [path, *targets, *(name for name in (split, group) if name in table)])
        self.paths = [str(value) for value in table[path]]
        self.splits = [str(value) for value in table[split]] if split in table else None
        self.groups = [str(value).encode() for value in table[group]] if group in table else None
        columns = [table[name] for name in targets]
        self.kind: Kind = kind or ("number" if len(columns) > 1 or columns[0].dtype.kind == "f" else "class")
        self.why = "as declared" if kind else f"by {'their number' if len(columns) > 1 else f'type {columns[0].dtype}'}"
        if self.kind == "number":
            self.values = np.stack([self._numbers(column) for column in columns], axis=1)
        elif len(columns) > 1:
            raise ValueError(f"`data.targets` must be one column of classes, got {', '.join(targets)}")
        else:
            self.names = [str(value) for value in columns[0]]

    def _refuse_empty(self, table: "pd.DataFrame", columns: list[str]) -> None:
        for name in columns:
            empty = np.flatnonzero(table[name].isna().to_numpy())
            if len(empty):
                raise ValueError(f"{self.file}, row {empty[0] + 1}: the column {name} is empty")

    def _numbers(self, column: "pd.Series") -> NDArray[np.float32]:
        try:
            values = column.to_numpy(dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.file}: the column {column.name} must hold numbers: {error}") from None
        if len(wrong := np.flatnonzero(~np.isfinite(values))):
            raise ValueError(f"{self.file}, row {wrong[0] + 1}: {column.name} is {column.iloc[wrong[0]]}, not finite")
        return values


def _read(file: str) -> "pd.DataFrame":
    import pandas as pd

    suffix = Path(file).suffix.lower()
    if suffix not in _READERS:
        raise ValueError(f"`data.path` must end in {', '.join(_READERS)}, got {file}")
    try:
        options = {"sep": "\t"} if suffix == ".tsv" else {}
        table = getattr(pd, _READERS[suffix])(file, **options)
    except FileNotFoundError:
        raise ValueError(f"`data.path` must be a table, and there is no {file}") from None
    except Exception as error:  # pandas and pyarrow meet broken files with every kind of error
        raise ValueError(f"`data.path` {file} cannot be read: {error}") from None
    if not len(table):
        raise ValueError(f"{file} has no rows")
    return table


def split_by_group(
    groups: Sequence[bytes], labels: NDArray[np.int64]
) -> tuple[list[bytes], NDArray[np.int64], NDArray[np.int64]]:
    """Return the groups, the commonest class of each, and the group of each sample.

    >>> split_by_group([b"a", b"b", b"a"], np.array([0, 1, 0]))
    ([b'a', b'b'], array([0, 1]), array([0, 1, 0]))
    """
    names = sorted(set(groups))
    number = {name: i for i, name in enumerate(names)}
    of = np.array([number[group] for group in groups])
    counts = np.zeros((len(names), labels.max() + 1), dtype=int)
    np.add.at(counts, (of, labels), 1)
    return names, counts.argmax(axis=1), of
