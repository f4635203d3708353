"""Position embeddings that rotate queries and keys."""

import math
from types import MappingProxyType
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.layers.pos_embed.base import PosEmbed, PosEmbedJoin
from vitlab.layers.pos_embed.resizable import grid_cells
from vitlab.layers.precision import without_autocast
from vitlab.layers.resample import Grid, ResizePolicy
from vitlab.ranges import check_arguments, check_word

PairName = Literal["interleaved", "half"]


class RotaryPosEmbed(PosEmbed):
    """Rotate each pair of channels of a query or key by an angle that depends on its cell.

    Pairs are neighbors (2i, 2i + 1), or with ``pairs = "half"`` channel i of the first and second half of the head.

    Prefix tokens are not rotated. A class token can therefore sense absolute positions: the logit of its query and a
    key depends on the angle of the key's cell.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        num_prefix_tokens: Number of prefix tokens P.

    Example:
        >>> class QuarterTurn(RotaryPosEmbed):
        ...     def cos_sin(self, layer):
        ...         return torch.zeros(6, 2), torch.ones(6, 2)
        >>> QuarterTurn((2, 3), num_prefix_tokens=0).rotate(torch.ones(1, 1, 6, 4), layer=0)[0, 0, 0]
        tensor([-1.,  1., -1.,  1.])
    """

    policies: tuple[ResizePolicy, ...] = ("extrapolate", "rescale")
    keeps_float32 = True  # angles in bfloat16 are off by about 1 %
    pairs: PairName = "interleaved"

    def __init__(self, grid_size: Grid, num_prefix_tokens: int) -> None:
        super().__init__(grid_size)
        self.num_prefix_tokens = num_prefix_tokens

    def cos_sin(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of block ``layer``, ``(L, d / 2)`` or ``(A, L, d / 2)`` each."""
        raise NotImplementedError

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        """Map ``(B, A, L, d)`` queries or keys to ``(B, A, L, d)``, in float32 inside."""
        order = self.token_order(self.num_prefix_tokens)
        cos, sin = (self.gather_tokens(table, order, table.ndim - 2) for table in self.cos_sin(layer))
        if self.pairs == "half":
            a, b = x.chunk(2, dim=-1)  # (B, A, L, d / 2) each
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
        if torch.compiler.is_compiling():  # compilers fuse real products, and have no kernels for complex ones
            a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)
        dtype = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
        rotated = _as_complex(x.to(dtype)) * torch.complex(cos.to(dtype), sin.to(dtype))
        return torch.view_as_real(rotated).flatten(-2).to(x.dtype)


def _as_complex(x: Tensor) -> Tensor:
    """Return neighboring channels as complex numbers, ``(..., d)`` to ``(..., d / 2)``; a view if strides allow."""
    *strides, last = x.stride()
    in_pairs = last == 1 and not any(step % 2 for step in [*strides, x.storage_offset()])
    x = x if in_pairs else x.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


class RoPE2d(RotaryPosEmbed):
    """Axial rotation, Heo et al. 2024 (arXiv:2403.13298): half of the channels encode the column, half the row.

    With coordinates "normalized", pairs "half" and axes "yx" it is the method of DINOv3, Simeoni et al. 2025
    (arXiv:2508.10104): cells lie in [-1, 1] on either axis, and angles are 2 pi times as large. Training can then move
    the coordinates of each batch at random: ``shift`` adds up to this much to each axis, ``jitter`` scales each axis
    and ``rescale`` both axes by up to this factor or its inverse.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        head_dim: Width d of a head, divisible by 4.
        num_prefix_tokens: Number of prefix tokens P.
        theta: Base of the frequencies, above 1.
        coordinates: Cell indices ("index") or [-1, 1] over the image ("normalized"); None is index.
        pairs: Channels that rotate together: neighbors ("interleaved") or of two halves ("half"); None is interleaved.
        axes: Coordinate of the first half of the pairs, then of the second: "xy" or "yx"; None is "xy".
        shift: Largest shift of normalized coordinates in training; 0 is none.
        jitter: Largest factor on each axis in training; 1 is none.
        rescale: Largest factor on both axes in training; 1 is none.
        register_theta: Base for prefix tokens: the last square number of them rotate as a grid, which below 4 tokens is
            one that stays; None rotates none.

    Example:
        >>> RoPE2d((2, 3), head_dim=8).rotate(torch.randn(1, 2, 6, 8), layer=0).shape
        torch.Size([1, 2, 6, 8])
    """

    joins = ("every_layer_shared",)
    cos: Tensor  # (L, d / 2)
    sin: Tensor  # (L, d / 2)

    def __init__(
        self,
        grid_size: Grid,
        head_dim: int,
        num_prefix_tokens: int = 0,
        theta: float = 100.0,
        coordinates: Literal["index", "normalized"] | None = None,
        pairs: PairName | None = None,
        axes: Literal["xy", "yx"] | None = None,
        shift: float = 0.0,
        jitter: float = 1.0,
        rescale: float = 1.0,
        register_theta: float | None = None,
    ) -> None:
        super().__init__(grid_size, num_prefix_tokens)
        self.is_explicit = None not in (coordinates, pairs, axes)  # weights of other libraries do not store these three
        coordinates, pairs, axes = coordinates or "index", pairs or "interleaved", axes or "xy"
        check_head_width("rope2d", head_dim)
        check_arguments(theta=theta, register_theta=register_theta)
        if register_theta is not None and not num_prefix_tokens:
            raise ValueError(
                f"`register_theta` rotates prefix tokens, and the network has none: leave it out, or set "
                f"`model.reg_tokens`, got {register_theta}"
            )
        check_word("coordinates", coordinates, ("index", "normalized"))
        check_word("pairs", pairs, ("interleaved", "half"))
        check_word("axes", axes, ("xy", "yx"))
        if shift < 0 or min(jitter, rescale) < 1:
            raise ValueError(f"`shift` must be at least 0, `jitter` and `rescale` 1, got {shift}, {jitter}, {rescale}")
        moves = shift > 0 or max(jitter, rescale) > 1
        if moves and coordinates == "index":
            raise ValueError("`shift`, `jitter` and `rescale` apply only to coordinates='normalized'")
        self.head_dim, self.theta, self.coordinates, self.pairs, self.axes = head_dim, theta, coordinates, pairs, axes
        self.shift, self.jitter, self.rescale, self.moves = shift, jitter, rescale, moves
        self.register_theta = register_theta
        self.policies = ("rescale",) if coordinates == "normalized" else self.policies
        self.fill_tables()

    def fill_tables(self) -> None:
        """Compute cosines and sines."""
        like = self.cos if hasattr(self, "cos") else torch.empty(0, dtype=torch.float32)
        for name, table in zip(("cos", "sin"), self._tables(self._cells()), strict=True):
            self.register_buffer(name, table.to(like), persistent=False)

    def for_batch(self) -> Self:
        """Return this method, in training with coordinates that are drawn for one batch."""
        if not (self.training and self.moves):
            return self
        factors = self.cos.new_empty(2, 1).uniform_(-1, 1) * math.log(self.jitter)
        factors = factors + self.cos.new_empty(1, 1).uniform_(-1, 1) * math.log(self.rescale)
        shift = self.cos.new_empty(2, 1).uniform_(-1, 1) * self.shift
        cos, sin = self._tables((self._cells().to(self.cos) + shift) * factors.exp())
        drawn = self.view()
        drawn._buffers.update(cos=cos, sin=sin)
        return drawn

    def cos_sin(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return ``(L, d / 2)`` cosines and sines, the same in every block."""
        return self.cos, self.sin

    def _cells(self) -> Tensor:
        """Return the ``(2, N)`` rows and columns of the patches in float64, as indices or in [-1, 1]."""
        cells = torch.stack(grid_cells(self.grid_size, self.trained_grid))
        if self.coordinates == "index":
            return cells
        return torch.stack([2 * (axis + 0.5) / side - 1 for axis, side in zip(cells, self.grid_size, strict=True)])

    def _tables(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(L, d / 2)`` cosines and sines for patches at ``(2, N)`` rows and columns."""
        angles, num_fixed = self._angles(cells, self.theta), self.num_prefix_tokens
        if self.register_theta is not None:  # ViT-5, Wang et al. 2026 (arXiv:2602.08071)
            side = math.isqrt(self.num_prefix_tokens)
            registers = torch.stack(grid_cells((side, side))).to(cells)
            angles, num_fixed = torch.cat([self._angles(registers, self.register_theta), angles]), num_fixed - side**2
        angles = F.pad(angles, (0, 0, num_fixed, 0))
        return angles.cos(), angles.sin()

    def _angles(self, cells: Tensor, theta: float) -> Tensor:
        """Return the ``(N, d / 2)`` angles of cells at ``(2, N)`` rows and columns."""
        quarter = self.head_dim // 4
        freqs = theta ** -(torch.arange(quarter, dtype=cells.dtype, device=cells.device) / quarter)
        freqs = freqs * (2 * math.pi if self.coordinates == "normalized" else 1.0)
        y, x = (axis[:, None] * freqs for axis in cells)
        return torch.cat([x, y] if self.axes == "xy" else [y, x], dim=1)

    def _resized_state(
        self, state: dict[str, Tensor], old_grid: Grid, policy: ResizePolicy, antialias: bool
    ) -> dict[str, Tensor]:
        if self.coordinates == "normalized":
            return dict(state)  # normalized coordinates fit any grid
        return super()._resized_state(state, old_grid, policy, antialias)


class RoPEMixed(RotaryPosEmbed):
    """Rotation by trained mixtures of column and row, one for each channel pair, Heo et al. 2024 (arXiv:2403.13298).

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        head_dim: Width d of a head, divisible by 4.
        num_heads: Number of heads A, each with frequencies of its own.
        depth: Number of blocks, each with frequencies of its own if ``join`` is every_layer.
        num_prefix_tokens: Number of prefix tokens P.
        theta: Base of the initial frequencies, above 1.
        join: Frequencies for every block (every_layer), or one set for all (every_layer_shared).

    Example:
        >>> RoPEMixed((2, 3), head_dim=8, num_heads=2).rotate(torch.randn(1, 2, 6, 8), layer=0).shape
        torch.Size([1, 2, 6, 8])
    """

    joins = ("every_layer", "every_layer_shared")
    trains = True
    rotates_stacked = True
    stacks = MappingProxyType({"freqs": 1})
    cells: Tensor  # (2, L): y, x

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
        super().__init__(grid_size, num_prefix_tokens)
        check_head_width("rope_mixed", head_dim)
        check_arguments(theta=theta)
        self.join = join
        angle = 2 * math.pi * torch.rand(self.num_sets(depth), num_heads, 1, dtype=torch.float32)
        self.freqs = nn.Parameter(mixed_freqs(angle, head_dim, theta))
        self.fill_tables()

    def fill_tables(self) -> None:
        """Compute the coordinates of all tokens."""
        cells = F.pad(torch.stack(grid_cells(self.grid_size, self.trained_grid)), (self.num_prefix_tokens, 0))
        self.register_buffer("cells", cells.to(self.freqs), persistent=False)

    def cos_sin(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return ``(A, L, d / 2)`` cosines and sines of block ``layer``."""
        fx, fy = self.freqs.select(1, layer % self.freqs.shape[1])[:, :, None]  # (A, 1, d / 2) each
        y, x = self.cells[..., None]  # (L, 1) each
        angles = x * fx + y * fy  # products, not a matmul: autocast leaves them in float32
        return angles.cos(), angles.sin()


def mixed_freqs(angle: Tensor, head_dim: int, theta: float) -> Tensor:
    """Return ``(2, J, A, d / 2)`` frequencies of x and y: two orthogonal directions, rotated by ``(J, A, 1)``.

    Example:
        >>> mixed_freqs(torch.zeros(12, 6, 1), head_dim=64, theta=10.0).shape
        torch.Size([2, 12, 6, 32])
    """
    size = theta ** -(4 * torch.arange(head_dim // 4, dtype=torch.float32) / head_dim)
    directions = [angle, angle + math.pi / 2]
    fx = torch.cat([size * direction.cos() for direction in directions], dim=-1)  # (J, A, d / 2)
    fy = torch.cat([size * direction.sin() for direction in directions], dim=-1)
    return torch.stack([fx, fy])


def check_head_width(method: str, head_dim: int) -> None:
    """Refuse a width of a head that 4 does not divide.

    Example:
        >>> check_head_width("rope2d", head_dim=64)
    """
    if head_dim % 4:
        raise ValueError(
            f"`embed_dim` / `num_heads` must be divisible by 4 for pos_embed={method!r}, got a head width of {head_dim}"
        )


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

    rotates_stacked = True
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


class LieRE(PosEmbed):
    """Rotate queries and keys by exp(y Y + x X) with trained generators Y, X: Ostmeier et al. 2025 (arXiv:2406.10322).

    Y and X are skew-symmetric and block-diagonal; blocks of 2 channels are the pairs of rope_mixed. The generators
    start uniform in [0, 2 pi], as in the authors' code; cells lie between 0 and 1 on either axis.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        head_dim: Width d of a head, divisible by ``block``.
        num_heads: Number of heads A, each with generators of its own.
        depth: Number of blocks of the network, each with generators of its own if ``join`` is every_layer.
        num_prefix_tokens: Number of prefix tokens P, which are not rotated.
        join: Own generators in every block (every_layer), or one set for all (every_layer_shared).
        block: Channels that rotate together; the paper uses 8 and the whole head.

    Example:
        >>> LieRE((2, 3), head_dim=8, num_heads=2, block=4).rotate(torch.randn(1, 2, 6, 8), layer=0).shape
        torch.Size([1, 2, 6, 8])
    """

    joins = ("every_layer", "every_layer_shared")
    trains = True
    policies: tuple[ResizePolicy, ...] = ("rescale",)
    rotates_stacked = True
    stacks = MappingProxyType({"generators": 1})
    keeps_float32 = True
    cells: Tensor  # (2, L): y, x

    def __init__(
        self,
        grid_size: Grid,
        head_dim: int,
        num_heads: int,
        depth: int = 1,
        num_prefix_tokens: int = 0,
        join: PosEmbedJoin = "every_layer",
        block: int = 8,
    ) -> None:
        super().__init__(grid_size)
        if block < 2 or head_dim % block:
            raise ValueError(
                f"`pos_embed.block` must divide the head width and be at least 2, got {block} and {head_dim}"
            )
        self.join, self.num_prefix_tokens, self.block = join, num_prefix_tokens, block
        shape = (self.num_sets(depth), num_heads, head_dim // block, block, block)
        numbers = torch.rand(2, *shape, dtype=torch.float32)
        self.generators = nn.Parameter(2 * math.pi * numbers)  # only entries above the diagonal are used
        self.fill_tables()

    def fill_tables(self) -> None:
        """Compute the coordinates of all tokens."""
        parts = [cell / side for cell, side in zip(grid_cells(self.grid_size), self.grid_size, strict=True)]
        cells = F.pad(torch.stack(parts), (self.num_prefix_tokens, 0))
        self.register_buffer("cells", cells.to(self.generators), persistent=False)

    def rotations(self, layer: int) -> Tensor:
        """Return ``(A, L, d / block, block, block)`` rotations of block ``layer``."""
        upper = self.generators.select(1, layer % self.generators.shape[1]).triu(1)
        y, x = (upper - upper.transpose(-2, -1))[:, :, None]  # (A, 1, d / block, block, block) each
        down, across = self.cells[:, :, None, None, None]
        return torch.matrix_exp(down * y + across * x)

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        """Map ``(B, A, L, d)`` queries or keys to ``(B, A, L, d)``, in float32 inside."""
        rotations = self.gather_tokens(self.rotations(layer), self.token_order(self.num_prefix_tokens), 1)
        parts = x.unflatten(-1, (-1, self.block)).to(rotations.dtype)  # (B, A, L, d / block, block)
        rotated_alike = parts.ndim + 1 - rotations.ndim  # leading axes: after `kept`, each image has its own rotations
        rows = parts.reshape(math.prod(parts.shape[:rotated_alike]), *parts.shape[rotated_alike:]).movedim(0, -2)
        with without_autocast(x):
            return (rows @ rotations.mT).movedim(-2, 0).reshape(parts.shape).flatten(-2).to(x.dtype)

    def _resized_state(
        self, state: dict[str, Tensor], old_grid: Grid, policy: ResizePolicy, antialias: bool
    ) -> dict[str, Tensor]:
        return dict(state)  # cells lie between 0 and 1 at any grid
