"""An additive position embedding: a small network maps the row and column of a patch to what its token receives.

vitlab posbench coordinates.Coordinates --trust_imports coordinates --data DIR
"""

import torch
from torch import Tensor, nn

from vitlab.layers import PosEmbed


class Coordinates(PosEmbed):
    """A network of (y, x), both from -1 to 1 over the grid, whose output is added to the patch tokens.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        embed_dim: Token width D.
        width: Hidden units.
    """

    def __init__(self, grid_size: tuple[int, int], embed_dim: int, width: int = 64) -> None:
        super().__init__(grid_size)
        self.net = nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, embed_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, D)`` patch tokens to ``(B, N, D)``."""
        sides = [torch.linspace(-1, 1, n, device=x.device) for n in self.grid_size]
        return x + self.net(torch.cartesian_prod(*sides))
