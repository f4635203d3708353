"""Whatever hook of a user's module changes its state, a run that was stopped ends with the bits of one that was not."""

import signal
from datetime import timedelta

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from test_checkpoint import Reordered, Validations
from test_stop import signalled
from tiny import batches, fit, loader, task, trainer
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.testing import assert_close

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.callbacks.ema import EMA
from vitlab.callbacks.stop import StopOnSignal
from vitlab.errors import Stopped

HOOKS = [f"on_train_{part}_{side}" for part in ("epoch", "batch") for side in ("start", "end")]
HOOKS += ["on_validation_end", "on_before_zero_grad"]


class Traced(L.LightningModule):
    """A module whose every hook leaves a trace in its state, with a schedule that waits for a plateau."""

    def __init__(self, stops, **schedule):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.stops, self.schedule = torch.nn.Linear(64, 3), stops, schedule
        self.register_buffer("trace", torch.zeros((), dtype=torch.int64))
        for number, name in enumerate(HOOKS, 2):
            setattr(self, name, self.leaving(number))

    def leaving(self, number):
        def hook(*given):
            if not self.trainer.sanity_checking:
                self.trace.copy_((self.trace * 31 + number) % 1_000_003)

        return hook

    def loss(self, batch, place):
        how, step = self.stops or ("", 0)
        if how == place and self.global_step >= step:
            signal.raise_signal(signal.SIGTERM)
        if how == f"killed in {place}" and self.global_step >= step:
            raise Stopped(signal.SIGKILL)
        return cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch, "step")

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch, "validation"))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=9.0)
        return [optimizer], [{"scheduler": scheduler, "monitor": "val/loss", **self.schedule}]


RUNS = {
    "each epoch": ({"interval": "epoch"}, {}),
    "every other epoch": ({"interval": "epoch", "strict": False}, {"check_val_every_n_epoch": 2}),
    "each step": ({"interval": "step", "strict": False}, {"val_check_interval": 2}),
}
PLACES = [("step", 1), ("step", 2), ("validation", 5), ("killed in step", 2), ("killed in step", 7)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on")  # no validation has measured it so far
@pytest.mark.parametrize(("schedule", "options"), RUNS.values(), ids=RUNS)
def test_what_follows_the_hooks_of_callbacks_is_saved_too(tmp_path, schedule, options):
    def run(folder, stops=None, **given):
        keeper, model = Checkpoint("val/loss", "min", every_n_steps=1), Traced(stops, **schedule)
        at_work = trainer(tmp_path / folder, StopOnSignal(keeper), keeper, max_epochs=3, **options)
        at_work.fit(model, Reordered(loader().dataset, batch_size=4), loader(batch=6), **given)
        return at_work.optimizers[0].param_groups[0]["lr"], int(model.trace), model.layer.weight.tolist()

    whole = run("whole")
    for stops in PLACES:
        with pytest.raises(Stopped):
            run("cut", stops)
        assert run("cut", ckpt_path=tmp_path / "cut/checkpoints/last.ckpt", weights_only=True) == whole, stops


def test_a_training_that_was_cut_within_its_epochs_ends_and_stops_as_one_that_was_not(tmp_path):
    def run(folder, steps=-1, **given):
        stop, keeper, model = EarlyStopping("val/loss", 9.0, patience=1), Checkpoint("val/loss", "min"), Traced(None)
        at_work = trainer(tmp_path / folder, stop, keeper, max_epochs=9, max_steps=steps)
        at_work.fit(model, batches(), loader(batch=6), **given)
        return at_work.global_step, stop.wait_count, int(model.trace), model.layer.weight.tolist()

    last = {"ckpt_path": tmp_path / "cut/checkpoints/last.ckpt", "weights_only": True}
    assert run("cut", 2)[0] == 2 and run("cut", 5, **last)[:2] == (5, 0)  # of 3 steps an epoch
    assert run("cut", **last) == run("whole")


@pytest.mark.slow
def test_a_resume_rounds_neither_weights_of_64_bits_nor_their_average(tmp_path):
    def run(folder, epochs, **given):
        at_work = trainer(tmp_path / folder, EMA(0.5), Checkpoint(), max_epochs=epochs, precision="64-true")
        at_work.fit(task(lr_scheduler="constant", warmup_epochs=0), batches(), loader(batch=6), **given)
        return torch.load(tmp_path / folder / "checkpoints/last.ckpt", weights_only=True)

    first = run("cut", 1)
    assert any((value != value.float()).any() for value in first["state_dict"].values())
    again = run("cut", 2, ckpt_path=tmp_path / "cut/checkpoints/last.ckpt", weights_only=True)
    whole = run("whole", 2)
    for kind in "state_dict", "current_model_state":
        assert_close(again[kind], whole[kind], rtol=0, atol=0)


@pytest.mark.slow
def test_a_checkpoint_callback_of_ones_own_saves_the_epoch_that_a_signal_ends(tmp_path):
    class Ends(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                signal.raise_signal(signal.SIGTERM)

    keeper, own = Checkpoint(), ModelCheckpoint(tmp_path / "own", monitor="val/loss", save_on_train_epoch_end=True)
    with pytest.raises(Stopped):
        fit(tmp_path, StopOnSignal(keeper), Ends(), keeper, own)
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["epoch=0-step=3.ckpt"]
    states = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["callbacks"]
    assert next(state for name, state in states.items() if name.startswith("ModelCheckpoint"))["best_k_models"]


@pytest.mark.slow
def test_a_validation_that_was_due_by_the_clock_is_repeated(tmp_path):
    class Passes(L.Callback):
        """An hour, in the second step."""

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 2:
                trainer._last_val_time -= 3600

    def run(folder, model=None, **given):
        keeper, rows = Checkpoint("val/loss", "min"), Validations()
        parts = [Passes(), rows, StopOnSignal(keeper), keeper]
        try:
            at_work = trainer(tmp_path / folder, *parts, max_steps=2, val_check_interval=timedelta(hours=1))
            at_work.fit(model or task(), batches(), loader(batch=6), **given)
        except Stopped:
            assert model
        return rows.seen

    whole = run("whole")
    assert [step for step, _ in whole] == [2]
    assert run("cut", signalled(signal.SIGTERM, step=3, validation=True)) == []  # after two of the sanity check
    assert run("cut", ckpt_path=tmp_path / "cut/checkpoints/last.ckpt", weights_only=True) == whole
