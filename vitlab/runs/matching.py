"""Look for files by a pattern; alone, since checkpoints, records and evidence need it, and none is below the others."""

import os
import stat
from fnmatch import fnmatchcase
from pathlib import Path


def is_there(path: Path) -> bool:
    """Return whether there is a file; :meth:`Path.is_file` says no of any error from Python 3.14 on.

    Raises:
        OSError: The file system does not answer, so this is unknown.

    Example:
        >>> is_there(Path("runs/first/run.json")), is_there(Path("runs/first"))
        (True, False)
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def matching(folder: Path, pattern: str) -> list[Path]:
    """Return what :meth:`Path.glob` finds, sorted; no files are found in a folder that is not there.

    Raises:
        OSError: A folder cannot be listed. ``glob`` would find nothing in it, as if it were empty.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     Path(place, "best.ckpt").touch()
        ...     [path.name for path in matching(Path(place), "*.ckpt")], matching(Path(place, "gone"), "*.ckpt")
        (['best.ckpt'], [])
    """
    name, _, rest = pattern.partition("/")
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [folder / each for each in sorted(names) if fnmatchcase(each, name)]
    return [path for each in found for path in matching(each, rest)] if rest else found
