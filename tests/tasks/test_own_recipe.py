"""Optimizers, schedules and metrics that are no word of vitlab: of torch, timm and torchmetrics, and one's own."""

import math
from contextlib import nullcontext

import lightning as L
import pytest
import torch
import torchmetrics
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from tests.training import QUIET
from vitlab import interface
from vitlab.errors import UsageError
from vitlab.jobs.train.facts import _groups
from vitlab.optim import warmed_up
from vitlab.tasks import Classifier, Regressor
from vitlab.tasks.optimizer import build_optimizer
from vitlab.tasks.schedule import build_scheduler, schedule

TINY = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
HERE = __name__


class Halving(LRScheduler):
    def __init__(self, optimizer, every: int = 1):
        self.every = every
        super().__init__(optimizer)

    def get_lr(self):
        return [lr * 0.5 ** (self.last_epoch // self.every) for lr in self.base_lrs]


class Falling(LRScheduler):
    def __init__(self, optimizer, total_steps: int, power: float = 1.0):
        self.total_steps, self.power = total_steps, power
        super().__init__(optimizer)

    def get_lr(self):
        return [lr * max(0.0, 1 - self.last_epoch / self.total_steps) ** self.power for lr in self.base_lrs]


class Square(Falling):
    def __init__(self, optimizer, **more):
        super().__init__(optimizer, power=2.0, **more)


class Forgets:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        """Do nothing."""

    def state_dict(self):
        return {"seen": object()}

    def load_state_dict(self, state):
        """Do nothing."""


class Share(torchmetrics.Metric):
    higher_is_better = True

    def __init__(self, of: int = 0):
        super().__init__()
        self.of = of
        self.add_state("hits", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("n", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, outputs, targets):
        self.hits += (outputs.argmax(1) == self.of).sum()
        self.n += len(outputs)

    def compute(self):
        return self.hits / self.n


class Losses(torchmetrics.MeanMetric):
    def update(self, outputs, targets):
        super().update(outputs)

    def compute(self):
        return {"top": super().compute(), "loss": super().compute()}


class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})


def spec(name, **args):
    return {"class_path": name if "." in name else f"{HERE}.{name}", "init_args": args}


def classifier(**arguments):
    return Classifier(num_classes=3, **{**TINY, "warmup_epochs": 0, "lr": 0.1, **arguments})


@pytest.mark.parametrize(
    ("shape", "args", "expected"),
    [
        ("constant", {}, [1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", {}, [1, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125]),
        ("step", {"every": 3, "gamma": 0.5}, [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]),
        ("wsd", {"decay": 0.5}, [1, 1, 1, 1, 1, 0.775, 0.55, 0.325]),
    ],
)
def test_a_schedule_has_its_shape_between_warm_up_and_cool_down(shape, args, expected):
    values = [warmed_up(t, warmup=0, total=8, final=0.1, shape=shape, **args) for t in range(8)]
    assert values == pytest.approx(expected)
    values = [warmed_up(t, warmup=4, total=8, final=0.1, shape=shape, **args) for t in range(10)]
    assert values == pytest.approx([0, 0.25, 0.5, 0.75, *expected[4:], 0.1, 0.1])


@pytest.mark.parametrize(
    ("opt", "name", "key", "value"),
    [
        (spec("adamw", betas=[0.8, 0.9], eps=1e-5), "AdamW", "betas", [0.8, 0.9]),
        (spec("SGD", momentum=0.3), "SGD", "momentum", 0.3),
        (spec("torch.optim.SGD", momentum=0.3, nesterov=True), "SGD", "nesterov", True),
        (spec("nadamw", betas=[0.8, 0.9]), "NAdamW", "betas", [0.8, 0.9]),
        (spec("timm.optim.lamb.Lamb", eps=1e-5), "Lamb", "eps", 1e-5),
        ("RMSprop", "RMSprop", "momentum", 0),
    ],
)
def test_an_optimizer_takes_its_arguments_and_keeps_the_groups(opt, name, key, value):
    if isinstance(opt, dict) and opt["class_path"].startswith(HERE):
        opt["class_path"] = opt["class_path"].rpartition(".")[2]
    import timm.optim.lamb  # noqa: F401

    recipe = {"layer_decay": 0.5, "pos_embed_lr_mult": 3.0, "weight_decay": 0.1}
    task = classifier(opt=opt, **recipe)
    optimizer = build_optimizer(task.hparams["opt"], task.optimizer_groups(), 1e-3)
    assert type(optimizer).__name__ == name
    assert {group[key] if not isinstance(value, list) else tuple(group[key]) for group in optimizer.param_groups} == {
        tuple(value) if isinstance(value, list) else value
    }
    kept = [{k: group[k] for k in ("lr", "weight_decay")} for group in optimizer.param_groups]
    assert kept == [{k: group[k] for k in ("lr", "weight_decay")} for group in classifier(**recipe).optimizer_groups()]


WRONG = {
    "a metric of another task": (
        {"metrics": [spec("torchmetrics.F1Score", task="binary")]},
        "F1Score does not take outp",
    ),
    "no metric": (
        {"metrics": ["F1Scor"]},
        'must be a class of torchmetrics or a class path such as mypkg.Mine, got .*; did you mean "F1Score"',
    ),
    "a matrix": ({"metrics": ["ConfusionMatrix"]}, r"ConfusionMatrix must return one number, .* got shape \(3, 3\)"),
    "no list": ({"metrics": "F1Score"}, r"`metrics` must be a list of classes, as in \[F1Score\], got 'F1Score'"),
    "a metric of labels for classes": (
        {"metrics": [spec("torchmetrics.F1Score", task="multilabel", num_labels=3)]},
        "class targets: ",
    ),
    "a metric that is there": ({"metrics": ["F1Score", "F1Score"]}, "F1Score is measured already"),
    "a metric that names one loss": ({"metrics": [f"{HERE}.Losses"]}, "Losses returns `loss`, which is measured alr"),
    "an argument of no metric": ({"metrics": [spec("Share", off=1)]}, 'takes no argument `off`; did you mean "of"'),
    "an argument of no optimizer": ({"opt": spec("torch.optim.SGD", mometum=1)}, 'did you mean "momentum"'),
    "a value no optimizer takes": ({"opt": spec("torch.optim.SGD", momentum=-1)}, "refuses its arguments: Invalid"),
    "an argument of none of timm": ({"opt": {"class_path": "lamb", "init_args": {"x": 1}}}, "lamb of timm refuses"),
    "a rate beside the rate": ({"opt": spec("torch.optim.SGD", lr=1)}, "set `model.lr`"),
    "an optimizer without decay": ({"opt": f"{HERE}.Plain"}, "has no weight decay: set `model.weight_decay` to 0"),
    "no optimizer": ({"opt": f"{HERE}.Halving"}, r"Halving must be a subclass of .*Optimizer"),
    "an unknown schedule": (
        {"lr_scheduler": "cosin"},
        "must be one of cosine, .*, got 'cosin'; did you mean \"cosine\"",
    ),
    "no schedule": ({"lr_scheduler": f"{HERE}.Share"}, "Share has no `step`"),
    "a state of objects": ({"lr_scheduler": f"{HERE}.Forgets"}, "keeps objects in its state, which a checkpoint"),
    "an argument of no schedule": ({"lr_scheduler": {"class_path": "step", "init_args": {"at": 3}}}, "takes every and"),
    "a share above 1": (
        {"lr_scheduler": {"class_path": "wsd", "init_args": {"decay": 2}}},
        "a share and must be at most 1, got 2",
    ),
    "no argument of StepLR": ({"lr_scheduler": "StepLR"}, "StepLR refuses its arguments: .*step_size"),
    "a base class": ({"lr_scheduler": "LRScheduler"}, "LRScheduler cannot be built: NotImplementedError"),
    "sparse gradients": ({"opt": "SparseAdam"}, "SparseAdam of torch takes sparse gradients"),
    "one group alone": ({"opt": "torch.optim.lbfgs.LBFGS"}, "LBFGS of torch takes one group .*: use adamw"),
    "arguments without names": (
        {"opt": {"class_path": "SGD", "init_args": 3}},
        "init_args must name arguments, .* got 3",
    ),
    "a monitor that is no name": (
        {"lr_scheduler": {"class_path": "ReduceLROnPlateau", "monitor": 3}},
        "`lr_scheduler`: monitor must be the name of a number, such as val/loss, got 3",
    ),
    "matrices alone": ({"opt": "torch.optim.Muon"}, "takes matrices alone: use muon"),
    "a module of torch.optim": ({"opt": "lr_schedule"}, "got 'lr_schedule'$"),
    "steps without a metric": (
        {"lr_scheduler": {"class_path": "ReduceLROnPlateau", "interval": "step"}},
        "interval of ReduceLROnPlateau must be epoch",
    ),
    "an interval": ({"lr_scheduler": {**spec("Halving"), "interval": "day"}}, "interval must be epoch or step"),
}


@pytest.mark.parametrize(("arguments", "answer"), WRONG.values(), ids=WRONG)
def test_unusable_values_of_a_recipe_are_refused_by_name_with_the_way_out(arguments, answer):
    with pytest.raises(ValueError, match=answer):
        classifier(**arguments)


def test_metrics_of_torchmetrics_and_custom_ones_are_measured_beside_the_tasks_own():
    macro = {"class_path": "F1Score", "init_args": {"average": "macro"}}
    task = classifier(metrics=["F1Score", macro, spec("Share", of=2)])
    outputs, targets = torch.randn(30, 3), torch.randint(3, (30,))
    for part in (slice(0, 7), slice(7, 30)):
        task.val_meter.update(outputs[part], targets[part], torch.zeros(()))
    found = task.val_meter.read("val/")
    expected = torchmetrics.F1Score("multiclass", num_classes=3, average="macro")(outputs, targets)
    assert found["val/F1Score(average=macro)"] == expected
    assert found["val/F1Score"] == found["val/acc1"] != expected
    assert found["val/Share"] == (outputs.argmax(1) == 2).float().mean()
    assert interface.mode_of(task, "val/Share") == interface.mode_of(task, "val/F1Score") == "max"
    errors = Regressor(num_targets=2, **TINY, metrics=["R2Score", "MeanAbsolutePercentageError"])
    assert interface.mode_of(errors, "val/MeanAbsolutePercentageError") == "min"


class SaveAt(L.Callback):
    def __init__(self, path):
        self.path, self.rates = path, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def batches_of_4():
    return DataLoader(TensorDataset(torch.randn(12, 1, 8, 8), torch.arange(12) % 3), batch_size=4)


def fit(task, path, **how):
    torch.manual_seed(1)
    batches, saver = batches_of_4(), SaveAt(path)
    trainer = L.Trainer(max_epochs=4, callbacks=[saver], log_every_n_steps=1, **QUIET)
    trainer.fit(task, batches, batches, weights_only=True, **how)
    return saver.rates, task.net.state_dict()


def built(**recipe):
    task = classifier(**recipe)
    optimizer = build_optimizer(task.hparams["opt"], task.optimizer_groups(), task.hparams["lr"])
    build_scheduler(task, optimizer, 100)
    return task, optimizer


@pytest.mark.parametrize(("name", "interval"), [("Falling", "step"), ("Square", "step"), ("Halving", "epoch")])
def test_a_schedule_that_asks_for_the_steps_itself_or_by_a_base_class_advances_with_each(name, interval):
    """One that passed `**kwargs` on advanced with each epoch, through all the steps of the training: it hardly fell."""
    task = classifier(lr_scheduler=spec(name))
    optimizer = build_optimizer(task.hparams["opt"], task.optimizer_groups(), task.hparams["lr"])
    assert build_scheduler(task, optimizer, 100)["interval"] == interval


@pytest.mark.parametrize("name", ["cosine", "OneCycleLR"])
def test_a_training_of_no_steps_has_a_schedule(name):
    task = classifier(lr_scheduler=name if name == "cosine" else {"class_path": name, "init_args": {"max_lr": 0.1}})
    optimizer = build_optimizer("SGD", task.optimizer_groups(), 0.1)
    build_scheduler(task, optimizer, 0, schedule(task.hparams, steps=0, per_epoch=8))
    assert all(math.isfinite(group["lr"]) for group in optimizer.param_groups)


def test_a_class_that_sets_its_own_rates_begins_at_them():
    cyclic = {"class_path": "CyclicLR", "init_args": {"base_lr": 1e-4, "max_lr": 0.05, "step_size_up": 3}}
    task, optimizer = built(lr_scheduler=cyclic, opt="adamc", layer_decay=0.5)
    assert {group["lr"] for group in optimizer.param_groups} == {1e-4}
    assert {group["initial_lr"] for group in optimizer.param_groups} == {1e-4}
    assert {group["max_lr_snapshot"] for group in optimizer.param_groups} == {0.05}  # the peak of corrected decay
    assert task.sets_own_peak


def test_a_class_that_follows_the_rates_of_the_groups_sets_no_peak():
    task, optimizer = built(lr_scheduler={"class_path": "StepLR", "init_args": {"step_size": 1}}, layer_decay=0.5)
    assert len({group["initial_lr"] for group in optimizer.param_groups}) > 1
    assert not task.sets_own_peak
    assert not classifier().sets_own_peak
    assert classifier(lr_scheduler={"class_path": "OneCycleLR", "init_args": {"max_lr": 0.025}}).sets_own_peak


def test_the_rates_that_a_run_records_are_those_of_a_schedule_that_sets_them():
    """The whole network is trained at them, but a table with a slice for each block, whose slices are slowed."""
    spec = {"class_path": "OneCycleLR", "init_args": {"max_lr": 0.025}}
    options = {"layer_decay": 0.5, "head_lr_mult": 4.0, "pos_embed": "relpos", "depth": 2}
    one, usual = (_groups(classifier(**options, **more)) for more in ({"lr_scheduler": spec}, {}))
    scales = {(row["name"], row.get("block")): row["lr_scale"] for row in one}
    assert scales.pop(("pos_embed.bias_table", 0)) == 0.5 and set(scales.values()) == {1.0}
    assert len({row["lr_scale"] for row in usual}) > 2


PLATEAU = {"class_path": "ReduceLROnPlateau", "init_args": {"patience": 0, "threshold": 9.0}, "monitor": "val/loss"}
TIMM_PLATEAU = {
    "class_path": "timm.scheduler.PlateauLRScheduler",
    "init_args": {"patience_t": 0, "threshold": 9.0},
    "monitor": "val/loss",
}
TWO_BAD_EPOCHS = {"patience_t": 1, "cooldown_t": 1, "threshold": 9.0, "decay_rate": 0.5, "noise_range_t": [3, 99]}


@pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated")
@pytest.mark.parametrize("epochs", range(1, 8))
def test_a_plateau_schedule_of_timm_counts_on_after_a_resume(epochs):
    import timm.scheduler  # noqa: F401

    task = classifier(lr_scheduler={**TIMM_PLATEAU, "init_args": TWO_BAD_EPOCHS})

    def started():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        return optimizer, build_scheduler(task, optimizer, 100)["scheduler"]

    def rates(optimizer, scheduler, epochs):
        return [scheduler.step(epoch, 1.0) or optimizer.param_groups[0]["lr"] for epoch in epochs]

    optimizer, scheduler = started()
    rates(optimizer, scheduler, range(1, epochs))
    weights, kept = optimizer.state_dict(), dict(scheduler.state_dict())
    whole = rates(optimizer, scheduler, range(epochs, 12))
    resumed, again = started()
    resumed.load_state_dict(weights)
    again.load_state_dict(kept)
    assert rates(resumed, again, range(epochs, 12)) == whole and len(set(whole)) > 2
    again.load_state_dict({"best": 2.0, "last_epoch": 3})  # of a checkpoint before
    assert again.lr_scheduler.best == 2.0


@pytest.mark.parametrize(
    "seldom",
    [
        {"limit_val_batches": 0},
        {"check_val_every_n_epoch": 3},
        {"check_val_every_n_epoch": None, "val_check_interval": 7},
        {},
    ],
)
def test_a_schedule_by_a_metric_that_no_validation_measures_is_refused_before_the_first_step(seldom):
    task, batches = classifier(lr_scheduler=PLATEAU), batches_of_4()
    trainer = L.Trainer(max_epochs=2, log_every_n_steps=1, **QUIET, **seldom)
    refusal = (
        "ReduceLROnPlateau follows val/loss, which no validation of this training will measure: let `trainer.limit"
    )
    with pytest.raises(UsageError, match=refusal) if seldom else nullcontext():
        trainer.fit(task, batches, batches)
    assert trainer.global_step == (0 if seldom else 6)


RATES = {
    "one's own, each epoch": (spec("Halving"), [0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.025, 0.025, 0.025, 0.0125]),
    "one's own, each step": ({**spec("Halving", every=2), "interval": "step"}, [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]),
    "torch's, with the steps it asks for": (spec("OneCycleLR", max_lr=0.1, cycle_momentum=False), None),
    "torch's, by a metric": (PLATEAU, [0.1] * 3 + [0.01] * 3 + [0.001] * 3),
    "timm's, by a metric": (TIMM_PLATEAU, [0.1] * 3 + [0.01] * 3 + [0.001] * 3),
    "timm's, each epoch": (spec("timm.scheduler.StepLRScheduler", decay_t=1, decay_rate=0.5), [0.1] * 3 + [0.05] * 3),
    "timm's, each step": (
        spec("timm.scheduler.StepLRScheduler", decay_t=2, decay_rate=0.5, t_in_epochs=False),
        [0.1, 0.1, 0.05, 0.05, 0.025, 0.025],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("scheduler", "expected"), RATES.values(), ids=RATES)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint", "ignore:PlateauLRScheduler is deprecated")
def test_a_schedule_of_a_class_sets_the_rates_and_resumes_exactly(scheduler, expected, tmp_path):
    import timm.scheduler  # noqa: F401

    if scheduler["class_path"] == f"{HERE}.OneCycleLR":
        scheduler = {**scheduler, "class_path": "OneCycleLR"}
    recipe = {"lr_scheduler": scheduler, "opt": spec("torch.optim.SGD", momentum=0.9)}
    rates, whole = fit(classifier(**recipe), tmp_path / "half.ckpt")
    if expected:
        assert rates[: len(expected)] == pytest.approx(expected)
    assert len(set(rates)) > 2
    again, weights = fit(classifier(**recipe), tmp_path / "no.ckpt", ckpt_path=tmp_path / "half.ckpt")
    assert again == rates[6:]
    assert all(torch.equal(weights[name], whole[name]) for name in whole)


class OwnPlateau(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler, options = self.plateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss", **options}}


def of_torch(optimizer):
    return ReduceLROnPlateau(optimizer, patience=0, threshold=9.0), {}


def of_timm(optimizer, **options):
    from timm.scheduler import PlateauLRScheduler

    return PlateauLRScheduler(optimizer, patience_t=0, threshold=9.0, mode="min"), options


def of_timm_by_lightning(optimizer):
    return of_timm(optimizer, reduce_on_plateau=True)


@pytest.mark.slow
@pytest.mark.parametrize("plateau", [of_torch, of_timm, of_timm_by_lightning])
@pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated")
def test_a_subclass_with_its_own_schedule_by_a_metric_steps_it_once_an_epoch(plateau, tmp_path):
    task = OwnPlateau(num_classes=3, **TINY)
    task.plateau = plateau
    rates, _ = fit(task, tmp_path / "half.ckpt")
    assert rates == pytest.approx([0.1] * 3 + [0.01] * 3 + [0.001] * 3 + [0.0001] * 3)
