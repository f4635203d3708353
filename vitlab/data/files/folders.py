"""List folders of photos: classes and files, without hidden and system files."""

import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

_FEW = 4  # images per class in the sample
_NOT_PHOTOS = ("thumbs.db", "desktop.ini", "__macosx")


def visible(folder: Path) -> list[os.DirEntry[str]]:
    """Return the visible entries of a folder in sorted order."""
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if _is_visible(entry.name)), key=lambda entry: entry.name)


def is_flat(folder: Path) -> bool:
    """Return whether a folder has files but no folders."""
    entries = visible(folder) if folder.is_dir() else []
    return bool(entries) and not any(entry.is_dir() for entry in entries)


def files_below(folder: str) -> list[str]:
    """Return all files below a folder in sorted order; refuse a link to a folder above."""
    return sorted(_walk(folder, {os.path.realpath(folder)}, os.path.realpath(folder)))


def class_folders(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the folders with files, and of those without.

    Raises:
        ValueError: Two classes differ only in case.
    """
    found = [(entry.name, next(_first_files(entry.path), None)) for entry in visible(folder) if entry.is_dir()]
    names = [name for name, file in found if file is not None]
    spellings = Counter(name.lower() for name in names if len(name) > 1)  # a and A may be classes of letters
    twice = [name for name in names if spellings[name.lower()] > 1]
    if twice:
        raise ValueError(f"the classes {', '.join(twice)} in {folder} differ only in case: join or rename them")
    return names, [name for name, file in found if file is None]


def sample_files(folder: Path) -> list[str]:
    """Return a sample of files of each class."""
    return [file for entry in visible(folder) if entry.is_dir() for file in islice(_first_files(entry.path), _FEW)]


def deeper(folder: Path) -> Path | None:
    """Return the folder of class folders below ``folder``, if the way there is one folder in another."""
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
        if (real := os.path.realpath(place)) in seen:  # a link to a folder already seen
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(filter(_is_visible, folders))
        yield from (os.path.join(place, name) for name in sorted(filter(_is_visible, names)))


def _walk(folder: str, above: set[str], top: str) -> list[str]:
    files: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not _is_visible(entry.name):
                continue
            if not entry.is_dir():
                files.append(entry.path)
                continue
            place = os.path.realpath(entry.path)
            if place in above:  # a link to a folder that contains it
                continue
            if f"{top}{os.sep}".startswith(place.rstrip(os.sep) + os.sep):
                raise ValueError(f"{entry.path} leads to {place}, above its class: remove the link")
            files += _walk(entry.path, above | {place}, top)
    return files


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name.lower() not in _NOT_PHOTOS
