"""Every phase of a command has an end: a line, a signal and a limit, wherever the main thread is."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from vitlab.errors import Stopped
from vitlab.runs import guard, interrupt
from vitlab.runs.guard import Guard, during, enter, guarded, limit_of

# The main thread waits in C++, where Python's handlers of signals do not run.
SCRIPT = """
import logging, sys, threading
from datetime import timedelta
from torch.distributed import TCPStore
from vitlab.runs import guard
from vitlab.runs.interrupt import second_interrupt_ends, stop_on_signals
guard.SILENT, guard.OBEY = 0.2, 0.5
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
with second_interrupt_ends(), stop_on_signals(), guard.guarded() as watched:
    watched.on_end = lambda *why: print("recorded", *why, flush=True)
    watched.enter("data", "the photos")
    print("ready", flush=True)
    store.get("never")
"""


@pytest.mark.rare
@pytest.mark.slow  # three imports of torch
@pytest.mark.parametrize(
    ("number", "limit", "code", "said"),
    [
        (15, "", 75, "stopped by SIGTERM; nothing is lost: start it again"),
        (2, "", 130, "stopped by SIGINT; nothing is lost: start it again"),
        (None, "0.5", 75, "waited 0 s in vain for the photos; nothing is lost: start it again"),
    ],
)
def test_a_phase_that_hangs_in_cpp_ends_by_a_signal_and_by_its_limit(monkeypatch, number, limit, code, said):
    monkeypatch.setenv("VITLAB_DATA_TIMEOUT", limit)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=-1, stderr=subprocess.STDOUT, text=True)
    assert process.stdout.readline() == "ready\n"
    if number:
        time.sleep(0.6)
        process.send_signal(number)
    out = process.communicate(timeout=30)[0]
    assert process.returncode == code, out
    assert said in out and "recorded" in out and "waiting for the photos" in out and "Traceback" not in out


@pytest.fixture
def left(monkeypatch):
    """The exit code with which the process would have ended, once it would have."""
    codes, ended = [], threading.Event()
    monkeypatch.setattr(guard.os, "_exit", lambda code: (codes.append(code), ended.set()))
    monkeypatch.setattr(guard, "LOOK", 0.01)
    monkeypatch.setattr(guard, "OBEY", 0.2)
    monkeypatch.setattr(interrupt, "RECEIVED", [])
    yield lambda seconds: codes[0] if ended.wait(seconds) else None
    interrupt.RECEIVED.clear()


@pytest.mark.slow
def test_a_limit_wakes_the_main_thread_first(monkeypatch, left):
    monkeypatch.setenv("VITLAB_DATA_TIMEOUT", "0.05")
    with pytest.raises(Stopped, match="waited 0 s in vain for the photos") as stopped, guarded():
        enter("data", "the photos")
        time.sleep(5)
    assert stopped.value.number == 15
    assert left(0.3) is None


@pytest.mark.slow
def test_a_signal_before_saving_does_not_cut_the_saving_short_and_one_within_it_does(left):
    with guarded():
        enter(None)
        interrupt.RECEIVED.append((15, time.monotonic()))
        with during("save", "the checkpoint"):
            assert left(0.5) is None
            interrupt.RECEIVED.append((15, time.monotonic()))
            assert left(5) == 75


@pytest.mark.slow
def test_a_child_process_that_ends_stops_nothing(left):
    handled = (signal.SIGCHLD, signal.SIGUSR1)  # the first by torch, for the workers of a loader
    before = {number: signal.signal(number, lambda number, frame: None) for number in handled}
    try:
        with interrupt.second_interrupt_ends(), guarded() as watched:
            watched.enter("data", "the photos")
            subprocess.run([sys.executable, "-c", ""], check=True)
            assert left(0.6) is None
            os.kill(os.getpid(), signal.SIGUSR1)
            assert left(5) == 75
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.slow
def test_a_phase_that_makes_progress_has_no_limit(monkeypatch, left):
    monkeypatch.setenv("VITLAB_PACK_TIMEOUT", "0.3")
    with guarded() as watched:
        enter("pack", "the next photos")
        for _ in range(8):
            time.sleep(0.1)
            guard.goes_on()
        assert not watched.reason


def test_each_limit_of_time_can_be_set_in_the_environment(monkeypatch):
    assert limit_of("save") == 1800
    monkeypatch.setenv("VITLAB_SAVE_TIMEOUT", "5")
    assert limit_of("save") == 5
    assert Guard().phase is None
