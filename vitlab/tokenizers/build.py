"""Build a tokenizer from its name or class path."""

import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import nn

from vitlab.class_paths import ClassSpec, build_part, find_class, name_and_args
from vitlab.errors import UsageError, did_you_mean
from vitlab.layers.custom import output_shape
from vitlab.named_kwargs import check_types
from vitlab.tokenizers.conv import ConvStem
from vitlab.tokenizers.patch import PatchEmbed
from vitlab.tokenizers.splits import pair
from vitlab.tokenizers.t2t import T2TArgs, T2TTokenizer

TokenizerName = Literal["patch", "t2t", "conv"]
TokenizerChoice = TokenizerName | str | ClassSpec
Tokenizer = PatchEmbed | T2TTokenizer | ConvStem


class ImageSizes(TypedDict):
    """The sizes that every tokenizer is built for.

    >>> sizes: ImageSizes = {"img_size": (32, 32), "in_chans": 3, "embed_dim": 8}
    """

    img_size: tuple[int, int]
    in_chans: int
    embed_dim: int


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

    ``patch`` takes ``flexi_patch``, ``t2t`` all of :class:`T2TArgs`, and ``conv`` those of the windows. A class
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
    word, args = name_and_args("tokenizer", tokenizer)
    sizes: ImageSizes = {"img_size": img_size, "in_chans": in_chans, "embed_dim": embed_dim}
    if word in get_args(TokenizerName):
        check_options(word, args)
    match word:
        case "patch":
            return PatchEmbed(**sizes, patch_size=patch_size, **args)
        case "t2t":
            return T2TTokenizer(**sizes, norm_eps=norm_eps, **args)
        case "conv":
            return ConvStem(**sizes, **args)
    return _build_class(tokenizer, sizes, {"patch_size": patch_size, "norm_eps": norm_eps})


def check_options(word: str, args: Mapping[str, Any]) -> None:
    """Refuse arguments that the tokenizer of a word does not have.

    Example:
        >>> check_options("patch", {"flexi_patch": [8, 16]})
    """
    windows = ["t2t_kernels", "t2t_strides", "t2t_dilations", "t2t_padding", "t2t_dim"]
    known = {"patch": ["flexi_patch"], "conv": windows, "t2t": [*typing.get_type_hints(T2TArgs), "fused"]}[word]
    for name in args:
        if name not in known:
            raise UsageError(f"tokenizer={word} takes no argument `{name}`{did_you_mean(name, known)}")
    check_types({"flexi_patch": Sequence[int] | None, **typing.get_type_hints(T2TArgs)}, args, "tokenizer")


def _build_class(tokenizer: TokenizerChoice, sizes: ImageSizes, more: Mapping[str, Any]) -> nn.Module:
    """Build the tokenizer of a class path, and check the shape of its tokens."""
    path, args = name_and_args("tokenizer", tokenizer)
    cls = find_class("tokenizer", path, nn.Module, get_args(TokenizerName))
    module: Any = build_part("tokenizer", cls, args, {**sizes, **more})
    for name in ("grid_size", "patch_size"):
        if not hasattr(module, name):
            raise ValueError(f"`tokenizer`: {path} must have a `{name}`, height and width")
    if not isinstance(module.grid_size, Sequence) or len(module.grid_size) != 2:
        raise ValueError(f"`tokenizer`: `grid_size` of {path} must be rows and columns, got {module.grid_size!r}")
    (h, w), images = module.grid_size, torch.zeros(1, sizes["in_chans"], *sizes["img_size"])
    shape = output_shape("tokenizer", path, module, images, f"images {tuple(images.shape)}")
    if shape != (expected := (1, h * w, sizes["embed_dim"])):
        raise ValueError(f"`tokenizer`: {path} must map an image to {expected} for its grid of {h} x {w}, got {shape}")
    return module
