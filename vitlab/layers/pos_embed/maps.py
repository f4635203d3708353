"""Position embeddings that a trained function computes: biases from offsets, vectors or rotations from cells."""

import math
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.layers.pos_embed.base import PosEmbed, PosEmbedJoin
from vitlab.layers.pos_embed.biases import BiasPosEmbed, displacement_index
from vitlab.layers.pos_embed.resizable import grid_cells
from vitlab.layers.precision import without_autocast
from vitlab.layers.resample import Grid, ResizePolicy


class ContinuousBias(BiasPosEmbed):
    """A bias for each head from an MLP of the log-spaced offset, Liu et al. 2022 (arXiv:2111.09883), Swin V2.

    An offset is scaled so that the largest is 8, then mapped to sign(x) log2(1 + |x|) / 3. The bias is 16 times the
    sigmoid of the output, minus 8, which cancels between patches and centers biases at the 0 of prefix tokens. Swin V2
    has an MLP per block; the last block's gets no gradient where only a class token is read.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        num_heads: Number of heads A.
        depth: Number of blocks, each with an MLP of its own if ``join`` is every_layer.
        num_prefix_tokens: Number of prefix tokens P.
        join: An MLP for every block (every_layer), or one for all (every_layer_shared).
        hidden: Hidden width of the MLP.

    Example:
        >>> ContinuousBias((2, 3), num_heads=2).bias(layer=0).shape
        torch.Size([2, 6, 6])
    """

    joins = ("every_layer_shared", "every_layer")
    trains = True
    policies: tuple[ResizePolicy, ...] = ("extrapolate", "rescale")
    splits_queries = True
    index: Tensor  # (L, L), rows of the table
    offsets: Tensor  # (R, 2), log-spaced

    def __init__(
        self,
        grid_size: Grid,
        num_heads: int,
        depth: int = 1,
        num_prefix_tokens: int = 0,
        join: PosEmbedJoin = "every_layer_shared",
        hidden: int = 512,
    ) -> None:
        super().__init__(grid_size, num_prefix_tokens)
        self.join = join
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, num_heads, bias=False))
            for _ in range(depth if join == "every_layer" else 1)
        )
        self.fill_tables()

    def fill_tables(self) -> None:
        """Compute all offsets, and the index of the offset of each pair of tokens."""
        like = next(self.mlps.parameters())
        reference = self.grid_size if self.trained_grid is None else self.trained_grid.cpu().double().unbind()
        steps = [8 / torch.as_tensor(full - 1, dtype=torch.float64).clamp(min=1) for full in reference]
        sides = [
            torch.arange(1 - side, side, dtype=torch.float32) * step
            for side, step in zip(self.grid_size, steps, strict=True)
        ]
        offsets = torch.cartesian_prod(*sides).view(-1, 2)
        offsets = offsets.sign() * (1 + offsets.abs()).log2() / 3
        index = displacement_index(self.grid_size, self.num_prefix_tokens)
        self.register_buffer("offsets", offsets.to(like), persistent=False)
        self.register_buffer("index", index.to(like.device), persistent=False)

    def biases(self, layer: int) -> Tensor:
        """Return ``(A, L, L)`` biases of block ``layer``."""
        with without_autocast(self.offsets):
            table = 16 * self.mlps[layer % len(self.mlps)](self.offsets).sigmoid() - 8  # (R, A)
        return F.pad(table, (0, 0, 0, 3)).t()[:, self.index[self.queries]]

    def block_parameters(self, layer: int) -> list[nn.Parameter]:
        """Return the parameters of the MLP of block ``layer``."""
        return list(self.mlps[layer].parameters()) if self.join == "every_layer" else []

    def policies_for(self, state: dict[str, Tensor]) -> tuple[ResizePolicy, ...]:
        """Return both: offsets can be scaled by the trained grid (extrapolate) or by the new one (rescale)."""
        return self.policies

    def _resized_state(
        self, state: dict[str, Tensor], old_grid: Grid, policy: ResizePolicy, antialias: bool
    ) -> dict[str, Tensor]:
        if policy == "extrapolate":
            return {"trained_grid": torch.tensor(old_grid)} | state
        return {name: value for name, value in state.items() if name != "trained_grid"}


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
    stacks = MappingProxyType({})
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
        half = 0.5 if self.trained_grid is not None else 0.0
        cells = torch.stack(grid_cells(self.grid_size, self.trained_grid, half), dim=1)
        self.register_buffer("cells", cells.to(self.freqs), persistent=False)

    def table(self, layer: int = 0) -> Tensor:
        """Return the ``(N, D)`` vectors, the same for every layer."""
        angles = (self.cells[:, None] * self.freqs).sum(-1)  # products, not a matmul: autocast leaves them in float32
        features = torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(2 * len(self.freqs))
        return self.mlp(features)


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
            raise ValueError(f"`block` must divide the head width and be at least 2, got {block} and {head_dim}")
        self.join, self.num_prefix_tokens, self.block = join, num_prefix_tokens, block
        sets = depth if join == "every_layer" else 1
        numbers = torch.rand(2, sets, num_heads, head_dim // block, block, block, dtype=torch.float32)
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
        parts = x.unflatten(-1, (-1, self.block)).to(rotations.dtype)
        return (rotations * parts[..., None, :]).sum(-1).flatten(-2).to(x.dtype)

    def _resized_state(
        self, state: dict[str, Tensor], old_grid: Grid, policy: ResizePolicy, antialias: bool
    ) -> dict[str, Tensor]:
        return dict(state)  # cells lie between 0 and 1 at any grid
