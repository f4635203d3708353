import json
import math
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from tiny import IMAGES, NETWORK, batches, fit, loader, task, trainer

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.callbacks.reasons import first_not_finite
from vitlab.callbacks.record import RunRecord, _rate
from vitlab.callbacks.steps import means
from vitlab.data.loading.order import TrainOrder
from vitlab.errors import Stopped, UsageError
from vitlab.runs.directory import RunDir
from vitlab.tasks import Classifier


@pytest.fixture
def record(tmp_path):
    """A record in a directory that holds what a run has before its first step."""
    run = RunDir(tmp_path)
    run.write("run.json", {"status": "running", "attempts": 2})
    run.write("model.json", {"flops": 1000})
    return RunRecord(run, lambda trainer, task: None)


def test_rows_are_means_over_the_steps_since_the_last_and_the_epochs_end(record, tmp_path):
    fit(tmp_path, record)
    rows = record.run.rows()
    train, val = ([row for row in rows if f"{kind}/loss" in row] for kind in ("train", "val"))
    assert [(row["step"], row["epoch"]) for row in train] == [(2, 0), (3, 0), (5, 1), (6, 1)]  # 3 steps an epoch
    assert [(row["step"], row["epoch"]) for row in val] == [(3, 0), (6, 1)]
    assert {row["attempt"] for row in rows} == {3}
    assert all(0 <= row["data_wait"] < 1 and row["images_per_second"] > 0 for row in train)


class Drawn(Logger):
    """Keeps the step of each metric."""

    name = version = "drawn"

    def __init__(self):
        super().__init__()
        self.steps = defaultdict(list)

    def log_metrics(self, metrics, step=None):
        for name in metrics:
            self.steps[name].append(step)

    def log_hyperparams(self, *args, **kwargs):
        """Keep none."""


def test_loggers_get_a_row_at_the_step_of_what_lightning_logs_then(record, tmp_path):
    logger, model = Drawn(), task()
    model.on_before_optimizer_step = lambda optimizer: model.log("own", float(model.global_step))
    fit(tmp_path, record, logger=logger, model=model, log_every_n_steps=1, accumulate_grad_batches=2)
    assert logger.steps["train/loss"] == [0, 1, 2, 3] and logger.steps["val/loss"] == [1, 3]
    assert logger.steps["own"] == [0, 0, 1, 1, 2, 2, 3, 3]  # by Lightning, and in the rows
    steps = {name: [row["step"] for row in record.run.rows() if name in row] for name in ("train/loss", "val/loss")}
    assert steps == {"train/loss": [1, 2, 3, 4], "val/loss": [2, 4]}


class Two(L.LightningModule):
    """A module of a user's with two loaders for validation."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 3)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val/n", float(len(batch[0]) + self.global_step))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_several_loaders_for_validation_are_recorded_watched_and_checked_before_the_first_step(record, tmp_path):
    loaders, parts = [loader(batch=6), loader(batch=4)], {"max_epochs": 2, "num_sanity_val_steps": 1}
    at_work = trainer(tmp_path, record, Checkpoint("val/n/dataloader_idx_1", "max"), **parts)
    at_work.fit(Two(), loader(), loaders)
    names = [f"val/n/dataloader_idx_{i}" for i in (0, 1)]
    assert [[row[name] for name in names] for row in record.run.rows() if names[0] in row] == [[9, 7], [12, 10]]
    assert at_work.checkpoint_callback.best_score == 10
    with pytest.raises(UsageError, match="one of val/n/dataloader_idx_0, val/n/dataloader_idx_1, got val/n"):
        trainer(tmp_path, record, Checkpoint("val/n", "max"), **parts).fit(Two(), loader(), loaders)


def test_a_row_is_the_mean_of_the_losses_of_its_steps(record, tmp_path):
    model, losses = task(), []
    loss = model.train_loss

    def kept(*given):
        losses.append(loss(*given))
        return losses[-1]

    model.train_loss = kept
    fit(tmp_path, record, model=model, max_epochs=1)
    rows = [row["train/loss"] for row in record.run.rows() if "train/loss" in row]
    assert rows == pytest.approx([(losses[0] + losses[1]).item() / 2, losses[2].item()])


class Clock(L.Callback):
    """A clock that goes by 2 seconds for each of three batches, 6 for its step, and 1000 for what is no training."""

    passed = 0.0

    def __len__(self):
        return 3

    def __iter__(self):
        for batch in loader():
            self.passed += 2.0
            yield batch

    def perf_counter(self):
        return self.passed

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.passed += 6.0

    def on_validation_batch_end(self, *_):
        self.passed += 1000.0

    def on_train_epoch_end(self, trainer, pl_module):
        self.passed += 1000.0


def test_validation_and_what_is_done_between_two_epochs_are_no_time_of_their_steps(record, tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("vitlab.callbacks.record.time", clock)
    fit(tmp_path, record, clock, train=clock, max_epochs=2, val_check_interval=1)
    rows = [row for row in record.run.rows() if "images_per_second" in row]
    assert [row["images_per_second"] for row in rows] == [4 / 8] * 4
    assert [row["data_wait"] for row in rows] == [2 / 8] * 4


class Own(Classifier):
    """A task with a step of its own, which keeps no sums."""

    def training_step(self, batch, batch_idx):
        return self.step_loss(batch)[0]


class OwnAndTheirs(Classifier):
    """A task with a step of its own, which calls that of the task."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 1.0


@pytest.mark.parametrize("kind", [Classifier, Own, OwnAndTheirs])
def test_the_first_row_after_a_resume_has_the_mean_of_all_its_steps_and_the_speed_of_those_of_this_attempt(
    record, tmp_path, kind
):
    def run(**options):
        torch.manual_seed(1)
        own = RunRecord(record.run, record.describe)
        once = trainer(tmp_path, own, Checkpoint(every_n_steps=2), max_epochs=1, log_every_n_steps=3)
        once.fit(kind(**NETWORK), batches(), loader(batch=6), weights_only=True, **options)
        speed = own.epoch_speed(once)["images_per_second"]
        assert own.row["images_per_second"] == speed
        return own.row["train/loss"], own.row.get("train/acc1"), round(speed * own._seconds)

    whole, cut = run(), run(ckpt_path=tmp_path / "checkpoints/previous.ckpt")
    assert whole[2] == 12 and cut == (pytest.approx(whole[0]), whole[1], 4)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_a_task_with_a_validation_of_its_own_records_what_it_logs(record, tmp_path):
    class Validates(Classifier):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", float(len(batch[0])))

    fit(tmp_path, record, Checkpoint("val/loss"), model=Validates(**NETWORK), max_epochs=1)
    assert [row["val/loss"] for row in record.run.rows() if "val/loss" in row] == [6.0]
    with pytest.raises(UsageError, match=r"`checkpoint.monitor` must be one of val/loss, got val/acc1"):
        fit(tmp_path, record, Checkpoint(), model=Validates(**NETWORK), max_epochs=1)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_a_row_keeps_its_own_step_and_epoch_where_a_module_logs_metrics_of_these_names(record, tmp_path):
    class Axis(Classifier):
        def validation_step(self, batch, batch_idx):
            self.log_dict({"val/own": 1.0, "step": 7.0, "epoch": 8.0, "attempt": 9.0})

    fit(tmp_path, record, model=Axis(**NETWORK))
    (first, second) = [row for row in record.run.rows() if "val/own" in row]
    assert [first[name] for name in ("step", "epoch", "attempt")] == [3, 0, 3]
    assert [second[name] for name in ("step", "epoch", "attempt")] == [6, 1, 3] and type(second["epoch"]) is int


@pytest.mark.parametrize("scheduler", ["cosine", "ReduceLROnPlateau"])
def test_each_row_has_the_learning_rate_of_its_own_step_and_of_the_last_layer(record, tmp_path, scheduler):
    model = task(layer_decay=0.5, lr_scheduler=scheduler)
    at_work = fit(tmp_path, record, model=model, log_every_n_steps=1)
    total = model.sum_of_learning_rates() or 6 * 1e-3  # losses of two epochs are no plateau
    assert at_work.global_step == 6
    assert sum(row["lr"] for row in record.run.rows() if "lr" in row) == pytest.approx(total)


def test_the_learning_rate_follows_from_the_peak_where_no_group_has_it():
    model = task(layer_decay=0.5, head_lr_mult=10.0, freeze=["norm"], lr=0.01)
    optimizer = torch.optim.SGD(model.optimizer_groups())
    for group in optimizer.param_groups:
        group["initial_lr"], group["lr"] = group["lr"], group["lr"] / 4
    assert all(group["initial_lr"] != 0.01 for group in optimizer.param_groups)
    model.peak_rate = lambda: 0.01
    assert _rate(SimpleNamespace(optimizers=[optimizer]), model) == pytest.approx(0.0025)
    for group in optimizer.param_groups:  # by a class of the user's own
        group["initial_lr"], group["lr"] = 0.3, 0.1
    assert _rate(SimpleNamespace(optimizers=[optimizer]), model) == 0.1


def test_the_last_row_has_the_gradient_norm_of_its_own_step(tmp_path, monkeypatch):
    norms = {}
    for every in (1, 3):
        run = RunDir(tmp_path / str(every))
        run.path.mkdir()
        run.write("run.json", {"status": "running"})
        run.write("model.json", {"flops": 1000})
        fit(run.path, RunRecord(run, lambda trainer, task: None), max_epochs=-1, max_steps=5, log_every_n_steps=every,
            train=loader(batch=1))  # fmt: skip
        norms[every] = {row["step"]: row["grad_norm"] for row in run.rows() if "grad_norm" in row}
    assert norms[3] == {step: norms[1][step] for step in (3, 5)}


class Asks(L.Callback):
    """Ends the training with its second step."""

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.global_step == 2


@pytest.mark.slow
def test_the_last_steps_of_a_cut_epoch_have_a_row_and_a_resume_has_that_of_a_whole_epoch(record, tmp_path):
    def run(*parts, **given):
        own = RunRecord(record.run, record.describe)
        at_work = trainer(tmp_path, own, *parts, Checkpoint(), max_epochs=1, log_every_n_steps=3)
        at_work.fit(task(), batches(), loader(batch=6), **given)
        assert own.epoch_sums["n"] == at_work.global_step * 4
        return [(row["step"], row["train/loss"], "lr" in row) for row in own.run.rows() if "train/loss" in row]

    whole = run()
    record.run.metrics.unlink()
    assert [(step, has_rate) for step, _, has_rate in run(Asks())] == [(2, False)]
    assert run(ckpt_path=tmp_path / "checkpoints/last.ckpt", weights_only=True) == whole and whole[0][0] == 3


def test_the_last_row_of_a_module_that_steps_over_max_steps_is_whole(record, tmp_path):
    class Twice(Two):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for _ in range(2):
                self.optimizers().zero_grad()
                loss = super().training_step(batch, batch_idx)
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

    fit(tmp_path, record, model=Twice(), max_steps=3, log_every_n_steps=9)
    (row,) = record.run.rows()
    assert row["step"] == 4 and row["lr"] > 0 and row["grad_norm"] > 0 and row["train/loss"] > 0


@pytest.mark.parametrize(("limits", "seconds"), [
    ({}, 50),  # 25 of 30 batches are left, of 2 seconds each, whatever the steps of a module that optimizes by itself
    ({"max_steps": 14}, 4),  # of 1 second each
    ({"callbacks": [Timer({"seconds": 7})]}, 7),
    ({"num_training_batches": math.inf}, math.inf),
    ({"max_epochs": -1}, math.inf),
    ({"max_epochs": -1, "callbacks": [Timer({"seconds": 7})]}, 7),
])  # fmt: skip
def test_the_time_left_is_that_until_the_first_limit(record, limits, seconds):
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_idx=4))
    usual = {"max_epochs": 3, "max_steps": -1, "current_epoch": 0, "num_training_batches": 10, "callbacks": []}
    record._start, record._first_step, record._batches = time.perf_counter() - 10, 0, 5
    left = record.seconds_left(SimpleNamespace(global_step=10, fit_loop=loop, **(usual | limits)))
    assert left == pytest.approx(seconds, abs=0.5)


def test_no_norm_is_told_of_a_step_that_was_not_measured(record, tmp_path):
    model = task()
    loss = model.train_loss

    def breaks(*given):
        return loss(*given) * (float("nan") if model.trainer.global_step == 4 else 1.0)

    model.train_loss = breaks
    with pytest.raises(FloatingPointError) as told:
        fit(tmp_path, record, model=model, max_epochs=1, log_every_n_steps=3, train=loader(batch=1))
    assert "batch 5," in str(told.value) and "gradient norm" not in str(told.value)  # that of step 3 is two before


@pytest.mark.parametrize(
    ("ends", "status"), [(Stopped(15), "preempted"), (RuntimeError("broken"), "failed"), (None, "done")]
)
def test_the_status_says_how_a_run_has_ended(record, tmp_path, ends, status):
    model = task()
    if ends is not None:

        def breaks(*given):
            raise ends

        model.train_loss = breaks
        with pytest.raises(type(ends)):
            fit(tmp_path, record, model=model)
    else:
        fit(tmp_path, record)
    told = json.loads((tmp_path / "run.json").read_text())
    assert told["status"] == status and told["ended"] and told["peak_memory"]["host"] > 0
    assert ("broken" in told.get("error", "")) == (status == "failed")


def test_a_loss_that_is_not_finite_names_step_batch_and_rate(record, tmp_path):
    images = IMAGES.clone()
    images[5] = torch.nan  # of the second batch
    with pytest.raises(
        FloatingPointError,
        match=r"not finite in epoch 1, batch 2, near step 2, lr 0.00016.*there is no checkpoint so far",
    ):
        fit(tmp_path, record, train=loader(images))


@pytest.mark.parametrize(("eps", "advice"), [(1e-8, "set `model.opt.eps` to 1e-4, as float16"), (1e-4, "lower `model")])
def test_a_loss_that_is_not_finite_in_16_bits_may_come_from_an_eps_of_0(eps, advice, record, tmp_path):
    images = IMAGES.half()
    images[5] = torch.nan
    model = task(opt={"class_path": "AdamW", "init_args": {"eps": eps}})
    with pytest.raises(FloatingPointError, match=f"not finite in epoch 1, batch 2, .*: {advice}"):
        fit(tmp_path, record, model=model, train=loader(images), precision="16-true")


def test_all_processes_name_the_batch_of_the_one_whose_loss_is_not_finite():
    """Of two processes, each a thread here; the first has no such loss, or has one later."""
    sound, nan, met = torch.tensor(1.0), torch.tensor(torch.nan), threading.Barrier(2, timeout=10)
    given, told = [None, None], {}

    def describe(rank, case, losses):
        def exchanged(value):
            met.wait()
            given[rank] = value
            met.wait()
            return list(given)

        strategy = SimpleNamespace(
            root_device=torch.device("cpu"),
            reduce=lambda value, reduce_op: getattr(torch, reduce_op)(torch.stack(exchanged(value))),
            broadcast=lambda value, source: exchanged(value)[source],
        )
        order = TrainOrder(8, batch_size=2, seed=0, rank=rank, world=2)
        facts = {"world_size": 2, "global_rank": rank, "current_epoch": 0, "global_step": 3}
        facts["train_dataloader"] = SimpleNamespace(sampler=order)
        at_work = SimpleNamespace(strategy=strategy, **facts)
        told[rank, case] = first_not_finite(at_work, {batch: (loss, None) for batch, loss in losses.items()}, 3, 0.1)

    cases = {
        "late": [{1: sound, 2: sound, 3: nan}, {1: sound, 2: nan, 3: nan}],
        "gradient": [{1: sound, 2: sound}, {1: sound, 2: sound}],
    }
    for case, both in cases.items():
        threads = [threading.Thread(target=describe, args=(rank, case, both[rank])) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert told[0, case] == told[1, case]
    (own,) = next(TrainOrder(8, batch_size=2, seed=0, rank=1, world=2).steps(2)).indices
    where = "is not finite in epoch 1, batch"
    assert told[0, "late"] == f"the loss of process 1 {where} 3, near step 3, lr 0.1; training samples {own}"
    assert told[0, "gradient"] == f"the gradient {where} 2, near step 3, lr 0.1"


class Skips(Two):
    """A module of a user's that trains on no more than the batches of these numbers."""

    def __init__(self, batches, by_itself=False, bad=None):
        super().__init__()
        self.batches, self.automatic_optimization, self.bad, self.losses = batches, not by_itself, bad, []

    def training_step(self, batch, batch_idx):
        if batch_idx in self.batches:
            self.losses.append(super().training_step(batch, batch_idx))
            return self.losses[-1] * (float("nan") if batch_idx == self.bad else 1.0)
        return None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_that_a_step_skips_by_none_is_no_part_of_the_mean_loss(record, tmp_path):
    model = Skips((0, 2))
    fit(tmp_path, record, model=model, max_epochs=1, log_every_n_steps=3)
    (row,) = (row for row in record.run.rows() if "train/loss" in row)
    assert row["train/loss"] == pytest.approx(sum(model.losses).item() / 2)
    assert row["train/skipped"] == pytest.approx(1 / 3) and record.epoch_sums["n"] == 8
    with pytest.raises(FloatingPointError, match="epoch 1, batch 3, near"):
        fit(tmp_path, record, model=Skips((0, 2), bad=2), max_epochs=1, log_every_n_steps=3)
    fit(tmp_path, record, model=Skips((), by_itself=True), max_epochs=1, log_every_n_steps=1)
    assert record.epoch_sums["n"] == 12  # it optimizes by itself, whatever it returns
    assert not any("train/loss" in row for row in record.run.rows()[-3:])


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_training_that_skips_every_batch_ends_after_its_first_epoch(record, tmp_path):
    with pytest.raises(UsageError, match=r"no weight has changed: `Skips.training_step` returned None for every batch"):
        fit(tmp_path, record, model=Skips(()), max_epochs=9)
    assert {row["epoch"] for row in record.run.rows()} == {0}
    fit(tmp_path, record, model=bad_in((0, 1, 2)), max_epochs=1)  # skipped by `nan_loss`, which ends it later


def test_the_mean_loss_of_a_module_that_optimizes_by_itself_is_that_of_the_losses_it_returns(record, tmp_path):
    model = Skips((0, 2), by_itself=True)
    fit(tmp_path, record, model=model, max_epochs=1, log_every_n_steps=3)
    (row,) = (row for row in record.run.rows() if "train/loss" in row)
    assert row["train/loss"] == pytest.approx(sum(model.losses).item() / 2) and "train/skipped" not in row
    assert means(record.epoch_sums)["loss"] == row["train/loss"] and record.epoch_sums["n"] == 12


class OwnStep(Classifier):
    """A task of vitlab with a training step of one's own."""

    def training_step(self, batch, batch_idx):
        return self.train_loss(self.net(batch[0]), batch[1])


class Calls(Classifier):
    """A task whose step changes the loss of vitlab's step, and trains on no more than the batches of these numbers."""

    def __init__(self, batches, **options):
        super().__init__(**NETWORK, **options)
        self.batches = batches

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) + 5.0
        return loss if batch_idx in self.batches else None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_calls_that_of_the_task_is_recorded_by_what_it_returns(record, tmp_path, accumulate):
    def row_of(model):
        parts = {"max_epochs": 1, "log_every_n_steps": 3, "accumulate_grad_batches": accumulate}
        own = RunRecord(record.run, record.describe)
        fit(tmp_path, own, model=model, **parts, limit_train_batches=2 if accumulate == 1 else 3)
        return [row for row in record.run.rows() if "train/loss" in row][-1]

    whole = row_of(task(lr=1e-9))
    torch.manual_seed(1)
    changed = row_of(Calls((0, 1, 2), lr=1e-9))
    added = 5.0 if accumulate == 1 else (5 + 5 + 5 / 2) / 3  # of the last batch, a step by itself, only half is added
    assert changed["train/loss"] == pytest.approx(whole["train/loss"] + added, abs=1e-3)
    assert changed["train/acc1"] == whole["train/acc1"] and "train/skipped" not in changed
    torch.manual_seed(1)
    skipped = row_of(Calls((0,), lr=1e-9))
    assert skipped["train/skipped"] == pytest.approx(1 / 2 if accumulate == 1 else 2 / 3)
    assert skipped["train/acc1"] in (0, 0.25, 0.5, 0.75, 1) and skipped["train/loss"] > 5.5
    with pytest.raises(UsageError, match=r"no weight has changed: `Calls.training_step` returned None for every batch"):
        row_of(Calls(()))


class InParts(Classifier):
    """A task whose step calls vitlab's step on each of these parts of its batch."""

    def training_step(self, batch, batch_idx):
        step = super().training_step
        return sum((step((batch[0][part], batch[1][part]), batch_idx) for part in self.parts), self.net.head.bias.sum())


@pytest.mark.parametrize("parts", [(slice(4), slice(4)), (slice(2),), (slice(1), slice(3)), ()])
def test_a_metric_of_training_is_a_mean_over_the_images_that_the_step_was_called_on(record, tmp_path, parts):
    model = InParts(**NETWORK, lr=1e-9)
    model.parts, right = parts, (model(IMAGES).argmax(1) == torch.arange(12) % 3).float().reshape(3, 4)
    fit(tmp_path, record, model=model, max_epochs=1, log_every_n_steps=3)
    seen = torch.cat([right[:, part].flatten() for part in parts]) if parts else None
    assert record.row.get("train/acc1") == (pytest.approx(seen.mean().item()) if parts else None)
    assert record.epoch_sums["n"] == 12


def bad_in(batches, gradient=False, kind=Classifier):
    """Return a task that skips steps, some of whose losses, or gradients alone, are not finite."""
    torch.manual_seed(1)
    model = kind(**NETWORK, nan_loss="skip")
    loss, bias = model.train_loss, model.net.head.bias

    def breaks(*given):
        if model.trainer.fit_loop.epoch_loop.batch_idx not in batches:
            return loss(*given)
        return loss(*given) + (bias - bias.detach()).sqrt().sum() if gradient else loss(*given) * float("nan")

    model.train_loss = breaks
    return model


@pytest.mark.parametrize("kind", [Classifier, OwnStep])
@pytest.mark.parametrize("gradient", [False, True])
def test_a_row_has_the_share_of_the_images_that_were_skipped(record, tmp_path, gradient, kind):
    fit(tmp_path, record, model=bad_in((1, 2), gradient, kind), max_epochs=1)
    rows = [row for row in record.run.rows() if "train/skipped" in row]
    assert [row["train/skipped"] for row in rows] == [0.5, 1.0]
    assert ["train/loss" in row for row in rows] == [True, False] and all(row["lr"] > 0 for row in rows)
    assert record.epoch_sums["skipped"] == 8 and record.epoch_sums["n"] == 4


@pytest.mark.parametrize("kind", [Classifier, OwnStep])
def test_all_images_of_a_step_that_is_skipped_count_as_skipped(record, tmp_path, kind):
    fit(tmp_path, record, model=bad_in((0,), kind=kind), max_epochs=1, accumulate_grad_batches=2, log_every_n_steps=1)
    rows = [row for row in record.run.rows() if "train/skipped" in row]
    assert [row["train/skipped"] for row in rows] == [1.0, 0.0] and math.isfinite(rows[1]["train/loss"])
    assert record.epoch_sums["skipped"] == 8 and record.epoch_sums["n"] == 4


def test_gradients_that_are_never_finite_end_a_run_that_skips_them(record, tmp_path):
    with pytest.raises(FloatingPointError, match="the gradient is not finite in epoch 7, batch 1, near step 20"):
        fit(tmp_path, record, model=bad_in(range(3), gradient=True), max_epochs=9)


class Own(Two):
    def __init__(self, fused=True):
        super().__init__()
        self.fused = fused

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, fused=self.fused)


@pytest.mark.parametrize(
    ("model", "clip"),
    [(task, None), (task, 0.1), (Own, None), (lambda: Own(fused=False), 0.1)],
    ids=["vitlab's", "vitlab's, clipped", "a user's", "a user's, clipped, which Lightning does unless it is fused"],
)
def test_the_gradient_norm_is_that_without_the_factor_of_a_float16_scaler(record, tmp_path, model, clip):
    norms = []
    for plugins in ([], [MixedPrecision("16-mixed", "cpu")]):
        torch.manual_seed(0)
        at_work = model()
        fit(tmp_path, record, model=at_work, plugins=plugins, max_epochs=1, log_every_n_steps=1, gradient_clip_val=clip)
        norms += [row["grad_norm"] for row in record.run.rows() if "lr" in row]
    assert len(norms) == 6 and norms[3:] == pytest.approx(norms[:3], rel=0.03)
    assert min(norms) > 0.2


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_without_a_loss_leaves_a_float16_scaler_as_it_was(record, tmp_path):
    model = Own()
    step = model.training_step
    model.training_step = lambda batch, batch_idx: step(batch, batch_idx) if batch_idx else None
    fit(tmp_path, record, model=model, plugins=[MixedPrecision("16-mixed", "cpu")], max_epochs=1, log_every_n_steps=1)
    norms = [row["grad_norm"] for row in record.run.rows() if "lr" in row]
    assert norms[0] == 0 and 0.2 < norms[1] < 20


@pytest.mark.parametrize("late", [False, True], ids=["one process", "sharded, which reads its checkpoint after set-up"])
def test_every_step_is_recorded_once_after_kills_and_torn_rows(record, tmp_path, monkeypatch, late):
    monkeypatch.setattr(SingleDeviceStrategy, "restore_checkpoint_after_setup", late)
    keeper = Checkpoint(every_n_steps=2)
    record.run.metrics.write_text('{"step": 1, "train/loss": 2.0}\n{"step": 2, "trai')  # killed before a checkpoint
    fit(tmp_path, record, keeper, max_epochs=1)
    first = record.run.metrics.read_text()
    assert [json.loads(line)["step"] for line in first.splitlines()] == [2, 3, 3]
    record.run.metrics.write_text(first + '{"step": 5, "epoch": 1}\n{"step": 6, "ep')  # killed in the second epoch
    again = RunRecord(record.run, lambda trainer, task: None)
    at_work = trainer(tmp_path, again, Checkpoint(every_n_steps=2))
    at_work.fit(task(), loader(), loader(batch=6), ckpt_path=tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert record.run.metrics.read_text().startswith(first)
    assert [row["step"] for row in record.run.rows()] == [2, 3, 3, 5, 6, 6]


def test_an_edited_file_of_metrics_loses_no_rows(record, tmp_path):
    fit(tmp_path, record, Checkpoint(), max_epochs=1)
    record.run.metrics.write_text('{"note": "mine, and longer than what was there"}\n' + record.run.metrics.read_text())
    again = RunRecord(record.run, lambda trainer, task: None)
    at_work = trainer(tmp_path, again, Checkpoint())
    at_work.fit(task(), loader(), loader(batch=6), ckpt_path=tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert "mine" in record.run.metrics.read_text()
    assert [row["step"] for row in record.run.rows()[1:]] == [2, 3, 3, 5, 6, 6]
