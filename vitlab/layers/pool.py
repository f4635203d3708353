"""What the head reads: a token, the mean or maximum of patch tokens, or what a module makes of all tokens."""

from typing import Literal, Unpack, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.class_paths import ClassSpec, build_part, find_class, name_and_args, word_of
from vitlab.layers.custom import output_shape
from vitlab.layers.linear import Linear
from vitlab.layers.mlp import ActChoice, Mlp
from vitlab.layers.norm import NormArgs, NormChoice, build_norm
from vitlab.layers.resample import Grid

PoolName = Literal["token", "avg", "max", "map"]
PoolChoice = PoolName | str | ClassSpec


class AttentionPoolArgs(NormArgs, total=False):
    """Arguments of :class:`AttentionPool` beside its sizes, as they are passed on.

    >>> by_attention: AttentionPoolArgs = {"mlp_ratio": 2.0, "norm_layer": "rmsnorm", "norm_eps": 1e-6}
    """

    mlp_ratio: float
    act_layer: ActChoice


class AttentionPool(nn.Module):
    """Multi-head attention pooling as in Zhai et al. 2022 (arXiv:2106.04560), state-dict keys as in timm.

    Args:
        dim: Token width D.
        num_heads: Number of heads A; divides ``dim``.
        mlp_ratio: Hidden width of the MLP, in units of ``dim``.
        act_layer: Activation of the MLP.
        norm_layer: Kind of normalization before the MLP.
        norm_eps: Epsilon of that normalization.

    Example:
        >>> AttentionPool(16, num_heads=2)(torch.randn(3, 5, 16)).shape
        torch.Size([3, 16])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mlp_ratio: float = 4.0,
        act_layer: ActChoice = "gelu",
        norm_layer: NormChoice = "layernorm",
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            rule = "must divide the width of the tokens that global_pool=map reads"
            raise ValueError(f"`num_heads` {rule}, got num_heads={num_heads} and a width of {dim}")
        self.num_heads = num_heads
        self.latent = nn.Parameter(torch.empty(1, 1, dim))
        nn.init.trunc_normal_(self.latent, std=dim**-0.5)
        self.q = Linear(dim, dim)
        self.kv = Linear(dim, 2 * dim)
        self.proj = Linear(dim, dim)
        self.norm = build_norm(norm_layer, dim, norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, D)`` to ``(B, D)``."""
        q = self.q(self.latent.expand(x.shape[0], -1, -1)).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(2, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # two of (B, A, N, d)
        x = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # (B, 1, D)
        x = x + self.mlp(self.norm(x))
        return x[:, 0]


def build_pool(
    global_pool: PoolChoice,
    dim: int,
    num_heads: int,
    num_prefix_tokens: int,
    grid_size: Grid,
    **by_attention: Unpack[AttentionPoolArgs],
) -> nn.Module | None:
    """Build the module of a pooling: of a class path, or by attention; None for token, avg and max.

    A class maps the ``(B, P + N, D)`` tokens to ``(B, D)``, and receives ``dim``, ``num_heads``,
    ``num_prefix_tokens`` and ``grid_size`` if its constructor has them.

    Args:
        global_pool: A word, or a class path with its arguments.
        dim: Token width D.
        num_heads: Number of attention heads A.
        num_prefix_tokens: Number of prefix tokens P.
        grid_size: Patch tokens per column and per row, (h, w), N = h * w.
        **by_attention: Further arguments of :class:`AttentionPool`, for the word map.

    Raises:
        ValueError: There is no such word or class, or it does not map ``(B, P + N, D)`` to ``(B, D)``.

    Example:
        >>> build_pool("avg", 8, num_heads=2, num_prefix_tokens=1, grid_size=(2, 3)) is None
        True
    """
    if word := word_of("global_pool", global_pool, get_args(PoolName)):
        return AttentionPool(dim, num_heads, **by_attention) if word == "map" else None
    path, args = name_and_args("global_pool", global_pool)
    offered = {"dim": dim, "num_heads": num_heads, "num_prefix_tokens": num_prefix_tokens, "grid_size": grid_size}
    cls = find_class("global_pool", path, nn.Module, get_args(PoolName))
    module: nn.Module = build_part("global_pool", cls, args, offered)
    tokens = torch.zeros(2, num_prefix_tokens + grid_size[0] * grid_size[1], dim)
    if tokens.is_meta:  # where a class that reads values cannot be called
        return module
    shape = output_shape("global_pool", path, module, tokens, f"(B, {tokens.shape[1]}, {dim}) tokens")
    if shape != (2, dim):
        raise ValueError(
            f"`global_pool`: {path} must map tokens (B, L, {dim}) to (B, {dim}), but gave {shape} for B = 2"
        )
    return module
