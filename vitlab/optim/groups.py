"""Optimizer groups: which parameters decay, and how fast each of them learns."""

from typing import Any

from torch import Tensor


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
    others. Parameters are identified by identity, so wrapping, compiling or renaming the network changes nothing.

    Args:
        net: The unwrapped network; ``stages()`` lists its parameters from input to output, ``no_weight_decay()`` names
            those without decay.
        lr: Peak learning rate of the last stage.
        weight_decay: Decoupled weight decay of linear and convolution weights.
        layer_decay: Learning rate of each stage relative to the next, Clark et al. 2020 (arXiv:2003.10555).
        pos_embed_lr_mult: Factor on the learning rate of the trained parameters of ``net.pos_embed``.
        head_lr_mult: Factor on the learning rate of the parameters of ``net.head``.

    Returns:
        Groups with ``params``, ``lr`` and ``weight_decay``; together they hold every trained parameter once.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, embed_dim=48, depth=1, num_heads=3)
        >>> [group["weight_decay"] for group in param_groups(net, lr=1e-3, weight_decay=0.05)]
        [0.05, 0.0]
    """
    positions = {id(p) for p in net.pos_embed.parameters()}
    factors = dict.fromkeys(positions, pos_embed_lr_mult) | {id(p): head_lr_mult for p in net.head.parameters()}
    if pos_embed_lr_mult != 1.0 and not any(p.requires_grad for p in net.pos_embed.parameters()):
        raise ValueError(
            f"`pos_embed_lr_mult` must stay 1 for a position embedding that trains nothing, got {pos_embed_lr_mult}"
        )
    exempt = net.no_weight_decay()
    decays = {id(p) for name, p in net.named_parameters() if name.removeprefix("_orig_mod.") not in exempt}
    stages, depth = net.stages(), len(net.blocks)
    block_of = {id(p): i for i in range(depth) for p in net.pos_embed.block_parameters(i)}
    block_of |= {id(p): depth - 1 for p, _ in net.pos_embed.stacked_parameters()}
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for i, stage in enumerate(stages):
        for p in stage:
            if p.requires_grad:
                later = len(stages) - 1 - (1 + block_of[id(p)] if id(p) in block_of else i)
                scale = layer_decay**later * factors.get(id(p), 1.0)
                groups.setdefault((lr * scale, weight_decay if id(p) in decays else 0.0), []).append(p)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]


def describe_groups(
    net: Any, groups: list[dict[str, Any]], lr: float, layer_decay: float = 1.0, task: Any = None
) -> list[dict[str, Any]]:
    """List each trained parameter with name, shape, weight decay and learning rate relative to ``lr``.

    A tensor with a slice for every block has a row for each block if their rates differ. ``task`` names parameters that
    are trained outside the network.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, embed_dim=48, depth=1, num_heads=3)
        >>> describe_groups(net, param_groups(net, lr=1e-3, weight_decay=0.05), lr=1e-3)[0]
        {'name': 'cls_token', 'shape': [1, 1, 48], 'weight_decay': 0.0, 'lr_scale': 1.0}
    """
    names = {id(p): name for module in (task, net) if module for name, p in module.named_parameters()}
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
