"""Normalizations by name, and layers of any kind given as a class: one of torch.nn, or a class path."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import Tensor, nn

from vitlab.class_paths import ClassSpec, build, choice_text, find_class, name_and_args

NormName = Literal["layernorm", "rmsnorm"]
NormChoice = NormName | str | ClassSpec


class PerToken(nn.Module):
    """Apply a normalization that expects channels second, such as BatchNorm1d, to tokens, whose channels are last.

    Args:
        norm: The normalization; it sees each token as a sample.

    Example:
        >>> PerToken(nn.BatchNorm1d(8))(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., D)`` to ``(..., D)``."""
        return self.norm(x.flatten(0, -2)).view_as(x)


def word_of(key: str, value: Any, words: Iterable[str]) -> str | None:
    """Return the word that ``key`` is set to, alone or as a ``class_path``; None for a class.

    Raises:
        ValueError: The word has arguments.

    Example:
        >>> word_of("act_layer", {"class_path": "gelu"}, ["gelu"]), word_of("act_layer", "Tanh", ["gelu"])
        ('gelu', None)
    """
    word, args = name_and_args(key, value)
    if word in words and args:
        raise ValueError(f"`{key}`: {word} takes no arguments, got {choice_text(value)}")
    return word if word in words else None


def build_custom(key: str, value: Any, dim: int, words: Iterable[str], offered: Mapping[str, Any]) -> nn.Module:
    """Build a layer from a class of torch.nn or a class path, and check that it keeps the shape ``(B, L, dim)``.

    Args:
        key: Name of the argument, for error messages.
        value: Name or path of a class, or a mapping with ``class_path`` and ``init_args``.
        dim: Token width D.
        words: The names that the argument also accepts, for error messages.
        offered: Arguments that are passed to the class if its constructor has them.

    Example:
        >>> build_custom("act_layer", {"class_path": "LeakyReLU", "init_args": {"negative_slope": 0.2}}, 8, [], {})
        LeakyReLU(negative_slope=0.2)
    """
    path, args = name_and_args(key, value)
    layer = build(key, find_class(key, path, nn.Module, words, home="torch.nn"), args, offered)
    if isinstance(layer, nn.modules.batchnorm._BatchNorm | nn.GroupNorm):
        layer = PerToken(layer)
    try:
        with torch.no_grad():
            shape = tuple(layer.eval()(torch.zeros(2, 3, dim)).shape)
    except Exception as error:  # foreign code can raise anything
        raise ValueError(
            f"`{key}`: {path} does not take (B, L, {dim}) tokens: {' '.join(str(error).split())}"
        ) from error
    if shape != (2, 3, dim):
        raise ValueError(f"`{key}`: {path} must keep the shape of tokens, but maps (2, 3, {dim}) to {shape}")
    return layer.train()


class NormArgs(TypedDict):
    """Kind and epsilon of a normalization, as they are passed on.

    >>> norms: NormArgs = {"norm_layer": "rmsnorm", "norm_eps": 1e-6}
    """

    norm_layer: NormChoice
    norm_eps: float


def build_norm(norm_layer: NormChoice, dim: int, norm_eps: float) -> nn.Module:
    """Build a normalization of ``dim`` channels: ``norm_layer`` is a name, a class of torch.nn or a class path.

    LayerNorm: Ba et al. 2016 (arXiv:1607.06450); RMSNorm: Zhang and Sennrich 2019 (arXiv:1910.07467). A class
    receives ``dim`` (also by torch's names for it) and ``eps`` if its constructor has them.

    Example:
        >>> build_norm("rmsnorm", 8, norm_eps=1e-6)
        RMSNorm((8,), eps=1e-06, elementwise_affine=True)
    """
    match word_of("norm_layer", norm_layer, get_args(NormName)):
        case "layernorm":
            return nn.LayerNorm(dim, eps=norm_eps)
        case "rmsnorm":
            return nn.RMSNorm(dim, eps=norm_eps)
    widths = dict.fromkeys(("dim", "normalized_shape", "num_features", "num_channels"), dim)
    return build_custom("norm_layer", norm_layer, dim, get_args(NormName), {**widths, "eps": norm_eps})
