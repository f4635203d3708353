"""How a task changes weights: optimizers and schedules from a name, a class of torch or timm, or a class path."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, cast, get_args

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, ReduceLROnPlateau

from vitlab.class_paths import ClassSpec, build, find_class, name_and_args
from vitlab.errors import UsageError, did_you_mean
from vitlab.interface import batches_of_a_step, check_asked_once, is_loadable, mode_of
from vitlab.layers.precision import full_tensor, norm_of_gradients, unscale
from vitlab.named_kwargs import taken_by
from vitlab.optim import ScheduleName, warmed_up
from vitlab.ranges import check_ranges

SHAPES: dict[str, tuple[str, ...]] = dict.fromkeys(get_args(ScheduleName), ())  # arguments of each named schedule
SHAPES |= {"step": ("every", "gamma"), "wsd": ("decay",)}
_GROUP_ARGS = ("lr", "weight_decay")  # optimizer arguments that the groups set
_UNFIT = {  # classes of torch that no network here can be trained with
    "SparseAdam": "takes sparse gradients, which no network here has: use Adam or adamw",
    "Muon": "takes matrices alone: use muon, which leaves all else to AdamW",
    "LBFGS": "takes one group of parameters, and here rates and weight decays have several: use adamw",
}


class SchedulerSpec(ClassSpec, total=False):
    """A scheduler: class path, arguments, step interval, and the metric that a plateau scheduler watches.

    >>> spec: SchedulerSpec = {"class_path": "StepLR", "init_args": {"step_size": 10}, "interval": "epoch"}
    """

    interval: str  # epoch or step; a Literal would be refused by the parser, which then names no key
    monitor: str


def check_optimizer(opt: str | ClassSpec, groups: list[dict[str, Any]], lr: float) -> None:
    """Refuse an unknown name, and a class that does not accept these groups or its arguments."""
    if opt == "adamw":
        return
    (name, args), timm_names = name_and_args("opt", opt), []
    if "." not in name and not _is_torch_class(name):
        from timm.optim import get_optimizer_info, list_optimizers

        timm_names = [str(known) for known in list_optimizers()]
        if name not in [*timm_names, "adamw"]:
            near = did_you_mean(name, [*filter(_is_torch_class, vars(torch.optim)), *timm_names])
            raise ValueError(
                f"`opt` must be adamw, lamb, sgd, muon or another name of timm, a class of torch.optim, or a class "
                f"path such as mypkg.Mine, got {name!r}{near}"
            )
        if name != "adamw" and get_optimizer_info(name).second_order:
            raise ValueError(f"`opt` must not need second derivatives, which vitlab does not compute, got {name}")
    home, _, short = name.rpartition(".")
    if (unfit := _UNFIT.get(short)) and f"{home}.".startswith(("torch.optim.", ".")):
        raise ValueError(f"`opt`: {name} of torch {unfit}")
    if given := [argument for argument in _GROUP_ARGS if argument in args]:
        raise ValueError(f"`opt`: {given[0]} of {name} belongs to the groups: set `model.{given[0]}`")
    optimizer = build_optimizer(opt, groups, lr) if args or name not in timm_names else None
    decays = any(group["weight_decay"] for group in groups)
    if optimizer and decays and "weight_decay" not in optimizer.defaults:
        raise ValueError(f"`opt`: {name} has no weight decay: set `model.weight_decay` to 0")


def groups_outside(task: Any, groups: list[dict[str, Any]], factor: float) -> list[dict[str, Any]]:
    """Return groups of the trained parameters of a task that the ``groups`` of its network lack, at the peak rate."""
    known, decaying = {id(p) for group in groups for p in group["params"]}, {id(p) for p in task.decaying()}
    others = [p for p in task.parameters() if p.requires_grad and id(p) not in known]
    outside = []
    for decays in (True, False):
        params = [p for p in others if (id(p) in decaying) == decays]
        decay = task.hparams["weight_decay"] if decays else 0.0
        outside += [{"params": params, "lr": task.hparams["lr"] * factor, "weight_decay": decay}] if params else []
    return outside


def check_groups(task: Any, groups: list[dict[str, Any]]) -> None:
    """Refuse groups that lack a trained parameter of a task, which would never change, or hold it twice."""
    counts = Counter(id(p) for group in groups for p in group["params"])
    for name, p in task.named_parameters():
        if p.requires_grad and counts[id(p)] != 1:
            raise ValueError(
                f"`optimizer_groups` of {type(task).__name__} must hold every trained parameter once, and {name} is "
                f"in {counts[id(p)]} groups: put it into one, or freeze it by `requires_grad_(False)`"
            )


def build_optimizer(
    opt: str | ClassSpec, groups: list[dict[str, Any]], lr: float, net: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Build an optimizer for groups that have their own learning rates and weight decays.

    A class of timm by its path gets the same groups as its name: peak rates of corrected decay, matrices of Muon.

    Args:
        opt: A name, a class, or a class with its arguments.
        groups: Groups of parameters, at their peak rates, to which timm's corrected weight decay relates each rate.
        lr: Peak learning rate of the last stage, to which the optimizer relates learning rates among its arguments.
        net: The network of these parameters. Muon orthogonalizes the updates of the matrices in its blocks, and leaves
            head, embeddings, tokenizer and positions to AdamW, Jordan et al. 2024 (kellerjordan.github.io/posts/muon).
    """
    name, args = name_and_args("opt", opt)
    if name == "adamw":
        return build("opt", torch.optim.AdamW, {**({} if "foreach" in args else {"fused": True}), **args}, {}, groups)
    optimizer: torch.optim.Optimizer
    if "." in name or _is_torch_class(name):
        cls = find_class("opt", name, torch.optim.Optimizer, home="torch.optim")
        optimizer = build("opt", cls, args, {"lr": lr}, groups)
    else:
        optimizer = _of_timm(name, args, groups, lr)
    for group in optimizer.param_groups:
        if "max_lr_snapshot" in group:
            group["max_lr_snapshot"] = group["lr"] or lr  # a rate of 0 decays nothing
    is_muon = any(base.__module__ == "timm.optim.muon" for base in type(optimizer).__mro__)
    if is_muon and (blocks := getattr(net, "blocks", None)):
        hidden = {id(p) for p in blocks.parameters()}  # Muon itself skips the vectors among them
        for p in (p for group in groups for p in group["params"] if id(p) not in hidden):
            optimizer.state[p]["use_muon"] = False
    return optimizer


def _of_timm(name: str, args: Mapping[str, Any], groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    from timm.optim import create_optimizer_v2

    defaults: dict[str, Any] = {"lr": lr, "weight_decay": 0.0, "filter_bias_and_bn": False}
    try:
        return create_optimizer_v2(groups, opt=name, **defaults, **args)
    except TypeError as error:
        raise ValueError(f"`opt`: {name} of timm refuses its arguments: {error}") from error


def _is_torch_class(name: str) -> bool:
    return isinstance(getattr(torch.optim, name, None), type)


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


def check_schedule(task: Any) -> bool:
    """Refuse a schedule that is neither a name nor a class, and arguments that it does not take.

    Returns:
        Whether it sets a peak of its own for all groups, as OneCycleLR does, in place of their rates.
    """
    shape, args = schedule_and_args("lr_scheduler", task.hparams["lr_scheduler"])
    if shape not in SHAPES:
        cls = find_class("lr_scheduler", shape, object, SHAPES, home="torch.optim.lr_scheduler")
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
        total=max(steps - round(recipe["cooldown_epochs"] * per_epoch, 9), 0),
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
    cls = _resumable(find_class("lr_scheduler", path, object, home="torch.optim.lr_scheduler"))
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


def freeze_parts(net: nn.Module, prefixes: Sequence[str]) -> None:
    """Freeze all parameters whose names start with one of ``prefixes``; refuse a prefix that matches none."""
    for prefix in prefixes:
        frozen = [p for name, p in net.named_parameters() if f"{name}.".startswith(prefix.rstrip(".") + ".")]
        if not frozen:
            parts = ", ".join(dict.fromkeys(name.split(".")[0] for name, _ in net.named_parameters()))
            raise ValueError(f"`freeze` must name parts of the network, got {prefix!r}; it has {parts}")
        for p in frozen:
            p.requires_grad = False


def check_recipe(task: Any) -> bool:
    """Refuse numbers out of range or NaN, an optimizer or schedule that cannot be built, and a network all frozen.

    Returns:
        Whether the schedule sets a peak of its own for all groups, in place of their rates.
    """
    check_ranges("model", task.hparams)
    if task.hparams["freeze"] and not any(p.requires_grad for p in task.parameters()):
        raise ValueError(f"`freeze` must leave a parameter to train, got {[*task.hparams['freeze']]}")
    check_optimizer(task.hparams["opt"], task.optimizer_groups(), task.hparams["lr"])
    return check_schedule(task)


def accumulate_from_the_start(trainer: Any, steps_are_counted: bool = False) -> None:
    """Accumulate what a GradientAccumulationScheduler of one number asks for before steps are counted, in its place.

    Lightning asks it when the first epoch begins, after schedules and learning rates were made.

    Raises:
        UsageError: It asks for another number in another epoch where a schedule counts the steps of an epoch.
    """
    for callback in [one for one in trainer.callbacks if isinstance(one, GradientAccumulationScheduler)]:
        if len(set(callback.scheduling.values())) == 1 and trainer.accumulate_grad_batches == 1:
            trainer.callbacks.remove(callback)
            trainer.accumulate_grad_batches = callback.scheduling[0]
        elif steps_are_counted:
            raise UsageError(
                "GradientAccumulationScheduler must accumulate as many batches in every epoch, as schedules count its "
                f"steps, and alone, without `trainer.accumulate_grad_batches`, got {callback.scheduling}"
            )


def as_part_of_step(trainer: Any, loss: Tensor, batch: int) -> Tensor:
    """Return the loss of a batch of the epoch, so that its step has the mean gradient of the batches that it has.

    Lightning divides each loss by the number of batches that are asked for. Without a trainer, a batch is a step.
    """
    if trainer is None or (n := batches_of_a_step(trainer, batch)) == trainer.accumulate_grad_batches:
        return loss
    return loss * (trainer.accumulate_grad_batches / n)


def complete_step(task: Any) -> None:
    """Give the last step of an epoch whose length was unknown the mean gradient of the batches that it has."""
    trainer = task.trainer
    if trainer.accumulate_grad_batches == 1:
        return
    check_asked_once(trainer, task._summed == task.global_step)
    if not trainer.is_last_batch:
        return
    batch = trainer.fit_loop.epoch_loop.batch_idx
    expected, there = batches_of_a_step(trainer, batch), batch % trainer.accumulate_grad_batches + 1
    if expected != there:
        for p in task.parameters():
            if p.grad is not None:
                p.grad.mul_(expected / there)


def clip_or_skip(
    task: Any, optimizer: torch.optim.Optimizer, limit: float | None, algorithm: str | None = None
) -> None:
    """Clip the gradients of a task, and with ``nan_loss: skip`` skip a step whose gradients are not finite.

    Args:
        task: The task.
        optimizer: Its optimizer, which may be a fused one.
        limit: Largest norm or value; 0 or None does not clip.
        algorithm: Whether to clip by norm or value.
    """
    unscale(task.trainer, optimizer)
    norm = norm_of_gradients(task)  # before clipping by value makes it finite
    task.grad_norm = full_tensor(norm)
    if limit and algorithm == "value":
        torch.nn.utils.clip_grad_value_(task.parameters(), limit)
    elif limit:
        torch.nn.utils.clip_grads_with_norm_(task.parameters(), limit, norm)
    if task.hparams["nan_loss"] == "skip" and not task.grad_norm.isfinite():  # over all processes
        optimizer.zero_grad()  # without gradients, an optimizer changes neither weights nor moments
