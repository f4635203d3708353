"""Linear attention: its cost grows with the number of tokens, not with the square of it; Katharopoulos et al. 2020.

arXiv:2006.16236. vitlab fit --config vit --model.attn=linear.Linear --trust_imports linear
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vitlab.layers import Attention, PosEmbed


class Linear(Attention):
    """Attention with weights f(q) f(k) / sum f(q) f(k), where f = elu + 1; it sums f(k) v over the tokens only once.

    There are no logits, so a position embedding that acts on them is refused with a ``ValueError``, as is
    ``attn_dropout``: :meth:`mix` has no weights to drop.
    """

    def __init__(self, dim: int, num_heads: int, **attention: Any) -> None:
        super().__init__(dim, num_heads, **attention)
        if self.attn_dropout:
            raise ValueError(f"linear attention has no weights to drop: leave attn_dropout={self.attn_dropout} out")

    def weigh(self, q: Tensor, k: Tensor, pos_embed: PosEmbed, layer: int) -> Tensor:
        """Return the weights, ``(B, A, L, L)``, for analyses; :meth:`mix` never computes them."""
        q, k = self.features(q, k, pos_embed, layer)
        products = q @ k.mT
        return products / products.sum(dim=-1, keepdim=True)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, pos_embed: PosEmbed, layer: int) -> Tensor:
        """Map queries ``(B, A, L, d)``, keys and values to ``(B, A, L, d)``."""
        if "weigh" in vars(self):  # an analysis records the weights
            return super().mix(q, k, v, pos_embed, layer)
        q, k = self.features(q, k, pos_embed, layer)
        return q @ (k.mT @ v) / (q @ k.sum(dim=2, keepdim=True).mT)

    def features(self, q: Tensor, k: Tensor, pos_embed: PosEmbed, layer: int) -> tuple[Tensor, Tensor]:
        """Return positive features of queries and keys, ``(B, A, L, d)`` each."""
        if self.position_bias(q, k, pos_embed, layer) is not None:
            raise ValueError(f"linear attention has no logits for {type(pos_embed).__name__} to act on: take another")
        return F.elu(q) + 1, F.elu(k) + 1
