"""The best checkpoint holds the weights of the best validation, and a resume repeats or skips no validation."""

import signal

import lightning as L
import pytest
import torch
from test_stop import signalled
from tiny import fit, loader, task, trainer
from torch.utils.data import DataLoader

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.callbacks.ema import EMA
from vitlab.callbacks.stop import StopOnSignal
from vitlab.errors import Stopped

WITHIN = {
    "in each epoch": {"val_check_interval": 2},
    "twice an epoch": {"val_check_interval": 1},
    "by steps": {"val_check_interval": 2, "check_val_every_n_epoch": None},
}


class Validations(L.Callback):
    """The step and the loss of each validation."""

    def __init__(self):
        self.seen = []

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.seen.append((trainer.global_step, float(trainer.callback_metrics["val/loss"])))


class Continued(DataLoader):
    """A loader that goes on after the batches that it has delivered, as those of vitlab do."""

    done = start = 0

    def __iter__(self):
        self.done, self.start = self.start, 0
        for batch in list(super().__iter__())[self.done :]:
            self.done += 1
            yield batch

    def state_dict(self):
        return {"done": self.done % len(self)}

    def load_state_dict(self, state):
        self.start = state["done"]


def batches():
    return Continued(loader().dataset, batch_size=4)


def rising(model):
    """Make the loss of validation rise after the second step, so that the last weights are not the best."""
    loss = model.eval_loss
    model.eval_loss = lambda *given: loss(*given) + max(0, model.trainer.global_step - 2)
    return model


@pytest.mark.parametrize("options", WITHIN.values(), ids=WITHIN)
@pytest.mark.parametrize("averages", [False, True], ids=["weights", "EMA"])
def test_the_best_checkpoint_holds_the_weights_that_were_validated(tmp_path, options, averages):
    keeper, rows = Checkpoint(monitor="val/loss", mode="min"), Validations()
    others = [EMA(decay=0.5)] if averages else []
    fit(tmp_path, rows, keeper, *others, model=rising(task()), max_epochs=3, **options)
    step, best = min(rows.seen, key=lambda row: row[1])
    assert (keeper.best_step, keeper.best_score) == (step, best)
    saved = torch.load(tmp_path / "checkpoints/best.ckpt", weights_only=True)
    assert saved["global_step"] == step
    again = trainer(tmp_path / "again")
    model = task()
    model.load_state_dict(saved["state_dict"])
    (found,) = again.validate(model, loader(batch=6), verbose=False)
    assert found["val/loss"] == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("options", WITHIN.values(), ids=WITHIN)
@pytest.mark.parametrize("saves", [{}, {"every_n_steps": 1}], ids=["epochs", "steps"])
@pytest.mark.parametrize("cut", [2, 4])
def test_a_resume_repeats_and_skips_no_validation_within_an_epoch(tmp_path, options, saves, cut):
    def parts():
        keeper, rows = Checkpoint("val/loss", "min", **saves), Validations()
        return [EMA(decay=0.5), rows, StopOnSignal(keeper), keeper], rows, keeper

    callbacks, whole, best = parts()
    fit(tmp_path / "whole", *callbacks, model=rising(task()), train=batches(), max_epochs=3, **options)
    callbacks, first, _ = parts()
    with pytest.raises(Stopped):
        model = rising(signalled(signal.SIGTERM, step=cut))
        fit(tmp_path / "cut", *callbacks, model=model, train=batches(), max_epochs=3, **options)
    callbacks, rest, again = parts()
    seen = trainer(tmp_path / "cut", *callbacks, max_epochs=3, **options)
    last = tmp_path / "cut/checkpoints/last.ckpt"
    seen.fit(rising(task()), batches(), loader(batch=6), ckpt_path=last, weights_only=True)
    assert first.seen + rest.seen == whole.seen
    assert again.state_dict() == best.state_dict()
    ends = [torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True) for name in ("whole", "cut")]
    assert all(torch.equal(ends[0]["state_dict"][k], ends[1]["state_dict"][k]) for k in ends[0]["state_dict"])
