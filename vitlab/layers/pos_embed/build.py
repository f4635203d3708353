"""Build a position embedding from its name or class path."""

import inspect
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from vitlab.class_paths import ClassSpec, build, choice_text, find_class, name_and_args
from vitlab.layers.pos_embed.added import AddedPosEmbed, Factorized, Fourier, Learned, SinCos1d, SinCos2d
from vitlab.layers.pos_embed.base import PosEmbed, PosEmbedJoin
from vitlab.layers.pos_embed.biases import Alibi2d, ContinuousBias, Fire, RelPos, RelPos1d
from vitlab.layers.pos_embed.conv import ConvPosEmbed
from vitlab.layers.pos_embed.rotary import LieRE, RoPE2d, RoPEMixed, String
from vitlab.layers.pos_embed.together import Together
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
    "cpb",
    "fourier",
    "liere",
    "string",
    "fire",
    "relpos1d",
    "conv",
]
PosEmbedChoice = PosEmbedName | Sequence[str | ClassSpec] | str | ClassSpec
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
    "cpb": ContinuousBias,
    "fourier": Fourier,
    "liere": LieRE,
    "string": String,
    "fire": Fire,
    "relpos1d": RelPos1d,
    "conv": ConvPosEmbed,
}


class NetworkSizes(TypedDict):
    """What a position embedding can ask of its network, besides the grid.

    >>> sizes: NetworkSizes = dict(embed_dim=8, num_heads=2, head_dim=4, depth=1, num_prefix_tokens=1)
    """

    embed_dim: int
    num_heads: int
    head_dim: int
    depth: int
    num_prefix_tokens: int


def build_pos_embed(
    name: PosEmbedChoice,
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
    """Build the position embedding called ``name``, or of a class path that leads to a :class:`PosEmbed`.

    The methods of a list act together, each with the ``init_args`` of its own entry. A class receives ``grid_size``,
    and of the other values those that its constructor has: ``embed_dim``, ``num_heads``, ``head_dim``, ``depth``,
    ``num_prefix_tokens``, ``join``, ``trainable`` and ``theta``. Any method takes ``init_args`` ``join``, ``trainable``
    and ``resize``, its policy for images of another size.

    Args:
        name: A name, a class path, a mapping with ``class_path`` and ``init_args``, or a list of these.
        grid_size: Patch tokens per column and per row, (h, w).
        embed_dim: Token width D.
        num_heads: Number of heads A.
        depth: Number of blocks.
        num_prefix_tokens: Number of prefix tokens P.
        trainable: Whether its tensors are trained; None is the default of the method.
        join: Where it acts on the tokens; None is the default of the method.
        theta: Base of the rotary frequencies; None is the published one, 100 for rope2d and 10 for rope_mixed.

    Example:
        >>> build_pos_embed("relpos", (2, 3), embed_dim=8, num_heads=2, depth=1, num_prefix_tokens=1).bias(0).shape
        torch.Size([2, 7, 7])
    """
    offered: NetworkSizes = {
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "head_dim": embed_dim // num_heads,
        "depth": depth,
        "num_prefix_tokens": num_prefix_tokens,
    }
    if not isinstance(name, list | tuple):
        return _build_one(name, grid_size, offered, trainable, join, theta)
    options = {"trainable": trainable, "join": join, "theta": theta}
    if given := [option for option, value in options.items() if value is not None]:
        form = "{class_path: learned, init_args: {join: every_layer}}"
        raise ValueError(f"`{given[0]}` cannot be given for a list of `pos_embed`; give it to an entry, as in {form}")
    parts = [(name_and_args("pos_embed", part)[0].rpartition(".")[2], part) for part in name]
    if len(dict(parts)) < len(parts):
        raise ValueError(f"`pos_embed`: a list must name each method only once, got {choice_text(name)}")
    return Together(grid_size, {word: _build_one(part, grid_size, offered) for word, part in parts})


def _build_one(
    name: Any,
    grid_size: Grid,
    offered: NetworkSizes,
    trainable: bool | None = None,
    join: PosEmbedJoin | None = None,
    theta: float | None = None,
) -> PosEmbed:
    method, args = name_and_args("pos_embed", name)
    trainable, join, scale = args.pop("trainable", trainable), args.pop("join", join), args.pop("scale", 1.0)
    resize = args.pop("resize", None)
    cls = POS_EMBEDS.get(method) or find_class("pos_embed", method, PosEmbed, POS_EMBEDS)  # type: ignore[call-overload]
    if not _is_rotary(cls):
        theta = args.pop("theta", theta)  # to refuse it
    _check_options(choice_text({"class_path": method, "init_args": args}), cls, trainable, join, theta)
    if resize is not None and resize not in cls.policies:
        choices = f"one of {', '.join(cls.policies)} or null" if cls.policies else "null: there is nothing to resize"
        raise ValueError(f"`pos_embed.resize` must be {choices} for pos_embed={method!r}, got {resize!r}")
    options = {"join": join or next(iter(cls.joins), None), "trainable": bool(trainable)}
    options |= {} if theta is None else {"theta": theta}
    module: PosEmbed = build("pos_embed", cls, args, {**offered, **options}, grid_size)
    if scale != 1:
        if not isinstance(module, AddedPosEmbed) or not isinstance(scale, int | float) or not 0 < scale < 1e6:
            rule = "belongs to a method that adds a vector to each token, and must be above 0"
            raise ValueError(f"`scale` {rule}, got {scale!r} for pos_embed={choice_text(name)!r}")
        module.scale = float(scale)
    module.resize = resize
    return module.requires_grad_(trainable is not False)


def _check_options(
    name: str, cls: type[PosEmbed], trainable: bool | None, join: PosEmbedJoin | None, theta: float | None
) -> None:
    if trainable is not None and not cls.trains:
        raise ValueError(
            f"pos_embed={name!r} has nothing to train: leave `pos_embed.trainable` at null, got {trainable}"
        )
    if join is not None and join not in cls.joins:
        allowed = ", ".join(cls.joins) or "null only"
        raise ValueError(f"`pos_embed.join` must be one of {allowed} for pos_embed={name!r}, got {join!r}")
    if theta is not None and not _is_rotary(cls):
        rotary = " and ".join(repr(known) for known, cls in POS_EMBEDS.items() if _is_rotary(cls))
        raise ValueError(
            f"`pos_embed.theta` belongs to pos_embed={rotary}: leave it at null for pos_embed={name!r}, got {theta}"
        )


def _is_rotary(cls: type[PosEmbed]) -> bool:
    return "theta" in inspect.signature(cls).parameters
