"""What folders of photos hold, told from what they seem to hold."""

import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

_FEW = 4  # images a class that are looked at before all others are
_NOT_PHOTOS = ("thumbs.db", "desktop.ini", "__macosx")


def visible(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder that count, in sorted order."""
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if _counts(entry.name)), key=lambda entry: entry.name)


def is_flat(folder: Path) -> bool:
    """Return whether a folder holds files and no folders."""
    entries = visible(folder) if folder.is_dir() else []
    return bool(entries) and not any(entry.is_dir() for entry in entries)


def files_below(folder: str) -> list[str]:
    """Return all files below a folder in sorted order; a link that leads above its class is refused."""
    return sorted(_walk(folder, {os.path.realpath(folder)}, os.path.realpath(folder)))


def class_folders(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the folders that hold an image, and of those that hold none.

    Raises:
        ValueError: There are classes that differ in case alone.
    """
    found = [(entry.name, next(_first_files(entry.path), None)) for entry in visible(folder) if entry.is_dir()]
    names = [name for name, file in found if file is not None]
    spellings = Counter(name.lower() for name in names if len(name) > 1)  # a and A are classes of letters
    twice = [name for name in names if spellings[name.lower()] > 1]
    if twice:
        raise ValueError(f"the classes {', '.join(twice)} in {folder} differ in case alone: join or rename them")
    return names, [name for name, file in found if file is None]


def some_files(folder: Path) -> list[str]:
    """Return a few files of each class."""
    return [file for entry in visible(folder) if entry.is_dir() for file in islice(_first_files(entry.path), _FEW)]


def deeper(folder: Path) -> Path | None:
    """Return the folder below that looks like a set of classes, where ``folder`` holds one folder and nothing else."""
    entries = visible(folder)
    while len(entries) == 1 and entries[0].is_dir():
        folder = Path(entries[0].path)
        entries = visible(folder)
        if len(entries) > 1 and all(entry.is_dir() for entry in entries):
            return folder
    return None


def _first_files(folder: str) -> Iterator[str]:
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(filter(_counts, folders))
        yield from (os.path.join(place, name) for name in sorted(filter(_counts, names)))


def _walk(folder: str, above: set[str], top: str) -> list[str]:
    files: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not _counts(entry.name):
                continue
            if not entry.is_dir():
                files.append(entry.path)
                continue
            place = os.path.realpath(entry.path)
            if place in above:  # a link that leads back: all of it has been seen
                continue
            if f"{top}{os.sep}".startswith(place.rstrip(os.sep) + os.sep):
                raise ValueError(f"{entry.path} leads to {place}, above its class: remove the link")
            files += _walk(entry.path, above | {place}, top)
    return files


def _counts(name: str) -> bool:
    return not name.startswith(".") and name.lower() not in _NOT_PHOTOS
