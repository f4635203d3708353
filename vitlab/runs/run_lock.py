"""The lock of a run directory: one process at a time trains in it, and the others refuse to, wait or learn who does."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from vitlab.errors import UsageError, before_again, printable
from vitlab.runs import guard, lock
from vitlab.runs.directory import LOCK, RunDir
from vitlab.runs.fence import RunGone, owner_text
from vitlab.runs.launch import is_leader
from vitlab.runs.processes import is_running

LOG = logging.getLogger("vitlab")
LEAVING = 4.0  # seconds that the main thread has to end once another process has the directory
ORPHANS = 15.0  # seconds; loader workers hold the lock of a killed trainer until they notice, within five seconds


def run_status(run: RunDir, record: Mapping[str, Any]) -> str:
    """Return the status of a run; ``killed`` if it says that it runs, and no process holds its lock."""
    status = str(record.get("status", "unknown"))
    return "killed" if status == "running" and not is_running_in(run) else status


def is_running_in(run: RunDir) -> bool:
    """Return whether a process trains in a run directory, as far as its lock tells; if it cannot be read, yes."""
    path = run.path / LOCK
    return path.is_file() and (not os.access(path, os.R_OK | os.W_OK) or lock.is_alive(path))


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


def _take(run: RunDir) -> lock.HeldLock:
    path = run.path / LOCK
    since = time.monotonic()
    announced = False
    try:
        while (claim := lock.take(path, partial(_check, run), partial(_leave, run))) is None:
            owner = lock.read(path) or {}
            waited = time.monotonic() - since
            if not _may_have_died(owner, lock.silence_of(path), waited):
                raise UsageError(f"{owner_text(owner)} is training in {run.path}; wait until it ends, or stop it")
            if waited > 3 and not announced:
                announced = True
                LOG.info("run    waiting for the lock of process %s on %s", owner.get("pid"), owner.get("host"))
            time.sleep(0.2)
    except OSError as error:
        way_out = "choose another --run_dir"
        if run.has_begun():
            way_out = f"{before_again(error.errno)}, or resume a copy of it elsewhere"
        raise UsageError(f"cannot write into {run.path}: {error.strerror}; {way_out}") from error
    return claim


def _may_have_died(owner: dict[str, Any], silence: float, waited: float) -> bool:
    """Return whether to keep waiting for a lock, because its owner is dead or has given no sign of life."""
    if lock.is_here(owner):
        return not is_running(owner.get("pid", 0)) and waited < ORPHANS
    return waited < lock.UNSIGNED or (silence > waited / 2 and waited < 2 * lock.DEAD)  # else it was touched meanwhile


def _check(run: RunDir) -> None:
    if run.fence:
        run.check_there()


def _leave(run: RunDir, error: RunGone, released: threading.Event) -> None:
    """End this process, which has lost the run directory: by an exception, or without the main thread if that hangs."""
    if run.fence:
        run.fence.loss = run.fence.loss or error
    if released.wait(LEAVING):
        return
    if not (run.fence and run.fence.told) and sys.stderr is not None:
        line = f"vitlab: {printable(str(error))}; this one ends and writes nothing more\n"
        guard.at_most(1.0, partial(print, line, end="", file=sys.stderr, flush=True))
    guard.end_process(1)
