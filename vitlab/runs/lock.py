"""Claims: of several workers, on one machine or many, exactly one owns a cell or a run directory.

A claim is a file that only one process can create. Its owner touches it regularly, and holds a lock on it that child
processes inherit. So a claim is dead when no process has the lock, or, on file systems without locks, when it has not
been touched for a minute. Times are those of the file system, and are checked by watching, as a clock may jump. An
owner that finds its file removed makes it again; one that finds the file of another has lost.
"""

import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vitlab.errors import named
from vitlab.runs import guard
from vitlab.runs.fence import Fenced, RunGone, owner_text
from vitlab.runs.processes import is_running, start_time

UNSIGNED = 2.0  # seconds that a new claim may lack its owner's name
LOOK = 1.0  # seconds between two looks at the own claim
TOUCH = 10.0  # seconds between two signs of life
DEAD = 60.0  # seconds without one after which another machine may take over
LONGEST = 1 << 16  # bytes of a claim that are read


class HeldLock:
    """The exclusive right to work on a cell or run.

    Args:
        path: The claim's file.
        fd: The open file.
        check: Called at every look; raises RunGone if the owner must not go on.
        on_loss: Called in a thread with what was raised, once the claim is lost; gets an event set at the release.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        check: Callable[[], None],
        on_loss: Callable[[RunGone, threading.Event], None],
    ) -> None:
        self.path, self.fd = path, fd
        self.check, self.on_loss = check, on_loss
        self.lost = False
        self._end = threading.Event()
        self._facts: dict[str, Any] = {**_place(), **_attempt(), "pid": os.getpid(), "started": round(time.time())}
        self.note()
        self._beat = threading.Thread(target=self._stay_alive, daemon=True)
        self._beat.start()

    def note(self, **facts: Any) -> None:
        """Write more facts into the claim."""
        self._facts |= facts
        text = json.dumps(self._facts).encode()
        with named(self.path):
            os.pwrite(self.fd, text + b" " * max(0, 512 - len(text)), 0)  # in place, as the lock belongs to this file

    def release(self) -> None:
        """Release the claim."""
        self._end.set()
        if threading.current_thread() is not self._beat:
            self._beat.join()
        with suppress(OSError):  # a disk that fails: others see that this process has ended
            if self.is_owned():
                self.path.unlink(missing_ok=True)
        os.close(self.fd)

    def is_owned(self) -> bool:
        """Return whether this process still owns the claim."""
        with suppress(FileNotFoundError):
            return self.path.stat().st_ino == os.fstat(self.fd).st_ino
        return False

    def _stay_alive(self) -> None:
        touched = time.monotonic()
        while not self._end.wait(min(LOOK, TOUCH)):
            if time.monotonic() - touched >= TOUCH - LOOK / 2:
                touched = time.monotonic()
                self._touch()
            try:
                self._look()
            except RunGone as error:
                self.lost = True
                self.on_loss(error, self._end)
                return
            except OSError:  # the disk or the network fails: whoever took over will be seen later
                continue

    def _touch(self) -> None:
        try:
            os.utime(self.fd)
        except OSError:
            with suppress(OSError):
                self.note()  # writing is a sign of life, too

    def _look(self) -> None:
        """Raise RunGone if the claim is lost; make its file again if it was removed."""
        self.check()
        try:
            status, own = self.path.stat(), os.fstat(self.fd)
        except FileNotFoundError:
            self._make_again()
            return
        if (status.st_dev, status.st_ino) != (own.st_dev, own.st_ino):
            owner = read(self.path) or {}
            raise Fenced(f"{owner_text(owner)} has taken {self.path} over")

    def _make_again(self) -> None:
        try:
            fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        except FileExistsError:  # by another, just now
            return
        except FileNotFoundError as error:
            raise RunGone(f"{self.path.parent} disappeared") from error
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.dup2(fd, self.fd, inheritable=os.get_inheritable(self.fd))
        os.close(fd)
        self.note()


def take(
    path: Path,
    check: Callable[[], None] = lambda: None,
    on_loss: Callable[[RunGone, threading.Event], None] = lambda error, released: None,
) -> HeldLock | None:
    """Return a claim on ``path``; None if a live worker has it. See :class:`HeldLock` for the other arguments."""
    for _ in range(2):
        try:
            fd = _create(path)
        except FileExistsError:
            if not _take_over(path):
                return None
            continue
        with suppress(OSError):  # a file system without locks: only the time of the last touch counts
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            claim = HeldLock(path, fd, check, on_loss)
        except OSError:  # a full disk
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        if claim.is_owned():
            return claim
        claim.release()  # another worker took it over before it was signed
    return None


def _create(path: Path) -> int:
    """Create a claim and open it; its folder, too, if that is missing."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)


def read(path: Path) -> dict[str, Any] | None:
    """Return the facts in a claim; None if there is none."""
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _parsed(text)


def _parsed(text: bytes) -> dict[str, Any]:
    """Return the facts in the text of a claim; none if a power failure has left it empty or torn."""
    try:
        facts = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _age(path: Path) -> float:
    """Return the seconds since a file was touched, by the clock of its file system."""
    now = path.with_name(f".now-{uuid.uuid4().hex}")
    try:
        now.touch()
        return now.stat().st_mtime - path.stat().st_mtime
    except OSError:
        return 0.0
    finally:
        with suppress(OSError):  # a disk that fails
            now.unlink(missing_ok=True)


def is_alive(path: Path) -> bool:
    """Return whether the owner of a claim, or a child process of it, is running; the claim does not change."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _is_dead(path, fd, _parsed(os.pread(fd, LONGEST, 0)), watched=False)
    finally:
        os.close(fd)


_watched: dict[Path, tuple[tuple[int, int], float]] = {}  # of each claim its last touch, and when it was first seen so


def silence_of(path: Path, status: os.stat_result | None = None) -> float:
    """Return the seconds, by this process's own clock, for which it has seen a claim untouched.

    Args:
        path: The claim's file.
        status: Of the file, where it is known.
    """
    try:
        status = status or path.stat()
    except OSError:
        return 0.0
    now, touch = time.monotonic(), (status.st_ino, status.st_mtime_ns)
    if _watched.get(path, (None, 0.0))[0] != touch:
        _watched[path] = touch, now
    return now - _watched[path][1]


def _place() -> dict[str, Any]:
    """Return what tells machines apart, and containers of one name."""
    try:
        return {"host": socket.gethostname(), "space": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {"host": socket.gethostname()}


def _attempt() -> dict[str, Any]:
    """Return the SLURM job that this process belongs to, and which of its attempts it is; empty outside of one."""
    job = os.environ.get("SLURM_JOB_ID")
    return {"job": job, "attempt": int(os.environ.get("SLURM_RESTART_COUNT") or 0)} if job else {}


def _is_earlier_attempt(facts: dict[str, Any]) -> bool:
    """Return whether a claim is of an earlier attempt of this very SLURM job.

    Slurm starts a job again when it has given a node up. Processes there may still live, stopped or without a
    network, and keep their lock; the fence ends them once they wake.
    """
    own = _attempt()
    return bool(own) and facts.get("job") == own["job"] and facts.get("attempt", own["attempt"]) < own["attempt"]


def is_here(facts: dict[str, Any]) -> bool:
    """Return whether the owner of a claim is on this machine, so that its number says whether it lives."""
    return all(facts.get(name, value) == value for name, value in _place().items()) and bool(facts.get("host"))


def _is_dead(path: Path, fd: int, facts: dict[str, Any], watched: bool = True) -> bool:
    """Return whether a claim is dead; if so, ``fd`` now has its lock, so no other process concludes the same.

    An old date alone does not suffice if ``watched``: the clock may have jumped since the owner's last touch. Whoever
    looks at a claim that is locked asks no more of the file system than that: a worker of many does so at every take.
    """
    if _is_earlier_attempt(facts):
        return True
    silence, locks = silence_of(path, os.fstat(fd)), True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        locks = False
    here = is_here(facts)
    if here and (locks or not is_running(facts.get("pid", 0))):
        return True
    age = _age(path)
    if not facts.get("host"):  # a power failure leaves an empty one
        return age > UNSIGNED or silence > UNSIGNED
    return silence > DEAD or (age > DEAD and (silence > 1.5 * TOUCH or not watched))


def _take_over(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        facts = _parsed(os.pread(fd, LONGEST, 0))
        _end_orphan(facts)
        if not _is_dead(path, fd, facts):
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
    if not child or not is_here(facts) or is_running(facts.get("pid", 0)):
        return
    if facts.get("child_started") and start_time(child) == facts["child_started"]:  # not a reused number
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while is_running(child) and time.monotonic() < deadline:
            time.sleep(0.02)


@contextmanager
def held(path: Path, what: str, sign: Callable[[], object] = lambda: None) -> Iterator[float]:
    """Hold a lock at ``path`` for work that several processes may want to do, and wait while another does it.

    Args:
        path: The lock, removed at the end.
        what: What its holder does, for the line that says who is waited for.
        sign: Function whose value changes while the holder's work goes on: the guard of the command then waits on.

    Yields:
        The seconds waited for another process, 0 if there was none.
    """
    since, said, seen = time.monotonic(), False, sign()
    while (claim := take(path)) is None:
        owner, waited = read(path) or {}, time.monotonic() - since
        who = owner_text(owner)
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
