"""Optimizers by name."""

from collections.abc import Mapping
from typing import Any

import torch

from vitlab.errors import did_you_mean


def check_optimizer(name: str) -> None:
    """Refuse a name that neither torch's fused AdamW nor timm answers to."""
    if name == "adamw":
        return
    from timm.optim import list_optimizers

    known = [str(known) for known in list_optimizers()]
    if name not in known:
        raise ValueError(
            f"`opt` must be adamw, lamb, sgd, muon or another of timm's, got {name!r}{did_you_mean(name, known)}"
        )


def build_optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build an optimizer over groups that hold their own learning rates and weight decays."""
    if name == "adamw":
        return torch.optim.AdamW(groups, fused=True)
    from timm.optim import create_optimizer_v2

    return create_optimizer_v2(groups, opt=name, lr=groups[0]["lr"], weight_decay=0.0, filter_bias_and_bn=False)


_ABOVE_ZERO = ("lr", "lr_batch", "layer_decay")
_NOT_NEGATIVE = (
    "weight_decay",
    "min_lr",
    "warmup_lr",
    "warmup_epochs",
    "cooldown_epochs",
    "pos_embed_lr_mult",
    "label_smoothing",
)


def check_recipe(recipe: Mapping[str, Any]) -> None:
    """Refuse numbers that no training can use; a NaN is none of them."""
    for name in (*_ABOVE_ZERO, *_NOT_NEGATIVE):
        value = recipe.get(name, 1)
        if not (value > 0 if name in _ABOVE_ZERO else value >= 0) or value == float("inf"):
            least = "above 0" if name in _ABOVE_ZERO else "at least 0"
            raise ValueError(f"`model.{name}` must be a number {least}, got {value}")
    for name in ("layer_decay", "label_smoothing"):
        if recipe.get(name, 0) > 1:
            raise ValueError(f"`model.{name}` must be at most 1, got {recipe[name]}")
