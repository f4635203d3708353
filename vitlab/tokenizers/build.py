"""Build a tokenizer from its name or class path."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_type_hints

import torch
from torch import nn

from vitlab.class_paths import ClassSpec, build_part, find_class, name_and_args
from vitlab.errors import UsageError, did_you_mean
from vitlab.layers.custom import output_shape
from vitlab.named_kwargs import check_types
from vitlab.tokenizers.conv import ConvStem
from vitlab.tokenizers.patch import PatchEmbed
from vitlab.tokenizers.splits import pair
from vitlab.tokenizers.t2t import T2TTokenizer
from vitlab.tokenizers.token_layers import build_token_layer

TokenizerName = Literal["patch", "t2t", "conv"]
TokenizerChoice = TokenizerName | str | ClassSpec
Tokenizer = PatchEmbed | T2TTokenizer | ConvStem
TOKENIZERS: dict[str, type[Tokenizer]] = {"patch": PatchEmbed, "t2t": T2TTokenizer, "conv": ConvStem}


def build_tokenizer(
    tokenizer: TokenizerChoice,
    img_size: tuple[int, int],
    in_chans: int,
    embed_dim: int,
    *,
    patch_size: int | Sequence[int],
    norm_eps: float,
) -> Any:
    """Build a tokenizer: by a word, with arguments of its own, or of a class path.

    The options of a word are those of its class, and of :func:`build_token_layer` for ``t2t``. A class of yours
    receives the sizes that its constructor has, maps ``(B, C, H, W)`` to ``(B, N, D)``, and has ``grid_size``, rows
    and columns of tokens, and ``patch_size``, pixels between tokens.

    Example:
        >>> build_tokenizer("patch", (32, 32), 3, 8, patch_size=4, norm_eps=1e-6).grid_size
        (8, 8)
        >>> t2t = {"class_path": "t2t", "init_args": {"t2t_attn": "transformer"}}
        >>> build_tokenizer(t2t, (32, 32), 3, 8, patch_size=4, norm_eps=1e-6).grid_size
        (2, 2)
    """
    pair("patch_size", patch_size)  # refuse a wrong value even if the tokenizer does not use it
    offered: dict[str, Any] = {"img_size": img_size, "in_chans": in_chans, "embed_dim": embed_dim}
    offered |= {"patch_size": patch_size, "norm_eps": norm_eps}
    word, args = name_and_args("tokenizer", tokenizer)
    if (cls := TOKENIZERS.get(word)) is None:
        return _build_class(word, args, offered)
    options = _options(cls)
    for name in args:
        if name not in options:
            raise UsageError(f"tokenizer={word} takes no argument `{name}`{did_you_mean(name, options)}")
    check_types(options, args, "tokenizer")
    taken = inspect.signature(cls).parameters
    return cls(**{name: value for name, value in offered.items() if name in taken}, **args)


def _options(cls: Any) -> dict[str, Any]:
    """Return the options of a tokenizer, and of its token layers, with their types: what has a default, by name."""
    options: dict[str, Any] = {}
    for taker in (build_token_layer, cls.__init__) if cls is T2TTokenizer else (cls.__init__,):
        kinds, parameters = get_type_hints(taker), inspect.signature(taker).parameters.values()
        options |= {p.name: kinds[p.name] for p in parameters if p.default is not p.empty and p.name != "norm_eps"}
    return options


def _build_class(path: str, args: Mapping[str, Any], offered: Mapping[str, Any]) -> nn.Module:
    """Build the tokenizer of a class path, and check the shape of its tokens."""
    cls = find_class("tokenizer", path, nn.Module, TOKENIZERS)
    module: Any = build_part("tokenizer", cls, args, offered)
    for name in ("grid_size", "patch_size"):
        if not hasattr(module, name):
            raise ValueError(f"`tokenizer`: {path} must have a `{name}`, height and width")
    if not isinstance(module.grid_size, Sequence) or len(module.grid_size) != 2:
        raise ValueError(f"`tokenizer`: `grid_size` of {path} must be rows and columns, got {module.grid_size!r}")
    (h, w), images = module.grid_size, torch.zeros(1, offered["in_chans"], *offered["img_size"])
    shape = output_shape("tokenizer", path, module, images, f"images {tuple(images.shape)}")
    if shape != (expected := (1, h * w, offered["embed_dim"])):
        raise ValueError(f"`tokenizer`: {path} must map an image to {expected} for its grid of {h} x {w}, got {shape}")
    return module
