import signal

import pytest
import torch
from tiny import fit, task

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.callbacks.stop import SIGNALS, StopOnSignal
from vitlab.errors import Stopped


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
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    after = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert before == after


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_step_saves_and_stops(tmp_path, number):
    keeper = Checkpoint()
    with pytest.raises(Stopped) as stopped:
        fit(tmp_path, StopOnSignal(keeper), keeper, model=signalled(number, step=2))
    assert stopped.value.args == (number,)
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert (saved["epoch"], saved["global_step"]) == (0, 2)


def test_a_signal_in_the_last_step_leaves_after_the_epochs_validation(tmp_path):
    keeper = Checkpoint()
    with pytest.raises(Stopped):
        fit(tmp_path, StopOnSignal(keeper), keeper, model=signalled(signal.SIGTERM, step=3))
    assert {path.name for path in (tmp_path / "checkpoints").glob("*.ckpt")} == {"last.ckpt", "best.ckpt"}


def test_where_nothing_is_kept_a_signal_stops_without_saving(tmp_path):
    with pytest.raises(Stopped):
        fit(tmp_path, StopOnSignal(None), model=signalled(signal.SIGUSR1, step=1))
    assert not (tmp_path / "checkpoints").exists()


def test_steps_that_belong_together_are_not_torn_apart(tmp_path):
    keeper = Checkpoint()
    with pytest.raises(Stopped):
        model = signalled(signal.SIGTERM, step=1)
        fit(tmp_path, StopOnSignal(keeper), keeper, model=model, accumulate_grad_batches=2)
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 1  # after two batches
