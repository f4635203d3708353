"""Who may train in a directory when its lock says that somebody does."""

import errno
import fcntl
import json
import os
import threading
import time

import pytest

from vitlab.errors import UsageError
from vitlab.runs import lock, run_lock
from vitlab.runs.directory import RunDir
from vitlab.runs.run_lock import locked


@pytest.fixture
def run(tmp_path, monkeypatch):
    """An empty run directory, in a time where a minute is two seconds."""
    monkeypatch.setattr(lock, "DEAD", 2.0)
    monkeypatch.setattr(lock, "TOUCH", 0.25)
    monkeypatch.setattr(lock, "UNSIGNED", 1.0)
    monkeypatch.setattr(run_lock.LOG, "info", lambda *words: None)
    return RunDir(tmp_path)


def left(run, text, age=0.0):
    (run.path / ".lock").write_text(text)
    os.utime(run.path / ".lock", (time.time() - age,) * 2)


def seconds(run):
    """Return how long it took to get the directory."""
    start = time.monotonic()
    with locked(run):
        return time.monotonic() - start


@pytest.mark.slow
def test_a_lock_of_another_host_without_a_heartbeat_is_taken_over_after_a_wait(run):
    left(run, json.dumps({"host": "elsewhere", "pid": 7}), age=0.5)
    assert 1 < seconds(run) < 10


@pytest.mark.slow
def test_a_lock_of_another_host_with_a_heartbeat_is_respected(run):
    left(run, json.dumps({"host": "elsewhere", "pid": 7}))
    end = threading.Event()

    def touch():
        while not end.wait(0.2):
            os.utime(run.path / ".lock")

    owner = threading.Thread(target=touch)
    owner.start()
    start = time.monotonic()
    with pytest.raises(UsageError, match="process 7 on elsewhere is training in"):
        seconds(run)
    assert time.monotonic() - start < 4
    end.set()
    owner.join()


@pytest.mark.parametrize("text", ["", "{", "\x00" * 512, "[1]", '"a"'])
def test_a_lock_that_names_nobody_is_stale(run, text):
    left(run, text, age=3)
    assert seconds(run) < 2


@pytest.mark.slow
def test_a_lock_that_is_being_made_is_not_taken_for_a_stale_one(run):
    left(run, "")
    me = json.dumps({"host": os.uname().nodename, "pid": os.getpid()})

    def sign():
        with (run.path / ".lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(me)
            file.flush()
            time.sleep(1)

    owner = threading.Timer(0.5, sign)
    owner.start()
    with pytest.raises(UsageError, match=f"process {os.getpid()} on .* is training in"):
        seconds(run)
    owner.join()


@pytest.mark.parametrize(
    ("begun", "way_out"), [(False, "choose another --run_dir"), (True, "make room, or resume a copy of it elsewhere")]
)
def test_a_directory_that_cannot_be_written_is_refused_with_the_way_out(run, begun, way_out, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lock, "take", full)
    if begun:
        run.config.touch()
    with pytest.raises(UsageError, match=f"No space left on device; {way_out}$"), locked(run):
        pass
