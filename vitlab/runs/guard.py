"""Every phase of a command has an end: a thread says what is waited for, and ends what waits for too long.

The main thread may be in C++ or in the kernel, where Python's signal handlers do not run. So a thread looks: after ten
seconds it says what is waited for; after the limit of the phase, or some seconds after a signal that the main thread
has not obeyed, it records why and ends the process. Callbacks of a training let it look for what they know: a step that
hangs (:class:`~vitlab.callbacks.deadline.Deadline`), a process of the run that is lost
(:class:`~vitlab.callbacks.watch.Watch`).
"""

import logging
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, Literal

from vitlab.errors import Stopped
from vitlab.runs import interrupt
from vitlab.runs.launch import meeting_place, others_of

LOG = logging.getLogger("vitlab")
Why = Literal["signal", "error"]
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
RECORDING = 1.5  # seconds for the last line and record after a signal


def limit_of(name: Name) -> float:
    """Return the seconds that a phase may take.

    Example:
        >>> limit_of("join")
        600.0
    """
    return float(os.environ.get(f"VITLAB_{name.upper()}_TIMEOUT") or LIMITS[name])


def at_most(seconds: float, work: Callable[[], None]) -> bool:
    """Do ``work``, such as a last line, and go on after so many seconds: a disk that hangs would hold it up.

    Returns:
        Whether it is done.
    """

    def tried() -> None:
        with suppress(Exception):
            work()

    helper = threading.Thread(target=tried, daemon=True)
    helper.start()
    helper.join(seconds)
    return not helper.is_alive()


def end_process(code: int, children: Iterable[subprocess.Popen[bytes]] = ()) -> None:
    """End this process without its main thread, and with it ``children`` and the workers of loaders."""
    ends: list[Any] = [*children, *multiprocessing.active_children()]
    for process in ends:
        with suppress(Exception):  # one that has been closed
            process.kill()  # works for stopped processes, too
    os._exit(code)


class Guard:
    """Watches over the phases of a command, one after the other.

    ``on_end`` is called with the reason, and whether it is a signal or an error, before the process ends without its
    main thread; ``children`` returns the processes of the run that this one has started; ``way_on`` tells how to go on.
    Each of ``looks`` is called at every look: with the guard, the time, and for how long this process itself was
    stopped since the look before.

    Example:
        >>> guard = Guard()
        >>> guard.enter("data", "the photos")
        >>> guard.phase
        'data'
    """

    def __init__(self) -> None:
        self.rank, self.world = 0, 1  # of several processes
        self.way_on = "nothing is lost: start it again"
        self.on_end: Callable[[str, Why], None] = lambda reason, why: None
        self.children: Callable[[], Sequence[subprocess.Popen[bytes]]] = lambda: ()
        self.phase: Name | None = None
        self.others = ""  # the other processes of the run, once there are any
        self.looks: list[Callable[[Guard, float, float], None]] = []
        self.reason = ""  # why the command is to end, once its time is over
        self.until = math.inf  # when the process ends without its main thread
        self._what = ""
        self.moved = self._since = self._heard = time.monotonic()  # the first: when work last went on
        self._said = False
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
        self.phase, self._what, self._since, self.moved, self._said = name, what, now, now, False

    def join(self, rank: int, world: int) -> None:
        """Begin the phase in which the processes of the run come together; it ends by itself once they have."""
        self.rank, self.world = rank, world
        self.others = others_of(rank, world)
        self.enter("join", f"{self.others} to join at {meeting_place()}")

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
            self._since = self.moved = time.monotonic()

    def _wake(self, number: int, frame: FrameType | None) -> None:
        if self.reason and not self._end.is_set():
            raise Stopped(signal.SIGTERM, self.reason)

    def end(self, reason: str, seconds: float) -> None:
        """Say why the command ends, and stop its main thread; after so many seconds the process ends without it."""
        self.reason, self.until = reason, time.monotonic() + seconds
        at_most(RECORDING, partial(self._tell, reason))
        signal.pthread_kill(threading.main_thread().ident or 0, interrupt.WAKE)

    def _watch(self) -> None:
        for now, frozen in interrupt.beats(self._end, LOOK):
            if frozen:
                self.moved += frozen
            if not self._told():  # else the command ends anyway
                for look in self.looks:
                    look(self, now, frozen)
            if now > self.until:
                self.leave(self.reason, 75, "error")
            if self.phase is not None:
                self._look_at_phase(self.phase, now)

    def _look_at_phase(self, phase: Name, now: float) -> None:
        if phase == "join":
            self._end_joining()
        if number := self._disobeyed(now):
            self.leave(f"stopped by {signal.Signals(number).name}", 130 if number == signal.SIGINT else 75, "signal")
        limit = limit_of(phase)
        if not self.reason and phase != "wandb" and now - self.moved > limit:  # W&B never ends a training
            who = f"process {self.rank} of {self.world} " if self.world > 1 else ""
            self.end(f"{who}waited {limit:.0f} s in vain for {self._what}", OBEY)
        self._announce(now)

    def _announce(self, now: float) -> None:
        if now - self._since > SILENT and not self._said and self._what:
            self._said = True
            ours = self.rank == 0 or self.phase == "join"
            text = f"waiting for {self._what}, for up to {limit_of(self.phase or 'build'):.0f} s"
            if ours and LOG.handlers:
                LOG.info(text)
            elif ours and sys.stderr is not None:  # a command without lines of its own
                sys.stderr.write(f"{text}\n")

    def _disobeyed(self, now: float) -> int:
        """Return a signal that the main thread has not obeyed in time, 0 if there is none."""
        return next((n for n, when in interrupt.RECEIVED if when >= self._heard and now - when > OBEY), 0)

    def _told(self) -> bool:
        """Return whether a signal came in this phase; training itself saves first."""
        return self.phase is not None and any(when >= self._heard for _, when in interrupt.RECEIVED)

    def _tell(self, reason: str) -> None:
        LOG.error("\n%s; %s", reason, self.way_on)

    def leave(self, reason: str, code: int, why: Why) -> None:
        """End this process without its main thread."""

        def last_words() -> None:
            if not self.reason:  # else it was told
                self._tell(reason)
            self.on_end(reason, why)

        at_most(RECORDING, last_words)
        end_process(code, self.children())


_current = [Guard()]  # the last is of the command that runs now; the first, which looks at nothing, of all others


@contextmanager
def guarded() -> Iterator[Guard]:
    """Watch over what is inside a ``with`` block; :func:`enter` tells its phases."""
    guard = Guard()
    _current.append(guard)
    guard.start()
    try:
        yield guard
    finally:
        guard.stop()
        _current.remove(guard)


def enter(name: Name | None, what: str = "") -> None:
    """Begin a phase of the command that runs now; see :meth:`Guard.enter`."""
    _current[-1].enter(name, what)


def during(name: Name, what: str) -> AbstractContextManager[None]:
    """Return a context in which the command that runs now is in another phase; see :meth:`Guard.during`."""
    return _current[-1].during(name, what)


def goes_on() -> None:
    """Note that the work of the command that runs now goes on: the limit of its phase counts from now."""
    _current[-1].moved = time.monotonic()


def obeyed() -> None:
    """Note that the main thread has stopped, as asked for: it may take the time of its next phases to save and end."""
    _current[-1].reason, _current[-1].until = "", math.inf
