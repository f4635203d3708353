"""Trainings that end within an epoch, validate where no checkpoint is due, or go on longer than was planned."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm.scheduler
import torch
from torch.optim import lr_scheduler

import vitlab
from vitlab.errors import UsageError
from vitlab.jobs.train.continued import check_extensible

pytestmark = pytest.mark.usefixtures("here")
BASE = {
    "trainer.max_epochs": 3,
    "trainer.accelerator": "cpu",
    "trainer.logger": False,
    "trainer.log_every_n_steps": 1,
    "model": "Classifier",
    "model.patch_size": 4,
    "model.embed_dim": 16,
    "model.depth": 1,
    "model.num_heads": 2,
    "model.warmup_epochs": 0,
    "data": "Digits",
    "data.batch_size": 128,  # 8 batches an epoch
}
CONSTANT = {"model.lr_scheduler": "constant"}


def fit(name, changes=None, resume=False, quiet=True):
    return vitlab.fit(None, {**BASE, **(changes or {})}, name=name, auto_resume=resume, quiet=quiet)


def rows(run, key):
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in lines if key in row]


def saved(run, name="last"):
    return torch.load(run.path / "checkpoints" / f"{name}.ckpt", weights_only=True)


@pytest.mark.parametrize("ema", [pytest.param(False, marks=pytest.mark.rare), True])  # without is a part of with
def test_an_epoch_that_max_steps_cuts_goes_on_with_its_next_batch(ema):
    average = {"trainer.callbacks": [{"class_path": "EMA", "init_args": {"decay": 0.9}}]} if ema else {}
    whole = fit("whole", {**CONSTANT, **average, "trainer.max_steps": 22})
    fit("cut", {**CONSTANT, **average, "trainer.max_steps": 13})
    again = fit("cut", {**CONSTANT, **average, "trainer.max_steps": 22}, resume=True)
    assert saved(whole)["global_step"] == saved(again)["global_step"] == 22
    assert rows(whole, "train/loss") == rows(again, "train/loss") and rows(whole, "val/loss") == rows(again, "val/loss")
    both = saved(whole)["state_dict"], saved(again)["state_dict"]
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])


def test_a_model_checkpoint_keeps_no_cut_epoch_under_the_metric_of_the_one_before():
    best = {"monitor": "val/acc1", "mode": "max", "save_top_k": 2, "filename": "of-{epoch}"}
    kept = {"trainer.callbacks": [{"class_path": "ModelCheckpoint", "init_args": best}]}
    run = fit("cut", {**kept, "trainer.max_steps": 10})
    assert [path.name for path in run.path.glob("checkpoints/of-*")] == ["of-epoch=0.ckpt"]


def test_a_longer_training_has_the_rates_of_its_schedule_from_the_first_step_on():
    few = {**CONSTANT, "trainer.limit_train_batches": 2}
    fit("short", {**few, "trainer.max_epochs": 1})
    again = fit("short", {**few, "trainer.max_epochs": 2}, resume=True)
    whole = fit("long", {**few, "trainer.max_epochs": 2})
    assert rows(again, "lr")[2:] == rows(whole, "lr")[2:]
    assert torch.equal(saved(again)["state_dict"]["net.head.weight"], saved(whole)["state_dict"]["net.head.weight"])


@pytest.mark.parametrize(("planned", "told"), [({}, "was made for 2 steps and has no more"), ({"total_steps": 4}, "")])
def test_a_schedule_that_ends_with_its_run_is_not_trained_longer_and_the_run_stays_as_it_is(planned, told):
    scheduler = {"class_path": "OneCycleLR", "init_args": {"max_lr": 0.01, **planned}}
    few = {"trainer.limit_train_batches": 2, "trainer.max_epochs": 1, "model.lr_scheduler": scheduler}
    run = fit("cycle", few)
    before = run.config
    if told:
        with pytest.raises(UsageError, match=told):
            fit("cycle", {**few, "trainer.max_epochs": 2}, resume=True)
        assert run.config == before and fit("cycle", few, resume=True).record["status"] == "done"
    else:
        assert saved(fit("cycle", {**few, "trainer.max_epochs": 2}, resume=True))["global_step"] == 4


class Falling(lr_scheduler.LRScheduler):
    """Falls to 0 over the steps that it is told, whose number is in its state under a name of its own."""

    def __init__(self, optimizer, total_steps):
        self.length = total_steps
        super().__init__(optimizer)

    def get_lr(self):
        return [max(0, 1 - self.last_epoch / self.length) * rate for rate in self.base_lrs]


class Following(Falling):
    """The same, without the number in its state: it is that of the longer plan."""

    def state_dict(self):
        return {name: value for name, value in super().state_dict().items() if name != "length"}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [Falling, Following])
def test_a_schedule_of_ones_own_that_keeps_its_steps_is_not_trained_longer_at_its_last_rate(schedule):
    few = {"trainer.limit_train_batches": 2, "trainer.max_epochs": 1, "model.lr_scheduler": schedule}
    fit("own", few)
    if schedule is Falling:
        with pytest.raises(UsageError, match="was made for 2 steps and has no more"):
            fit("own", {**few, "trainer.max_epochs": 2}, resume=True)
    else:
        assert rows(fit("own", {**few, "trainer.max_epochs": 2}, resume=True), "lr")[3:] == [0.001 / 4]


def annealed(optimizer, length):
    return lr_scheduler.CosineAnnealingLR(optimizer, length)


def warmed_up(optimizer, length):
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=2), annealed(optimizer, length - 2)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


def chained(optimizer, length):
    return lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(optimizer, total_iters=2), annealed(optimizer, length)])


def one_cycle(optimizer, length):
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=length)


def falling(optimizer, length):
    return lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=length)


def polynomial(optimizer, length):
    return lr_scheduler.PolynomialLR(optimizer, length)


def restarted(optimizer, length):
    return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, length)


class OfTimm:
    """Schedules of timm, which have no count of steps; of as many epochs, or of four times as many steps."""

    def __init__(self, name, **options):
        self.build, self.options, self.__name__ = getattr(timm.scheduler, name), options, name

    def __call__(self, optimizer, length):
        options = {"t_initial": length, "t_in_epochs": length < 12} | self.options
        built = self.build(optimizer, **options)
        return SimpleNamespace(step=lambda: None, state_dict=built.state_dict)


TIMM = [
    OfTimm("CosineLRScheduler", warmup_t=1),
    OfTimm("PolyLRScheduler"),
    OfTimm("TanhLRScheduler", t_initial=2, cycle_limit=2, cycle_mul=2.0, t_in_epochs=True),
]
ENDING = [annealed, warmed_up, chained, one_cycle, falling, polynomial, *TIMM]
CYCLES = [(restarted, 6), (annealed, 3), (falling, 3), (TIMM[0], 3), (TIMM[0], 9)]
CASES = [*((built, 6, "was made for") for built in ENDING), *((built, length, "") for built, length in CYCLES)]


@pytest.mark.parametrize(("built", "length", "told"), CASES)
@pytest.mark.parametrize("of_a_unit", [1, 4], ids=["by epoch", "by step"])
def test_schedules_of_own_modules_that_end_with_their_run_are_not_trained_longer(
    built, length, told, of_a_unit, monkeypatch
):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule = built(optimizer, length * of_a_unit)
    for _ in range(3 * of_a_unit):  # of 6 epochs half is trained, with two optimizers
        optimizer.step()
        schedule.step()
    loops = {"fit_loop": {"epoch_loop.state_dict": {"_batches_that_stepped": 12}}}
    content = {"lr_schedulers": [schedule.state_dict()], "epoch": 2, "global_step": 2 * 12, "loops": loops}
    monkeypatch.setattr("vitlab.jobs.train.continued.read_to_resume", lambda path: content)
    run = SimpleNamespace(last_checkpoint=lambda: Path("last.ckpt"), record={"steps": 24}, path="run", typed="run")
    for epochs in (6, -1):  # the second: `trainer.max_steps` ends it
        with pytest.raises(UsageError, match=told) if told else nullcontext():
            check_extensible(run, epochs)


def test_a_training_that_has_stopped_early_has_nothing_left_to_resume():
    stop = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/acc1", "mode": "max", "patience": 1}}
    early = {**CONSTANT, "trainer.max_epochs": 30, "model.lr": 0.05, "trainer.callbacks": [stop]}
    run = fit("early", early)
    before, ending = saved(run), run.record["ending"]
    again = fit("early", early, resume=True)
    assert ending["why"] == "early stop" and again.record["ending"] == ending
    assert saved(again)["global_step"] == before["global_step"] and len(rows(again, "lr")) == before["global_step"]


def test_the_last_step_is_saved_where_no_checkpoint_is_due():
    run = fit("steps", {"trainer.max_epochs": -1, "trainer.max_steps": 12, "checkpoint.every_n_epochs": 10})
    assert saved(run)["global_step"] == 12 and (run.path / "weights" / "last.safetensors").is_file()


@pytest.mark.parametrize(
    "where",
    [
        {"trainer.accumulate_grad_batches": 3, "trainer.val_check_interval": 4},
        {"trainer.max_epochs": 5, "trainer.check_val_every_n_epoch": 2, "checkpoint.every_n_epochs": 3},
    ],
    ids=["between accumulated batches", "between checkpoints"],
)
def test_every_validation_can_be_the_best(where, capsys):
    run = fit("best", {**where, "model.lr": 0.01}, quiet=False)
    found = rows(run, "val/acc1")
    assert len(found) >= 2 and run.results["val"]["acc1"] == max(found)
    assert "never validated" not in capsys.readouterr().out
    measured = vitlab.Run(str(run.path / "checkpoints/best.ckpt")).validate()
    assert measured["acc1"] == max(found)


def test_a_warm_up_is_as_long_as_epochs_are_where_steps_are_limited():
    for epochs in (-1, 100):
        changes = {"trainer.max_epochs": epochs, "trainer.max_steps": 20, "model.warmup_epochs": 1, "model.lr": 1e-3}
        rates = rows(fit(f"warm{epochs}", changes), "lr")
        assert rates[:8] == pytest.approx([1e-3 * step / 8 for step in range(8)], abs=2e-6)
        assert rates[8:] == sorted(rates[8:], reverse=True) and rates[-1] < 2e-5


def test_clipping_at_zero_is_none_and_by_value_is_not_by_norm():
    few = {"trainer.max_epochs": 1, "trainer.limit_train_batches": 2, **CONSTANT}
    found = {}
    for name, clip in {
        "none": {},
        "zero": {"trainer.gradient_clip_val": 0},
        "norm": {"trainer.gradient_clip_val": 1e-3, "model.opt": "SGD"},
        "value": {"trainer.gradient_clip_val": 1e-3, "model.opt": "SGD", "trainer.gradient_clip_algorithm": "value"},
    }.items():
        run = fit(name, few | clip)
        found[name] = saved(run)["state_dict"]["net.head.weight"]
        assert all(norm > 1e-2 for norm in rows(run, "grad_norm"))
    assert torch.equal(found["none"], found["zero"]) and not torch.equal(found["norm"], found["value"])


def test_the_rate_of_a_row_is_that_of_the_last_layer():
    rates = {"model.layer_decay": 0.5, "model.head_lr_mult": 10, "model.lr": 1e-3}
    run = fit("decay", {**CONSTANT, **rates, "trainer.max_epochs": 1})
    assert set(rows(run, "lr")) == {1e-3}
    sums = run.record["sum_of_learning_rates"], run.record["sum_of_learning_rates_pos_embed"]
    assert sums[1] == pytest.approx(sums[0] * 0.25)  # of its two stages, positions are two below the head


def accumulating(counts):
    callback = {"class_path": "GradientAccumulationScheduler", "init_args": {"scheduling": counts}}
    return {"model.lr_scheduler": "linear", "model.lr_scale": "linear", "trainer.callbacks": [callback]}


def test_a_scheduler_of_accumulation_is_counted_before_the_first_step():
    plain = fit("plain", {**accumulating({0: 1}), "trainer.callbacks": [], "trainer.accumulate_grad_batches": 2})
    asked = fit("asked", accumulating({0: 2}))
    assert rows(asked, "lr") == rows(plain, "lr") and rows(asked, "val/loss") == rows(plain, "val/loss")
    steps = [json.loads((run.path / "run.json").read_text())["steps"] for run in (plain, asked)]
    assert steps == [12, 12] and rows(asked, "lr")[-1] < rows(asked, "lr")[0]
    with pytest.raises(UsageError, match="as many batches in every epoch"):
        fit("changing", accumulating({0: 4, 2: 1}))


def test_the_last_epoch_is_measured_where_steps_are_limited_and_a_best_that_never_was_is_named(recwarn, capsys):
    def measured(name, **changes):
        quality = {"class_path": "FeatureQuality", "init_args": {"measures": ["knn"]}}
        stop = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss", "patience": 1, "min_delta": 9.0}}
        callbacks = {"trainer.callbacks": [quality] + ([stop] if name == "stopped" else [])}
        wanted = {"checkpoint.monitor": "val/knn"}
        few = {"trainer.limit_train_batches": 2, **changes}
        return fit(name, {**CONSTANT, **callbacks, **wanted, **few}, quiet=name != "stopped")

    assert measured("limited", **{"trainer.max_steps": 4, "trainer.max_epochs": -1}).results["val"]["knn"] > 0
    assert not [one for one in recwarn if "best" in str(one.message)]
    run = measured("stopped", **{"trainer.max_epochs": 4})  # which keeps the numbers of its last validation
    told = "no best epoch: no validation has measured val/knn, `checkpoint.monitor`; kept is epoch 2: loss"
    assert told in capsys.readouterr().out and run.results["val"]["loss"] == rows(run, "val/loss")[-1]
    assert run.results["val"]["checkpoint"] == "last.ckpt" and "knn" not in run.results["val"]
    assert [one for one in recwarn if "no validation has measured val/knn" in str(one.message)]
