"""Lock a run directory, so that one process at a time trains in it, and prepare it."""

import logging
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from vitlab.errors import UsageError, printable
from vitlab.runs import guard, lock
from vitlab.runs.directory import LOCK, RunDir
from vitlab.runs.fence import RunGone, owner_text
from vitlab.runs.generations import check_room
from vitlab.runs.launch import launched_rank
from vitlab.runs.processes import is_running

LOG = logging.getLogger("vitlab")
LEAVING = 4.0  # seconds that the main thread has to end once another process has the directory
ORPHANS = 15.0  # seconds; loader workers hold the lock of a killed trainer until they notice, within five seconds


def is_leader() -> bool:
    """Return whether this process of a launch manages the run directory."""
    return launched_rank() == 0 and "VITLAB_RUN_DIR" not in os.environ


@contextmanager
def locked(run: RunDir) -> Iterator[None]:
    """Lock the run directory; refuse if another process holds the lock. A dead process's lock is taken over."""
    if not is_leader():
        yield
        return
    claim = _take(run)
    try:
        yield
    finally:
        claim.release()
        if run.fence:
            run.fence.close()
        with suppress(OSError):
            run.path.rmdir()  # succeeds only if nothing was written


@contextmanager
def held(
    path: Path, what: str, patience: float = float("inf"), sign: Callable[[], object] = lambda: None
) -> Iterator[float]:
    """Hold a lock at ``path`` for work that several processes may want to do, and wait while another does it.

    Args:
        path: The lock, removed at the end.
        what: What its holder does, for the line that says who is waited for.
        patience: Seconds after which to give up.
        sign: Function whose value changes while the holder's work goes on: the guard of the command then waits on.

    Yields:
        The seconds waited for another process, 0 if there was none.

    Raises:
        UsageError: Another process has it for longer than ``patience``.
    """
    since, said, seen = time.monotonic(), False, sign()
    while (claim := lock.take(path)) is None:
        owner, waited = lock.read(path) or {}, time.monotonic() - since
        who = owner_text(owner)
        if waited > patience:
            raise UsageError(f"{who} {what} and has not finished after {patience:.0f} s")
        if waited > 3 and not said and sys.stderr is not None:
            said = True
            sys.stderr.write(f"waiting: {who} {what}\n")
        if (now := sign()) != seen:
            seen = now
            guard.goes_on()
        time.sleep(0.1)
    waited = time.monotonic() - since
    try:
        yield waited if waited > 0.1 else 0.0
    finally:
        claim.release()


def _take(run: RunDir) -> lock.HeldLock:
    path = run.path / LOCK
    since = time.monotonic()
    announced = False
    try:
        while (claim := lock.take(path, partial(_guard, run), partial(_leave, run))) is None:
            owner = lock.read(path) or {}
            waited = time.monotonic() - since
            if not _may_have_died(owner, lock.silence_of(path), waited):
                raise UsageError(f"{owner_text(owner)} is training in {run.path}; wait until it ends, or stop it")
            if waited > 3 and not announced:
                announced = True
                LOG.info("run    waiting for the lock of process %s on %s", owner.get("pid"), owner.get("host"))
            time.sleep(0.2)
    except OSError as error:
        raise UsageError(f"cannot write into {run.path}: {error.strerror}; choose another --run_dir") from error
    return claim


def _may_have_died(owner: dict[str, Any], silence: float, waited: float) -> bool:
    """Return whether to keep waiting for a lock, because its owner is dead or has given no sign of life."""
    if lock.is_here(owner):
        return not is_running(owner.get("pid", 0)) and waited < ORPHANS
    return waited < lock.UNSIGNED or (silence > waited / 2 and waited < 2 * lock.DEAD)  # else it was touched meanwhile


def _guard(run: RunDir) -> None:
    if run.fence:
        run.check_there()


def _leave(run: RunDir, error: RunGone, released: threading.Event) -> None:
    """End this process, which has lost the run directory: by an exception, or without the main thread if that hangs."""
    if run.fence:
        run.fence.loss = run.fence.loss or error
    if released.wait(LEAVING):
        return
    if not (run.fence and run.fence.told) and sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"vitlab: {printable(str(error))}; this one ends and writes nothing more\n")
            sys.stderr.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


def prepare(run: RunDir, overwrite: bool, resumed: bool, weights: int) -> None:
    """Empty the run directory if requested, now that the build has succeeded, and check that it has room.

    Args:
        run: The run directory, locked.
        overwrite: Whether to delete its content.
        resumed: Whether its run is resumed.
        weights: Bytes of the network's weights.
    """
    if overwrite:
        for path in run.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink()
    elif not resumed and run.has_begun():
        raise UsageError(f"another process has just started a run in {run.path}")
    check_room(run.path, weights)
