"""Contextual position encoding: positions count what a query attends to; Golovneva et al. 2024 (arXiv:2405.18719).

vitlab fit --config vit --model.attn=cope.CoPE --model.pos_embed=none --trust_imports cope
"""

from typing import Any

import torch
from torch import Tensor, nn

from vitlab.layers import Attention, PosEmbed


class CoPE(Attention):
    """Attention whose position of a key is the sum of the gates from it to the last key.

    The bias of a sum between two whole positions is interpolated.

    Args:
        dim: Token width D.
        num_heads: Number of heads A.
        positions: Number of positions; larger sums count as the last.
        **attention: Passed to :class:`Attention`.
    """

    def __init__(self, dim: int, num_heads: int, positions: int = 64, **attention: Any) -> None:
        super().__init__(dim, num_heads, **attention)
        self.table = nn.Parameter(torch.zeros(dim // num_heads, positions))  # (d, M)

    def score(self, q: Tensor, k: Tensor, pos_embed: PosEmbed, layer: int) -> Tensor:
        """Return the logits of :class:`Attention` plus the bias of the contextual positions, ``(B, A, L, L)``."""
        logits = super().score(q, k, pos_embed, layer)
        counted = logits.sigmoid().flip(-1).cumsum(-1).flip(-1).clamp(max=self.table.shape[1] - 1)
        below, above, biases = counted.floor().long(), counted.ceil().long(), q @ self.table
        return logits + biases.gather(-1, below).lerp(biases.gather(-1, above), counted - below)
