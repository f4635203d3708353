"""Trained position embeddings that are added to the patch tokens."""

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.layers.pos_embed.base import PosEmbed, PosEmbedJoin
from vitlab.layers.resample import Grid, ResizePolicy, resize_axis, resize_table


class AddedPosEmbed(PosEmbed):
    """Add a vector to each patch token, once or before every block.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        join: Add once after the tokenizer (stem), or before each block, with a table for each (every_layer) or one.

    Example:
        >>> class Ramp(AddedPosEmbed):
        ...     def table(self, layer=0):
        ...         return torch.arange(6.0)[:, None].expand(6, 4)
        >>> Ramp((2, 3))(torch.zeros(1, 6, 4))[0, :, 0]
        tensor([0., 1., 2., 3., 4., 5.])
    """

    joins: tuple[PosEmbedJoin, ...] = ("stem", "every_layer", "every_layer_shared")
    trains = True
    scale = 1.0  # factor on the vectors: ``scale`` in the ``init_args`` of a method
    policies: tuple[ResizePolicy, ...] = ("interpolate",)
    stacks = MappingProxyType({"weight": 0, "row": 0, "col": 0})

    def __init__(self, grid_size: Grid, join: PosEmbedJoin = "stem") -> None:
        super().__init__(grid_size)
        self.join = join

    def table(self, layer: int = 0) -> Tensor:
        """Return the ``(N, D)`` vectors to add before block ``layer``, in raster order."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, D)`` patch tokens to ``(B, N, D)``."""
        return x + self._ordered_table(0) if self.join == "stem" else x

    def enter(self, x: Tensor, layer: int) -> Tensor:
        """Map the ``(B, L, D)`` tokens that enter block ``layer`` to ``(B, L, D)``; prefix tokens get zeros."""
        if self.join == "stem":
            return x
        table = self._ordered_table(layer)
        return x + F.pad(table, (0, 0, x.shape[1] - table.shape[-2], 0))  # (L, D), or (B, L, D)

    def _ordered_table(self, layer: int) -> Tensor:
        table = self.table(layer) if self.scale == 1 else self.scale * self.table(layer)
        # the gradient of F.embedding is faster than that of indexing
        return table if self.order is None else F.embedding(self.order, table)


class Learned(AddedPosEmbed):
    """One trained vector for each grid cell, Dosovitskiy et al. 2021 (arXiv:2010.11929).

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        embed_dim: Token width D.
        depth: Number of blocks, each with a table of its own if ``join`` is every_layer.
        join: See :class:`AddedPosEmbed`.

    Example:
        >>> Learned((2, 3), embed_dim=8)(torch.zeros(1, 6, 8)).shape
        torch.Size([1, 6, 8])
    """

    def __init__(self, grid_size: Grid, embed_dim: int, depth: int = 1, join: PosEmbedJoin = "stem") -> None:
        super().__init__(grid_size, join)
        num_tables = depth if join == "every_layer" else 1
        self.weight = nn.Parameter(torch.empty(num_tables, grid_size[0] * grid_size[1], embed_dim))  # (J, N, D)
        nn.init.trunc_normal_(self.weight, std=0.02)

    def table(self, layer: int = 0) -> Tensor:
        """Return the ``(N, D)`` table of block ``layer``."""
        return self.weight[layer % len(self.weight)]

    def _resized_state(
        self, state: dict[str, Tensor], old_grid: Grid, policy: ResizePolicy, antialias: bool
    ) -> dict[str, Tensor]:
        return state | {"weight": resize_table(state["weight"], old_grid, self.grid_size, antialias)}


class Factorized(AddedPosEmbed):
    """A trained vector for each row plus one for each column, Dehghani et al. 2023 (arXiv:2307.06304).

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        embed_dim: Token width D.
        depth: Number of blocks, each with vectors of its own if ``join`` is every_layer.
        join: See :class:`AddedPosEmbed`.

    Example:
        >>> Factorized((2, 3), embed_dim=8)(torch.zeros(1, 6, 8)).shape
        torch.Size([1, 6, 8])
    """

    def __init__(self, grid_size: Grid, embed_dim: int, depth: int = 1, join: PosEmbedJoin = "stem") -> None:
        super().__init__(grid_size, join)
        num_tables = depth if join == "every_layer" else 1
        self.row = nn.Parameter(torch.empty(num_tables, grid_size[0], embed_dim))  # (J, h, D)
        self.col = nn.Parameter(torch.empty(num_tables, grid_size[1], embed_dim))  # (J, w, D)
        nn.init.normal_(self.row, std=0.02)
        nn.init.normal_(self.col, std=0.02)

    def table(self, layer: int = 0) -> Tensor:
        """Return the ``(N, D)`` sums of row and column vectors of block ``layer``."""
        row, col = self.row[layer % len(self.row)], self.col[layer % len(self.col)]
        return (row[:, None] + col).flatten(0, 1)

    def _resized_state(
        self, state: dict[str, Tensor], old_grid: Grid, policy: ResizePolicy, antialias: bool
    ) -> dict[str, Tensor]:
        h, w = self.grid_size
        return state | {"row": resize_axis(state["row"], h), "col": resize_axis(state["col"], w)}
