"""Commands in forks of a process that has imported vitlab: what a fresh process would do, for less."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from vitlab.ablation.work import process
from vitlab.runs import lock

pytestmark = pytest.mark.slow  # it imports torch, and trains
FIT = ["fit", "--config", "vit", "--data", "PositionProbe", "--trainer.max_epochs", "1", "--run_dir"]
FIT_ENDS = ["--trainer.limit_train_batches", "3", "--trainer.limit_val_batches", "2", "--trainer.accelerator", "cpu"]


@pytest.fixture
def finish(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def call(*args, fork=True, **more):
        env = process.environment(2, WORD="of its own")
        return process.finish([*process.VITLAB, *args], env, tmp_path / "log", fork=fork, **more)

    yield call
    for server in process._servers.values():
        server.socket.close()
        server.process.wait(30)
    process._servers.clear()


def test_a_command_in_a_fork_ends_as_one_in_a_process_and_its_death_is_its_own(finish, tmp_path):
    assert finish("--version") == finish("--version", fork=False)
    assert finish("fot") == finish("fot", fork=False) and finish("fot")[0] == 2
    (server,) = process._servers.values()
    assert server.served
    slow = [*FIT, "long", "--trainer.max_epochs", "1000", "--quiet"]
    for stop, code in ((False, -signal.SIGKILL), (True, process.STOPPED)):
        claim, ended = lock.take(tmp_path / "claim"), []
        asked = threading.Event()
        more = {"claim": claim, "stop": asked.is_set}
        thread = threading.Thread(
            target=lambda more=more, ended=ended: ended.append(finish(*slow, **more)), daemon=True
        )
        thread.start()
        while not (child := (lock.read(claim.path) or {}).get("child")):
            time.sleep(0.05)
        assert os.getsid(child) == child and os.getpgid(child) == child
        asked.set() if stop else os.kill(child, signal.SIGKILL)
        thread.join(60)
        assert ended[0][0] == code
        claim.release()
        shutil.rmtree("long", ignore_errors=True)
    assert server.process.poll() is None and finish("--version")[0] == 0  # others go on
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    assert finish("--version")[0] == 0  # and so they do without it


@pytest.mark.rare
def test_a_forked_training_is_that_of_a_process_to_the_bit(finish):
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
