"""Normalizations by name, of torch.nn, or of a class path."""

from typing import Literal, TypedDict, get_args

from torch import nn

from vitlab.class_paths import ClassSpec, word_of
from vitlab.layers.custom import build_custom

NormName = Literal["layernorm", "rmsnorm"]
NormChoice = NormName | str | ClassSpec


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
