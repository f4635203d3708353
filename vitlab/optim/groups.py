"""Which parameters decay, and how fast each of them learns."""

from typing import Any

from torch import Tensor, nn


def param_groups(
    net: Any,
    lr: float,
    weight_decay: float,
    layer_decay: float = 1.0,
    pos_embed_lr_mult: float = 1.0,
    head_lr_mult: float = 1.0,
) -> list[dict[str, Any]]:
    """Split the trained parameters of a ``VisionTransformer`` into optimizer groups.

    What decays is the network's to say. Parameters are told apart by identity, so that wrapping, compiling or renaming
    the network changes nothing.

    Args:
        net: The bare network; its ``stages()`` lists parameters from input to output, its ``no_weight_decay()`` names
            those without decay.
        lr: Peak learning rate of the last stage.
        weight_decay: Decoupled weight decay of linear and convolution weights.
        layer_decay: Learning rate of each stage relative to the stage after it, Clark et al. 2020 (arXiv:2003.10555).
        pos_embed_lr_mult: Factor on the learning rate of everything trained under ``net.pos_embed``.
        head_lr_mult: Factor on the learning rate of everything under ``net.head``.

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
    stages = net.stages()
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for i, stage in enumerate(stages):
        for p in stage:
            if p.requires_grad:
                scale = layer_decay ** (len(stages) - 1 - i) * factors.get(id(p), 1.0)
                groups.setdefault((lr * scale, weight_decay if id(p) in decays else 0.0), []).append(p)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]


def describe_groups(net: nn.Module, groups: list[dict[str, Any]], lr: float) -> list[dict[str, Any]]:
    """List each trained parameter with name, shape, weight decay and learning rate relative to ``lr``.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, embed_dim=48, depth=1, num_heads=3)
        >>> describe_groups(net, param_groups(net, lr=1e-3, weight_decay=0.05), lr=1e-3)[0]
        {'name': 'cls_token', 'shape': [1, 1, 48], 'weight_decay': 0.0, 'lr_scale': 1.0}
    """
    names = {id(p): name for name, p in net.named_parameters()}
    rows = [
        {
            "name": names[id(p)],
            "shape": list(p.shape),
            "weight_decay": group["weight_decay"],
            "lr_scale": group["lr"] / lr,
        }
        for group in groups
        for p in group["params"]
    ]
    order = {name: i for i, name in enumerate(names.values())}
    return sorted(rows, key=lambda row: order[row["name"]])
