"""How a task changes weights: optimizers from a name, a class of torch or timm, or a class path, and their steps."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn

from vitlab.class_paths import ClassSpec, build, find_class, name_and_args
from vitlab.errors import UsageError, did_you_mean
from vitlab.interface import batches_of_a_step, check_asked_once
from vitlab.layers.precision import full_tensor, norm_of_gradients, unscale
from vitlab.ranges import check_ranges
from vitlab.tasks.schedule import check_schedule

_GROUP_ARGS = ("lr", "weight_decay")  # optimizer arguments that the groups set
_UNFIT = {  # classes of torch that no network here can be trained with
    "SparseAdam": "takes sparse gradients, which no network here has: use Adam or adamw",
    "Muon": "takes matrices alone: use muon, which leaves all else to AdamW",
    "LBFGS": "takes one group of parameters, and here rates and weight decays have several: use adamw",
}


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
        fused = "foreach" not in args and not any(p.is_complex() for group in groups for p in group["params"])
        return build("opt", torch.optim.AdamW, {**({"fused": True} if fused else {}), **args}, {}, groups)
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

    try:
        return create_optimizer_v2(groups, opt=name, lr=lr, **args)
    except TypeError as error:
        raise ValueError(f"`opt`: {name} of timm refuses its arguments: {error}") from error


def _is_torch_class(name: str) -> bool:
    return isinstance(getattr(torch.optim, name, None), type)


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
