"""Commands in forks of a process that has imported vitlab: what a fresh process would do, for less."""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vitlab.ablation.execution import process, warm
from vitlab.ablation.execution.gpus import Slot
from vitlab.ablation.file.settings import Execution
from vitlab.runs import lock

FIT = ["fit", "--config", "vit", "--data", "PositionProbe", "--trainer.max_epochs", "1", "--run_dir"]
FIT_ENDS = ["--trainer.limit_train_batches", "3", "--trainer.limit_val_batches", "2", "--trainer.accelerator", "cpu"]
LIGHT = """\
import sys, time, types
from vitlab.ablation.execution import warm
from vitlab.cli import main
warm.ROOMS, warm.OTHERS, warm._parse = ("cli.main",), ("numpy.random",), lambda: None
sys.modules["hang"] = types.SimpleNamespace(main=lambda args: time.sleep(60))
main.COMMANDS["hang"] = ("", "hang:main")
sys.exit(warm.main(int(sys.argv[3])))
"""


@pytest.fixture
def finish(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(process, "_warned", [])
    monkeypatch.setattr(process, "_servers", {})

    def call(*args, fork=True, **more):
        run, log = Execution(fork=fork), tmp_path / "log"
        seat = process.Seat(Slot(workers=2), **more)
        return process.run_in_slot([*process.VITLAB, *args], log, run, seat, {"WORD": "of its own"})

    yield call
    for server in process._servers.values():
        server.close()
        server.process.wait(30)
    process._servers.clear()


@pytest.fixture
def light(finish, tmp_path, monkeypatch):
    """Servers that import next to nothing, and know a command that hangs."""
    (tmp_path / "server.py").write_text(LIGHT)
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "server.py"} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return finish


def test_a_fork_has_the_code_and_the_directory_of_now(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_servers", {})
    monkeypatch.setattr(process, "Server", lambda env: SimpleNamespace(has_ended=lambda: False))
    monkeypatch.setattr(process, "code_digest", lambda: code)
    code = "a"
    first = process._server({})
    assert process._server({}) is first and process._server({"PYTHONPATH": "x"}) is not first
    monkeypatch.chdir(tmp_path)  # in which a module of the same name may lie
    second = process._server({})
    code = "b"
    assert first is not second is not process._server({})


@pytest.mark.slow
def test_a_forked_command_ends_like_a_process_and_its_death_affects_no_other(light, tmp_path, capsys):
    assert light("--version") == light("--version", fork=False)
    assert light("fot") == light("fot", fork=False) and light("fot")[0] == 2
    (server,) = process._servers.values()
    assert server.served
    for number in (signal.SIGKILL, signal.SIGUSR1, None):
        claim, ended, asked = lock.take(tmp_path / "claim"), [], threading.Event()
        more = {"claim": claim, "stop": asked.is_set}
        thread = threading.Thread(target=lambda more=more, ended=ended: ended.append(light("hang", **more)))
        thread.start()
        while not (child := (lock.read(claim.path) or {}).get("child")):
            time.sleep(0.02)
        assert os.getsid(child) == child and os.getpgid(child) == child
        if number == signal.SIGUSR1:  # SLURM's warning is sent to all that it knows of
            os.kill(server.process.pid, number)
            time.sleep(0.2)
        os.kill(child, number) if number else asked.set()
        thread.join(30)
        assert ended[0][0] == (-number if number else process.STOPPED)
        claim.release()
    assert server.process.poll() is None and light("--version")[0] == 0  # others go on
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    assert light("--version")[0] == 0 and capsys.readouterr().err == ""  # and so they do without it


def test_where_forking_is_impossible_one_line_says_so_and_processes_do_the_work(light, tmp_path, capsys):
    (tmp_path / "server.py").write_text("raise ImportError('no libcudart')")
    assert light("--version")[0] == light("--version")[0] == 0
    text = "vitlab: cells start as new processes, which is slower, as forking failed: ImportError: no libcudart\n"
    assert capsys.readouterr().err == text


def test_a_process_in_which_cuda_is_in_use_does_not_fork(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    wakeup, old = signal.set_wakeup_fd(-1), signal.getsignal(signal.SIGCHLD)
    asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reply, theirs = socket.socketpair()
    try:
        with asking, asked, reply, theirs:
            socket.send_fds(asking, [b"{}"], [theirs.fileno()])
            theirs.close()
            assert warm._serve(asked) is None
            assert reply.recv(8) == b""  # whoever asked starts a process
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGCHLD, old)
    assert "CUDA is in use in the process that forks" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.rare
def test_a_forked_training_equals_one_in_its_own_process_to_the_bit(finish):
    for name, fork in (("first", True), ("second", True), ("fresh", False)):
        assert finish(*FIT, name, *FIT_ENDS, "--quiet", fork=fork) == (0, [])
        assert finish("validate", f"{name}/checkpoints/last.ckpt", "--quiet", fork=fork) == (0, [])
    from vitlab.runs.directory import RunDir

    def numbers(name):
        run = RunDir(name)
        rows = [{k: v for k, v in row.items() if "second" not in k} for row in run.rows()]
        return rows, {k: v for k, v in run.measured("val").items() if k != "sha256"}

    assert numbers("first")[1] == numbers("second")[1] == numbers("fresh")[1]
    losses = [[row.get("train/loss") for row in numbers(name)[0]] for name in ("first", "second", "fresh")]
    assert losses[0] == losses[1] == losses[2]
