"""Text in columns."""

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return rows of cells as lines whose columns stand below each other.

    Args:
        rows: Cells of each line, the headings first.
        right: Numbers of the columns that are flush right, from 0.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        lines.append([cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(cells)])
    return "\n".join("  ".join(line).rstrip() for line in lines)
