"""What ``--overwrite`` replaces, kept until the new run has its first row.

A run that is refused before, or fails, leaves the directory as it was.
"""

import shutil
from collections.abc import Collection
from pathlib import Path

from vitlab.errors import UsageError
from vitlab.runs.directory import LOCK, RunDir
from vitlab.runs.generations import check_room

OVERWRITTEN = ".overwritten"  # the folder of the run before


def prepare(run: RunDir, overwrite: bool, resumed: bool, weights: int) -> None:
    """Empty the run directory if requested, now that the build has succeeded, once it is known to have room.

    Args:
        run: The run directory, locked.
        overwrite: Whether to set its content aside, which :func:`forget` deletes and :func:`discard` puts back.
        resumed: Whether its run is resumed.
        weights: Bytes of the network's weights.
    """
    if not overwrite and not resumed and run.has_begun():
        raise UsageError(f"another process has just started a run in {run.path}")
    check_room(run.path, weights, overwrite)
    if overwrite:
        _set_aside(run)


def _set_aside(run: RunDir) -> None:
    """Move the content of a run directory aside; what never made a step gives way to what it was to replace."""
    kept = run.path / OVERWRITTEN
    if kept.is_dir():
        _remove(_content(run))
        return
    unfinished = run.path / f"{OVERWRITTEN}-unfinished"  # of a process that was killed, or new
    content = [path for path in _content(run) if path != unfinished]
    unfinished.mkdir(exist_ok=True)
    for path in content:
        path.rename(unfinished / path.name)
    unfinished.rename(kept)


def has_set_aside(run: RunDir) -> bool:
    """Return whether a run directory holds what its run is to replace."""
    return (run.path / OVERWRITTEN).is_dir()


def forget(run: RunDir) -> None:
    """Delete what a run has replaced."""
    shutil.rmtree(run.path / OVERWRITTEN, ignore_errors=True)


def discard(run: RunDir, before: Collection[Path] = ()) -> None:
    """Delete a run that has made no step; what it was to overwrite, or what was there ``before``, is there again."""
    kept = run.path / OVERWRITTEN
    if run.fence:
        run.fence.close()  # or the look at the lock, once a second, would write the files again
    run.fence = None  # the record is another's
    if not kept.is_dir():
        _remove([path for path in _content(run) if path not in before])
        return
    _remove(_content(run))
    for path in kept.iterdir():
        path.rename(run.path / path.name)
    kept.rmdir()


def _content(run: RunDir) -> list[Path]:
    return [path for path in run.path.iterdir() if path.name not in (LOCK, OVERWRITTEN)]


def _remove(paths: list[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
