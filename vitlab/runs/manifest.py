"""Checksums of checkpoint files, in ``manifest.json`` beside them, and checks against them."""

import errno
import hashlib
import logging
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitlab.errors import UsageError, what_failed
from vitlab.runs.atomic import write_json
from vitlab.runs.fence import Fence
from vitlab.runs.matching import is_there
from vitlab.runs.records import read_json

LOG = logging.getLogger("vitlab")
NAME = "manifest.json"

Entry = dict[str, Any]


def file_digest(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path) -> dict[str, Entry]:
    """Return the manifest's entry of each checkpoint in a folder; empty if it is missing or unreadable."""
    with suppress(OSError, UsageError):
        return read_json(folder / NAME)
    return {}


def write_manifest(folder: Path, entries: dict[str, Entry], fence: Fence | None = None) -> None:
    """Replace the manifest of a folder, whole and synced."""
    write_json(folder / NAME, entries, fence)


def noted(path: Path, entries: dict[str, Entry]) -> Entry | None:
    """Return the entry of a file as it lies there, by its size and time; None if no entry has both.

    Where several have, as on a file system that counts whole seconds, it is that of its name.
    """
    status = path.stat()
    now = status.st_size, status.st_mtime_ns
    found = {name: entry for name, entry in entries.items() if (entry.get("size"), entry.get("modified")) == now}
    return found.get(path.name) or next(iter(found.values()), None)


def damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint file, or None if it is intact.

    A file in the manifest must have one of the manifest's checksums; any entry's, because a process may have ended
    between two renames. For any other file, the checksums within the archive are verified. A manifest that is there
    and cannot be read leaves nothing to compare a file with.
    """
    try:
        return _damage(path, read_json(path.parent / NAME))
    except OSError as error:
        return what_failed(error) if error.filename == str(path.parent / NAME) else error.strerror or str(error)
    except UsageError as error:
        return str(error)


def _damage_of(path: Path) -> str | None:
    """Return what is wrong with a checkpoint of which another may take the place; None if it is intact.

    Raises:
        OSError: The file cannot be opened now, so this is unknown, and another file would give other numbers. If the
            disk cannot read the file (EIO), it counts as damaged.
    """
    try:
        return _damage(path, read_manifest(path.parent))
    except OSError as error:
        if error.errno == errno.EIO:
            return error.strerror
        raise OSError(error.errno, error.strerror, str(error.filename or path)) from error


def _damage(path: Path, entries: dict[str, Entry]) -> str | None:
    if path.name in entries:
        known, digest = {entry["sha256"]: entry for entry in entries.values()}, file_digest(path)
        if digest in known:
            return _torn_shards(path.parent, known[digest])
        written = entries[path.name]["size"]
        if path.stat().st_size < written:
            return f"it has {path.stat().st_size:,} of the {written:,} bytes that were written"
        return "its content has changed since it was written (sha256)"
    return torn_archive(path)


def _torn_shards(folder: Path, entry: Entry) -> str | None:
    """Return what is wrong with the shards of a checkpoint in ``folder``; None if they are intact."""
    named = entry.get("shards") or {"folder": "", "files": {}}
    for name, digest in named["files"].items():
        path = folder / named["folder"] / name
        if not is_there(path):
            return f"its shard {path} is missing"
        if file_digest(path) != digest:
            return f"its shard {path} has changed since it was written (sha256)"
    return None


def torn_archive(path: Path) -> str | None:
    """Return what is wrong with a file in torch's zip format; None if it is intact or in another format."""
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return None
    try:
        with zipfile.ZipFile(path) as archive:
            torn = archive.testzip()
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError) as error:
        return f"it is truncated or damaged ({error})"
    return f"its part {torn} is damaged" if torn else None


def is_within_step(path: Path) -> bool:
    """Return whether a checkpoint was saved within an accumulated step; its entry may still have another name."""
    digests = {entry["sha256"] for entry in read_manifest(path.parent).values() if entry.get("within_step")}
    return bool(digests) and is_there(path) and file_digest(path) in digests


def first_whole(paths: list[Path]) -> Path | None:
    """Return the first of ``paths`` that exists and is intact, and log which ones were skipped.

    Raises:
        UsageError: Files exist, and none is intact.
    """
    bad: list[str] = []
    for path in paths:
        if not is_there(path):
            continue
        reason = _damage_of(path)
        if reason is None:
            if bad:
                LOG.warning("%s; using %s instead", "; ".join(bad), path)
            return path
        bad.append(f"{path} is damaged: {reason}")
    if bad:
        raise UsageError("; ".join(bad) + "; no intact checkpoint is left")
    return None


def check_whole(path: Path) -> None:
    """Refuse a checkpoint that is damaged."""
    if reason := _damage_of(path):
        others = [p for p in sorted(path.parent.glob("*.ckpt")) if p != path and damage(p) is None]
        hint = f"; {others[-1]} is intact" if others else ""
        raise UsageError(f"{path} is damaged: {reason}{hint}")


def last_saved(folder: Path) -> str:
    """Return a sentence on the last saved state, ending before the command that resumes from it."""
    entry = read_manifest(folder).get("last.ckpt") if (folder / "last.ckpt").is_file() else None
    if entry is None:
        return "Nothing was saved yet; start again with"
    step, epoch = entry.get("step", "?"), entry.get("epoch", 0) + 1
    return f"The last checkpoint is of step {step}, in epoch {epoch}; continue with"
