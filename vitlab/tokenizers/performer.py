"""The token layer of T2T-ViT with linear attention, between the soft splits."""

import math

import torch
from torch import Tensor, nn

from vitlab.layers.mlp import ActChoice, build_act
from vitlab.layers.norm import NormChoice, build_norm
from vitlab.layers.precision import without_autocast
from vitlab.layers.recompute import recomputed


class TokenPerformer(nn.Module):
    """Token layer with linear attention, Yuan et al. 2021 (arXiv:2101.11986).

    The attention is that of Choromanski et al. 2021 (arXiv:2009.14794) with shorter rows of ``w``, the frozen random
    features. They are saved with the weights, because other features give another function. Dropout is 0.1, as in the
    published models, whatever the rest of the network uses.

    Args:
        in_dim: Width of the input tokens.
        dim: Width of the output tokens, at least 2.
        mlp_ratio: Hidden width of the MLP, in units of ``dim``.
        qkv_bias: Whether the query, key and value projections have a bias.
        value_skip: Whether the values are added to the output of attention.
        act_layer: Activation of the MLP.
        norm_layer: Kind of both normalizations.
        norm_eps: Epsilon of both normalizations.
        dropout: Dropout rate after attention and after the MLP, 0 to 1.
        features: Number of random features m; None is ``dim // 2``.
        relu: Whether a feature is ``relu(w x) + 0.001``, their generalized attention, instead of the exponential.

    Example:
        >>> TokenPerformer(49, 64)(torch.randn(1, 9, 49)).shape
        torch.Size([1, 9, 64])
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        norm_eps: float = 1e-5,
        *,
        mlp_ratio: float = 1.0,
        qkv_bias: bool = True,
        value_skip: bool = True,
        act_layer: ActChoice = "gelu",
        norm_layer: NormChoice = "layernorm",
        dropout: float = 0.1,
        features: int | None = None,
        relu: bool = False,
    ) -> None:
        super().__init__()
        m = dim // 2 if features is None else features
        if dim < 2 or m < 1:
            raise ValueError(f"`t2t_dim` must be at least 2 for t2t_attn='performer', got {dim} and {m} features")
        hidden = int(dim * mlp_ratio)
        self.value_skip, self.relu = value_skip, relu
        self.norm1 = build_norm(norm_layer, in_dim, norm_eps)
        self.kqv = nn.Linear(in_dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = build_norm(norm_layer, dim, norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden), build_act(act_layer, hidden), nn.Linear(hidden, dim), nn.Dropout(dropout)
        )
        self.dropout = nn.Dropout(dropout)
        self.w: Tensor
        self.register_buffer("w", random_features(m, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, in_dim)`` to ``(B, N, dim)``."""
        k, q, v = self.kqv(self.norm1(x)).chunk(3, dim=-1)  # three of (B, N, dim); the keys come first
        y = self.dropout(self.proj(self.attend(q, k, v)))
        x = v + y if self.value_skip else y
        return x + recomputed(self.norm2, x, self.mlp)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map three of ``(B, N, dim)`` to ``(B, N, dim)``: linear attention over positive random features.

        Computed at least in float32. In float16 the features overflow and the epsilon is 0, hence 0 / 0; in bfloat16
        they are off by several percent. Autocast would cast the products back, so it is switched off here.
        """
        dtype = torch.promote_types(v.dtype, torch.float32)
        with without_autocast(v):
            q, k = self.features(q.to(dtype)), self.features(k.to(dtype))  # (B, N, m)
            context = k.transpose(-2, -1) @ v.to(dtype)  # (B, m, dim)
            total = k.sum(dim=-2, keepdim=True).transpose(-2, -1)  # (B, m, 1)
            return (q @ context / (q @ total + 1e-8)).to(v.dtype)

    def features(self, x: Tensor) -> Tensor:
        """Map ``(B, N, dim)`` to ``(B, N, m)`` positive features: ``exp(w x - |x|^2 / 2) / sqrt(m)``, or ``relu``."""
        w = self.w.to(x.dtype)
        if self.relu:
            return torch.relu(x @ w.T) / math.sqrt(len(w)) + 1e-3
        return torch.exp(x @ w.T - x.square().sum(dim=-1, keepdim=True) / 2) / math.sqrt(len(w))


def random_features(m: int, dim: int) -> Tensor:
    """Return ``(m, dim)`` random features: orthogonal rows of length sqrt(min(m, dim)), in blocks of ``dim`` rows.

    Example:
        >>> w = random_features(32, 64)
        >>> torch.allclose(w @ w.T, 32 * torch.eye(32), atol=1e-4)
        True
    """
    if m <= dim:
        return nn.init.orthogonal_(torch.empty(m, dim)) * math.sqrt(m)
    rows = [nn.init.orthogonal_(torch.empty(min(dim, m - start), dim)) for start in range(0, m, dim)]
    return torch.cat(rows) * math.sqrt(dim)
