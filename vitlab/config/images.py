"""Find the image files that a user names by files, folders and patterns."""

import fnmatch
import glob
import os

from vitlab.errors import UsageError, escaped

Problem = tuple[str, str]  # a path, and why there is no image to read


def find_images(words: list[str]) -> tuple[list[str], list[Problem]]:
    """Return the files that ``words`` name, in order, and the paths that are none; what is named twice is there twice.

    A folder stands for all files below it, sorted, with any suffix; hidden files are skipped. Links to folders are
    followed, and each folder is visited once.
    """
    files: list[str] = []
    others: list[Problem] = []
    for word in words:
        paths = [word] if os.path.lexists(word) else _matching(word)
        if not paths:
            others.append((word, "matches no file" if glob.has_magic(word) else "no such file or folder"))
        for path in paths:
            if os.path.isdir(path):
                files += _below(path, others)
            elif os.path.isfile(path):
                files.append(path)
            else:
                others.append((path, _no_file(path)))
    return files, others


def refuse_none(files: list[str], others: list[Problem], words: list[str]) -> None:
    """Refuse words that name no image.

    Args:
        files: What they name.
        others: Why other paths are not read.
        words: The words.

    Raises:
        UsageError: There is no file; the message names the first reason.
    """
    if not files:
        reason = f"{escaped(others[0][0])}: {others[0][1]}" if others else f"nothing in {', '.join(words)}"
        raise UsageError(f"no images found: {reason}")


def _no_file(path: str) -> str:
    return "a broken link" if os.path.islink(path) else "neither a file nor a folder"


def _below(folder: str, others: list[Problem]) -> list[str]:
    def note(error: OSError) -> None:
        others.append((error.filename, error.strerror or str(error)))

    files: list[str] = []
    seen: set[str] = set()
    tops = [folder]  # links to folders are followed last, so that files are listed under their real place
    while tops:
        for place, folders, names in os.walk(tops.pop(0), onerror=note):
            real = os.path.realpath(place)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            tops += [path for name in folders if os.path.islink(path := os.path.join(place, name))]
            for name in names:
                path = os.path.join(place, name)
                if name.startswith(".") or name.lower() in ("thumbs.db", "desktop.ini"):
                    continue
                if os.path.isfile(path):
                    files.append(path)
                else:
                    others.append((path, _no_file(path)))
    return sorted(files, key=lambda path: path.split(os.sep))


def _matching(pattern: str) -> list[str]:
    """Return the paths that match, sorted; ** walks folders as above, because `glob` would follow link loops."""
    top, recursive, rest = pattern.partition("**")
    if not recursive or (top and not top.endswith(os.sep)):
        return sorted(glob.glob(pattern))
    found = []
    for folder in sorted(glob.glob(top)) if top else ["."]:
        for path in _below(folder, []):
            if _fits(os.path.relpath(path, folder).split(os.sep), (recursive + rest).split(os.sep)):
                found.append(path if top else os.path.relpath(path))
    return found


def _fits(parts: list[str], patterns: list[str]) -> bool:
    if not patterns or (not parts and patterns != ["**"]):
        return not patterns and not parts
    if patterns[0] == "**":
        return _fits(parts, patterns[1:]) or (bool(parts) and _fits(parts[1:], patterns))
    return fnmatch.fnmatchcase(parts[0], patterns[0]) and _fits(parts[1:], patterns[1:])
