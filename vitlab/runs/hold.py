"""One process at a time trains in a run directory, and finds it ready."""

import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from vitlab.errors import UsageError
from vitlab.runs import lock
from vitlab.runs.directory import LOCK, RunDir
from vitlab.runs.generations import check_room
from vitlab.runs.launch import launched_rank
from vitlab.runs.processes import runs

LOG = logging.getLogger("vitlab")
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
    since, first = time.monotonic(), lock.read(path) or {}
    told = False
    try:
        while (claim := lock.take(path)) is None:
            owner = lock.read(path) or {}
            waited = time.monotonic() - since
            if not _may_have_died(owner, first, waited):
                who = f"process {owner.get('pid', '?')} on {owner.get('host', 'another machine')}"
                raise UsageError(f"{who} is training in {run.path}; wait for its end, or stop it, before you go on")
            if waited > 3 and not told:
                told = True
                LOG.info("run    waits for the lock of process %s on %s", owner.get("pid", "?"), owner.get("host", "?"))
            time.sleep(0.2)
    except OSError as error:
        raise UsageError(f"{run.path} cannot be written into: {error.strerror}; choose another --run_dir") from error
    return claim


def _may_have_died(owner: dict[str, Any], first: dict[str, Any], waited: float) -> bool:
    """Return whether it is worth to wait on for a lock: its owner is dead, or has given no sign of life meanwhile."""
    if owner.get("host") == socket.gethostname():
        return not runs(owner.get("pid", 0)) and waited < ORPHANS
    touched = owner.get("age", 0) < first.get("age", 0) + waited / 2  # it would be older by all of it
    return waited < lock.UNSIGNED or (not touched and waited < 2 * lock.DEAD)


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
    elif not resumed and run.has_begun():
        raise UsageError(f"the run directory {run.path} was written by another process a moment ago")
    check_room(run.path, weights)
