"""Activations and normalizations that have no word of their own: any of torch.nn's, or a class path."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.classes import build, find_class, name_and_args


class PerToken(nn.Module):
    """A normalization that expects channels second, such as BatchNorm1d, of tokens, whose channels are last.

    Args:
        norm: The normalization; each token is a sample to it.

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


def build_own(key: str, value: Any, dim: int, words: Iterable[str], offered: Mapping[str, Any]) -> nn.Module:
    """Build the layer that ``key`` names by a class of torch.nn or a class path, and see that it keeps ``(B, L, dim)``.

    Args:
        key: The argument, for messages.
        value: Name or path of a class, or a mapping of ``class_path`` and ``init_args``.
        dim: Width of the tokens that it gets.
        words: What else the argument can be.
        offered: Arguments that the class gets if it asks for them.

    Example:
        >>> build_own("act_layer", {"class_path": "LeakyReLU", "init_args": {"negative_slope": 0.2}}, 8, ["gelu"], {})
        LeakyReLU(negative_slope=0.2)
    """
    path, args = name_and_args(key, value)
    layer = build(key, find_class(key, path, nn.Module, words, home="torch.nn"), args, offered)
    if isinstance(layer, nn.modules.batchnorm._BatchNorm | nn.GroupNorm):
        layer = PerToken(layer)
    try:
        with torch.no_grad():
            shape = tuple(layer.eval()(torch.zeros(2, 3, dim)).shape)
    except Exception as error:  # code of others fails as it likes
        raise ValueError(
            f"`{key}`: {path} does not take (B, L, {dim}) tokens: {' '.join(str(error).split())}"
        ) from error
    if shape != (2, 3, dim):
        raise ValueError(f"`{key}`: {path} must keep the shape of tokens, and makes {shape} of (2, 3, {dim})")
    return layer.train()
