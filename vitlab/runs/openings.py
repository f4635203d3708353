"""How often a split of a run was opened: each evaluation adds a line to ``openings.jsonl``, whatever its outcome."""

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitlab.errors import named
from vitlab.runs.records import now_utc

FILE = "openings.jsonl"


def note_opening(run: Path, split: str, checkpoint: str, overrides: Mapping[str, Any]) -> None:
    """Note that a split is opened now; a run that is read-only here notes nothing.

    Args:
        run: The run directory.
        split: The split.
        checkpoint: Name of the file of the weights.
        overrides: What is asked to be changed against the run's own conditions; nothing is read yet, so that another
            place of the same images is among it.

    Raises:
        OSError: The disk is full or fails. The evaluation must not begin then, as nothing would count it.
    """
    row = {"split": split, "time": now_utc(), "checkpoint": checkpoint, "overrides": dict(overrides)}
    try:
        with named(run / FILE), (run / FILE).open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise


def openings(run: Path, split: str) -> int:
    """Return how often a split of a run was opened, as far as it is noted.

    Raises:
        OSError: What is noted cannot be read.

    Example:
        >>> openings(Path("nowhere"), "test")
        0
    """
    try:
        lines = (run / FILE).read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return sum(f'"split": "{split}"' in line for line in lines)
