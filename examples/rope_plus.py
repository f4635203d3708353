"""The imaginary part of rotated queries and keys as more heads: RoPE++, Liu et al. 2025 (arXiv:2512.07525).

vitlab fit --config vit --model.attn=rope_plus.RoPEPlus --model.pos_embed=rope2d --trust_imports rope_plus
"""

from typing import Any

import torch
from torch import Tensor, nn

from vitlab.layers import Attention, PosEmbed


class RoPEPlus(Attention):
    """Attention with two maps of each head, one from the real part and one from the imaginary part of its products.

    With a pair of channels as a complex number, the logits of the first map are the real part of q conj(k), as in
    plain attention. Those of the second are its imaginary part, for which queries turn by -90 degrees. Pairs are
    neighbors, as those of rope2d and rope_mixed are by default.
    This is the paper's RoPE++ of equal cache (EC).

    Args:
        dim: Token width D.
        num_heads: Number of heads A, each of which gives two maps.
        **attention: Passed to :class:`Attention`.
    """

    def __init__(self, dim: int, num_heads: int, **attention: Any) -> None:
        super().__init__(dim, num_heads, **attention)
        self.proj = nn.Linear(2 * dim, dim)
        self.gate = None if self.gate is None else nn.Linear(dim, 2 * dim)

    def weigh(self, q: Tensor, k: Tensor, pos_embed: PosEmbed, layer: int) -> Tensor:
        """Return the maps by the real parts, then those by the imaginary parts, ``(B, 2 A, L, L)``."""
        a, b = q.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([b, -a], dim=-1).flatten(-2)
        real, imaginary = super().weigh(q, k, pos_embed, layer), super().weigh(turned, k, pos_embed, layer)
        return torch.cat([real, imaginary], dim=1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, pos_embed: PosEmbed, layer: int) -> Tensor:
        """Map queries, keys and values to ``(B, 2 A, L, d)``."""
        return super().mix(q, k, torch.cat([v, v], dim=1), pos_embed, layer)
