"""Optimizers by name."""

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
