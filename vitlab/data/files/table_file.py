"""Read the file of a table, whose words stay as they are written."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

_READERS = {
    ".csv": "read_csv", ".tsv": "read_csv", ".parquet": "read_parquet", ".arrow": "read_feather",
    ".feather": "read_feather",
}  # fmt: skip


def read_table(
    file: str,
    columns: Sequence[str] | None = None,
    required: Sequence[str] = (),
    text: Sequence[str] = (),
    classes: Sequence[str] = (),
    groups: Sequence[str] = (),
) -> "pd.DataFrame":
    """Return the rows of a CSV, TSV, Parquet or Arrow file (Feather is Arrow's file format).

    Args:
        file: The table.
        columns: Columns to read of a Parquet or Arrow file, those that it has; default: all.
        required: Columns without which all are returned, and no row.
        text: Columns of a CSV file whose cells stay as they are written, 0000 among them.
        classes: Columns whose cells stay so where whole numbers would be written otherwise, as 01.
        groups: Columns whose cells stay so where two of them would be one number, as 01 and 1.

    Raises:
        ValueError: The file cannot be read; its kind, the line or the reason is named.
    """
    import pandas as pd

    suffix = Path(file).suffix.lower()
    if suffix not in _READERS:
        raise ValueError(f"`data.path` must end in {', '.join(_READERS)}, or be a Hugging Face data set, got {file}")
    try:
        options: dict[str, Any] = {"sep": "\t"} if suffix == ".tsv" else {}
        if columns is not None and _READERS[suffix] != "read_csv":
            names = _names(file, suffix)
            if not {*required} <= {*names}:
                return pd.DataFrame(columns=names)
            options["columns"] = [name for name in names if name in columns]
        table = getattr(pd, _READERS[suffix])(file, **options)
        if _READERS[suffix] != "read_csv":
            return _without_index(table, columns)
        if _ends_in_separators(table):  # or pandas would take the first column for names of the rows
            options |= {"index_col": False, "usecols": range(table.shape[1])}
            table = pd.read_csv(file, **options)
        table = table.reset_index(drop=True)
        written = pd.read_csv(file, dtype=str, keep_default_na=False, na_values=[""], **options).reset_index(drop=True)
        return _as_written(table, written, text, classes, groups)
    except FileNotFoundError:
        raise ValueError(f"`data.path` must be a table, and there is no {file}") from None
    except UnicodeDecodeError as error:
        line = next((i for i, text in enumerate(Path(file).read_bytes().splitlines(), 1) if not _is_utf8(text)), 0)
        raise ValueError(f"`data.path` {file} must be UTF-8, and its line {line} is not: {error.reason}") from None
    except Exception as error:  # pandas and pyarrow can raise anything for a broken file
        raise ValueError(f"`data.path` {file} cannot be read: {error}") from None


def _as_written(
    table: "pd.DataFrame", written: "pd.DataFrame", text: Sequence[str], classes: Sequence[str], groups: Sequence[str]
) -> "pd.DataFrame":
    """Return a table with the cells as they are ``written`` in columns that would lose words, zeros or differences."""
    for name in table:
        cells = written[name]
        if table[name].dtype.kind in "iuf":  # beside numbers, NA is an empty cell
            cells = cells.where(table[name].notna())
        lost = name in text or _has_lost_words(table[name])
        lost = lost or (name in classes and _is_rewritten(table[name], cells))
        if lost or (name in groups and table[name].nunique() < cells.nunique()):
            table[name] = cells
    return table


def _without_index(table: "pd.DataFrame", columns: Sequence[str] | None) -> "pd.DataFrame":
    """Return the rows numbered from 0; an index is a column if it has a name, one of ``columns``.

    >>> import pandas as pd
    >>> _without_index(pd.DataFrame({"y": [5, 6]}, pd.Index(["a", "b"], name="path")), ["path"]).columns.tolist()
    ['path', 'y']
    """
    named = [name for name in table.index.names if name is not None and (columns is None or name in columns)]
    return (table.reset_index(named) if named else table).reset_index(drop=True)


def _ends_in_separators(table: "pd.DataFrame") -> bool:
    """Return whether the rows of a CSV file have more cells than the header, of which the last are empty."""
    import pandas as pd

    return not isinstance(table.index, pd.RangeIndex) and bool(table.iloc[:, -1].isna().all())


def _has_lost_words(column: "pd.Series") -> bool:
    """Return whether a column of words has empty cells, such as None and NA, or numbers in place of text."""
    import pandas as pd

    kind = pd.api.types.infer_dtype(column, skipna=True)
    return kind in ("mixed", "mixed-integer") or (kind == "string" and bool(column.isna().any()))


def _is_rewritten(column: "pd.Series", written: "pd.Series") -> bool:
    """Return whether whole numbers are written otherwise in the file.

    >>> import pandas as pd
    >>> [_is_rewritten(pd.Series([1, 2]), pd.Series(cells)) for cells in (["01", "2"], ["1", "2"], ["1.0", "2.0"])]
    [True, False, False]
    """
    cells = written.dropna().str.strip()
    if column.dtype.kind not in "iuf" or not cells.str.fullmatch(r"[+-]?[0-9]+").all():
        return False
    return any(cell != f"{number:.0f}" for cell, number in zip(cells, column.dropna(), strict=False))


def _is_utf8(text: bytes) -> bool:
    return text.decode(errors="ignore").encode() == text


def _names(file: str, suffix: str) -> list[str]:
    """Return the columns of a Parquet or Arrow file, of which only the end is read."""
    import pyarrow as pa
    import pyarrow.parquet

    if suffix == ".parquet":
        return [name for name in pyarrow.parquet.read_schema(file).names if not re.match("__index_level_", name)]
    with pa.memory_map(file) as source:
        return pa.ipc.open_file(source).schema.names
