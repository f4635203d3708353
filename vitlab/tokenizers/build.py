"""Build a tokenizer from its name or class path."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn

from vitlab.class_paths import ClassSpec, build, find_class, name_and_args
from vitlab.tokenizers.conv import ConvStem
from vitlab.tokenizers.patch import PatchEmbed
from vitlab.tokenizers.splits import pair
from vitlab.tokenizers.t2t import T2TTokenizer

TokenizerName = Literal["patch", "t2t", "conv"]
TokenizerChoice = TokenizerName | str | ClassSpec
Tokenizer = PatchEmbed | T2TTokenizer | ConvStem


def build_tokenizer(
    tokenizer: TokenizerChoice,
    img_size: tuple[int, int],
    in_chans: int,
    embed_dim: int,
    *,
    patch_size: int | Sequence[int],
    norm_eps: float,
    flexi_patch: Sequence[int] | None = None,
    **t2t: Any,
) -> Any:
    """Build the tokenizer called ``tokenizer``; ``t2t`` are arguments of T2T, of which others use what they have.

    The class of a class path receives those of these values that its constructor has, maps ``(B, C, H, W)`` to
    ``(B, N, D)``, and has ``grid_size``, rows and columns of tokens, and ``patch_size``, pixels between tokens.

    Example:
        >>> build_tokenizer("patch", (32, 32), 3, 8, patch_size=4, norm_eps=1e-6).grid_size
        (8, 8)
    """
    if flexi_patch is not None and tokenizer != "patch":
        raise ValueError(f"`flexi_patch` belongs to tokenizer='patch', got {flexi_patch} for {tokenizer!r}")
    pair("patch_size", patch_size)  # refuse a wrong value even if the tokenizer does not use it
    match tokenizer:
        case "patch":
            return PatchEmbed(img_size, patch_size, in_chans, embed_dim, flexi_patch)
        case "t2t":
            return T2TTokenizer(img_size, in_chans, embed_dim, norm_eps=norm_eps, fused=True, **t2t)
        case "conv":
            windows = ("t2t_kernels", "t2t_strides", "t2t_dilations", "t2t_padding", "t2t_dim")
            known = {name: t2t[name] for name in windows if name in t2t}
            return ConvStem(img_size, in_chans, embed_dim, **known)
    sizes = {"img_size": img_size, "in_chans": in_chans, "embed_dim": embed_dim}
    return _build_class(tokenizer, {**sizes, "patch_size": patch_size, "norm_eps": norm_eps, **t2t})


def _build_class(tokenizer: Any, offered: dict[str, Any]) -> nn.Module:
    """Build the tokenizer of a class path, and check the shape of its tokens."""
    path, args = name_and_args("tokenizer", tokenizer)
    cls = find_class("tokenizer", path, nn.Module, get_args(TokenizerName))
    module: Any = build("tokenizer", cls, args, offered)
    for name in ("grid_size", "patch_size"):
        if not hasattr(module, name):
            raise ValueError(f"`tokenizer`: {path} must have a `{name}`, height and width")
    (h, w), images = module.grid_size, torch.zeros(1, offered["in_chans"], *offered["img_size"])
    try:
        with torch.no_grad():
            shape = tuple(module.eval()(images).shape)
    except Exception as error:  # foreign code can raise anything
        text = " ".join(str(error).split())
        raise ValueError(f"`tokenizer`: {path} does not take images {tuple(images.shape)}: {text}") from error
    if shape != (expected := (1, h * w, offered["embed_dim"])):
        raise ValueError(f"`tokenizer`: {path} must map an image to {expected} for its grid of {h} x {w}, got {shape}")
    return module.train()
