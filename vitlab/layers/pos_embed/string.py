"""STRING: trained rotations of queries and keys whose logits depend on offsets only."""

from types import MappingProxyType

import torch
from torch import Tensor, nn

from vitlab.layers.pos_embed.base import PosEmbedJoin
from vitlab.layers.pos_embed.rotary import RoPEMixed
from vitlab.layers.precision import without_autocast
from vitlab.layers.resample import Grid


class String(RoPEMixed):
    """Trained commuting rotations of all channels of a head: STRING, Schenck et al. 2025 (arXiv:2502.02562).

    Every such rotation is P R(y, x) P^T for an orthogonal P and the rotations R of rope_mixed. P is the Cayley
    transform (I - S)(I + S)^-1 of a trained skew-symmetric S, their Cayley-STRING. S starts at 0, where this is
    rope_mixed.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        head_dim: Width d of a head, divisible by 4.
        num_heads: Number of heads A, each with its own frequencies and its own P.
        depth: Number of blocks, each with its own values if ``join`` is every_layer.
        num_prefix_tokens: Number of prefix tokens P.
        theta: Base of the initial frequencies, above 1.
        join: Values for every block (every_layer), or one set for all (every_layer_shared).

    Example:
        >>> String((2, 3), head_dim=8, num_heads=2).rotate(torch.randn(1, 2, 6, 8), layer=0).shape
        torch.Size([1, 2, 6, 8])
    """

    stacks = MappingProxyType({"freqs": 1, "skew": 0})

    def __init__(
        self,
        grid_size: Grid,
        head_dim: int,
        num_heads: int,
        depth: int = 1,
        num_prefix_tokens: int = 0,
        theta: float = 10.0,
        join: PosEmbedJoin = "every_layer",
    ) -> None:
        super().__init__(grid_size, head_dim, num_heads, depth, num_prefix_tokens, theta, join)
        sets = self.freqs.shape[1]
        self.skew = nn.Parameter(torch.zeros(sets, num_heads, head_dim, head_dim, dtype=torch.float32))

    def channels(self, layer: int) -> Tensor:
        """Return the orthogonal ``(A, d, d)`` matrices P of block ``layer``, from the upper triangle of ``skew``."""
        upper = self.skew[layer % len(self.skew)].triu(1)
        S, one = upper - upper.mT, torch.eye(upper.shape[-1], dtype=upper.dtype, device=upper.device)
        return torch.linalg.solve(one + S, one - S)  # the two commute

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        """Map ``(B, A, L, d)`` queries or keys to ``(B, A, L, d)``, in float32 inside."""
        with without_autocast(x):
            P = self.channels(layer)
            return (super().rotate(x.to(P.dtype) @ P, layer) @ P.mT).to(x.dtype)
