"""How a file is written, whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitlab.runs.fence import Fence, renamed_or_removed


@contextmanager
def atomic_write(path: Path, fence: Fence | None = None) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; the file replaces ``path`` in one step, or is removed on failure.

    With the ``fence`` of a training it replaces ``path`` only while that training may write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if fence:
        with fence.beside(path) as beside:
            yield beside
        return
    beside = path.with_name(f".{os.getpid()}-{os.urandom(3).hex()}.{path.name}")  # some libraries depend on the suffix
    with renamed_or_removed(beside, path):
        yield beside
        os.replace(beside, path)


@contextmanager
def atomic_folder(place: Path) -> Iterator[Path]:
    """Yield a new folder beside ``place``; it becomes ``place`` in one step, or is removed on failure."""
    work = place.with_name(f".{place.name}-unfinished")
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
    try:
        work.mkdir(parents=True)
        yield work
        os.replace(work, place)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def as_umask(path: Path) -> None:
    """Give a file the mode of new files; safetensors writes files that only the owner can read."""
    probe = path.with_name(f"{path.name}.mode")
    try:
        probe.touch()
        path.chmod(probe.stat().st_mode)
    finally:
        probe.unlink(missing_ok=True)


def is_writable(folder: Path) -> bool:
    """Return whether files can be written into a folder, which may have to be made; a full disk does not tell.

    Example:
        >>> is_writable(Path("runs/first/new")), is_writable(Path("runs/first/run.json/new"))
        (True, False)
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)


def write_text(path: Path, text: str, sync: bool = False, fence: Fence | None = None) -> None:
    """Write a text file atomically, with ``sync`` also across a power failure."""
    with atomic_write(path, fence) as beside, beside.open("w") as file:
        file.write(text)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def write_json(path: Path, content: Any, fence: Fence | None = None) -> None:
    """Write a JSON file atomically, also across a power failure; a reader sees all of it or nothing."""
    write_text(path, json.dumps(content, indent=1, default=str) + "\n", sync=True, fence=fence)


def sync_folder(folder: Path) -> None:
    """Sync the directory entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
