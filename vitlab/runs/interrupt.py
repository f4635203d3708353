"""End a command on a signal, at the second Ctrl-C whatever it is doing; what threads that watch a process share."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from vitlab.errors import Stopped, exit_code

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # which end a command; SIGCHLD does not
TWICE = 0.4  # seconds within which a second signal is a duplicate: a terminal and a launcher both send it
RECEIVED: list[tuple[int, float]] = []  # of STOPPING, and when they came, also while the main thread is in C++
HURRY = threading.Event()  # set where the process must not wait at its end for what libraries have left open
GRACE = 0.5  # seconds that a process has to end normally after the second Ctrl-C
WAKE = signal.SIGURG  # to the main thread, from one that watches; not used by others, and ignored by default
FROZEN = 5.0  # seconds between two beats after which this process itself was stopped, as by Ctrl-Z


def beats(end: threading.Event, seconds: float) -> Iterator[tuple[float, float]]:
    """Yield the time every so many seconds until ``end``, and for how long this process was stopped meanwhile, often 0.

    Example:
        >>> next(beats(threading.Event(), 0.01))[1]
        0.0
    """
    last = time.monotonic()
    while not end.wait(seconds):
        now = time.monotonic()
        yield now, now - last if now - last > FROZEN else 0.0
        last = now


@contextmanager
def second_interrupt_ends() -> Iterator[None]:
    """End the process at the second Ctrl-C, even where Python cannot run its signal handlers.

    A thread receives each signal through a socket. It leaves the first to the handlers; after the second they have a
    moment to finish.
    """
    reads, writes = socket.socketpair()
    writes.setblocking(False)
    before = signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
    twice = threading.Event()
    threading.Thread(target=_listen, args=(reads, twice), daemon=True).start()
    os.register_at_fork(after_in_child=_ignore_in_worker)  # else a worker's signals count too
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writes.close()  # ends the thread
        if twice.is_set():  # cleaning up the interpreter takes seconds
            sys.stdout.flush()
            os._exit(128 + signal.SIGINT)


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise :class:`Stopped` on a signal, also while libraries load; training installs handlers that save first."""
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    before = {n: signal.signal(n, _stop) for n in STOPPING if n != signal.SIGHUP or not is_nohup}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def until_stopped(command: Callable[[], int], when: str = "") -> int:
    """Run a command that may take long, and return its exit code, or that of the signal which ended it.

    Args:
        command: The command; a second Ctrl-C ends it at once.
        when: What the signal ended, to be said where nothing else was; default: what ``Stopped`` tells.
    """
    with second_interrupt_ends():
        try:
            with stop_on_signals():
                return command()
        except Stopped as stopped:
            _say_stopped(stopped, when or stopped.when)
            return exit_code(stopped)


def _say_stopped(stopped: Stopped, when: str) -> None:
    """Say why a command stopped, unless that has been said."""
    if not stopped.said:
        why = stopped.reason or f"stopped{stopped.by} {when}"
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"vitlab: {why}\n")


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def _listen(reads: socket.socket, twice: threading.Event) -> None:
    first = 0.0
    while number := reads.recv(1):
        if number[0] in STOPPING:
            RECEIVED.append((number[0], time.monotonic()))
        if number[0] == signal.SIGINT:
            first = first or time.monotonic()
            if time.monotonic() - first > TWICE:
                twice.set()
                time.sleep(GRACE)
                os._exit(128 + signal.SIGINT)
    reads.close()


def _ignore_in_worker() -> None:
    signal.set_wakeup_fd(-1)
