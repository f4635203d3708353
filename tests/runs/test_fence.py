"""Of the attempts to train in one directory only the newest writes there, whatever became of its lock."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch

from vitlab.runs import lock, run_lock
from vitlab.runs.atomic import atomic_write
from vitlab.runs.directory import RunDir
from vitlab.runs.fence import Fenced, RunGone
from vitlab.runs.generations import BackgroundCheckpointIO, rotate, writing
from vitlab.runs.run_lock import locked


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A directory that somebody trains in, in a time where a minute is three seconds."""
    monkeypatch.setattr(lock, "DEAD", 3.0)
    monkeypatch.setattr(lock, "TOUCH", 0.4)
    monkeypatch.setattr(lock, "LOOK", 0.1)
    run = RunDir(tmp_path)
    run.take_over()
    run.write_text("config.yaml", "a: 1\n")
    run.append_row({"step": 1})
    return run


def another(run):
    """Return the directory as a process sees it that has taken it over."""
    new = RunDir(run.path)
    new.take_over()
    return new


def save(run, number):
    files = BackgroundCheckpointIO()
    files.finish = lambda: rotate(run.checkpoints, ["last"], {"step": number}, fence=run.fence)
    files.save_checkpoint({"w": torch.full((9,), number)}, run.checkpoints / writing(run.fence))
    return files.wait()


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_process_that_was_taken_over_writes_nothing_more(run):
    assert save(run, 1) is None
    new = another(run)
    new.append_row({"step": 2})
    assert save(new, 2) is None
    before = content(run.path)
    for write in (
        lambda: run.append_row({"step": 3}),
        lambda: run.update("run.json", status="done"),
        lambda: run.write("results.json", {"val": {}}),
        lambda: save(run, 3),
    ):
        with pytest.raises(Fenced, match=f"process {os.getpid()} on"):
            write()
    assert content(run.path) == before
    assert [row["step"] for row in new.rows()] == [1, 2]


@pytest.mark.parametrize("write", [lambda run: run.write("results.json", {}), lambda run: run.append_row({"step": 9})])
def test_a_process_stopped_between_its_check_and_its_write_changes_nothing(run, monkeypatch, write):
    check, taken = run.fence.check, []

    def checked():
        check()
        taken.append(another(run))  # the process is stopped here, and continues after another has taken over
        monkeypatch.setattr(run.fence, "check", check)

    monkeypatch.setattr(run.fence, "check", checked)
    with suppress(RunGone):  # a row is lost without notice until the next one
        write(run)
    assert taken and not (run.path / "results.json").exists()
    assert [row["step"] for row in run.rows()] == [1]
    with pytest.raises(Fenced):
        write(run)


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "metrics.jsonl"])
def test_what_was_removed_during_training_is_written_again(run, name):
    before = content(run.path)
    (run.path / name).unlink()
    run.append_row({"step": 2})
    row = b'{"step": 2}\n'
    assert content(run.path) == {**before, "metrics.jsonl": before["metrics.jsonl"] + row}


def test_a_damaged_record_is_written_again_and_a_removed_directory_ends_the_training(run):
    (run.path / "run.json").write_text("{")
    run.check_there()
    assert "token" in run.record
    os.rename(run.path, run.path.with_name("elsewhere"))
    with pytest.raises(RunGone, match="disappeared"):
        run.append_row({"step": 2})


def test_checkpoints_that_were_removed_are_written_into_a_new_folder(run):
    assert save(run, 1) is None
    (run.checkpoints / "last.ckpt").unlink()
    (run.checkpoints / "manifest.json").unlink()
    run.checkpoints.rmdir()
    assert save(run, 2) is None
    assert (run.checkpoints / "last.ckpt").is_file()


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_a_removed_lock_is_made_again(run):
    with locked(run):
        path = run.path / ".lock"
        path.unlink()
        assert until(path.exists)
        assert until(lambda: (lock.read(path) or {}).get("pid") == os.getpid())
        assert lock.take(path) is None
    assert not path.exists()


@pytest.mark.slow
def test_the_heartbeat_outlives_errors_of_its_file_system(run, monkeypatch):
    beats, real = [], os.utime

    def utime(*words):
        beats.append(len(beats))
        if len(beats) < 4:
            raise OSError(116, "Stale file handle")
        return real(*words)

    monkeypatch.setattr(os, "utime", utime)
    with locked(run):
        first = (run.path / ".lock").stat().st_mtime_ns
        assert until(lambda: len(beats) > 5)
        assert (run.path / ".lock").stat().st_mtime_ns > first


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_directory_that_cannot_be_seen_for_a_moment_is_not_called_gone(run, monkeypatch, number):
    """Before, the heartbeat took any error of stat for the end of the directory, and ended the training."""
    failed, real = [], os.stat
    monkeypatch.setattr(run_lock, "LEAVING", 60.0)

    def stat(path, *words, **more):
        if str(path) == str(run.path) and len(failed) < 3:
            failed.append(threading.current_thread())
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *words, **more)

    with locked(run):
        monkeypatch.setattr(os, "stat", stat)
        assert until(lambda: len(failed) == 3)
        time.sleep(0.3)
        assert run.fence.loss is None
        failed.clear()
        with pytest.raises(OSError, match=os.strerror(number)) as error:
            run.check_there()
    assert not isinstance(error.value, RunGone) and error.value.filename == str(run.path)


@pytest.mark.rare
@pytest.mark.parametrize("jump", [-3600, 3600])
def test_a_clock_that_jumps_gives_nobody_the_lock_of_a_living_owner(run, monkeypatch, jump):
    def flock(*words):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(run):
        path, place = run.path / ".lock", lock._place()
        monkeypatch.setattr(lock, "_place", lambda: {**place, "host": "elsewhere"})
        end = time.monotonic() + 5
        while time.monotonic() < end:
            os.utime(path, (time.time() - jump,) * 2)  # touched before the jump
            time.sleep(0.3)
            assert lock.take(path) is None


@pytest.mark.slow
@pytest.mark.parametrize("main_thread", ["hangs", "ends by itself"])
def test_the_process_that_lost_its_lock_ends_with_one_line(run, monkeypatch, capsys, main_thread):
    ended = threading.Event()
    monkeypatch.setattr(run_lock, "LEAVING", 0.3 if main_thread == "hangs" else 60)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(multiprocessing, "active_children", list)  # those of tests before live on
    with locked(run):
        another(run)
        assert until(lambda: run.fence.loss is not None)
        if main_thread == "hangs":
            assert ended.wait(5)
    assert ended.is_set() == (main_thread == "hangs")
    said = capsys.readouterr().err
    assert said.count("this one ends and writes nothing more") == ended.is_set()


def test_unfinished_files_of_two_processes_have_different_names(tmp_path):
    with atomic_write(tmp_path / "a.csv") as one, atomic_write(tmp_path / "a.csv") as other:
        assert one != other
        one.write_text("1")
        other.write_text("2")
    assert (tmp_path / "a.csv").read_text() == "1"


def test_a_lock_that_cannot_be_signed_is_not_left_behind(tmp_path, monkeypatch):
    def full(*words):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        lock.take(tmp_path / ".lock")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fenced", [False, True])
def test_a_full_disk_is_reported_with_the_path_of_the_file(run, fenced):
    with (
        pytest.raises(OSError, match=r"results\.json") as error,
        atomic_write(run.path / "results.json", run.fence if fenced else None),
    ):
        raise OSError(28, "No space left on device")
    assert error.value.filename == str(run.path / "results.json")


@pytest.mark.parametrize(
    ("call", "name"), [("os.fsync", "run.json"), ("pathlib.Path.write_bytes", "metrics.jsonl")], ids=["fsync", "write"]
)
def test_a_failed_takeover_names_the_file_that_failed(run, monkeypatch, call, name):
    """The system's errors of a descriptor have no name: before, `vitlab fit` said "Stale file handle" alone."""

    def stale(*words):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(call, stale)
    with pytest.raises(OSError, match="Stale file handle") as error:
        another(run)
    assert error.value.filename == str(run.path / name)


@pytest.mark.parametrize(
    ("job", "attempt", "taken"), [("7", "1", True), ("7", "0", False), ("8", "1", False), ("", "1", False)]
)
def test_the_next_attempt_of_a_slurm_job_takes_the_lock_of_one_that_hangs(tmp_path, monkeypatch, job, attempt, taken):
    hold = "import sys, time; from vitlab.runs import lock; c = lock.take(__import__('pathlib').Path(sys.argv[1]));"
    hold += "print(c is not None, flush=True); time.sleep(600)"
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}
    words = [sys.executable, "-c", hold, str(tmp_path / ".lock")]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "True\n"
            holder.send_signal(signal.SIGSTOP)  # it lives, and has the lock
            monkeypatch.setenv("SLURM_JOB_ID", job)
            monkeypatch.setenv("SLURM_RESTART_COUNT", attempt)
            claim = lock.take(tmp_path / ".lock")
            assert (claim is not None) == taken
            if claim:
                assert claim.is_owned() and not lock.is_alive(tmp_path / "none")
                claim.release()
        finally:
            holder.kill()
