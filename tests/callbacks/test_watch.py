import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from vitlab.callbacks.watch import Watch
from vitlab.errors import Stopped
from vitlab.runs.guard import Guard

pytestmark = pytest.mark.slow
BEAT = 0.25


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Look four times as often as in a training."""
    monkeypatch.setattr("vitlab.callbacks.watch.BEAT", BEAT)


class Strategy:
    """Two processes that have met: what one broadcasts, the other has."""

    launcher = SimpleNamespace()
    port = None

    def broadcast(self, value):
        type(self).port = value or self.port
        return self.port

    def barrier(self, name):
        pass


@pytest.fixture
def left(monkeypatch):
    """How this process would have ended."""
    left = threading.Event()
    left.code = None

    def leave(code):
        left.code = code
        left.set()

    monkeypatch.setattr(os, "_exit", leave)
    return left


@pytest.fixture
def other():
    """Another process of this machine."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def watching(other, patience="30", told=None):
    """Return the watch of rank 0 of two, and the store where rank 1 is the ``other`` process."""
    os.environ["VITLAB_RANK_TIMEOUT"] = patience
    watch = Watch(told.append if told is not None else (lambda what: None))
    del os.environ["VITLAB_RANK_TIMEOUT"]
    trainer = SimpleNamespace(world_size=2, global_rank=0, strategy=Strategy())

    def met(name):
        store = dist.TCPStore("127.0.0.1", Strategy.port, is_master=False)
        store.set("process1", f'{{"pid": {other.pid}, "host": "{os.uname().nodename}"}}')
        watch.test_store = store

    trainer.strategy.barrier = met
    watch.setup(trainer, None, "fit")
    return watch


def test_a_single_process_watches_no_other():
    watch = Watch(lambda what: None)
    watch.setup(SimpleNamespace(world_size=1), None, "fit")
    assert not watch._thread.is_alive()


def test_a_process_that_has_died_is_named_and_this_one_ends(other, left):
    told = []
    watch = watching(other, told=told)
    other.kill()
    other.wait()
    assert left.wait(10)
    assert left.code == 1
    assert told == [watch.loss] and f"process 1 of 2 (rank 1, pid {other.pid} on" in watch.loss
    assert watch.loss.endswith("has ended")


@pytest.mark.rare
def test_a_silent_process_counts_as_lost_after_the_timeout(other, left):
    told = []
    watch = watching(other, patience="2", told=told)
    watch.test_store.set("count1", "1")  # and never again
    assert left.wait(20)
    assert told[0].endswith("has not answered for 2 s")


def test_a_process_that_signed_off_does_not_count_as_lost(other, left):
    watch = watching(other, patience="0.2")
    watch.test_store.set("bye1", "1")
    other.kill()
    other.wait()
    assert not left.wait(5 * BEAT)
    watch.on_exception(SimpleNamespace(strategy=Strategy()), None, Stopped(15))
    assert not watch._thread.is_alive() and watch.loss is None


@pytest.mark.rare
def test_a_frozen_first_process_counts_as_lost(other, left):
    """The store lives in the frozen process: a call to it returns to nobody."""
    watch = Watch(lambda what: None)
    watch.patience, watch.rank, watch.world = 2.0, 1, 2
    watch.peers = {0: {"pid": other.pid, "host": os.uname().nodename}}
    asked = threading.Event()

    class Frozen:
        def set(self, key, value):
            asked.set()
            watch._end.wait(30)

    watch.store = Frozen()
    watch._thread.start()
    assert left.wait(10) and asked.is_set()
    assert watch.loss.startswith("process 0 of 2 (rank 0, ") and watch.loss.endswith("has not answered for 2 s")
    watch._end.set()


def test_a_process_of_the_run_that_ends_before_all_are_connected_is_named(other, left, monkeypatch):
    monkeypatch.setattr("vitlab.callbacks.watch.LEAVING", 0.1)
    watch, asked, said = Watch(print), Guard(), []
    asked.children, asked.on_end = lambda: [other], lambda *why: said.append(why)
    watch.look(asked, 1.0, 0.0)
    assert not left.is_set()
    other.kill()
    other.wait()
    for now in (2.0, 3.0):
        watch.look(asked, now, 0.0)
    assert left.code == 1
    assert said == [(f"process 1 (rank 1, pid {other.pid}) has ended with a signal (9); the run ends", "error")]


def test_processes_end_if_the_one_that_started_them_dies_before_they_connect(other, left, monkeypatch):
    monkeypatch.setenv("VITLAB_LAUNCHER", str(other.pid))
    watch = Watch(print)
    watch.look(Guard(), 1.0, 0.0)
    assert not left.is_set()
    other.kill()
    other.wait()
    watch.look(Guard(), 2.0, 0.0)
    assert left.code == 1
