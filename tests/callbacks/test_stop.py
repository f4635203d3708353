import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from tiny import Stream, fit, loader, task, trainer
from torch.utils.data import DataLoader

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.callbacks.ema import EMA
from vitlab.callbacks.stop import StopOnSignal
from vitlab.errors import Stopped
from vitlab.runs.interrupt import STOPPING


def signalled(number, step, validation=False):
    """Return a task that is sent a signal in the middle of a step, or of a batch of a validation."""
    model = task()
    name = "eval_loss" if validation else "train_loss"
    loss, calls = getattr(model, name), []

    def sending(*given):
        calls.append(1)
        if len(calls) == step:
            signal.raise_signal(number)
        return loss(*given)

    setattr(model, name, sending)
    return model


@pytest.fixture(autouse=True)
def handlers():
    """The handlers are as they were, whatever a test does."""
    own = {number: signal.getsignal(number) for number in STOPPING}
    for number in STOPPING:  # `nohup make test` ignores some, as the callback then rightly does
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    after = {number: signal.getsignal(number) for number in STOPPING}
    for number, handler in own.items():
        signal.signal(number, handler)
    assert before == after


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_ends_the_step_saves_and_stops(tmp_path, number):
    keeper = Checkpoint()
    with pytest.raises(Stopped) as stopped:
        fit(tmp_path, StopOnSignal(keeper), keeper, model=signalled(number, step=2))
    assert (stopped.value.number, stopped.value.reason) == (number, "")
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert (saved["epoch"], saved["global_step"]) == (0, 2)


def test_a_training_in_a_thread_leaves_the_handlers_to_the_main_one(tmp_path):
    keeper = Checkpoint()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fit, tmp_path, StopOnSignal(keeper), keeper).result()
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()


def test_a_signal_in_the_last_step_stops_during_the_validation_of_the_epoch(tmp_path):
    keeper = Checkpoint()
    with pytest.raises(Stopped):
        fit(tmp_path, StopOnSignal(keeper), keeper, model=signalled(signal.SIGTERM, step=3))
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert (saved["epoch"], saved["global_step"]) == (0, 3)


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("averages", [False, True], ids=["weights", "EMA"])
def test_an_interrupted_validation_is_repeated_with_the_same_numbers(tmp_path, averages, epoch):
    def parts():
        return [Checkpoint(), *([EMA(decay=0.5)] if averages else [])]

    keeper, *others = parts()
    whole = fit(tmp_path / "whole", StopOnSignal(keeper), keeper, *others)
    keeper, *others = parts()
    with pytest.raises(Stopped) as stopped:
        model = signalled(signal.SIGHUP, step=2 * epoch + 1, validation=True)  # two in the sanity check
        fit(tmp_path / "cut", StopOnSignal(keeper), keeper, *others, model=model)
    assert stopped.value.number == signal.SIGHUP
    keeper, *others = parts()
    steps, seen = [], trainer(tmp_path / "cut", StopOnSignal(keeper), keeper, *others)
    model = task()
    loss = model.train_loss
    model.train_loss = lambda *given: steps.append(1) or loss(*given)
    seen.fit(model, loader(), loader(batch=6), ckpt_path=tmp_path / "cut/checkpoints/last.ckpt", weights_only=True)
    assert len(steps) == 3 * (2 - epoch)  # no step is made twice
    assert seen.callback_metrics["val/loss"] == whole.callback_metrics["val/loss"]
    ends = [torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True) for name in ("whole", "cut")]
    assert all(torch.equal(ends[0]["state_dict"][k], ends[1]["state_dict"][k]) for k in ends[0]["state_dict"])
    assert keeper.best_epoch == whole.checkpoint_callbacks[0].best_epoch


@pytest.mark.parametrize("step", [None, 5])
def test_a_validation_without_a_length_is_interrupted_as_others_are(tmp_path, step):
    keeper = Checkpoint()
    at_work = trainer(tmp_path, StopOnSignal(keeper), keeper, max_epochs=1)
    model = signalled(signal.SIGTERM, step, validation=True)
    with nullcontext() if step is None else pytest.raises(Stopped):
        at_work.fit(model, loader(), DataLoader(Stream(), batch_size=4))
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [1, 2])
def test_a_signal_at_the_end_of_an_epoch_waits_for_the_hook_of_the_module_and_for_early_stopping(tmp_path, epoch):
    class Ends(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            if self.signals and not trainer.sanity_checking and trainer.current_epoch + 1 == epoch:
                signal.raise_signal(signal.SIGTERM)

    def run(folder, signals=False, **options):
        keeper, ends, model = Checkpoint(), Ends(), task()
        ends.signals = signals
        model.register_buffer("epochs", torch.zeros(()))
        model.on_train_epoch_end = lambda: model.epochs.add_(1)
        early = EarlyStopping("val/loss", min_delta=100.0, patience=1)
        at_work = trainer(tmp_path / folder, StopOnSignal(keeper), early, ends, keeper, max_epochs=4)
        at_work.fit(model, loader(), loader(batch=6), **options)
        return at_work.global_step, int(model.epochs), float(model.net.head.weight.detach().sum())

    whole = run("whole")
    assert whole[:2] == (6, 2)
    with pytest.raises(Stopped):
        run("cut", signals=True)
    assert run("cut", ckpt_path=tmp_path / "cut/checkpoints/last.ckpt", weights_only=True) == whole


def test_without_checkpoints_a_signal_stops_without_saving(tmp_path):
    with pytest.raises(Stopped):
        fit(tmp_path, StopOnSignal(None), model=signalled(signal.SIGUSR1, step=1))
    assert not (tmp_path / "checkpoints").exists()


def test_a_signal_never_splits_accumulated_batches(tmp_path):
    keeper = Checkpoint()
    with pytest.raises(Stopped):
        model = signalled(signal.SIGTERM, step=1)
        fit(tmp_path, StopOnSignal(keeper), keeper, model=model, accumulate_grad_batches=2)
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 1  # after two batches


WAITS = """
import signal, sys, threading, time
from vitlab.runs.interrupt import second_interrupt_ends
import {needs}
signal.signal(signal.SIGINT, lambda number, frame: None)
with second_interrupt_ends():
    print("ready", flush=True)
    {work}
"""


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize(
    ("needs", "work"),
    [("time", "time.sleep(60); time.sleep(60)"), ("torch", "x = torch.ones(12000, 12000); x @ x @ x")],
)
def test_a_second_interrupt_ends_a_process_in_the_middle_of_a_call(needs, work):
    words = [sys.executable, "-c", WAITS.format(needs=needs, work=work)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        assert process.wait(20) == 130
        assert time.monotonic() - start < 10  # half a second of grace, and a busy machine
