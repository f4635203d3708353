"""From the name of a position embedding to the module."""

from typing import get_args

from vitlab.layers.pos_embed.added import Learned, SinCos1d, SinCos2d
from vitlab.layers.pos_embed.base import Grid, PosEmbed, PosEmbedJoin, PosEmbedName


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
    """Build the position embedding called ``name``; None stands for the method's own value."""
    stem = join or "stem"
    match name:
        case "none":
            return PosEmbed(grid_size)
        case "learned":
            module: PosEmbed = Learned(grid_size, embed_dim, depth, stem)
        case "sincos1d":
            module = SinCos1d(grid_size, embed_dim, depth, stem, bool(trainable))
        case "sincos2d":
            module = SinCos2d(grid_size, embed_dim, depth, stem, bool(trainable))
        case _:
            raise ValueError(f"`pos_embed` must be one of {', '.join(get_args(PosEmbedName))}, got {name!r}")
    if trainable is False:
        module.requires_grad_(False)
    return module
