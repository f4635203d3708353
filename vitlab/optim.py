"""Optimizer groups, per-layer learning rates and learning-rate schedules."""

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from vitlab.errors import UsageError

__all__ = ["describe_groups", "param_groups", "slow_earlier_blocks", "warmed_up"]
ScheduleName = Literal["cosine", "linear", "constant", "step", "wsd"]


def param_groups(
    net: Any,
    lr: float,
    weight_decay: float,
    layer_decay: float = 1.0,
    pos_embed_lr_mult: float = 1.0,
    head_lr_mult: float = 1.0,
) -> list[dict[str, Any]]:
    """Split the trained parameters of a ``VisionTransformer`` into optimizer groups.

    The network decides what decays. Parameters that a position embedding has for one block learn at the rate of that
    block; a tensor with a slice for every block gets the rate of the last, and :func:`slow_earlier_blocks` corrects the
    others. Weights that blocks share learn at the rate of the first of them, positions that they share at that of the
    embedding. Parameters are identified by identity: wrapping, compiling or renaming the network changes nothing.

    Args:
        net: The unwrapped network; ``stages()`` lists its parameters from input to output, ``no_weight_decay()`` names
            those without decay.
        lr: Peak learning rate of the last stage.
        weight_decay: Weight decay of linear and convolution weights; the optimizer decides whether it is decoupled.
        layer_decay: Learning rate of each stage relative to the next, Clark et al. 2020 (arXiv:2003.10555).
        pos_embed_lr_mult: Factor on the learning rate of the parameters of ``net.pos_embed``, if it trains any.
        head_lr_mult: Factor on the learning rate of the parameters of ``net.head``.

    Returns:
        Groups with ``params``, ``lr`` and ``weight_decay``; together they hold every trained parameter once.

    Raises:
        UsageError: The network is of another kind, or, with ``layer_decay``, a position embedding stacks parameters of
            another number of blocks.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, embed_dim=48, depth=1, num_heads=3)
        >>> [group["weight_decay"] for group in param_groups(net, lr=1e-3, weight_decay=0.05)]
        [0.05, 0.0]
    """
    if not hasattr(net, "start_step"):
        raise UsageError(
            f"a task of vitlab trains a VisionTransformer, got a {type(net).__name__} as its network: train that by a "
            "LightningModule of your own, see docs/bring_your_own.md"
        )
    positions = {id(p) for p in net.pos_embed.parameters()}
    factors = dict.fromkeys(positions, pos_embed_lr_mult) | {id(p): head_lr_mult for p in net.head.parameters()}
    exempt = net.no_weight_decay()
    decays = {id(p) for name, p in net.named_parameters() if name.removeprefix("_orig_mod.") not in exempt}
    stages, depth = net.stages(), len(net.blocks)
    block_of = {id(p): i for i in range(depth) for p in net.pos_embed.block_parameters(i)}
    for p, axis in net.pos_embed.stacked_parameters():
        block_of[id(p)] = depth - 1
        if layer_decay != 1.0 and (not 0 <= axis < p.ndim or p.shape[axis] != depth):
            name = next(name for name, other in net.pos_embed.named_parameters() if other is p)
            raise UsageError(
                f"`stacks` of the position embedding names axis {axis} of `{name}`, {tuple(p.shape)}, as that of the "
                f"blocks, for `layer_decay`: it must be {depth} long, as the network is deep"
            )
    groups: dict[tuple[float, float], list[Tensor]] = {}
    seen: set[int] = set()
    for i, stage in enumerate(stages):
        for p in stage:
            if p.requires_grad and id(p) not in seen:
                seen.add(id(p))
                later = len(stages) - 1 - (1 + block_of[id(p)] if id(p) in block_of else i)
                scale = layer_decay**later * factors.get(id(p), 1.0)
                groups.setdefault((lr * scale, weight_decay if id(p) in decays else 0.0), []).append(p)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]


def describe_groups(
    net: Any, groups: list[dict[str, Any]], lr: float, layer_decay: float = 1.0, task: Any = None
) -> list[dict[str, Any]]:
    """List each trained parameter with name, shape, weight decay and learning rate relative to ``lr``.

    A tensor with a slice for every block has a row for each block if their rates differ.

    Args:
        net: The unwrapped network that is trained.
        groups: Groups of its optimizer.
        lr: Peak learning rate of the last stage.
        layer_decay: As in :func:`param_groups`.
        task: Names all parameters, also those that are trained outside the network: ``net.`` is left out.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, embed_dim=48, depth=1, num_heads=3)
        >>> describe_groups(net, param_groups(net, lr=1e-3, weight_decay=0.05), lr=1e-3)[0]
        {'name': 'cls_token', 'shape': [1, 1, 48], 'weight_decay': 0.0, 'lr_scale': 1.0}
    """
    named = (task or net).named_parameters()
    names = {id(p): name.removeprefix("net.") for name, p in named}
    order = {name: i for i, name in enumerate(names.values())}
    stacked = {id(p): axis for p, axis in net.pos_embed.stacked_parameters()} if layer_decay != 1.0 else {}
    rows = []
    pairs = [(p, group) for group in groups for p in group["params"]]
    for p, group in sorted(pairs, key=lambda pair: order[names[id(pair[0])]]):
        name, axis, rate = names[id(p)], stacked.get(id(p)), group["lr"] / lr
        depth = 1 if axis is None else p.shape[axis]
        for i in range(depth):
            block = {} if axis is None else {"block": i}
            shape = [side for j, side in enumerate(p.shape) if j != axis]
            scale = rate * layer_decay ** (depth - 1 - i)
            rows.append(
                {"name": name, "shape": shape, "weight_decay": group["weight_decay"], "lr_scale": scale, **block}
            )
    return rows


def slow_earlier_blocks(optimizer: Optimizer, net: Any, layer_decay: float) -> None:
    """Make ``optimizer`` update each slice of a tensor with one slice per block at the rate of that block.

    The group of the tensor has the rate of the last block. After each step, hooks scale the change of the other slices,
    which equals a lower rate for every optimizer whose steps are proportional to it: positions have no weight decay.

    Args:
        optimizer: Optimizer of the parameters of ``net``.
        net: The unwrapped network.
        layer_decay: As in :func:`param_groups`.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> from vitlab.optim import param_groups
        >>> net = VisionTransformer(img_size=32, embed_dim=48, depth=2, num_heads=3, pos_embed="relpos")
        >>> optimizer, table = torch.optim.SGD(param_groups(net, 1.0, 0.0, layer_decay=0.5)), net.pos_embed.bias_table
        >>> before, table.grad = table.detach().clone(), torch.ones_like(table)
        >>> slow_earlier_blocks(optimizer, net, 0.5)
        >>> optimizer.step()
        >>> (before - table).mean((1, 2)).tolist()
        [0.25, 0.5]
    """
    stacked = [] if layer_decay == 1.0 else [(p, axis) for p, axis in net.pos_embed.stacked_parameters()]
    before: list[Tensor] = []

    def keep(*call: Any) -> None:
        before[:] = [p.detach().clone() for p, _ in stacked]

    @torch.no_grad()
    def scale(*call: Any) -> None:
        for (p, axis), old in zip(stacked, before, strict=True):
            factors = _row_scales(p, axis, layer_decay)
            if isinstance(p, DTensor):
                factors = distribute_tensor(factors, p.device_mesh, p.placements)
            p.lerp_(old, 1 - factors)

    if stacked:
        optimizer.register_step_pre_hook(keep)
        optimizer.register_step_post_hook(scale)


def _row_scales(p: Tensor, axis: int, layer_decay: float) -> Tensor:
    """Return the learning rate of each value of a tensor with a slice per block, relative to the last block."""
    steps = torch.arange(p.shape[axis] - 1, -1, -1, dtype=p.dtype, device=p.device)
    return (layer_decay**steps).unflatten(0, (-1, *[1] * (p.ndim - 1 - axis))).expand(p.shape).contiguous()


def warmed_up(
    step: float,
    warmup: float,
    total: float,
    start: float = 0.0,
    final: float = 0.0,
    shape: ScheduleName = "cosine",
    epoch: float = 1.0,
    *,
    every: float = 30.0,
    gamma: float = 0.1,
    decay: float = 0.2,
) -> float:
    """Rise linearly from ``start`` to 1 over ``warmup``, then follow ``shape`` until ``total``, and stay at ``final``.

    Shapes: half a cosine to ``final`` (Loshchilov and Hutter 2017, arXiv:1608.03983); a line to it; constant 1; a
    factor ``gamma`` after every ``every`` epochs (step); 1, then a line to ``final`` over the last share ``decay``
    (wsd, Hu et al. 2024, arXiv:2404.06395). The warm-up replaces the start of the shape without shifting it, as timm's
    ``CosineLRScheduler``. Times can be in any unit; ``epoch`` is the length of an epoch in that unit.

    Example:
        >>> [round(warmed_up(epoch, warmup=5, total=10), 2) for epoch in range(11)]
        [0.0, 0.2, 0.4, 0.6, 0.8, 0.5, 0.35, 0.21, 0.1, 0.02, 0.0]
    """
    if step < warmup:
        return start + (1 - start) * step / warmup
    if step >= total:
        return final
    match shape:
        case "cosine":
            return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * step / total))
        case "linear":
            return 1 - (1 - final) * step / total
        case "step":
            return gamma ** math.floor(round(step / epoch / every, 9))  # 0.3 / 0.1 is a little below 3
        case "wsd":
            return 1 - (1 - final) * max(0.0, step / total - (1 - decay)) / decay
    return 1.0
