"""Tables: aligned text, Markdown, JSON, CSV, files, and sections of a page."""

import csv
import io
import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitlab.errors import UsageError, printable
from vitlab.runs.atomic import atomic_write, write_text
from vitlab.runs.records import without_counts

if TYPE_CHECKING:
    import pandas as pd


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return rows of cells as lines with aligned columns.

    Args:
        rows: Cells of each line, the headings first.
        right: Indices of right-aligned columns.

    Example:
        >>> print(columns([["arm", "acc1"], ["none", "0.25"]], right=[1]))
        arm   acc1
        none  0.25
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        lines.append([cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(cells)])
    return "\n".join(printable("  ".join(line).rstrip()) for line in lines)


def counted(n: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    Example:
        >>> counted(1, "block"), counted(2, "class")
        ('1 block', '2 classes')
    """
    return f"{n:,} {noun}" + ("" if n == 1 else "es" if noun.endswith("s") else "s")


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape in words.

    Example:
        >>> shape_text((3, 224, 224))
        '3 x 224 x 224'
    """
    return " x ".join(map(str, shape))


def wrapped(line: str, width: int) -> str:
    """Return a line broken between words at ``width``; what follows starts below the second column.

    A command in backticks stays on one line.

    Example:
        >>> print(wrapped("data   60 photos; `vitlab data photos` lists them", width=30))
        data   60 photos;
               `vitlab data photos`
               lists them
    """
    start = re.match(r" *(\S+ {2,})?", line)
    assert start  # the pattern matches an empty line, too
    line = re.sub("`[^`]*`", lambda quoted: quoted[0].replace(" ", "\0"), line)
    indent = " " * start.end()
    lines = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def table(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    """Return rows as a Markdown table.

    Args:
        rows: The values of each row.
        columns: Heading of each column and its format string, with the keys of a row.

    Example:
        >>> print(table([{"arm": "none", "acc1": 0.251}], {"arm": "{arm}", "accuracy": "{acc1:.1%}"}))
        | arm | accuracy |
        | --- | --- |
        | none | 25.1% |
    """
    return "\n".join(markdown_lines([[*columns], *([_cell(text, row) for text in columns.values()] for row in rows)]))


def markdown_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells, the headings first, as the lines of a Markdown table.

    Example:
        >>> markdown_lines([["claim", "verdict"], ["a > b | c=d", "supported"]])
        ['| claim | verdict |', '| --- | --- |', '| a > b \\\\| c=d | supported |']
    """
    head, *others = [[re.sub(r"(?<!\\)\|", r"\|", cell) for cell in row] for row in rows]  # it would end the cell
    return [printable(f"| {' | '.join(row)} |") for row in (head, ["---"] * len(head), *others)]


def percent_factor(accuracies: Sequence[float]) -> int:
    """Return the factor that makes percent of accuracies: 1 where a module of the user's has logged percent itself.

    Example:
        >>> percent_factor([0.93, 0.94]), percent_factor([93.2, 94.1])
        (100, 1)
    """
    return 100 if max(accuracies) <= 1 else 1


def in_short(value: float, places: int = 4) -> str:
    """Return a number with four decimal places, or ``places``; one that has a digit there or none, with as many digits.

    Example:
        >>> in_short(0.98333), in_short(0.00123), in_short(-0.000123456), in_short(0.0), in_short(0.00123, places=3)
        ('0.9833', '0.0012', '-0.0001235', '0.0000', '0.00123')
    """
    return f"{value:.{places}{'g' if 0 < abs(value) < 10 ** (1 - places) else 'f'}}"


def metrics_text(values: Mapping[str, float], images: str = "images", split: str = "") -> str:
    """Return metrics as one line of text, each named with its split if one is given, and of how many images they are.

    Example:
        >>> metrics_text({"acc1": 0.5, "loss": 1.25, "n": 288.0}, split="val")
        'val/acc1 0.5000, val/loss 1.2500 on 288 images'
        >>> metrics_text({"knn": 0.75, "knn_images": 50.0, "acc1": 0.5, "n": 288.0})
        'acc1 0.5000 on 288 images; knn 0.7500 on 50 images'
    """
    by_count: dict[float | None, list[str]] = {values.get("n"): []}
    for name in without_counts(values):
        text = f"{split}{'/' if split else ''}{name} {in_short(values[name])}"
        by_count.setdefault(values.get(f"{name}_images", values.get("n")), []).append(text)
    parts = [(", ".join(texts), n) for n, texts in by_count.items() if texts]
    return "; ".join(text if n is None else f"{text} on {n:.0f} {images}" for text, n in parts)


def formatted(rows: Sequence[Mapping[str, Any]], form: Literal["json", "csv"]) -> str:
    """Return rows as a JSON list or as CSV, for programs: every number in full, nothing where there is none.

    Args:
        rows: The values of each row; the columns of CSV are all their keys, in the order of their first appearance.
        form: The format. CSV writes lists and mappings as JSON, and text that a spreadsheet would read as a formula
            after an apostrophe.

    Example:
        >>> print(formatted([{"arm": "none", "acc1": 1 / 3}, {"arm": "rope2d", "n": [1, 2]}], "csv"), end="")
        arm,acc1,n
        none,0.3333333333333333,
        rope2d,,"[1, 2]"
        >>> print(formatted([{"acc1": float("nan")}], "json"), end="")
        [
         {
          "acc1": null
         }
        ]
    """
    plain = [{name: _plain(value) for name, value in row.items()} for row in rows]
    if form == "json":
        return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in plain for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _csv_cell(value) for name, value in row.items()} for row in plain)
    return text.getvalue()


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: a number that is not finite is none."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "item"):  # a number of NumPy
        return _plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _csv_cell(value: Any) -> Any:
    if isinstance(value, list | dict):
        value = json.dumps(value, ensure_ascii=False)
    return _no_formula(value) if isinstance(value, str) else value


def marks(name: str) -> tuple[str, str]:
    """Return the lines that enclose the table called ``name`` on a page.

    Example:
        >>> marks("results")
        ('<!-- results -->', '<!-- /results -->')
    """
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def replace_section(text: str, path: Path, name: str) -> None:
    """Write ``text`` into a page, between the two marks of ``name``.

    Example:
        >>> page = Path("page.md")
        >>> _ = page.write_text("Measured:\\n<!-- results -->\\n<!-- /results -->\\n")
        >>> replace_section("| 98 % |", page, "results")
        >>> page.read_text().splitlines()[2]
        '| 98 % |'
    """
    begin, end = marks(name)
    page = path.read_text() if path.is_file() else ""
    if page.count(begin) != 1 or page.count(end) != 1:
        raise UsageError(f"{path} must contain the lines {begin} and {end} once each; the table goes between them")
    before, after = page.partition(begin)[0], page.partition(end)[2]
    write_text(path, f"{before}{begin}\n{text}\n{end}{after}")


def _cell(text: str, row: dict[str, Any]) -> str:
    try:
        return text.format(**row)
    except (KeyError, TypeError, ValueError):  # not measured for this row
        return "-"


def records(table: "pd.DataFrame") -> list[dict[str, Any]]:
    """Return the rows of a table with the names of its columns as text, as :func:`formatted` takes them.

    Example:
        >>> import pandas as pd
        >>> records(pd.DataFrame({"path": ["a.png"], 0: [0.5]}))
        [{'path': 'a.png', '0': 0.5}]
    """
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def as_text(table: "pd.DataFrame") -> str:
    """Return a table of predictions for the terminal, without control characters.

    Example:
        >>> import pandas as pd
        >>> print(as_text(pd.DataFrame({"path": ["a.png"], "value": [0.5]})))
        path   value
        a.png  0.5000
        >>> print(as_text(pd.DataFrame({"index": [3]})))
        index
        3
    """
    rows = table.itertuples(index=False)
    cells = [[in_short(v) if isinstance(v, float) else printable(str(v)) for v in row] for row in rows]
    numbers = [i for i, kind in enumerate(table.dtypes) if kind == "float32"]
    return columns([list(table.columns), *cells], right=numbers)


def write(table: "pd.DataFrame", path: Path) -> None:
    """Write a table atomically as .csv, .parquet or .json, every number in full.

    In .csv, an apostrophe protects text that a spreadsheet would read as a formula.

    Example:
        >>> import pandas as pd, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(pd.DataFrame({"path": ["=a.png"]}), Path(folder) / "table.csv")
        ...     print((Path(folder) / "table.csv").read_text().split())
        ['path', "'=a.png"]
    """
    with atomic_write(path) as beside:
        match path.suffix:
            case ".csv":
                text = table.select_dtypes("str")
                table.assign(**text.map(_no_formula)).to_csv(beside, index=False, encoding="utf-8")
            case ".json":
                rows = (dict(zip(table, map(_plain, row), strict=True)) for row in table.itertuples(index=False))
                lines = ",\n ".join(json.dumps(row, ensure_ascii=False) for row in rows)
                beside.write_text(f"[\n {lines}\n]\n", encoding="utf-8")  # pandas writes 15 decimal places at most
            case _:
                table.to_parquet(beside, index=False)


def _no_formula(cell: str) -> str:
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell
