"""Axial rotation by the highest frequencies alone: p-RoPE, Barbero et al. 2024 (arXiv:2410.06205).

vitlab fit --config vit --model.pos_embed=p_rope.PRoPE --trust_imports p_rope
"""

import torch
from torch import Tensor

from vitlab.layers.pos_embed.rotary import RoPE2d


class PRoPE(RoPE2d):
    """:class:`RoPE2d` whose lowest frequencies are 0, so that their channels carry content alone.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        head_dim: Width d of a head, divisible by 4.
        num_prefix_tokens: Number of prefix tokens P.
        theta: Base of the frequencies.
        p: Share of the frequencies that rotate, from the highest; 1 is :class:`RoPE2d`, 0 has no positions.

    Raises:
        ValueError: ``p`` is not from 0 to 1.
    """

    def __init__(
        self,
        grid_size: tuple[int, int],
        head_dim: int,
        num_prefix_tokens: int = 0,
        theta: float = 100.0,
        p: float = 0.5,
    ) -> None:
        if not 0 <= p <= 1:
            raise ValueError(f"`p` must be from 0 to 1, got {p}")
        super().__init__(grid_size, head_dim, num_prefix_tokens, theta)
        self.p = p

    def cos_sin(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return ``(L, d / 2)`` cosines and sines, 1 and 0 for channels that do not rotate."""
        cos, sin = super().cos_sin(layer)
        quarter = self.head_dim // 4  # frequencies of each axis, the highest first
        turns = torch.arange(2 * quarter, device=cos.device) % quarter < round(self.p * quarter)
        return torch.where(turns, cos, 1.0), torch.where(turns, sin, 0.0)
