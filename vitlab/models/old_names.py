"""The one table of options that were arguments of the network, and the part that each belongs to now.

Flags, config files, runs and checkpoints of older versions are read by it; state dicts do not change.
"""

import sys
from collections.abc import Container, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple, TypedDict, Unpack

from vitlab.class_paths import name_and_args
from vitlab.layers.attention import AttnChoice
from vitlab.layers.block import BlockChoice
from vitlab.layers.mlp import ActChoice
from vitlab.layers.norm import NormChoice
from vitlab.layers.pos_embed import POS_EMBEDS, PosEmbedChoice, PosEmbedJoin
from vitlab.layers.resample import ResizePolicy
from vitlab.tokenizers.build import TokenizerChoice
from vitlab.tokenizers.splits import PaddingName
from vitlab.tokenizers.token_layers import T2TAttn


class Old(NamedTuple):
    """Where an option has gone.

    Args:
        part: The argument of the network that names the part.
        name: Its name among the ``init_args`` of that part.
        default: What it was if nobody gave it.

    Example:
        >>> OLD["rope_theta"]
        Old(part='pos_embed', name='theta', default=None)
    """

    part: str
    name: str
    default: Any


WINDOWS = {"t2t_kernels": [7, 3, 3], "t2t_strides": None, "t2t_dilations": None, "t2t_padding": "zero", "t2t_dim": 64}
_LAYERS = {"t2t_attn": "performer", "t2t_num_heads": 1, "t2t_mlp_ratio": 1.0, "t2t_qkv_bias": None}
_LAYERS |= {"t2t_qk_scale": None, "t2t_value_skip": True, "t2t_act_layer": "gelu", "t2t_norm_layer": "layernorm"}
_LAYERS |= {"t2t_dropout": None, "t2t_features": None}
_ATTN: dict[str, object] = {"qk_scale": None, "qk_norm": False, "value_skip": False, "se_reduction": 0, "ghost": False}
_ATTN |= {"attn_gate": False, "attn_dropout": 0.0}
OLD = {
    **{name: Old("tokenizer", name, default) for name, default in {"flexi_patch": None, **WINDOWS, **_LAYERS}.items()},
    **{name: Old("attn", name, default) for name, default in _ATTN.items()},
    "dense_blocks": Old("block", "dense_blocks", None),
    "dense_growth": Old("block", "dense_growth", 64),
    "rope_theta": Old("pos_embed", "theta", None),
    "pos_embed_join": Old("pos_embed", "join", None),
    "pos_embed_trainable": Old("pos_embed", "trainable", None),
    "pos_embed_resize": Old("pos_embed", "resize", None),
}
DEFAULTS = {"tokenizer": "patch", "block": "plain", "attn": "softmax", "pos_embed": "learned"}
_TAKES = {"patch": ["flexi_patch"], "t2t": [*WINDOWS, *_LAYERS], "conv": [*WINDOWS]}


class OldArgs(TypedDict, total=False):
    """Options that belong to parts now, by the names that they had; None is not given.

    >>> arguments: OldArgs = {"qk_norm": True}
    """

    flexi_patch: Sequence[int] | None
    qk_scale: float | None
    qk_norm: bool | None
    value_skip: bool | None
    pos_embed_trainable: bool | None
    pos_embed_join: PosEmbedJoin | None
    pos_embed_resize: ResizePolicy | None
    rope_theta: float | None
    se_reduction: int | None
    ghost: bool | None
    dense_blocks: Sequence[int] | None
    dense_growth: int | None
    attn_gate: bool | None
    attn_dropout: float | None
    t2t_attn: T2TAttn | None
    t2t_kernels: Sequence[int | Sequence[int]] | None
    t2t_strides: Sequence[int | Sequence[int]] | None
    t2t_dilations: Sequence[int | Sequence[int]] | None
    t2t_padding: PaddingName | None
    t2t_dim: int | Sequence[int] | None
    t2t_num_heads: int | None
    t2t_mlp_ratio: float | None
    t2t_qkv_bias: bool | None
    t2t_qk_scale: float | None
    t2t_value_skip: bool | None
    t2t_act_layer: ActChoice | None
    t2t_norm_layer: NormChoice | None
    t2t_dropout: float | None
    t2t_features: int | None


def upgrade(arguments: Mapping[str, Any], weak: Container[str] = ()) -> dict[str, Any]:
    """Return arguments of a network or task with every option in the part that understands it.

    Args:
        arguments: By new and old names; an old one that is None or its default says nothing.
        weak: Old names that do not override what a part says.

    Raises:
        ValueError: An option was never one of the chosen part.

    Example:
        >>> upgrade({"depth": 3, "qk_norm": True, "attn_gate": False})
        {'depth': 3, 'attn': {'class_path': 'softmax', 'init_args': {'qk_norm': True}}}
    """
    new = {name: value for name, value in arguments.items() if name not in OLD}
    for part in DEFAULTS:
        given = {n: v for n, v in arguments.items() if n in OLD and OLD[n].part == part and v is not None}
        if given:
            before = DEFAULTS[part] if new.get(part) is None else new[part]
            if (value := _with_options(part, before, given, weak)) != before:
                new[part] = value
    return new


def new_name(old: str) -> str:
    """Return where an option is given now.

    Example:
        >>> new_name("qk_norm")
        'attn.init_args.qk_norm'
    """
    return f"{OLD[old].part}.init_args.{OLD[old].name}"


def _with_options(part: str, value: Any, given: Mapping[str, Any], weak: Container[str]) -> Any:
    if part == "pos_embed" and isinstance(value, list | tuple):
        return _with_policy(value, given)
    path, args = name_and_args(part, value)
    if part == "block" and given.get("dense_blocks") is not None:
        path = "dense"
    options = {}
    for old, option in given.items():
        name, default = OLD[old].name, OLD[old].default
        says_nothing = option == default or list(option) == default if isinstance(option, tuple) else option == default
        if (
            (name in args and old in weak)
            or (name not in args and says_nothing)
            or not _belongs(part, path, old, option)
        ):
            continue
        options[name] = option
    return {"class_path": path, "init_args": args | options} if options else value


def _belongs(part: str, path: str, old: str, option: Any) -> bool:
    """Return whether the part takes an option; those of other tokenizers and blocks were always ignored."""
    if part == "block":
        return path == "dense"
    if part != "tokenizer":
        return True
    if old == "flexi_patch" and path != "patch":
        raise ValueError(f"`flexi_patch` belongs to tokenizer='patch', got {option} for {path!r}")
    if path in _TAKES:
        return old in _TAKES[path]
    module, _, name = path.rpartition(".")
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and old in signature(cls).parameters


def _with_policy(entries: Sequence[Any], given: Mapping[str, Any]) -> list[Any]:
    """Return a list of position embeddings with the policy of resizing in each that has it."""
    for old in given:
        if old != "pos_embed_resize":
            form = "{class_path: learned, init_args: {join: every_layer}}"
            raise ValueError(f"`{old}` cannot be given for a list of `pos_embed`; give it to an entry, as in {form}")
    policy, new = given["pos_embed_resize"], []
    for entry in entries:
        path, args = name_and_args("pos_embed", entry)
        cls = POS_EMBEDS.get(path)  # type: ignore[call-overload]
        has_it = cls is not None and policy in cls.policies
        new.append({"class_path": path, "init_args": {"resize": policy} | args} if has_it else entry)
    if new == list(entries):
        raise ValueError(f"`pos_embed_resize` {policy!r} is not a policy of any entry of `pos_embed`")
    return new


def moved(
    tokenizer: TokenizerChoice, pos_embed: PosEmbedChoice, block: BlockChoice, attn: AttnChoice, **old: Unpack[OldArgs]
) -> tuple[TokenizerChoice, PosEmbedChoice, BlockChoice, AttnChoice]:
    """Return tokenizer, position embedding, block and attention with the options that were given by old names.

    Example:
        >>> moved("patch", "rope2d", "plain", "softmax", rope_theta=50.0)[1]
        {'class_path': 'rope2d', 'init_args': {'theta': 50.0}}
    """
    new = upgrade({"tokenizer": tokenizer, "pos_embed": pos_embed, "block": block, "attn": attn, **old})
    return new["tokenizer"], new["pos_embed"], new["block"], new["attn"]
