"""One process at a time trains in a run directory, and finds it ready."""

import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from vitlab.errors import UsageError
from vitlab.runs import lock
from vitlab.runs.directory import LOCK, RunDir
from vitlab.runs.generations import check_room
from vitlab.runs.launch import launched_rank
from vitlab.runs.processes import runs

ORPHANS = 15.0  # seconds; the loader's workers notice within five that their trainer was killed, and hold its lock


def leads() -> bool:
    """Return whether this is the process of a launch that sees to the run directory."""
    return launched_rank() == 0 and "VITLAB_RUN_DIR" not in os.environ


@contextmanager
def locked(run: RunDir) -> Iterator[None]:
    """Hold the run directory; refuse if another process does. A lock whose process has died is taken over."""
    if not leads():
        yield
        return
    claim = _take(run)
    try:
        yield
    finally:
        claim.release()
        with suppress(OSError):
            run.path.rmdir()  # nothing was written


def _take(run: RunDir) -> lock.Claim:
    path = run.path / LOCK
    until = time.monotonic() + ORPHANS
    try:
        while (claim := lock.take(path)) is None:
            owner = lock.read(path) or {}
            died = owner.get("host") == socket.gethostname() and not runs(owner.get("pid", 0))
            if not died or time.monotonic() > until:
                who = f"process {owner.get('pid', '?')} on {owner.get('host', 'another machine')}"
                raise UsageError(f"{who} is training in {run.path}; wait for its end, or stop it, before you go on")
            time.sleep(0.2)
    except OSError as error:
        raise UsageError(f"{run.path} cannot be written into: {error.strerror}; choose another --run_dir") from error
    return claim


def prepare(run: RunDir, overwrite: bool, resumed: bool, weights: int) -> None:
    """Empty the run directory if asked to, now that everything could be built, and see whether it has room.

    Args:
        run: The run directory, locked.
        overwrite: Whether to delete what is there.
        resumed: Whether what is there is to be continued.
        weights: Bytes of the network's weights.
    """
    if overwrite:
        for path in run.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink()
    elif not resumed and run.exists():
        raise UsageError(f"the run directory {run.path} was written by another process a moment ago")
    check_room(run.path, weights)
