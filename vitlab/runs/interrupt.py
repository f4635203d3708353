"""The second Ctrl-C ends a process, whatever it does."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TWICE = 0.4  # seconds within which a second signal is the same one: a terminal and a launcher both send it
GRACE = 0.5  # seconds that a process has to end by itself after the second Ctrl-C


@contextmanager
def second_interrupt_ends() -> Iterator[None]:
    """End the process at the second Ctrl-C, whatever it does: also where Python does not come to run its handlers.

    A thread hears of each signal through a socket. The first is left to the handlers, and after the second they have a
    moment to end in good order.
    """
    reads, writes = socket.socketpair()
    writes.setblocking(False)
    before = signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
    twice = threading.Event()
    threading.Thread(target=_hear, args=(reads, twice), daemon=True).start()
    os.register_at_fork(after_in_child=_hear_nothing)  # or the signals of a worker would count
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writes.close()  # ends the thread
        if twice.is_set():  # an interpreter takes seconds to clean up
            sys.stdout.flush()
            os._exit(128 + signal.SIGINT)


def _hear(reads: socket.socket, twice: threading.Event) -> None:
    first = 0.0
    while number := reads.recv(1):
        if number[0] == signal.SIGINT:
            first = first or time.monotonic()
            if time.monotonic() - first > TWICE:
                twice.set()
                time.sleep(GRACE)
                os._exit(128 + signal.SIGINT)
    reads.close()


def _hear_nothing() -> None:
    signal.set_wakeup_fd(-1)
