"""Which checkpoint files are whole: their checksums, kept beside them in ``manifest.json``."""

import hashlib
import json
import logging
import os
import zipfile
from pathlib import Path
from typing import Any

from vitlab.errors import UsageError

LOG = logging.getLogger("vitlab")
NAME = "manifest.json"

Entry = dict[str, Any]


def file_digest(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path) -> dict[str, Entry]:
    """Return what is known of each checkpoint in a folder; empty where nothing is or it cannot be read."""
    try:
        content = json.loads((folder / NAME).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint file, or None if it is whole.

    A file that the manifest beside it names must have one of the manifest's checksums: of any entry, for a process may
    have ended between two renames. Any other file is read through once for the checksums that its parts carry.
    """
    entries = read_manifest(path.parent)
    try:
        if path.name in entries:
            known, digest = {entry["sha256"]: entry for entry in entries.values()}, file_digest(path)
            if digest in known:
                return _torn_shards(path.parent, known[digest])
            written = entries[path.name]["size"]
            if path.stat().st_size < written:
                return f"it has {path.stat().st_size:,} of the {written:,} bytes that were written"
            return "its bytes are not those that were written (sha256)"
        return torn_archive(path)
    except OSError as error:
        return error.strerror or str(error)


def _torn_shards(folder: Path, entry: Entry) -> str | None:
    """Return what is wrong with the shards that a checkpoint in ``folder`` names; None if they are whole."""
    named = entry.get("shards") or {"folder": "", "files": {}}
    for name, digest in named["files"].items():
        path = folder / named["folder"] / name
        if not path.is_file():
            return f"its shard {path} is gone"
        if file_digest(path) != digest:
            return f"the bytes of its shard {path} are not those that were written (sha256)"
    return None


def torn_archive(path: Path) -> str | None:
    """Return what is wrong with a file in torch's zip format, or None if it is whole or of another format."""
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return None
    try:
        with zipfile.ZipFile(path) as archive:
            torn = archive.testzip()
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError) as error:
        return f"it is truncated or damaged ({error})"
    return f"its part {torn} is damaged" if torn else None


def first_whole(paths: list[Path]) -> Path | None:
    """Return the first of ``paths`` that exists and is whole, and say which others were passed over."""
    bad: list[str] = []
    for path in paths:
        if not path.is_file():
            continue
        reason = damage(path)
        if reason is None:
            if bad:
                LOG.warning("%s; using %s instead", "; ".join(bad), path)
            return path
        bad.append(f"{path} is damaged: {reason}")
    if bad:
        raise UsageError("; ".join(bad) + "; no whole checkpoint is left")
    return None


def check_whole(path: Path) -> None:
    """Refuse a checkpoint that a user has named if it is not what was written."""
    if reason := damage(path):
        others = [p for p in sorted(path.parent.glob("*.ckpt")) if p != path and damage(p) is None]
        hint = f"; {others[-1]} is whole" if others else ""
        raise UsageError(f"{path} is damaged: {reason}{hint}")


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def last_saved(folder: Path) -> str:
    """Say what a run has to go on from, if it ended now."""
    entry = read_manifest(folder).get("last.ckpt") if (folder / "last.ckpt").is_file() else None
    if entry is None:
        return "Nothing has been saved so far, and it starts anew with"
    step, epoch = entry.get("step", "?"), entry.get("epoch", 0) + 1
    return f"What was saved last is step {step}, in epoch {epoch}; it goes on with"
