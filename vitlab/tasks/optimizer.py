"""Optimizers and schedules: a word, a class of torch or timm, or one of the user's own."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, Literal, cast, get_args

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from vitlab.classes import ClassSpec, build, find_class, name_and_args
from vitlab.contract import better, is_plain
from vitlab.errors import UsageError, did_you_mean
from vitlab.optim.schedule import ScheduleName, warmed_up
from vitlab.ranges import check_ranges

SHAPES: dict[str, tuple[str, ...]] = dict.fromkeys(get_args(ScheduleName), ())  # and the arguments of each
SHAPES |= {"step": ("every", "gamma"), "wsd": ("decay",)}
_OF_RECIPE = ("lr", "weight_decay")  # arguments of optimizers that every group has


class SchedulerSpec(ClassSpec, total=False):
    """A scheduler's class, what it is called with, and when it steps; the best metric it may wait for.

    >>> spec: SchedulerSpec = {"class_path": "StepLR", "init_args": {"step_size": 10}, "interval": "epoch"}
    """

    interval: Literal["epoch", "step"]
    monitor: str


def check_optimizer(opt: str | ClassSpec, groups: list[dict[str, Any]]) -> None:
    """Refuse a name that nobody answers to, and a class that does not take these groups or its arguments."""
    if opt == "adamw":
        return
    (word, args), known = name_and_args("opt", opt), []
    if "." not in word and not _of_torch(word):
        from timm.optim import list_optimizers

        known = [str(known) for known in list_optimizers()]
    if "." not in word and word not in [*known, "adamw"] and not _of_torch(word):
        near = did_you_mean(word, [*vars(torch.optim), *known])
        raise ValueError(
            f"`opt` must be adamw, lamb, sgd, muon or another of timm's, got {word!r}{near}; or any class of "
            "torch.optim, a class path such as mypkg.Mine"
        )
    if given := [name for name in _OF_RECIPE if name in args]:
        raise ValueError(f"`opt`: {given[0]} of {word} belongs to the groups: set `model.{given[0]}`")
    optimizer = build_optimizer(opt, groups) if args or word not in known else None
    decays = any(group["weight_decay"] for group in groups)
    if optimizer and decays and "weight_decay" not in optimizer.defaults:
        raise ValueError(f"`opt`: {word} knows no weight decay: set `model.weight_decay` to 0")


def build_optimizer(
    opt: str | ClassSpec, groups: list[dict[str, Any]], net: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Build an optimizer over groups that hold their own learning rates and weight decays.

    Args:
        opt: A word, a class, or a class with its arguments.
        groups: Groups of parameters.
        net: The network of these parameters. Muon makes the updates of its blocks' matrices orthogonal, and leaves
            head, embeddings, tokenizer and positions to AdamW, Jordan et al. 2024 (kellerjordan.github.io/posts/muon).
    """
    word, args = name_and_args("opt", opt)
    if word == "adamw":
        return build("opt", torch.optim.AdamW, {"fused": True, **args}, {}, groups)
    if "." in word or _of_torch(word):
        cls = find_class("opt", word, torch.optim.Optimizer, home="torch.optim")
        return build("opt", cls, args, {"lr": groups[0]["lr"]}, groups)
    from timm.optim import create_optimizer_v2

    of_timm = {"lr": groups[0]["lr"], "weight_decay": 0.0, "filter_bias_and_bn": False}
    try:
        optimizer = create_optimizer_v2(groups, opt=word, **of_timm, **args)
    except TypeError as error:
        raise ValueError(f"`opt`: {word} of timm refuses its arguments: {error}") from error
    if word.endswith("muon") and (blocks := getattr(net, "blocks", None)):
        hidden = {id(p) for p in blocks.parameters()}  # of which Muon itself leaves vectors alone
        for p in (p for group in groups for p in group["params"] if id(p) not in hidden):
            optimizer.state[p]["use_muon"] = False
    return optimizer


def _of_torch(word: str) -> bool:
    return isinstance(getattr(torch.optim, word, None), type)


def check_schedule(task: Any) -> None:
    """Refuse a schedule that is neither a word nor a class, and arguments that its word does not take."""
    word, args = name_and_args("lr_scheduler", task.hparams["lr_scheduler"], SchedulerSpec.__annotations__)
    if word not in SHAPES:
        cls = find_class("lr_scheduler", word, object, SHAPES, home="torch.optim.lr_scheduler")
        for name in ("step", "state_dict", "load_state_dict"):
            if not hasattr(cls, name):
                raise ValueError(f"`lr_scheduler`: {word} has no `{name}`, as schedulers of torch and timm have")
        built = build_scheduler(task, torch.optim.AdamW([torch.zeros(1, requires_grad=True)]), 100)
        if built["interval"] not in ("step", "epoch"):
            raise ValueError(f"`lr_scheduler`: interval must be epoch or step, got {built['interval']!r}")
        if not is_plain(built["scheduler"].state_dict()):
            raise ValueError(f"`lr_scheduler`: {word} keeps objects in its state, which no checkpoint may hold")
        return
    for name in args:
        if name not in SHAPES[word]:
            takes = f"takes {' and '.join(SHAPES[word])}" if SHAPES[word] else "takes no arguments"
            raise ValueError(f"`lr_scheduler`: {word} {takes}, got {name}")
    if wrong := [name for name, value in args.items() if not (isinstance(value, int | float) and value > 0)]:
        raise ValueError(f"`lr_scheduler`: {wrong[0]} of {word} must be a number above 0, got {args[wrong[0]]!r}")
    if args.get("decay", 0) > 1:
        raise ValueError(f"`lr_scheduler`: decay of wsd is a share, at most 1, got {args['decay']}")


def schedule(recipe: Mapping[str, Any], steps: float, epochs: int) -> Callable[[float], float] | None:
    """Return the learning rate of each step, relative to the peak; None where a class sets it.

    Args:
        recipe: Hyper-parameters of a task.
        steps: Steps of the whole training.
        epochs: Its epochs; not above 0 where steps alone are counted.
    """
    if not 0 < steps < float("inf"):
        raise ValueError("`trainer.max_epochs` or `trainer.max_steps` must be set: the schedule needs an end")
    word, args = name_and_args("lr_scheduler", recipe["lr_scheduler"], SchedulerSpec.__annotations__)
    if word not in SHAPES:
        return None
    per_epoch = steps / epochs if epochs > 0 else steps
    return partial(
        warmed_up,
        warmup=min(recipe["warmup_epochs"] * per_epoch, steps),
        total=steps - recipe["cooldown_epochs"] * per_epoch,
        start=recipe["warmup_lr"] / recipe["lr"],
        final=recipe["min_lr"] / recipe["lr"],
        shape=cast(ScheduleName, word),
        epoch=per_epoch,
        **args,
    )


def build_scheduler(
    task: Any, optimizer: torch.optim.Optimizer, steps: float, factor: Callable[[float], float] | None = None
) -> dict[str, Any]:
    """Return the scheduler of a task, and when it steps, as Lightning is told: each epoch, or each step.

    Each step is right for a word, for a class that asks for ``total_steps``, and for timm's that count steps.

    Args:
        task: Names it, and tells which metric is best at which end, for one that waits for a metric.
        optimizer: Whose rates it sets.
        steps: Steps of the whole training.
        factor: The learning rate of each step, where a word says it.
    """
    if factor:
        return {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}
    spec = task.hparams["lr_scheduler"]
    word, args = name_and_args("lr_scheduler", spec, SchedulerSpec.__annotations__)
    more: Mapping[str, Any] = spec if isinstance(spec, Mapping) else {}
    cls = find_class("lr_scheduler", word, object, home="torch.optim.lr_scheduler")
    metric = more.get("monitor") or (task.monitor or ("min", "val/loss"))[1]
    offered = {
        "total_steps": int(steps),
        **({"mode": better(task, metric) or "min"} if cls is ReduceLROnPlateau else {}),
    }
    scheduler = build("lr_scheduler", cls, args, offered, optimizer)
    by_step = "total_steps" in signature(cls).parameters or getattr(scheduler, "t_in_epochs", True) is False
    found = {"scheduler": scheduler, "interval": more.get("interval", "step" if by_step else "epoch")}
    if isinstance(scheduler, ReduceLROnPlateau):  # steps where its metric is measured, which is before it is saved
        found |= {"frequency": sys.maxsize, "reduce_on_plateau": False, "monitor": metric}
    return found


def step_plateaus(schedulers: Sequence[Any], values: Mapping[str, Any], is_check: bool) -> None:
    """Let schedulers that wait for a metric see what has been measured."""
    for waiting in schedulers:
        if isinstance(waiting.scheduler, ReduceLROnPlateau):
            if waiting.monitor not in values:
                raise UsageError(f"`lr_scheduler`: monitor must be one of {', '.join(values)}, got {waiting.monitor}")
            if not is_check:
                waiting.scheduler.step(float(values[waiting.monitor]))


def step_scheduler(scheduler: Any, epoch: int, steps: int) -> None:
    """Let a schedule take its step; those of timm ask how many epochs or steps are over."""
    if not hasattr(scheduler, "step_update"):
        scheduler.step()
    elif scheduler.t_in_epochs:
        scheduler.step(epoch + 1)
    else:
        scheduler.step_update(steps)


def freeze_parts(net: nn.Module, beginnings: Sequence[str]) -> None:
    """Train no parameter whose name begins with one of these parts; refuse one that the network has not."""
    for beginning in beginnings:
        found = [p for name, p in net.named_parameters() if f"{name}.".startswith(beginning.rstrip(".") + ".")]
        if not found:
            parts = ", ".join(dict.fromkeys(name.split(".")[0] for name, _ in net.named_parameters()))
            raise ValueError(f"`freeze` must name parts of the network, got {beginning!r}; it has {parts}")
        for p in found:
            p.requires_grad = False


def check_recipe(task: Any) -> None:
    """Refuse numbers that no training can use, a NaN among them, and an optimizer or schedule that cannot be built."""
    check_ranges("model", task.hparams)
    check_optimizer(task.hparams["opt"], task.optimizer_groups())
    check_schedule(task)
