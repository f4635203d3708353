"""The position embedding of docs/tutorial_positions.md, where it is explained.

vitlab posbench coordinates.Coordinates --trust_imports coordinates --data DIR
"""

import torch
from torch import nn

from vitlab.layers.pos_embed import grid_cells
from vitlab.layers.pos_embed.added import AddedPosEmbed


class Coordinates(AddedPosEmbed):
    """A small network that maps row and column of a patch to a vector."""

    policies = ()  # it has no tensor of the grid's size, so that nothing is resized with the image

    def __init__(self, grid_size, embed_dim, width=64):
        super().__init__(grid_size)
        self.mlp = nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, embed_dim))

    def table(self, layer=0):
        y, x = grid_cells(self.grid_size)  # row and column of each patch
        cells = torch.stack([y / self.grid_size[0], x / self.grid_size[1]], dim=1)  # (N, 2), from 0 to 1
        return self.mlp(cells.to(self.mlp[0].weight))  # (N, D)
