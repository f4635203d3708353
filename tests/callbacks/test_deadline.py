import multiprocessing
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from tiny import fit, loader, task, trainer

from vitlab.callbacks import deadline as watched
from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.callbacks.deadline import Deadline
from vitlab.callbacks.ema import EMA
from vitlab.errors import Stopped
from vitlab.runs import guard
from vitlab.runs.guard import Guard, guarded

FLOOR = 1.0


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Look often, and let the first batch be as quick as the others."""
    monkeypatch.setattr(guard, "LOOK", 0.1)
    monkeypatch.setattr(watched, "FIRST", 1.0)


def hanging(name, step):
    """Return a task that hangs in the middle of a step or of a batch of a validation."""
    model = task()
    loss, calls = getattr(model, name), []

    def waits(*given):
        calls.append(1)
        if len(calls) == step:
            time.sleep(60)
        return loss(*given)

    setattr(model, name, waits)
    return model


class Batches:
    """A loader that can be left in the middle of an epoch, as those of vitlab can; one of its batches may be late."""

    def __init__(self, late=None):
        self.batches, self.late, self.done, self.first = list(loader()), late, 0, 0

    def __len__(self):
        return 3

    def __iter__(self):
        self.done, self.first = self.first, 0
        for batch in self.batches[self.done :]:
            if self.late is not None:
                self.late -= 1
                if self.late == 0:
                    time.sleep(60)
            self.done += 1
            yield batch

    def state_dict(self):
        return {"batches": self.done % 3}

    def load_state_dict(self, state):
        self.first = state["batches"]


def unheard():
    """Return the guard of a command, which ends nothing."""
    asked = Guard()
    asked.end, asked.moved = lambda reason, seconds: None, 0.0
    return asked


def ends(folder, keeper, *callbacks, model=None, late=None):
    """Train until it hangs; return the sentence."""
    batches = Batches(late)
    start = time.monotonic()
    deadline = Deadline(folder / "train.log", FLOOR, keeper)
    with pytest.raises(Stopped) as stopped, guarded() as command:
        command.looks = [deadline.look]
        fit(folder, deadline, keeper, *callbacks, model=model, train=batches)
    assert time.monotonic() - start < 40
    return stopped.value.reason


@pytest.mark.slow
def test_a_step_that_hangs_is_named_with_the_stacks_of_all_threads(tmp_path):
    other = multiprocessing.Process(target=time.sleep, args=(60,), daemon=True)
    other.start()
    said = ends(tmp_path, Checkpoint(), model=hanging("train_loss", 5))
    other.join(0.5)
    assert other.exitcode is None  # who is not of this run is left alone
    other.kill()
    assert said.startswith("process 0 of 1 (rank 0) hangs: its step has taken ")
    log = (tmp_path / "train.log").read_text()
    assert "waits" in log and "Thread 0x" in log and "_watch" in log
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 3  # of the epoch before: in the middle of a step nothing is whole


@pytest.mark.slow
@pytest.mark.parametrize("averages", [False, True], ids=["weights", "EMA"])
@pytest.mark.parametrize("place", ["loader", "validation batch"])
def test_a_consistent_state_is_saved_and_resumes_to_the_same_numbers(tmp_path, place, averages):
    def parts():
        return [Checkpoint(), *([EMA(decay=0.5)] if averages else [])]

    fit(tmp_path / "whole", *parts(), train=Batches())
    keeper, *others = parts()
    if place == "loader":
        said = ends(tmp_path, keeper, *others, late=6)  # in the second epoch
    else:
        said = ends(tmp_path, keeper, *others, model=hanging("eval_loss", 6))  # after the sanity check and an epoch
    assert f"its {place} has taken" in said
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == (5 if place == "loader" else 6)
    trainer(tmp_path, *parts()).fit(task(), Batches(), loader(batch=6), ckpt_path=last, weights_only=True)
    states = [torch.load(p / "checkpoints/last.ckpt", weights_only=True) for p in (tmp_path / "whole", tmp_path)]
    assert all(torch.equal(states[0]["state_dict"][k], states[1]["state_dict"][k]) for k in states[0]["state_dict"])


@pytest.mark.rare
def test_the_thread_ends_a_process_that_is_stuck_in_c(tmp_path):
    code = f"""
import sys; sys.path.insert(0, {str(__file__.rpartition("/")[0])!r})
import multiprocessing
import threading, time, warnings; warnings.simplefilter("ignore")
from pathlib import Path
from vitlab.callbacks import deadline
from vitlab.runs.guard import guarded
deadline.FIRST, deadline.GRACE = 1.0, 1.0
from tiny import fit, task
model = task()
loss = model.train_loss
def stuck(*given):
    end = time.monotonic() + 600
    while time.monotonic() < end:
        try:  # as a call would that never comes back to Python
            threading.Event().wait(30)
        except BaseException:
            pass
    return loss(*given)
model.train_loss = stuck
place = Path({str(tmp_path)!r})
looking = deadline.Deadline(place / "log", 1.0, None)
with guarded() as command:
    command.looks, command.on_end = [looking.look], lambda *what: print("told", *what, flush=True)
    fit(place, looking, model=model)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 75, done.stderr
    assert "told process 0 of 1 (rank 0) hangs: its step has taken" in done.stdout and " error\n" in done.stdout


def test_limits_follow_the_median_and_the_floor(tmp_path):
    deadline = Deadline(tmp_path / "log", 10.0, None)
    assert deadline.limit("step") == 10.0  # the first; here as long as others
    deadline._times["step"] = [0.1, 0.2, 0.1]
    assert deadline.limit("step") == 10.0
    deadline._times["step"] = [2.0, 3.0, 100.0]
    assert deadline.limit("step") == 60.0
    deadline._alone = False  # who waits for another speaks later than who hangs
    assert deadline.limit("step") == 75.0


def test_a_hang_after_the_last_epoch_is_named_and_saves_nothing(tmp_path):
    saved = []
    keeper = SimpleNamespace(save_between=lambda *given: saved.append(given))
    stopped = Stopped(signal.SIGTERM, "hangs")
    for ends, names in ((False, ["loader"]), (True, ["loader", "end"])):
        deadline = Deadline(tmp_path / "log", FLOOR, keeper)
        deadline.hung = "hangs"
        deadline.on_train_batch_end()
        if ends:
            deadline.on_train_end(None, None)
        assert deadline.phase == names[-1]
        deadline.on_exception(SimpleNamespace(sanity_checking=False), None, stopped)
    assert len(saved) == 1  # of the hang between two steps


@pytest.mark.parametrize(
    "hook", ["on_train_epoch_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end"]
)
def test_a_hook_that_hangs_between_two_batches_is_named_and_saves_nothing(tmp_path, hook):
    keeper, model = SimpleNamespace(save_between=lambda *given: saved.append(given)), task()
    deadline, saved, asked = Deadline(tmp_path / "log", 100.0, keeper), [], unheard()

    def hangs(*given):
        if not model.trainer.sanity_checking:
            deadline._since -= 601.0
            deadline.look(asked, time.monotonic(), 0.0)
            raise Stopped(signal.SIGTERM, deadline.hung)

    setattr(model, hook, hangs)
    with pytest.raises(Stopped, match=f"hangs: its {hook} has taken 601 s"):
        fit(tmp_path, deadline, model=model)
    assert not saved


def test_a_deadline_of_zero_turns_the_checks_off(tmp_path):
    deadline = Deadline(tmp_path / "log", 0.0, None)
    deadline.on_train_start()
    deadline.look(unheard(), time.monotonic() + 1e6, 0.0)
    assert not deadline.hung


def test_a_checkpoint_that_is_written_within_a_phase_has_a_limit_of_its_own(tmp_path):
    deadline, asked = Deadline(tmp_path / "log", FLOOR, None), unheard()
    deadline.on_train_batch_start()
    with asked.during("save", "the checkpoint to be written"):
        deadline.look(asked, time.monotonic() + 60, 0.0)
        assert not deadline.hung
    deadline.look(asked, time.monotonic() + 60, 0.0)
    assert deadline.hung


def test_a_process_that_waits_for_the_first_one_to_write_has_that_limit_too(tmp_path):
    keeper, seen = Checkpoint(), []
    keeper.directory, keeper._unsettled = tmp_path, ["last"]
    with guarded() as command:
        told = SimpleNamespace(checkpoint_io=None, broadcast=lambda failure: seen.append(command.phase))
        keeper.settle(SimpleNamespace(world_size=2, loggers=[], strategy=told))
        assert seen == ["save"] and command.phase is None


def test_the_death_of_a_worker_that_is_killed_raises_nothing(tmp_path):
    def raises(*given):
        if os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            raise RuntimeError("DataLoader worker is killed by signal")  # as torch's handler does

    deadline = Deadline(tmp_path / "log", FLOOR, None)
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    worker.start()  # before the handler: what it raises within a fork leaves the lock of logging taken for ever
    before = signal.signal(signal.SIGCHLD, raises)
    try:
        deadline._kill_workers()
        assert not worker.is_alive() and signal.getsignal(signal.SIGCHLD) is raises
    finally:
        signal.signal(signal.SIGCHLD, before)
