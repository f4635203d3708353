"""Claims: of several workers, on one machine or many, exactly one owns a cell or trains in a run directory.

A claim is a file that only one process can create. Its owner touches it regularly, and holds a lock on it that child
processes inherit. So a claim is dead when no process has the lock, or, on file systems without locks, when it has not
been touched for a minute.
"""

import fcntl
import json
import os
import signal
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitlab.runs.processes import is_running, start_time

UNSIGNED = 2.0  # seconds that a new claim may lack its owner's name
TOUCH = 10.0  # seconds between two signs of life
DEAD = 60.0  # seconds without one after which another machine may take over


class Claim:
    """The exclusive right to work on a cell or run.

    Args:
        path: The claim's file.
        fd: The open file.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd
        self.lost = False
        self._end = threading.Event()
        self._facts: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "started": round(time.time())}
        self.note()
        self._beat = threading.Thread(target=self._stay_alive, daemon=True)
        self._beat.start()

    def note(self, **facts: Any) -> None:
        """Write more facts into the claim."""
        self._facts |= facts
        text = json.dumps(self._facts).encode()
        os.pwrite(self.fd, text + b" " * max(0, 512 - len(text)), 0)  # in place, as the lock belongs to this file

    def release(self) -> None:
        """Release the claim."""
        self._end.set()
        self._beat.join()
        if self.is_owned():
            self.path.unlink(missing_ok=True)
        os.close(self.fd)

    def is_owned(self) -> bool:
        """Return whether this process still owns the claim."""
        with suppress(FileNotFoundError):
            return self.path.stat().st_ino == os.fstat(self.fd).st_ino
        return False

    def _stay_alive(self) -> None:
        while not self._end.wait(TOUCH):
            os.utime(self.fd)
            self.lost = self.lost or not self.is_owned()


def take(path: Path) -> Claim | None:
    """Return a claim on ``path``; None if a live worker has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        except FileExistsError:
            if not _take_over(path):
                return None
            continue
        with suppress(OSError):  # a file system without locks: only the time of the last touch counts
            fcntl.flock(fd, fcntl.LOCK_EX)
        claim = Claim(path, fd)
        if claim.is_owned():
            return claim
        claim.release()  # another worker took it over before it was signed
    return None


def read(path: Path) -> dict[str, Any] | None:
    """Return the facts in a claim and its age in seconds; None if there is none."""
    try:
        facts = json.loads(path.read_text() or "{}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError):
        facts = {}
    return {**(facts if isinstance(facts, dict) else {}), "age": _age(path)}


def _age(path: Path) -> float:
    """Return the seconds since a file was touched, by the clock of its file system."""
    now = path.with_name(f".now-{uuid.uuid4().hex}")
    try:
        now.touch()
        return now.stat().st_mtime - path.stat().st_mtime
    except OSError:
        return 0.0
    finally:
        now.unlink(missing_ok=True)


def is_alive(path: Path) -> bool:
    """Return whether the owner of a claim, or a child process of it, is running; the claim does not change."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _is_dead(path, fd)
    finally:
        os.close(fd)


def _is_dead(path: Path, fd: int) -> bool:
    """Return whether a claim is dead; if so, ``fd`` now has its lock, so no other process concludes the same."""
    facts = read(path) or {}
    here = facts.get("host") == socket.gethostname()
    patience = DEAD if facts.get("host") else UNSIGNED  # a power failure leaves an empty one
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        return (here and not is_running(facts.get("pid", 0))) or facts.get("age", 0) > patience
    return here or facts.get("age", 0) > patience


def _take_over(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        _end_orphan(read(path) or {})
        if not _is_dead(path, fd):
            return False
        aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        if path.stat().st_ino != os.fstat(fd).st_ino:
            return False
        os.rename(path, aside)  # one winner
        aside.unlink()
        return True
    except FileNotFoundError:
        return False
    finally:
        os.close(fd)


def _end_orphan(facts: dict[str, Any]) -> None:
    """Kill the child process that a killed worker of this machine left, as it still writes into the run directory."""
    child = facts.get("child")
    if not child or facts.get("host") != socket.gethostname() or is_running(facts.get("pid", 0)):
        return
    if facts.get("child_started") and start_time(child) == facts["child_started"]:  # not a reused number
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while is_running(child) and time.monotonic() < deadline:
            time.sleep(0.02)
