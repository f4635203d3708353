"""Position embeddings that are added to the patch tokens."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.layers.pos_embed.base import Grid, PosEmbed, PosEmbedJoin, grid_cells


class AddedPosEmbed(PosEmbed):
    """A vector for each patch token, added once or before every block.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        join: Add after the tokenizer (stem), or before each block: its own table (every_layer) or one for all.
    """

    def __init__(self, grid_size: Grid, join: PosEmbedJoin = "stem") -> None:
        super().__init__(grid_size)
        self.join = join

    def table(self, layer: int = 0) -> Tensor:
        """Return the ``(N, D)`` vectors that are added before block ``layer``, in raster order."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, D)`` patch tokens to ``(B, N, D)``."""
        return x + self._ordered_table(0) if self.join == "stem" else x

    def enter(self, x: Tensor, layer: int) -> Tensor:
        """Map the ``(B, L, D)`` tokens that enter block ``layer`` to ``(B, L, D)``; prefix tokens get zeros."""
        if self.join == "stem":
            return x
        table = self._ordered_table(layer)
        return x + F.pad(table, (0, 0, x.shape[1] - len(table), 0))  # (L, D)

    def _ordered_table(self, layer: int) -> Tensor:
        table = self.table(layer)
        return table if self.order is None else table[self.order]


class Learned(AddedPosEmbed):
    """One trained vector for each cell, Dosovitskiy et al. 2021 (arXiv:2010.11929).

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        embed_dim: Token width D.
        depth: Number of blocks, each with a table of its own if ``join`` is every_layer.
        join: See :class:`AddedPosEmbed`.
    """

    def __init__(self, grid_size: Grid, embed_dim: int, depth: int = 1, join: PosEmbedJoin = "stem") -> None:
        super().__init__(grid_size, join)
        num_tables = depth if join == "every_layer" else 1
        self.weight = nn.Parameter(torch.empty(num_tables, grid_size[0] * grid_size[1], embed_dim))  # (J, N, D)
        nn.init.trunc_normal_(self.weight, std=0.02)

    def table(self, layer: int = 0) -> Tensor:
        """Return the ``(N, D)`` table of block ``layer``."""
        return self.weight[layer % len(self.weight)]


class SinCos(AddedPosEmbed):
    """A table of sines and cosines: fixed and unsaved, or trained from there. See its two subclasses.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        embed_dim: Token width D.
        depth: Number of blocks, each with a table of its own if it is trained and ``join`` is every_layer.
        join: See :class:`AddedPosEmbed`.
        trainable: Whether the table is trained; it starts at the formula.
    """

    weight: Tensor  # (J, N, D); J is 1 unless every layer trains its own

    def __init__(
        self, grid_size: Grid, embed_dim: int, depth: int = 1, join: PosEmbedJoin = "stem", trainable: bool = False
    ) -> None:
        super().__init__(grid_size, join)
        self.embed_dim = embed_dim
        self.trainable = trainable
        table = self.formula().float()[None]  # (1, N, D)
        if trainable:
            self.weight = nn.Parameter(table.repeat(depth if join == "every_layer" else 1, 1, 1))
        else:
            self.register_buffer("weight", table, persistent=False)

    def formula(self) -> Tensor:
        """Return the ``(N, D)`` table in float64."""
        raise NotImplementedError

    def table(self, layer: int = 0) -> Tensor:
        """Return the ``(N, D)`` table of block ``layer``."""
        return self.weight[layer % len(self.weight)]

    def fill_tables(self) -> None:
        """Compute the fixed table."""
        if not self.trainable:
            self.weight = self.formula().to(self.weight)[None]


class SinCos1d(SinCos):
    """Sines and cosines of the raster index, Vaswani et al. 2017 (arXiv:1706.03762), as T2T-ViT uses them.

    Patch n has position n + 1 with or without a class token: position 0 was the class token's in T2T-ViT.
    """

    def formula(self) -> Tensor:
        """Return the ``(N, D)`` table in float64."""
        h, w = self.grid_size
        positions = torch.arange(1, h * w + 1, dtype=torch.float64)
        channels = torch.arange(self.embed_dim)
        angles = positions[:, None] / 10_000.0 ** (2 * (channels // 2).double() / self.embed_dim)
        return torch.where(channels % 2 == 0, angles.sin(), angles.cos())


class SinCos2d(SinCos):
    """Sines and cosines of column and row. Published codes share the name and differ in channel order and frequencies.

    mae: He et al. 2022 (arXiv:2111.06377); moco: Chen et al. 2021 (arXiv:2104.02057); big_vision: Beyer et al. 2022
    (arXiv:2205.01580); timm: the default of its ``build_sincos2d_pos_embed``.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        embed_dim: Token width D, divisible by 4.
        depth: See :class:`SinCos`.
        join: See :class:`AddedPosEmbed`.
        trainable: See :class:`SinCos`.
        style: Whose channel order and frequencies to follow.
    """

    def __init__(
        self,
        grid_size: Grid,
        embed_dim: int,
        depth: int = 1,
        join: PosEmbedJoin = "stem",
        trainable: bool = False,
        style: Literal["mae", "moco", "big_vision", "timm"] = "mae",
    ) -> None:
        if embed_dim % 4:
            raise ValueError(f"`embed_dim` must be divisible by 4 for pos_embed='sincos2d', got embed_dim={embed_dim}")
        if style == "big_vision" and embed_dim < 8:
            raise ValueError(f"`embed_dim` must be at least 8 for style='big_vision', got embed_dim={embed_dim}")
        nn.Module.__init__(self)  # so that formula() below can read the style
        self.style = style
        super().__init__(grid_size, embed_dim, depth, join, trainable)

    def formula(self) -> Tensor:
        """Return the ``(N, D)`` table in float64."""
        y, x = grid_cells(self.grid_size)
        quarter = self.embed_dim // 4
        steps = quarter - 1 if self.style == "big_vision" else quarter
        omega = 10_000.0 ** -(torch.arange(quarter, dtype=torch.float64) / steps)
        x_angles, y_angles = x[:, None] * omega, y[:, None] * omega  # (N, D / 4) each
        match self.style:
            case "mae" | "big_vision":
                parts = [x_angles.sin(), x_angles.cos(), y_angles.sin(), y_angles.cos()]
            case "moco":
                parts = [y_angles.sin(), y_angles.cos(), x_angles.sin(), x_angles.cos()]
            case "timm":
                parts = [y_angles.sin(), x_angles.sin(), y_angles.cos(), x_angles.cos()]
        return torch.cat(parts, dim=1)
