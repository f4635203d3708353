"""Every phase of a command has an end: a thread says what is waited for, and ends what waits for too long.

The main thread may be in C++ or in the kernel, where Python's signal handlers do not run. So a thread looks: after ten
seconds it says what is waited for; after the limit of the phase, or some seconds after a signal that the main thread
has not obeyed, it records why and ends the process.
"""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Literal

from vitlab.errors import Stopped
from vitlab.runs import interrupt
from vitlab.runs.launch import CONNECTED
from vitlab.runs.processes import state

LOG = logging.getLogger("vitlab")
Name = Literal["build", "join", "download", "data", "start", "save", "wandb", "close", "pack"]
LIMITS: dict[Name, float] = {  # seconds; VITLAB_<NAME>_TIMEOUT takes priority
    "build": 3600.0,
    "join": 600.0,
    "download": 6 * 3600.0,
    "data": 4 * 3600.0,
    "start": 7200.0,
    "save": 1800.0,
    "wandb": 150.0,
    "close": 1800.0,
    "pack": 1800.0,
}
BEFORE = ("build", "join", "download", "data", "start")  # nothing is lost by ending here
SILENT = 10.0  # seconds after which a line says what is waited for
OBEY = 5.0  # seconds that the main thread has to obey a signal, or the end of its phase
LOOK = 0.25  # seconds between two looks
LEAVING = 5.0  # seconds that this process has to end after a child process of the run has ended
RECORDING = 1.5  # seconds for the last line and record, which a disk that hangs would hold up


def limit_of(name: Name) -> float:
    """Return the seconds that a phase may take.

    Example:
        >>> limit_of("join")
        600.0
    """
    return float(os.environ.get(f"VITLAB_{name.upper()}_TIMEOUT") or LIMITS[name])


class Guard:
    """Watches over the phases of a command, one after the other.

    ``on_end`` is called with the reason before the process ends without its main thread; ``children`` returns the
    processes of the run that this one has started; ``way_on`` tells how to go on.

    Example:
        >>> guard = Guard()
        >>> guard.enter("data", "the photos")
        >>> guard.phase
        'data'
    """

    def __init__(self) -> None:
        self.who = ""  # which of several processes this is, as "process 0 of 2 "
        self.way_on = "nothing is lost: start it again"
        self.on_end: Callable[[str], None] = lambda reason: None
        self.children: Callable[[], Sequence[subprocess.Popen[bytes]]] = lambda: ()
        self.phase: Name | None = None
        self.others = ""  # the other processes of the run, once there are any
        self.reason = ""  # why the phase has ended, once its time is over
        self._what = ""
        self._since = self._moved = self._heard = time.monotonic()
        self._said = False
        self._stopped: dict[int, float] = {}  # processes of the run that are stopped, and since when
        self._gone: tuple[str, float] | None = None
        self._launcher = int(os.environ.get("VITLAB_LAUNCHER") or 0)
        self._end = threading.Event()
        self._before: Any = None
        self._turn = threading.Lock()

    def start(self) -> None:
        """Start to look."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(interrupt.WAKE, self._wake)
        threading.Thread(target=self._watch, name="guard", daemon=True).start()

    def stop(self) -> None:
        """Stop looking."""
        self._end.set()
        if self._before is not None:
            signal.signal(interrupt.WAKE, self._before)

    def enter(self, name: Name | None, what: str = "") -> None:
        """Begin a phase that waits for ``what``; None is the training itself, which has a deadline of its own."""
        with self._turn:
            self._enter(name, what)

    def _enter(self, name: Name | None, what: str) -> None:
        now = time.monotonic()
        if name not in BEFORE or self.phase not in BEFORE:
            self._heard = now  # what came before has been heard: training ends because of it, and this is a part of it
        self.phase, self._what, self._since, self._moved, self._said = name, what, now, now, False

    def join(self, rank: int, world: int) -> None:
        """Begin the phase in which the processes of the run come together; it ends by itself once they have."""
        self.who = f"process {rank} of {world} "
        self.others = others_of(rank, world)
        self.enter("join", f"{self.others} to join at {_meeting_place()}")

    def _end_joining(self) -> None:
        from torch import distributed

        with self._turn:
            if self.phase == "join" and distributed.is_initialized():
                self._enter("data", f"{self.others} and the data")

    @contextmanager
    def during(self, name: Name, what: str) -> Iterator[None]:
        """Inside a ``with`` block, another phase."""
        before, heard = (self.phase, self._what), self._heard
        self.enter(name, what)
        self._heard = time.monotonic()
        try:
            yield
        finally:
            self.phase, self._what, self._heard = *before, heard if before[0] in BEFORE else self._heard
            self._since = self._moved = time.monotonic()

    def moved(self) -> None:
        """Note that work goes on: the limit of the phase counts from now."""
        self._moved = time.monotonic()

    def _wake(self, number: int, frame: FrameType | None) -> None:
        if self.reason and not self._end.is_set():
            raise Stopped(signal.SIGTERM, self.reason)

    def _watch(self) -> None:
        asked = 0.0
        for now, frozen in interrupt.beats(self._end, LOOK):
            if frozen:
                self._moved += frozen
                self._stopped.clear()
            told = self.phase is not None and any(when >= self._heard for _, when in interrupt.RECEIVED)
            if not CONNECTED.is_set() and not told and (lost := self._lost(now)):  # a signal ends it anyway
                self._leave(f"{lost}; the run ends", 1)
            if self.phase is None:
                continue
            if self.phase == "join":
                self._end_joining()
            if number := self._disobeyed(now):
                self._leave(f"stopped by {signal.Signals(number).name}", 130 if number == signal.SIGINT else 75)
            if self.reason and now - asked > OBEY:
                self._leave(self.reason, 75)
            limit = limit_of(self.phase)
            if not self.reason and self.phase != "wandb" and now - self._moved > limit:  # W&B never ends a training
                asked, self.reason = now, f"{self.who}waited {limit:.0f} s in vain for {self._what}"
                self._tell(self.reason)
                signal.pthread_kill(threading.main_thread().ident or 0, interrupt.WAKE)
            self._announce(now)

    def _announce(self, now: float) -> None:
        if now - self._since > SILENT and not self._said and self._what:
            self._said = True
            ours = self.who.split()[1:2] in ([], ["0"]) or self.phase == "join"
            text = f"waiting for {self._what}, for up to {limit_of(self.phase or 'build'):.0f} s"
            if ours and LOG.handlers:
                LOG.info(text)
            elif ours and sys.stderr is not None:  # a command without lines of its own
                sys.stderr.write(f"{text}\n")

    def _disobeyed(self, now: float) -> int:
        """Return a signal that the main thread has not obeyed in time, 0 if there is none."""
        return next((n for n, when in interrupt.RECEIVED if when >= self._heard and now - when > OBEY), 0)

    def _lost(self, now: float) -> str | None:
        """Return which process of the run on this machine has ended or is stopped, before all watch each other."""
        children = list(self.children())
        for rank, child in enumerate(children, 1):
            if child.poll() is not None and self._gone is None:
                ended = f"a signal ({-child.returncode})" if child.returncode < 0 else f"exit code {child.returncode}"
                self._gone = f"process {rank} (rank {rank}, pid {child.pid}) has ended with {ended}", now
        if self._gone is not None and now - self._gone[1] > LEAVING:
            return self._gone[0]
        patience = float(os.environ.get("VITLAB_RANK_TIMEOUT") or 30.0)
        pids = [(rank, child.pid) for rank, child in enumerate(children, 1)]
        for rank, pid in [(0, self._launcher)] if self._launcher else pids:
            if state(pid) not in ("T", "t"):
                self._stopped.pop(pid, None)
            elif now - self._stopped.setdefault(pid, now) > patience:
                return f"process {rank} (rank {rank}, pid {pid}) is stopped for {patience:.0f} s"
        return None

    def _tell(self, reason: str) -> None:
        LOG.error("\n%s; %s", reason, self.way_on)

    def _leave(self, reason: str, code: int) -> None:
        """End this process without its main thread."""

        def last_words() -> None:
            if not self.reason:  # else it was told
                self._tell(reason)
            self.on_end(reason)

        helper = threading.Thread(target=last_words, daemon=True)
        helper.start()
        helper.join(RECORDING)
        for child in self.children():
            child.kill()  # works for stopped processes, too
        with suppress(Exception):
            for worker in multiprocessing.active_children():
                worker.kill()
        os._exit(code)


_current: list[Guard] = []  # the last is of the command that runs now


@contextmanager
def guarded() -> Iterator[Guard]:
    """Watch over what is inside a ``with`` block; :func:`enter` tells its phases."""
    guard = Guard()
    CONNECTED.clear()
    _current.append(guard)
    guard.start()
    try:
        yield guard
    finally:
        guard.stop()
        _current.remove(guard)


def enter(name: Name | None, what: str = "") -> None:
    """Begin a phase of the command that runs now, if it is watched; see :meth:`Guard.enter`."""
    if _current:
        _current[-1].enter(name, what)


def _meeting_place() -> str:
    """Return where the processes of a run meet: what a launcher says, or the first node of a SLURM job."""
    address, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not address and (nodes := os.environ.get("SLURM_NODELIST")):
        from lightning.fabric.plugins.environments import SLURMEnvironment

        address, port = SLURMEnvironment.resolve_root_node_address(nodes), str(SLURMEnvironment().main_port)
    return f"{address or '127.0.0.1'}{port and ':'}{port}"


@contextmanager
def during(name: Name, what: str) -> Iterator[None]:
    """Inside a ``with`` block, the command that runs now is in another phase; see :meth:`Guard.during`."""
    if not _current:
        yield
        return
    with _current[-1].during(name, what):
        yield


def goes_on() -> None:
    """Note that the work of the command that runs now goes on; see :meth:`Guard.moved`."""
    if _current:
        _current[-1].moved()


def others_of(rank: int, world: int) -> str:
    """Return how messages call the processes that one of several waits for.

    Example:
        >>> others_of(0, 2), others_of(0, 3), others_of(2, 3)
        ('process 1 of 2', 'processes 1 to 2 of 3', 'process 0 of 3')
    """
    if rank:
        return f"process 0 of {world}"
    return f"process 1 of {world}" if world == 2 else f"processes 1 to {world - 1} of {world}"
