"""Position embeddings that are added to the patch tokens: trained, by a formula, or by Fourier features."""

import math
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.pos_embed.base import PosEmbed, PosEmbedJoin
from vitlab.layers.pos_embed.checked import in_precision_of
from vitlab.layers.pos_embed.resizable import grid_cells, resizes
from vitlab.layers.resample import Grid, ResizePolicy, resize_axis, resize_table
from vitlab.ranges import check_word

StyleName = Literal["mae", "moco", "big_vision", "timm"]


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
    chosen_scale = 1.0  # factor on the vectors: ``scale`` of the ``init_args``
    policies: tuple[ResizePolicy, ...] = ("interpolate",)

    def __init__(self, grid_size: Grid, join: PosEmbedJoin = "stem") -> None:
        super().__init__(grid_size)
        self.join = join

    def table(self, layer: int = 0) -> Tensor:
        """Return the ``(N, D)`` vectors to add before block ``layer``, in raster order, not yet times the scale."""
        raise NotImplementedError(f"{type(self).__name__} has no `table(layer)`, which returns (N, D)")

    def added(self, layer: int = 0) -> Tensor:
        """Return the ``(N, D)`` vectors that are added before block ``layer``: the table times :attr:`chosen_scale`.

        Raises:
            UsageError: The table of a class of the user's has other dimensions, or neither N rows nor one for all.
        """
        table, num_patches = self.table(layer), self.grid_size[0] * self.grid_size[1]
        if table.ndim != 2 or (table.shape[0] != num_patches and table.shape[0] != 1):
            raise self._misshapen(table)
        table = table if table.shape[0] == num_patches else table.expand(num_patches, -1)
        return table if self.chosen_scale == 1 else self.chosen_scale * table

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, D)`` patch tokens to ``(B, N, D)``."""
        return x + self._ordered_table(0, x) if self.join == "stem" else x

    def enter(self, x: Tensor, layer: int) -> Tensor:
        """Map the ``(B, L, D)`` tokens that enter block ``layer`` to ``(B, L, D)``; prefix tokens get zeros."""
        if self.join == "stem":
            return x
        table = self._ordered_table(layer, x)
        return x + F.pad(table, (0, 0, x.shape[1] - table.shape[-2], 0))  # (L, D), or (B, L, D)

    def _ordered_table(self, layer: int, x: Tensor) -> Tensor:
        table = in_precision_of(x, self.added(layer))
        if table.shape[1] != x.shape[-1]:
            raise self._misshapen(table, x.shape[-1])
        # the gradient of F.embedding is faster than that of indexing
        return table if self.order is None else F.embedding(self.order, table)

    def _misshapen(self, table: Tensor, width: int | str = "D") -> UsageError:
        num_patches = self.grid_size[0] * self.grid_size[1]
        rule = f"(N, {width}), a vector for each of the {num_patches} patches or one for all"
        return UsageError(f"`table` of {type(self).__name__} must return {rule}, got {tuple(table.shape)}")

    def _stuck(self) -> str | None:
        """Return "table" if a larger grid gets no row for each patch, and the class does not resize one."""
        if resizes(self):
            return super()._stuck()
        h, w = self.grid_size
        try:
            with torch.no_grad():
                rows = self._at((h + 1, w + 1)).table(0).shape[-2]
            follows = rows in (1, (h + 1) * (w + 1))
        except Exception as error:  # it may not take such a grid, or have no table
            follows = isinstance(error, NotImplementedError) or not isinstance(error, IndexError | RuntimeError)
        return super()._stuck() if follows else "table"


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

    stacks = MappingProxyType({"weight": 0})

    def __init__(self, grid_size: Grid, embed_dim: int, depth: int = 1, join: PosEmbedJoin = "stem") -> None:
        super().__init__(grid_size, join)
        num_tables = self.num_sets(depth)
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

    stacks = MappingProxyType({"row": 0, "col": 0})

    def __init__(self, grid_size: Grid, embed_dim: int, depth: int = 1, join: PosEmbedJoin = "stem") -> None:
        super().__init__(grid_size, join)
        num_tables = self.num_sets(depth)
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


class SinCosPosEmbed(AddedPosEmbed):
    """A table that a formula gives: the common part of :class:`SinCos1d` and :class:`SinCos2d`.

    A fixed table is not saved, unless it was interpolated from another grid: then ``load_state_dict`` reads it from the
    key ``interpolated``, and it is saved from then on.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        embed_dim: Token width D.
        join: See :class:`AddedPosEmbed`.
        trainable: Whether the table is trained.

    Example:
        >>> position: SinCosPosEmbed = SinCos2d((2, 3), embed_dim=8)
        >>> position.formula((4, 6)).shape  # at another grid
        torch.Size([24, 8])
    """

    stacks = MappingProxyType({"weight": 0})
    weight: Tensor  # (J, N, D); J is 1 unless every layer trains its own
    interpolated: Tensor | None  # (1, N, D)

    def __init__(self, grid_size: Grid, embed_dim: int, join: PosEmbedJoin, trainable: bool) -> None:
        super().__init__(grid_size, join)
        self.embed_dim = embed_dim
        self.trainable = trainable
        self.register_buffer("interpolated", None)

    def formula(self, grid_size: Grid, trained_grid: Tensor | None = None) -> Tensor:
        """Return the ``(N, D)`` table in float64; coordinates are in cells of ``trained_grid`` if given."""
        raise NotImplementedError

    def table(self, layer: int = 0) -> Tensor:
        """Return the ``(N, D)`` table of block ``layer``."""
        weight = self.weight if self.interpolated is None else self.interpolated
        return weight[layer % len(weight)]

    def fill_tables(self) -> None:
        """Compute the fixed table."""
        if not self.trainable:
            table = self.formula(self.grid_size, self.trained_grid).to(self.weight)[None]
            self.register_buffer("weight", table, persistent=False)

    def policies_for(self, state: dict[str, Tensor]) -> tuple[ResizePolicy, ...]:
        """Return only interpolate for a trained or interpolated table, every policy of the class otherwise."""
        return ("interpolate",) if "weight" in state or "interpolated" in state else super().policies_for(state)

    def _create_table(self, depth: int) -> None:
        table = self.formula(self.grid_size).float()[None]  # (1, N, D)
        if self.trainable:
            self.weight = nn.Parameter(table.repeat(self.num_sets(depth), 1, 1))
        else:
            self.register_buffer("weight", table, persistent=False)

    def _resized_state(
        self, state: dict[str, Tensor], old_grid: Grid, policy: ResizePolicy, antialias: bool
    ) -> dict[str, Tensor]:
        if policy != "interpolate":
            return super()._resized_state(state, old_grid, policy, antialias)
        key = "weight" if self.trainable else "interpolated"
        table = state[key] if key in state else self.formula(old_grid).float()[None]
        return state | {key: resize_table(table, old_grid, self.grid_size, antialias)}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if not self.trainable and prefix + "interpolated" in state_dict:
            self.interpolated = self.weight.clone()  # super() fills it in
        super()._load_from_state_dict(state_dict, prefix, *args)


class SinCos1d(SinCosPosEmbed):
    """Sines and cosines of the raster index, Vaswani et al. 2017 (arXiv:1706.03762), as in T2T-ViT.

    Patch n has position n + 1, with or without a class token: T2T-ViT, Yuan et al. 2021 (arXiv:2101.11986), gives
    position 0 to its class token.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        embed_dim: Token width D.
        depth: Number of blocks, each with a table of its own if it is trained and ``join`` is every_layer.
        join: See :class:`AddedPosEmbed`.
        trainable: Whether the table is trained; it starts at the formula.

    Example:
        >>> SinCos1d((1, 2), embed_dim=2).table()  # sin 1, cos 1; sin 2, cos 2
        tensor([[ 0.8415,  0.5403],
                [ 0.9093, -0.4161]])
    """

    policies: tuple[ResizePolicy, ...] = ("interpolate", "extrapolate")

    def __init__(
        self, grid_size: Grid, embed_dim: int, depth: int = 1, join: PosEmbedJoin = "stem", trainable: bool = False
    ) -> None:
        super().__init__(grid_size, embed_dim, join, trainable)
        self._create_table(depth)

    def formula(self, grid_size: Grid, trained_grid: Tensor | None = None) -> Tensor:
        """Return the ``(N, D)`` table in float64."""
        positions = torch.arange(1, grid_size[0] * grid_size[1] + 1, dtype=torch.float64)
        channels = torch.arange(self.embed_dim)
        angles = positions[:, None] / 10_000.0 ** (2 * (channels // 2).double() / self.embed_dim)
        return torch.where(channels % 2 == 0, angles.sin(), angles.cos())


class SinCos2d(SinCosPosEmbed):
    """Sines and cosines of column and row; libraries differ in channel order and frequencies, see ``style``.

    mae: He et al. 2022 (arXiv:2111.06377); moco: Chen et al. 2021 (arXiv:2104.02057); big_vision: Beyer et al. 2022
    (arXiv:2205.01580); timm: the default of its ``build_sincos2d_pos_embed``.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        embed_dim: Token width D, divisible by 4.
        depth: Number of blocks, each with a table of its own if it is trained and ``join`` is every_layer.
        join: See :class:`AddedPosEmbed`.
        trainable: Whether the table is trained; it starts at the formula.
        style: Library whose channel order and frequencies to follow.

    Example:
        >>> SinCos2d((2, 2), embed_dim=4).table()  # sin x, cos x, sin y, cos y
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0000, 1.0000],
                [0.0000, 1.0000, 0.8415, 0.5403],
                [0.8415, 0.5403, 0.8415, 0.5403]])
    """

    policies: tuple[ResizePolicy, ...] = ("rescale", "interpolate", "extrapolate")

    def __init__(
        self,
        grid_size: Grid,
        embed_dim: int,
        depth: int = 1,
        join: PosEmbedJoin = "stem",
        trainable: bool = False,
        style: StyleName = "mae",
    ) -> None:
        if embed_dim % 4:
            raise ValueError(f"`embed_dim` must be divisible by 4 for pos_embed='sincos2d', got embed_dim={embed_dim}")
        if style == "big_vision" and embed_dim < 8:
            raise ValueError(f"`embed_dim` must be at least 8 for style='big_vision', got embed_dim={embed_dim}")
        check_word("style", style, get_args(StyleName))
        super().__init__(grid_size, embed_dim, join, trainable)
        self.style = style
        self._create_table(depth)

    def formula(self, grid_size: Grid, trained_grid: Tensor | None = None) -> Tensor:
        """Return the ``(N, D)`` table in float64."""
        y, x = grid_cells(grid_size, trained_grid, half_cell=0.5)
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


class Fourier(AddedPosEmbed):
    """Trained Fourier features of row and column through an MLP, Li et al. 2021 (arXiv:2106.02795).

    The features are cos and sin of W (y, x), divided by the root of their number; W starts at N(0, 1 / gamma ** 2).

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        embed_dim: Token width D, even; also the number of features and the hidden width of the MLP.
        gamma: Initial scale of the features, in cells per radian.

    Example:
        >>> Fourier((2, 3), embed_dim=8)(torch.zeros(1, 6, 8)).shape
        torch.Size([1, 6, 8])
    """

    joins = ("stem",)
    policies: tuple[ResizePolicy, ...] = ("rescale", "extrapolate")
    cells: Tensor  # (N, 2): y, x

    def __init__(self, grid_size: Grid, embed_dim: int, gamma: float = 10.0) -> None:
        super().__init__(grid_size)
        if embed_dim % 2 or gamma <= 0:
            raise ValueError(f"`embed_dim` must be even and `gamma` above 0 for fourier, got {embed_dim} and {gamma}")
        self.freqs = nn.Parameter(torch.randn(embed_dim // 2, 2) / gamma)
        self.mlp = nn.Sequential(nn.Linear(embed_dim, embed_dim), nn.GELU(), nn.Linear(embed_dim, embed_dim))
        self.fill_tables()

    def fill_tables(self) -> None:
        """Compute the coordinates of all patches."""
        cells = torch.stack(grid_cells(self.grid_size, self.trained_grid, half_cell=0.5), dim=1)
        self.register_buffer("cells", cells.to(self.freqs), persistent=False)

    def table(self, layer: int = 0) -> Tensor:
        """Return the ``(N, D)`` vectors, the same for every layer."""
        angles = (self.cells[:, None] * self.freqs).sum(-1)  # products, not a matmul: autocast leaves them in float32
        features = torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(2 * len(self.freqs))
        return self.mlp(features)
