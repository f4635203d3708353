"""Folders of photos as they lie on disk: what is visible in them, which are classes, and the files below."""

import os
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

ALIKE = "differ only in case, spaces, or how accents are encoded"
_FEW = 4  # images per class in the sample
_NOT_PHOTOS = ("thumbs.db", "desktop.ini", "__macosx")


def visible(folder: Path) -> list[os.DirEntry[str]]:
    """Return the visible entries of a folder in sorted order."""
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if _is_visible(entry.name)), key=lambda entry: entry.name)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder; a link onto itself is a file that cannot be read, as a dead one is."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_flat(folder: Path) -> bool:
    """Return whether a folder has files but no folders."""
    entries = visible(folder) if folder.is_dir() else []
    return bool(entries) and not any(is_folder(entry) for entry in entries)


def files_below(folder: str) -> Iterator[str]:
    """Yield all files below a folder, each folder in sorted order.

    Raises:
        ValueError: A link leads to a folder above.
    """
    return _walk(folder, frozenset([os.path.realpath(folder)]), os.path.realpath(folder))


def classes_in(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the folders with files, and of those without.

    Raises:
        ValueError: Two classes are alike: some file systems change case, and how accents are encoded.
    """
    found = [(entry.name, next(files_below(entry.path), None)) for entry in visible(folder) if is_folder(entry)]
    names = [name for name, file in found if file is not None]
    if twice := next(iter(alike(names)), None):
        shown = ", ".join(twice).encode("ascii", "backslashreplace").decode()  # accents look the same
        raise ValueError(f"the classes {shown} in {folder} {ALIKE}: join or rename them")
    return names, [name for name, file in found if file is None]


def alike(names: Iterable[str]) -> list[list[str]]:
    """Return the names that differ only in case, in spaces, or in how accents are encoded, if any do.

    Single letters may differ in case.

    >>> alike(["cat", "Cat ", "a", "A", "dog"])
    [['Cat ', 'cat']]
    """
    found: dict[str, list[str]] = {}
    for name in sorted({*names}):
        text = " ".join(unicodedata.normalize("NFC", name).split())
        found.setdefault(text.lower() if len(text) > 1 else text, []).append(name)
    return [same for same in found.values() if len(same) > 1]


def sample_files(folder: Path) -> list[str]:
    """Return a sample of files of each class."""
    return [file for entry in visible(folder) if is_folder(entry) for file in islice(files_below(entry.path), _FEW)]


def deeper(folder: Path) -> Path | None:
    """Return the folder of class folders below ``folder``, if the way there is one folder in another."""
    entries = visible(folder)
    while len(entries) == 1 and is_folder(entries[0]):
        folder = Path(entries[0].path)
        entries = visible(folder)
        if len(entries) > 1 and all(is_folder(entry) for entry in entries):
            return folder
    return None


def _walk(folder: str, above: frozenset[str], top: str) -> Iterator[str]:
    for entry in visible(Path(folder)):
        if not is_folder(entry):
            yield entry.path
            continue
        place = os.path.realpath(entry.path)
        if place in above:  # a link to a folder that contains it
            continue
        if f"{top}{os.sep}".startswith(place.rstrip(os.sep) + os.sep):
            raise ValueError(f"{entry.path} leads to {place}, above its class: remove the link")
        yield from _walk(entry.path, above | {place}, top)


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name.lower() not in _NOT_PHOTOS
