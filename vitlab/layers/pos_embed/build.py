"""From the name of a position embedding to the module."""

import inspect
from typing import Literal

from vitlab.layers.pos_embed.added import Factorized, Learned
from vitlab.layers.pos_embed.base import PosEmbed, PosEmbedJoin
from vitlab.layers.pos_embed.biases import Alibi2d, RelPos
from vitlab.layers.pos_embed.conv import ConvPosEmbed
from vitlab.layers.pos_embed.rotary import RoPE2d, RoPEMixed
from vitlab.layers.pos_embed.sincos import SinCos1d, SinCos2d
from vitlab.layers.resample import Grid

PosEmbedName = Literal[
    "none",
    "learned",
    "factorized",
    "sincos1d",
    "sincos2d",
    "relpos",
    "alibi2d",
    "rope2d",
    "rope_mixed",
    "conv",
]
POS_EMBEDS: dict[PosEmbedName, type[PosEmbed]] = {
    "none": PosEmbed,
    "learned": Learned,
    "factorized": Factorized,
    "sincos1d": SinCos1d,
    "sincos2d": SinCos2d,
    "relpos": RelPos,
    "alibi2d": Alibi2d,
    "rope2d": RoPE2d,
    "rope_mixed": RoPEMixed,
    "conv": ConvPosEmbed,
}


def build_pos_embed(
    name: PosEmbedName,
    grid_size: Grid,
    embed_dim: int,
    num_heads: int,
    depth: int,
    num_prefix_tokens: int,
    *,
    trainable: bool | None = None,
    join: PosEmbedJoin | None = None,
    theta: float | None = None,
) -> PosEmbed:
    """Build the position embedding called ``name``; its class gets those of the other values that it asks for.

    Args:
        name: Which one.
        grid_size: Patch tokens per column and per row, (h, w).
        embed_dim: Token width D.
        num_heads: Number of heads A.
        depth: Number of blocks.
        num_prefix_tokens: Number of prefix tokens P.
        trainable: Whether its tensors are trained; None is the method's own choice.
        join: Where it meets the tokens; None is the method's own choice.
        theta: Base of the rotary frequencies; None is the published one, 100 for rope2d and 10 for rope_mixed.

    Example:
        >>> build_pos_embed("relpos", (2, 3), embed_dim=8, num_heads=2, depth=1, num_prefix_tokens=1).bias(0).shape
        torch.Size([2, 7, 7])
    """
    _check_options(name, trainable, join, theta)
    cls = POS_EMBEDS[name]
    offered = {
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "head_dim": embed_dim // num_heads,
        "depth": depth,
        "num_prefix_tokens": num_prefix_tokens,
        "join": join or next(iter(cls.joins), None),
        "trainable": bool(trainable),
        **({} if theta is None else {"theta": theta}),
    }
    asked = inspect.signature(cls).parameters
    module = cls(grid_size, **{argument: value for argument, value in offered.items() if argument in asked})
    return module.requires_grad_(trainable is not False)


def _check_options(name: PosEmbedName, trainable: bool | None, join: PosEmbedJoin | None, theta: float | None) -> None:
    if name not in POS_EMBEDS:
        raise ValueError(f"`pos_embed` must be one of {', '.join(POS_EMBEDS)}, got {name!r}")
    cls = POS_EMBEDS[name]
    if trainable is not None and not cls.trains:
        raise ValueError(
            f"pos_embed={name!r} has nothing to train: leave `pos_embed_trainable` at null, got {trainable}"
        )
    if join is not None and join not in cls.joins:
        allowed = ", ".join(cls.joins) or "null only"
        raise ValueError(f"`pos_embed_join` must be one of {allowed} for pos_embed={name!r}, got {join!r}")
    rotary = [known for known, cls in POS_EMBEDS.items() if "theta" in inspect.signature(cls).parameters]
    if theta is not None and name not in rotary:
        raise ValueError(
            f"`rope_theta` belongs to pos_embed={' and '.join(map(repr, rotary))}: leave it at null for "
            f"pos_embed={name!r}, got {theta}"
        )
