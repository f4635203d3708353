"""The lines and tables that commands print, alone because several commands do so."""

import sys
from typing import Any, Literal

from vitlab.errors import printable
from vitlab.tables import formatted


def show(*texts: str) -> None:
    """Print texts of one or more lines to stdout, without the control characters that file names may contain."""
    sys.stdout.write("".join(f"{printable(line)}\n" for text in texts for line in text.split("\n")))
    sys.stdout.flush()


def note(*lines: str) -> None:
    """Print lines to stderr, where they do not disturb a table in JSON or CSV."""
    sys.stderr.write("".join(f"{printable(line)}\n" for line in lines))


def show_rows(rows: list[dict[str, Any]], form: Literal["json", "csv"]) -> None:
    """Print the rows of a table to stdout as JSON or CSV."""
    sys.stdout.write(formatted(rows, form))


def show_found(found: Any, form: Literal["json", "csv"] | None) -> None:
    """Print what a command found, which has a text and ``rows``: these in a format for programs, or the text."""
    show_rows(found.rows, form) if form else show(str(found))
