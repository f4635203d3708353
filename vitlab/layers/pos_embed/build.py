"""From the name of a position embedding to the module."""

from typing import get_args

from vitlab.layers.pos_embed.added import Factorized, Learned
from vitlab.layers.pos_embed.base import PosEmbed, PosEmbedJoin, PosEmbedName
from vitlab.layers.pos_embed.biases import Alibi2d, RelPos
from vitlab.layers.pos_embed.conv import ConvPosEmbed
from vitlab.layers.pos_embed.rotary import RoPE2d, RoPEMixed
from vitlab.layers.pos_embed.sincos import SinCos1d, SinCos2d
from vitlab.layers.resample import Grid

JOINS: dict[str, tuple[PosEmbedJoin, ...]] = {  # what a method can do, its own choice first
    "none": (),
    "learned": ("stem", "every_layer", "every_layer_shared"),
    "factorized": ("stem", "every_layer", "every_layer_shared"),
    "sincos1d": ("stem", "every_layer", "every_layer_shared"),
    "sincos2d": ("stem", "every_layer", "every_layer_shared"),
    "relpos": ("every_layer", "every_layer_shared"),
    "alibi2d": ("every_layer_shared",),
    "rope2d": ("every_layer_shared",),
    "rope_mixed": ("every_layer", "every_layer_shared"),
    "conv": ("stem", "every_layer"),
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
    """Build the position embedding called ``name``.

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
    """
    _check_options(name, trainable, join, theta)
    own: PosEmbedJoin = join or (JOINS[name] or ("stem",))[0]
    head_dim = embed_dim // num_heads
    match name:
        case "none":
            module: PosEmbed = PosEmbed(grid_size)
        case "learned":
            module = Learned(grid_size, embed_dim, depth, own)
        case "factorized":
            module = Factorized(grid_size, embed_dim, depth, own)
        case "sincos1d":
            module = SinCos1d(grid_size, embed_dim, depth, own, bool(trainable))
        case "sincos2d":
            module = SinCos2d(grid_size, embed_dim, depth, own, bool(trainable))
        case "relpos":
            module = RelPos(grid_size, num_heads, depth, num_prefix_tokens, own)
        case "alibi2d":
            module = Alibi2d(grid_size, num_heads, num_prefix_tokens)
        case "rope2d":
            module = RoPE2d(grid_size, head_dim, num_prefix_tokens, 100.0 if theta is None else theta)
        case "rope_mixed":
            module = RoPEMixed(
                grid_size, head_dim, num_heads, depth, num_prefix_tokens, 10.0 if theta is None else theta, own
            )
        case "conv":
            module = ConvPosEmbed(grid_size, embed_dim, depth, own)
    return module.requires_grad_(trainable is not False)


def _check_options(name: PosEmbedName, trainable: bool | None, join: PosEmbedJoin | None, theta: float | None) -> None:
    if name not in JOINS:
        raise ValueError(f"`pos_embed` must be one of {', '.join(get_args(PosEmbedName))}, got {name!r}")
    if trainable is not None and name in ("none", "alibi2d", "rope2d"):
        raise ValueError(
            f"pos_embed={name!r} has nothing to train: leave `pos_embed_trainable` at null, got {trainable}"
        )
    if join is not None and join not in JOINS[name]:
        allowed = ", ".join(JOINS[name]) or "null only"
        raise ValueError(f"`pos_embed_join` must be one of {allowed} for pos_embed={name!r}, got {join!r}")
    if theta is not None and name not in ("rope2d", "rope_mixed"):
        raise ValueError(
            f"`rope_theta` belongs to pos_embed='rope2d' and 'rope_mixed': leave it at null for pos_embed={name!r}, "
            f"got {theta}"
        )
