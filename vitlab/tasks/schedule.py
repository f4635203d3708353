"""How the learning rate of a task goes: a named schedule by step, or a class of torch, timm or the user's."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, cast, get_args

import torch
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, ReduceLROnPlateau

from vitlab.class_paths import ClassSpec, build, find_class, name_and_args
from vitlab.errors import UsageError
from vitlab.interface import is_loadable, mode_of
from vitlab.named_kwargs import taken_by
from vitlab.optim import ScheduleName, warmed_up

SHAPES: dict[str, tuple[str, ...]] = dict.fromkeys(get_args(ScheduleName), ())  # arguments of each named schedule
SHAPES |= {"step": ("every", "gamma"), "wsd": ("decay",)}


class SchedulerSpec(ClassSpec, total=False):
    """A scheduler: class path, arguments, step interval, and the metric that a plateau scheduler watches.

    >>> spec: SchedulerSpec = {"class_path": "StepLR", "init_args": {"step_size": 10}, "interval": "epoch"}
    """

    interval: str  # epoch or step; a Literal would be refused by the parser, which then names no key
    monitor: str


def schedule_and_args(key: str, spec: Any) -> tuple[str, dict[str, Any]]:
    """Return the name or class path of a schedule and its arguments; refuse options beside them that are no words.

    >>> schedule_and_args("lr_scheduler", {"class_path": "ReduceLROnPlateau", "monitor": "val/loss"})
    ('ReduceLROnPlateau', {})
    """
    for option, such in (("interval", "epoch or step"), ("monitor", "the name of a number, such as val/loss")):
        given = spec.get(option) if isinstance(spec, Mapping) else None
        if not isinstance(given, str | None):
            raise ValueError(f"`{key}`: {option} must be {such}, got {given!r}")
    return name_and_args(key, spec, SchedulerSpec.__annotations__)


def schedule_class(path: str) -> type[Any]:
    """Return the class of a schedule that is none of :data:`SHAPES`, of torch where the path has no module.

    >>> schedule_class("OneCycleLR").__module__
    'torch.optim.lr_scheduler'
    """
    return find_class("lr_scheduler", path, object, SHAPES, home="torch.optim.lr_scheduler")


def check_schedule(task: Any) -> bool:
    """Refuse a schedule that is neither a name nor a class, and arguments that it does not take.

    Returns:
        Whether it sets a peak of its own for all groups, as OneCycleLR does, in place of their rates.
    """
    shape, args = schedule_and_args("lr_scheduler", task.hparams["lr_scheduler"])
    if shape not in SHAPES:
        cls = schedule_class(shape)
        for name in ("step", "state_dict", "load_state_dict"):
            if not hasattr(cls, name):
                raise ValueError(f"`lr_scheduler`: {shape} has no `{name}`, as schedulers of torch and timm have")
        rate = math.e * 1e-3  # which no configuration names
        optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=rate)
        built = build_scheduler(task, optimizer, 100)
        if built["interval"] not in ("step", "epoch"):
            raise ValueError(f"`lr_scheduler`: interval must be epoch or step, got {built['interval']!r}")
        if "monitor" in built and built["interval"] == "step":
            raise ValueError(f"`lr_scheduler`: interval of {shape} must be epoch, as it follows a metric, got 'step'")
        if not is_loadable(built["scheduler"].state_dict()):
            raise ValueError(f"`lr_scheduler`: {shape} keeps objects in its state, which a checkpoint cannot hold")
        return bool(optimizer.param_groups[0]["initial_lr"] != rate)
    for name in args:
        if name not in SHAPES[shape]:
            takes = f"takes {' and '.join(SHAPES[shape])}" if SHAPES[shape] else "takes no arguments"
            raise ValueError(f"`lr_scheduler`: {shape} {takes}, got {name}")
    if wrong := [name for name, value in args.items() if not (isinstance(value, int | float) and value > 0)]:
        raise ValueError(f"`lr_scheduler`: {wrong[0]} of {shape} must be a number above 0, got {args[wrong[0]]!r}")
    if args.get("decay", 0) > 1:
        raise ValueError(f"`lr_scheduler`: decay of wsd is a share and must be at most 1, got {args['decay']}")
    return False


def schedule(recipe: Mapping[str, Any], steps: float, per_epoch: float) -> Callable[[float], float] | None:
    """Return a function from the step to the learning rate relative to the peak; None if a class sets the rates.

    Args:
        recipe: Hyper-parameters of a task.
        steps: Number of training steps.
        per_epoch: Number of steps of an epoch; infinite if the images have no number.
    """
    if steps == -1 and math.isinf(per_epoch):  # as Lightning estimates
        raise ValueError("`trainer.max_steps` must be set: the schedule needs an end, and the images have no number")
    if not 0 <= steps < float("inf"):
        raise ValueError("`trainer.max_epochs` or `trainer.max_steps` must be set: the schedule needs an end")
    steps = max(steps, 1)  # `trainer.max_steps=0` makes none
    shape, args = schedule_and_args("lr_scheduler", recipe["lr_scheduler"])
    if shape not in SHAPES:
        return None
    per_epoch = steps if math.isinf(per_epoch) else per_epoch
    return partial(
        warmed_up,
        warmup=min(round(recipe["warmup_epochs"] * per_epoch, 9), steps),  # 1.1 * 100 is a little above 110
        total=steps - round(recipe["cooldown_epochs"] * per_epoch, 9),
        start=recipe["warmup_lr"] / recipe["lr"],
        final=recipe["min_lr"] / recipe["lr"],
        shape=cast(ScheduleName, shape),
        epoch=per_epoch,
        **args,
    )


def build_scheduler(
    task: Any, optimizer: torch.optim.Optimizer, steps: float, factor: Callable[[float], float] | None = None
) -> dict[str, Any]:
    """Build the scheduler of a task; return Lightning's dictionary of it with its interval, step or epoch.

    The interval is step for a named schedule, a class that takes ``total_steps``, and schedulers of timm that count
    steps; otherwise epoch, unless the config sets it.

    Args:
        task: The task; its ``lr_scheduler`` is built, and ``monitor`` is the default metric of one that takes a metric.
        optimizer: The optimizer whose rates it sets.
        steps: Number of training steps.
        factor: The relative learning rate of each step, see :func:`schedule`; None if a class sets the rates.
    """
    if factor:
        return {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}
    spec = task.hparams["lr_scheduler"]
    path, args = schedule_and_args("lr_scheduler", spec)
    options: Mapping[str, Any] = spec if isinstance(spec, Mapping) else {}
    cls = _resumable(schedule_class(path))
    metric = options.get("monitor") or (task.monitor or ("min", f"val/{task.val_meter.loss_name}"))[1]
    offered = {
        "total_steps": max(int(steps), 1),
        **({"mode": mode_of(task, metric) or "min"} if _takes_metric(cls) else {}),
    }
    rates = [group["lr"] for group in optimizer.param_groups]
    scheduler = build("lr_scheduler", cls, args, offered, optimizer)
    is_cyclic = isinstance(scheduler, CyclicLR)
    peaks = scheduler.max_lrs if is_cyclic else [group.get("max_lr") for group in optimizer.param_groups]
    for group, rate, peak in zip(optimizer.param_groups, rates, peaks, strict=True):
        group.setdefault("initial_lr", rate)  # as most schedulers do: it tells the last layer from earlier ones
        if peak and "max_lr_snapshot" in group:  # of CyclicLR or OneCycleLR, for timm's corrected weight decay
            group["max_lr_snapshot"] = peak
    by_step = "total_steps" in taken_by(cls) or getattr(scheduler, "t_in_epochs", True) is False
    by_step = by_step and not _takes_metric(cls)
    config = {"scheduler": scheduler, "interval": options.get("interval", "step" if by_step else "epoch")}
    if _takes_metric(cls):  # step_plateaus steps it, before the checkpoint is saved
        _check_validated(task._trainer, path, metric)
        config |= {"frequency": sys.maxsize, "reduce_on_plateau": False, "monitor": metric}
    return config


def _check_validated(trainer: Any, name: str, metric: str) -> None:
    """Refuse a schedule that follows a metric where no validation will measure it, so that its rate would never fall.

    A task that is just built has no trainer.
    """
    if trainer is None:
        return
    first = trainer.check_val_every_n_epoch or (trainer.val_check_batch or 0) / max(1, trainer.num_training_batches)
    if not trainer.enable_validation or 0 < trainer.max_epochs < first:  # the epoch, from 1, with the first validation
        raise UsageError(
            f"`lr_scheduler`: {name} follows {metric}, which no validation of this training will measure: let `trainer."
            "limit_val_batches`, `check_val_every_n_epoch` or `val_check_interval` make one, or take a schedule that "
            "follows no metric, such as cosine"
        )


class _KeepsCounts:
    """A schedule of plateaus of timm whose state holds all that its next step depends on, which timm's does not."""

    lr_scheduler: ReduceLROnPlateau
    restore_lr: list[float] | None  # rates of before the noise
    of_plateau = ("num_bad_epochs", "cooldown_counter")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of timm, and what it leaves out."""
        counts = {name: getattr(self.lr_scheduler, name) for name in self.of_plateau}
        return super().state_dict() | counts | {"restore_lr": self.restore_lr}  # type: ignore[misc]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a state; one of a checkpoint before 0.2.0 has no counts."""
        state = dict(state_dict)
        for name in self.of_plateau:
            setattr(self.lr_scheduler, name, state.pop(name, 0))
        self.restore_lr = state.pop("restore_lr", None)
        super().load_state_dict(state)  # type: ignore[misc]


def _resumable(cls: Any) -> Any:
    """Return a scheduler's class with a complete state."""
    if all(base.__module__ != "timm.scheduler.plateau_lr" for base in cls.__mro__):
        return cls
    return type(cls.__name__, (_KeepsCounts, cls), {"__module__": cls.__module__})


def _takes_metric(cls: Any) -> bool:
    """Return whether the step of a scheduler takes a metric; that of timm's base class ignores it."""
    is_usual = cls.step.__module__ == "timm.scheduler.scheduler"
    return not is_usual and not {"metric", "metrics"}.isdisjoint(signature(cls.step).parameters)


def step_plateaus(configs: Sequence[Any], values: Mapping[str, Any], epoch: int, is_check: bool) -> None:
    """Step each scheduler that takes a metric with its own in ``values``, unless this is the sanity check.

    Lightning steps those of a ``configure_optimizers`` of the user's that it takes for such ones itself.
    """
    for config in configs:
        if config.monitor and not config.reduce_on_plateau and _takes_metric(type(config.scheduler)):
            if config.monitor not in values:
                raise UsageError(f"`lr_scheduler`: monitor must be one of {', '.join(values)}, got {config.monitor}")
            if not is_check:
                finished = [epoch + 1] if hasattr(config.scheduler, "step_update") else []  # of timm
                config.scheduler.step(*finished, float(values[config.monitor]))


def step_scheduler(scheduler: Any, epoch: int, steps: int, metric: Any = None) -> None:
    """Step a scheduler with the metric that Lightning has for it, if any.

    Those of timm take the number of finished epochs or steps.
    """
    measured = () if metric is None else (metric,)
    if not hasattr(scheduler, "step_update"):
        scheduler.step(*measured)
    elif scheduler.t_in_epochs:
        scheduler.step(epoch + 1, *measured)
    else:
        scheduler.step_update(steps, *measured)
