"""Relative positions on keys and values, a vector for each offset of cells; Wu et al. 2021 (arXiv:2107.14222).

vitlab fit --config vit --model.attn=relative_values.RelativeValues --model.pos_embed=none \
    --trust_imports relative_values
"""

from typing import Any

import torch
from torch import Tensor, nn

from vitlab.layers import Attention, PosEmbed, grid_cells


class RelativeValues(Attention):
    """Attention with q (k + a) / sqrt(d) as logits and w (v + b) as output: a and b depend on the offset of two cells.

    Args:
        dim: Token width D.
        num_heads: Number of heads A, which share both tables.
        grid_size: Rows and columns of patches; offsets of a larger image count as the largest.
        num_prefix_tokens: Number of prefix tokens P, which have vectors of their own.
        **attention: Passed to :class:`Attention`.
    """

    def __init__(
        self, dim: int, num_heads: int, grid_size: tuple[int, int], num_prefix_tokens: int, **attention: Any
    ) -> None:
        super().__init__(dim, num_heads, **attention)
        self.sides, self.num_prefix_tokens = grid_size, num_prefix_tokens
        count = (2 * grid_size[0] - 1) * (2 * grid_size[1] - 1) + 1  # the last one for prefix tokens
        self.keys = nn.Parameter(torch.zeros(count, dim // num_heads))
        self.values = nn.Parameter(torch.zeros(count, dim // num_heads))

    def offsets(self, pos_embed: PosEmbed, device: torch.device) -> Tensor:
        """Return the row of the tables for each query and key, ``(L, L)``.

        Raises:
            ValueError: Tokens are missing, in another order, or of several images.
        """
        if pos_embed.order is not None or pos_embed.owner is not None:
            raise ValueError("RelativeValues needs all tokens of one grid in their places")
        (h, w), P = self.sides, self.num_prefix_tokens
        y, x = (side.long().to(device) for side in grid_cells(pos_embed.grid_size))
        dy = (y[:, None] - y).clamp(1 - h, h - 1) + h - 1
        dx = (x[:, None] - x).clamp(1 - w, w - 1) + w - 1
        return nn.functional.pad(dy * (2 * w - 1) + dx, (P, 0, P, 0), value=len(self.keys) - 1)

    def score(self, q: Tensor, k: Tensor, pos_embed: PosEmbed, layer: int) -> Tensor:
        """Return ``(B, A, L, L)`` logits."""
        rows = self.keys[self.offsets(pos_embed, q.device)]  # (L, L, d)
        return super().score(q, k, pos_embed, layer) + torch.einsum("baid,ijd->baij", q * self.qk_scale, rows)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, pos_embed: PosEmbed, layer: int) -> Tensor:
        """Return ``(B, A, L, d)``."""
        weights = nn.functional.dropout(self.weigh(q, k, pos_embed, layer), self.attn_dropout, self.training)
        return weights @ v + torch.einsum("baij,ijd->baid", weights, self.values[self.offsets(pos_embed, q.device)])
