"""Differential attention: two softmax maps, of which one is subtracted; Ye et al. 2024 (arXiv:2410.05258).

vitlab fit --config vit --model.attn=differential.Differential --trust_imports differential
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.layers import Attention, PosEmbed


class Differential(Attention):
    """Attention whose weights are softmax(q1 k1) - lambda softmax(q2 k2), followed by a normalization of each head.

    Args:
        dim: Token width D.
        num_heads: Number of heads A, whose width must be even.
        layer: Index of the block, from 0, which sets about which value lambda starts.
        **attention: Passed to :class:`Attention`.
    """

    def __init__(self, dim: int, num_heads: int, layer: int = 0, **attention: Any) -> None:
        super().__init__(dim, num_heads, **attention)
        half = dim // num_heads // 2
        self.qk_scale, self.start = half**-0.5, 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.lambdas = nn.Parameter(0.1 * torch.randn(4, half))  # of q1, k1, q2, k2
        self.head_norm = nn.RMSNorm(2 * half, eps=1e-5)

    def weigh(self, q: Tensor, k: Tensor, pos_embed: PosEmbed, layer: int) -> Tensor:
        """Return the difference of both maps, ``(B, A, L, L)``; rows sum to 1 - lambda."""
        bias = self.position_bias(q, k, pos_embed, layer)
        maps = []
        for one, other in zip(q.chunk(2, dim=-1), k.chunk(2, dim=-1), strict=True):
            logits = one @ other.transpose(-2, -1) * self.qk_scale
            maps.append((logits if bias is None else logits + bias).softmax(dim=-1))
        q1, k1, q2, k2 = self.lambdas
        return maps[0] - (torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + self.start) * maps[1]

    def mix(self, q: Tensor, k: Tensor, v: Tensor, pos_embed: PosEmbed, layer: int) -> Tensor:
        """Map queries, keys and values to ``(B, A, L, d)``, normalized head by head."""
        return self.head_norm(super().mix(q, k, v, pos_embed, layer)) * (1 - self.start)
