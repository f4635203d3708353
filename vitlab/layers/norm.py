"""Normalisation layers by name."""

from typing import Literal, get_args

from torch import nn

NormName = Literal["layernorm", "rmsnorm"]


def build_norm(norm_layer: NormName, dim: int, norm_eps: float) -> nn.Module:
    """Build the normalisation of ``dim`` channels called ``norm_layer``.

    LayerNorm: Ba et al. 2016 (arXiv:1607.06450); RMSNorm: Zhang and Sennrich 2019 (arXiv:1910.07467).

    Example:
        >>> build_norm("rmsnorm", 8, norm_eps=1e-6)
        RMSNorm((8,), eps=1e-06, elementwise_affine=True)
    """
    match norm_layer:
        case "layernorm":
            return nn.LayerNorm(dim, eps=norm_eps)
        case "rmsnorm":
            return nn.RMSNorm(dim, eps=norm_eps)
    raise ValueError(f"`norm_layer` must be one of {', '.join(get_args(NormName))}, got {norm_layer!r}")
