"""What lies in a run directory before an attempt to train in it, which one that is refused leaves as it was.

What ``--overwrite`` replaces is set aside until the new run has its first row; what a resume writes anew is in memory.
"""

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from vitlab.errors import UsageError, megabytes
from vitlab.runs.atomic import nearest_existing
from vitlab.runs.directory import LOCK, RunDir
from vitlab.runs.matching import is_there

OVERWRITTEN = ".overwritten"  # the folder of the run before
WRITTEN = (  # before the first step of a resume
    *("config.yaml", "overrides.yaml", "parts.py", "run.json", "data.json", "model.json", "param_groups.json"),
    *("trained_on.npy", "metrics.jsonl", "train.log"),
)
LOGS = ("wandb", "lightning_logs")
_KEPT = 4  # checkpoints of the same size: last, previous, best, and one being written
_PROBE = 2**23  # bytes, at most


def prepare(run: RunDir, overwrite: bool, resumed: bool, weights: int) -> None:
    """Empty the run directory if requested, now that the build has succeeded, once it is known to have room.

    Args:
        run: The run directory, locked.
        overwrite: Whether to set its content aside, which :func:`forget` deletes and :class:`Before` puts back.
        resumed: Whether its run is resumed.
        weights: Bytes of the network's weights.
    """
    if not overwrite and not resumed and run.has_begun():
        raise UsageError(f"another process has just started a run in {run.path}")
    check_room(run.path, weights, overwrite)
    if overwrite:
        _set_aside(run)


def _freed(folder: Path) -> int:
    """Return the bytes that are free once a folder is deleted; files of several names count once."""
    files = {(s.st_dev, s.st_ino): s.st_size for s in (p.lstat() for p in folder.rglob("*") if p.is_file())}
    return sum(files.values())


def check_room(run: Path, weights: int, overwrite: bool = False) -> None:
    """Refuse a run directory that is not writable or lacks room for the checkpoints.

    Args:
        run: The run directory, which may not exist yet.
        weights: Bytes of the network's weights; a checkpoint has about three times that, with Adam's moments.
        overwrite: Whether what lies there is deleted at the first steps, and leaves its room to the run.
    """
    one, free = 3 * weights + 2**18, shutil.disk_usage(nearest_existing(run)).free
    have = 0 if overwrite else sum(p.stat().st_size for p in (run / "checkpoints").rglob("*") if p.is_file())
    need, size = max(_KEPT * one - have, one), min(one, _PROBE, free)
    free += _freed(run) if overwrite else 0
    ways_out = "choose another place with --run_dir, or make room"
    if free < need:
        text = f"{run} has no room for the checkpoints: they need about {megabytes(need)}, {megabytes(free)} are free"
        raise UsageError(f"{text}; {ways_out}")
    probe = run / f".probe-{os.getpid()}"
    try:
        run.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UsageError(f"cannot write into {run}: {error.strerror}; {ways_out}") from error
    finally:
        if probe.parent.is_dir():
            probe.unlink(missing_ok=True)


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


def forget(run: RunDir) -> None:
    """Delete what a run has replaced."""
    shutil.rmtree(run.path / OVERWRITTEN, ignore_errors=True)


class Before:
    """The content of a run directory, locked by this process, before an attempt to train in it.

    Args:
        run: The run directory.
        resumed: Whether its run is resumed.
    """

    def __init__(self, run: RunDir, resumed: bool) -> None:
        self.run, self.resumed, self._there = run, resumed, [*run.path.iterdir()]
        damaged = run.damaged()  # which are set aside
        names = [*WRITTEN, *damaged, *(f"{file}.damaged" for file in damaged)]
        paths = [run.path / name for name in names if resumed]
        self._files = {path.name: path.read_bytes() if is_there(path) else None for path in paths}
        self._logs = _logs(run.path) if resumed else {}

    def put_back(self, is_refusal: bool) -> None:
        """Leave the directory as it was, now that the attempt has ended before its first step.

        A new run stays if it has failed, unless it was to overwrite another; so does what this process has not taken
        over, as it may be the run of another.

        Args:
            is_refusal: Whether the attempt was the user's mistake.
        """
        run = self.run
        if not self.resumed and ((is_refusal and run.fence) or (run.path / OVERWRITTEN).is_dir()):
            _discard(run, self._there)
        elif self.resumed and run.fence:
            run.fence.put_back(self._files)
            run.fence = None
            _put_back_logs(run.path, self._logs)


def _discard(run: RunDir, before: Collection[Path]) -> None:
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


def _logs(folder: Path) -> dict[Path, str | None]:
    """Return the paths in the folders of the loggers; for a symbolic link its target, for others None."""
    paths = (path for name in LOGS for path in (folder / name, *(folder / name).rglob("*")))
    return {path: os.readlink(path) if path.is_symlink() else None for path in paths if os.path.lexists(path)}


def _put_back_logs(folder: Path, logs: dict[Path, str | None]) -> None:
    """Remove what loggers have written since, and give symbolic links the targets that they had."""
    now = _logs(folder)
    for path in sorted(now, reverse=True):  # what lies in a folder before the folder
        if now[path] is not None and now[path] != logs.get(path):
            path.unlink()
        elif path not in logs:
            path.rmdir() if path.is_dir() else path.unlink()
    for path, leads_to in logs.items():
        if leads_to is not None and not path.is_symlink():
            path.symlink_to(leads_to)


def _content(run: RunDir) -> list[Path]:
    return [path for path in run.path.iterdir() if path.name not in (LOCK, OVERWRITTEN)]


def _remove(paths: list[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
