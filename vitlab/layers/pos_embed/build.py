"""Build a position embedding from its name or class path."""

from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import Any, Literal

from vitlab.class_paths import ClassSpec, build_part, choice_text, find_class, name_and_args
from vitlab.layers.custom import check_shaped
from vitlab.layers.plain import goes_around
from vitlab.layers.pos_embed.added import AddedPosEmbed, Factorized, Fourier, Learned, SinCos1d, SinCos2d
from vitlab.layers.pos_embed.base import PosEmbed, PosEmbedJoin
from vitlab.layers.pos_embed.biases import Alibi2d, ContinuousBias, Fire, RelPos, RelPos1d
from vitlab.layers.pos_embed.conv import ConvPosEmbed
from vitlab.layers.pos_embed.rotary import LieRE, RoPE2d, RoPEMixed, String
from vitlab.layers.pos_embed.together import Together
from vitlab.layers.resample import Grid, same_size
from vitlab.named_kwargs import taken_by

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


def build_pos_embed(
    name: PosEmbedChoice,
    grid_size: Grid,
    embed_dim: int,
    num_heads: int,
    depth: int,
    num_prefix_tokens: int,
) -> PosEmbed:
    """Build the position embedding called ``name``, or of a class path that leads to a :class:`PosEmbed`.

    The methods of a list act together, each with the ``init_args`` of its own entry. A class receives ``grid_size``,
    and of the other values those that its constructor has: ``embed_dim``, ``num_heads``, ``head_dim``, ``depth``,
    ``num_prefix_tokens``, ``join`` and ``trainable``. Any method takes ``init_args`` ``join``, ``trainable`` and
    ``resize``, its policy for images of another size.

    Args:
        name: A name, a class path, a mapping with ``class_path`` and ``init_args``, or a list of these.
        grid_size: Patch tokens per column and per row, (h, w).
        embed_dim: Token width D.
        num_heads: Number of heads A.
        depth: Number of blocks.
        num_prefix_tokens: Number of prefix tokens P.

    Example:
        >>> build_pos_embed("relpos", (2, 3), embed_dim=8, num_heads=2, depth=1, num_prefix_tokens=1).bias(0).shape
        torch.Size([2, 7, 7])
    """
    offered = {
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "head_dim": embed_dim // num_heads,
        "depth": depth,
        "num_prefix_tokens": num_prefix_tokens,
    }
    if not isinstance(name, list | tuple):
        return _build_one(name, grid_size, offered)
    words = [name_and_args("pos_embed", part)[0].rpartition(".")[2] for part in name]
    if len(set(words)) < len(words):
        raise ValueError(f"`pos_embed`: methods of a list need names of their own, got {choice_text(name)}")
    parts = zip(words, name, strict=True)
    return Together(grid_size, {word: _build_one(part, grid_size, offered) for word, part in parts})


def _build_one(name: Any, grid_size: Grid, sizes: Mapping[str, int]) -> PosEmbed:
    """Build one method. ``scale`` and ``resize`` are set here, unless its constructor takes them."""
    method, args = name_and_args("pos_embed", name)
    cls = POS_EMBEDS.get(method) or find_class("pos_embed", method, PosEmbed, POS_EMBEDS)  # type: ignore[call-overload]
    taken = taken_by(cls)
    join, trainable = args.pop("join", None), args.pop("trainable", None)
    if "theta" not in taken and args.get("theta", 0) is None:  # as older versions advised
        del args["theta"]
    scale = 1.0 if "scale" in taken else args.pop("scale", 1.0)
    resize = None if "resize" in taken else args.pop("resize", None)
    for option, value, choices in (("join", join, cls.joins), ("resize", resize, cls.policies)):
        if value not in (None, *choices):
            allowed = f"one of {', '.join(choices)} or null" if choices else "null"
            raise ValueError(f"`pos_embed.{option}` must be {allowed} for pos_embed={method!r}, got {value!r}")
    offered: dict[str, Any] = {**sizes}
    for option, value, usual in (("join", join, next(iter(cls.joins), None)), ("trainable", trainable, False)):
        if value is not None:
            offered[option] = value
        elif option in taken and taken[option].default in (None, Parameter.empty):
            offered[option] = usual
    module: PosEmbed = build_part("pos_embed", cls, args, offered, grid_size)
    module.chosen_policy = resize
    if scale != 1:
        _set_scale(module, scale)
    _check_built(method, module, grid_size, trainable, join, taken)
    return module if trainable is None else module.requires_grad_(trainable)


def _set_scale(module: PosEmbed, scale: float) -> None:
    """Multiply what a method adds to the tokens, or refuse to where its class adds something else."""
    name = type(module).__name__
    if not isinstance(module, AddedPosEmbed) or not isinstance(scale, int | float) or not 0 < scale < 1e6:
        rule = "belongs to a method that adds a vector to each token, and must be above 0"
        raise ValueError(f"`scale` {rule}, got {scale!r} for {name}")
    for hook in ("forward" if module.join == "stem" else "enter", "added"):
        if goes_around(type(module), AddedPosEmbed, hook, "added", "chosen_scale"):
            rule = f"multiplies `table`, which `{hook}` of {name} goes around"
            raise ValueError(f"`scale` {rule}, got {scale!r}: leave it out, or make it an argument of the constructor")
    module.chosen_scale = float(scale)


def _check_built(
    name: str,
    module: PosEmbed,
    grid_size: Grid,
    trainable: bool | None,
    join: PosEmbedJoin | None,
    taken: Mapping[str, Parameter],
) -> None:
    """Refuse what a class of the user's was given and has not followed, and parts that its base class hides."""
    check_shaped("pos_embed", module)
    if hidden := next((part for part in module._modules if hasattr(type(module), part)), None):
        path = f"{type(module).__module__}.{type(module).__qualname__}"
        raise ValueError(f"`pos_embed`: {path} has a module `{hidden}`, a name of its base class: call it otherwise")
    if not same_size(module.grid_size, grid_size):
        (h, w), (own_h, own_w) = grid_size, module.grid_size
        way = "its constructor must pass the grid on, as in `super().__init__(grid_size)`"
        raise ValueError(f"pos_embed={name!r} has a grid of {own_h} x {own_w} in place of {h} x {w}: {way}")
    may_be_fixed = trainable is not True and (module.trains or "trainable" in taken)
    if trainable is not None and not may_be_fixed and not any(True for _ in module.parameters()):
        raise ValueError(
            f"pos_embed={name!r} has nothing to train: leave `pos_embed.trainable` at null, got {trainable}"
        )
    acts = module.join or (join if "join" in taken else next(iter(module.joins), None))
    if join not in (None, acts):
        rule = f"must be {acts} or null for pos_embed={name!r}, whose constructor does not pass `join` on"
        raise ValueError(f"`pos_embed.join` {rule}, got {join!r}")
