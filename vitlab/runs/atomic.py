"""How a file is written, whole or not at all."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vitlab.runs.fence import Fence, renamed_or_removed

PATIENCE = 5.0  # seconds


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


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let one process at a time read a file of a folder and write it again.

    Without locks on the file system all go on at once, and so does who has waited for ``PATIENCE``: a process that was
    stopped while it wrote must not hold up a training.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, until = os.open(folder, os.O_RDONLY), time.monotonic() + PATIENCE
    try:
        while time.monotonic() < until:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.01)
                continue
            except OSError:
                pass
            break
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked in between has it, too
        os.close(descriptor)


def as_umask(path: Path) -> None:
    """Give a file the mode of new files; safetensors writes files that only the owner can read."""
    probe = path.with_name(f"{path.name}.mode")
    try:
        probe.touch()
        path.chmod(probe.stat().st_mode)
    finally:
        probe.unlink(missing_ok=True)


def nearest_existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that exists.

    Example:
        >>> nearest_existing(Path("runs/first/new/file")).name
        'first'
    """
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def is_writable(folder: Path) -> bool:
    """Return whether files can be written into a folder, which may have to be made; a full disk does not tell.

    Example:
        >>> is_writable(Path("runs/first/new")), is_writable(Path("runs/first/run.json/new"))
        (True, False)
    """
    existing = nearest_existing(folder)
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
