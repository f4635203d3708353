"""Claims: who owns a cell, and when another may have it."""

import errno
import io
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from vitlab.runs import lock


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s0.claim.json"


def left_behind(path, age=0.0, **facts):
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, **facts}))
    now = path.stat().st_mtime
    os.utime(path, (now - age, now - age))


def test_exactly_one_of_many_workers_gets_a_cell(path):
    taken = []
    barrier = threading.Barrier(8)

    def reach():
        barrier.wait()
        taken.append(lock.take(path))

    threads = [threading.Thread(target=reach) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owners = [claim for claim in taken if claim]
    assert len(owners) == 1
    assert lock.is_alive(path)
    owners[0].release()
    assert not path.exists()


def test_seeing_that_a_cell_is_taken_costs_two_calls_of_the_file_system(path, monkeypatch):
    """A worker of many looks at claims of others at every take; it took 14 calls over a network."""
    claim, calls = lock.take(path), []
    for module, names in ((os, ("open", "stat", "mkdir", "unlink", "utime", "rename")), (io, ("open",))):
        for name in names:
            real = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, name=name, real=real, **k: calls.append(name) or real(*a, **k))
    taken = lock.take(path)
    monkeypatch.undo()
    assert taken is None and calls == ["open", "open"]
    claim.release()


def test_claiming_a_cell_creates_its_missing_folder(tmp_path):
    claim = lock.take(tmp_path / "arm" / "s0.claim.json")
    assert claim and claim.is_owned()
    claim.release()


def test_exactly_one_of_many_workers_takes_over_a_dead_claim(path, monkeypatch):
    left_behind(path, age=lock.DEAD + 5)
    assert lock.take(path) is None  # an old date alone does not tell: the clock may have jumped
    monkeypatch.setattr(lock, "TOUCH", 0.01)
    time.sleep(0.1)
    taken = []
    threads = [threading.Thread(target=lambda: taken.append(lock.take(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owners = [claim for claim in taken if claim]
    assert len(owners) == 1
    owners[0].release()


def test_a_fresh_claim_of_another_machine_is_left_alone(path):
    left_behind(path, age=lock.DEAD - 10)
    assert lock.is_alive(path)
    assert lock.take(path) is None
    assert path.exists()


def test_a_claim_of_a_dead_process_of_this_machine_is_taken_over_at_once(path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    left_behind(path, host=lock.socket.gethostname(), pid=child.pid)
    claim = lock.take(path)
    assert claim
    assert json.loads(path.read_text())["pid"] == os.getpid()
    claim.release()


def test_a_claim_lives_as_long_as_a_process_that_its_owner_started(path):
    claim = lock.take(path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(claim.fd,))
    os.close(claim.fd)  # as when the owner is killed
    assert lock.is_alive(path)
    child.communicate(b"\n")
    assert not lock.is_alive(path)
    claim._end.set()


def test_an_owner_notices_that_another_has_taken_its_claim(path, monkeypatch):
    monkeypatch.setattr(lock, "TOUCH", 0.02)
    claim = lock.take(path)
    path.unlink()
    left_behind(path)
    for _ in range(200):
        if claim.lost:
            break
        threading.Event().wait(0.02)
    assert claim.lost
    claim.release()
    assert path.exists()  # it belongs to the other


def test_the_age_of_a_claim_needs_no_disk_that_removes_files(path, monkeypatch):
    left_behind(path, age=100.0)

    def fails(*words, **more):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "unlink", fails)
    assert 99 < lock._age(path) < 110
