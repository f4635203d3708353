"""Build a position embedding from its name or class path."""

from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import Any, Literal, TypedDict

from vitlab.class_paths import ClassSpec, build_part, choice_text, find_class, name_and_args
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
    offered: NetworkSizes = {
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "head_dim": embed_dim // num_heads,
        "depth": depth,
        "num_prefix_tokens": num_prefix_tokens,
    }
    if not isinstance(name, list | tuple):
        return _build_one(name, grid_size, offered)
    parts = [(name_and_args("pos_embed", part)[0].rpartition(".")[2], part) for part in name]
    if len(dict(parts)) < len(parts):
        paths = dict.fromkeys(name_and_args("pos_embed", part)[0] for part in name)
        if len(paths) == len(parts):
            rule = "two classes of one name cannot be in a list, where each is called by its name: rename one of"
            raise ValueError(f"`pos_embed`: {rule} {', '.join(paths)}")
        raise ValueError(f"`pos_embed`: a list must name each method only once, got {choice_text(name)}")
    return Together(grid_size, {word: _build_one(part, grid_size, offered) for word, part in parts})


def _build_one(name: Any, grid_size: Grid, offered: NetworkSizes) -> PosEmbed:
    method, args = name_and_args("pos_embed", name)
    cls = POS_EMBEDS.get(method) or find_class("pos_embed", method, PosEmbed, POS_EMBEDS)  # type: ignore[call-overload]
    trainable, join, taken = args.pop("trainable", None), args.pop("join", None), taken_by(cls)
    scale = 1.0 if "scale" in taken else args.pop("scale", 1.0)
    resize = None if "resize" in taken else args.pop("resize", None)
    theta = None if _is_rotary(cls) else args.pop("theta", None)  # to refuse it
    _check_options(choice_text({"class_path": method, "init_args": args}), cls, join, theta)
    if resize is not None and resize not in cls.policies:
        choices = f"one of {', '.join(cls.policies)} or null" if cls.policies else "null: there is nothing to resize"
        raise ValueError(f"`pos_embed.resize` must be {choices} for pos_embed={method!r}, got {resize!r}")
    usual = {"join": next(iter(cls.joins), None), "trainable": False}  # where the class has no default of its own
    options = {option: value for option, value in usual.items() if _default(taken, option) in (None, Parameter.empty)}
    options |= {option: value for option, value in (("join", join), ("trainable", trainable)) if value is not None}
    module: PosEmbed = build_part("pos_embed", cls, args, {**offered, **options}, grid_size)
    if scale != 1:
        if not isinstance(module, AddedPosEmbed) or not isinstance(scale, int | float) or not 0 < scale < 1e6:
            rule = "belongs to a method that adds a vector to each token, and must be above 0"
            raise ValueError(f"`scale` {rule}, got {scale!r} for pos_embed={choice_text(name)!r}")
        hooks = ("forward" if module.join == "stem" else "enter", "added")
        own = (hook for hook in hooks if goes_around(type(module), AddedPosEmbed, hook, "added", "chosen_scale"))
        if (hook := next(own, None)) is not None:
            rule = f"multiplies `table`, which `{hook}` of {type(module).__name__} goes around"
            raise ValueError(f"`scale` {rule}, got {scale!r}: leave it out, or make it an argument of the constructor")
        module.chosen_scale = float(scale)
    module.chosen_policy = resize
    _check_built(method, module, grid_size, trainable, join, taken)
    return module if trainable is None else module.requires_grad_(trainable)


def _default(taken: Mapping[str, Parameter], option: str) -> Any:
    return taken[option].default if option in taken else None


def _check_built(
    name: str,
    module: PosEmbed,
    grid_size: Grid,
    trainable: bool | None,
    join: PosEmbedJoin | None,
    taken: Mapping[str, Parameter],
) -> None:
    """Refuse what a class of the user's was given and has not followed, and parts that its base class hides."""
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


def _check_options(name: str, cls: type[PosEmbed], join: PosEmbedJoin | None, theta: float | None) -> None:
    if join is not None and join not in cls.joins:
        allowed = ", ".join(cls.joins) or "null only"
        raise ValueError(f"`pos_embed.join` must be one of {allowed} for pos_embed={name!r}, got {join!r}")
    if theta is not None:
        rotary = " and ".join(repr(known) for known, cls in POS_EMBEDS.items() if _is_rotary(cls))
        raise ValueError(
            f"`pos_embed.theta` belongs to pos_embed={rotary}: leave it at null for pos_embed={name!r}, got {theta}"
        )


def _is_rotary(cls: type[PosEmbed]) -> bool:
    return "theta" in taken_by(cls)
