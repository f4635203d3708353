"""Position embeddings that bias the attention logits: trained, by distance, by an MLP, or by queries and offsets."""

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.layers.pos_embed.base import PosEmbed, PosEmbedJoin
from vitlab.layers.pos_embed.resizable import grid_cells
from vitlab.layers.precision import without_autocast
from vitlab.layers.resample import Grid, ResizePolicy, resize_axis, resize_bias_table


class BiasPosEmbed(PosEmbed):
    """A bias for each head, query and key, added to the scaled logits.

    A float bias rules out flash attention, so report throughput next to accuracy.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        num_prefix_tokens: Number of prefix tokens P.

    Example:
        >>> class SelfBias(BiasPosEmbed):  # every token attends to itself a little more
        ...     def biases(self, layer):
        ...         return torch.eye(6)[None]
        >>> SelfBias((2, 3), num_prefix_tokens=0).bias(layer=0).shape
        torch.Size([1, 6, 6])
    """

    keeps_float32 = True

    def __init__(self, grid_size: Grid, num_prefix_tokens: int) -> None:
        super().__init__(grid_size)
        self.num_prefix_tokens = num_prefix_tokens

    def biases(self, layer: int) -> Tensor:
        """Return ``(A, L, L)`` biases of block ``layer``, patches in raster order; rows of ``queries`` where split."""
        raise NotImplementedError

    def bias(self, layer: int) -> Tensor:
        """Return ``(A, L, L)`` to add to the scaled attention logits of block ``layer``, or ``(B, A, L, L)``."""
        biases, order = self.biases(layer), self.token_order(self.num_prefix_tokens)
        if order is None:
            return biases
        biases = biases[:, order[..., None], order[..., None, :]]
        return biases if order.ndim == 1 else biases.transpose(0, 1)


class RelPos(BiasPosEmbed):
    """A trained bias for each displacement, Liu et al. 2021 (arXiv:2103.14030), with BEiT's entries for prefix tokens.

    Bao et al. 2022 (arXiv:2106.08254) add three: prefix to patch, patch to prefix, prefix to prefix.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        num_heads: Number of heads A.
        depth: Number of blocks, each with a table of its own if ``join`` is every_layer.
        num_prefix_tokens: Number of prefix tokens P.
        join: Own table in every block (every_layer), or one for all (every_layer_shared).

    Example:
        >>> RelPos((2, 3), num_heads=2).bias(layer=0).shape
        torch.Size([2, 6, 6])
    """

    joins = ("every_layer", "every_layer_shared")
    trains = True
    policies: tuple[ResizePolicy, ...] = ("interpolate",)
    splits_queries = True
    stacks = MappingProxyType({"bias_table": 0})
    index: Tensor  # (L, L), rows of the table

    def __init__(
        self,
        grid_size: Grid,
        num_heads: int,
        depth: int = 1,
        num_prefix_tokens: int = 0,
        join: PosEmbedJoin = "every_layer",
    ) -> None:
        super().__init__(grid_size, num_prefix_tokens)
        self.join = join
        num_rows = (2 * grid_size[0] - 1) * (2 * grid_size[1] - 1) + (3 if num_prefix_tokens else 0)
        self.bias_table = nn.Parameter(torch.empty(self.num_sets(depth), num_rows, num_heads, dtype=torch.float32))
        nn.init.trunc_normal_(self.bias_table, std=0.02)
        self.fill_tables()

    def fill_tables(self) -> None:
        """Compute the row of the bias table for each pair of tokens."""
        index = displacement_index(self.grid_size, self.num_prefix_tokens).to(self.bias_table.device)
        self.register_buffer("index", index, persistent=False)

    def biases(self, layer: int) -> Tensor:
        """Return ``(A, L, L)`` biases of block ``layer``."""
        return self.bias_table[layer % len(self.bias_table)].t()[:, self.index[self.queries]]

    def _resized_state(
        self, state: dict[str, Tensor], old_grid: Grid, policy: ResizePolicy, antialias: bool
    ) -> dict[str, Tensor]:
        return state | {"bias_table": resize_bias_table(state["bias_table"], old_grid, self.grid_size)}


class Alibi2d(BiasPosEmbed):
    """Minus the distance between two cells, times a slope per head: Fuller et al. 2023 (arXiv:2311.00566), CROMA.

    Biases do not change when the grid is mirrored or rotated: this method cannot tell left from right. The slopes are
    those of Press et al. 2022 (arXiv:2108.12409). Biases to and from prefix tokens are 0.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        num_heads: Number of heads A.
        num_prefix_tokens: Number of prefix tokens P.

    Example:
        >>> Alibi2d((1, 3), num_heads=8).bias(layer=0)[0]  # the slope of head 0 is 1/2
        tensor([[-0.0000, -0.5000, -1.0000],
                [-0.5000, -0.0000, -0.5000],
                [-1.0000, -0.5000, -0.0000]])
    """

    joins = ("every_layer_shared",)
    policies: tuple[ResizePolicy, ...] = ("extrapolate", "rescale")
    splits_queries = True
    distances: Tensor  # (L, L), in cells
    slopes: Tensor  # (A, 1, 1)

    def __init__(self, grid_size: Grid, num_heads: int, num_prefix_tokens: int = 0) -> None:
        super().__init__(grid_size, num_prefix_tokens)
        self.num_heads = num_heads
        self.fill_tables()

    def fill_tables(self) -> None:
        """Compute slopes and distances."""
        y, x = grid_cells(self.grid_size, self.trained_grid)
        distances = ((y[:, None] - y).square() + (x[:, None] - x).square()).sqrt()  # (N, N); ONNX has no hypot
        num_prefix = self.num_prefix_tokens
        distances = F.pad(distances, (num_prefix, 0, num_prefix, 0))  # (L, L)
        like = self.slopes if hasattr(self, "slopes") else torch.empty(0, dtype=torch.float32)
        slopes = torch.tensor(alibi_slopes(self.num_heads)).view(-1, 1, 1)
        self.register_buffer("slopes", slopes.to(like), persistent=False)
        self.register_buffer("distances", distances.to(like), persistent=False)

    def biases(self, layer: int) -> Tensor:
        """Return ``(A, L, L)`` biases, the same in every block."""
        return -self.slopes * self.distances[self.queries]


def displacement_index(grid_size: Grid, num_prefix_tokens: int) -> Tensor:
    """Return ``(L, L)`` row numbers of the bias table: query minus key, row-major, then three for prefix tokens.

    Example:
        >>> displacement_index((1, 3), num_prefix_tokens=0)
        tensor([[2, 1, 0],
                [3, 2, 1],
                [4, 3, 2]])
    """
    h, w = grid_size
    y, x = (cell.long() for cell in grid_cells(grid_size))
    row = y * (2 * w - 1) + x  # of a table for displacements: that of two cells is the difference of theirs
    index = (row + (h - 1) * (2 * w - 1) + w - 1)[:, None] - row  # (N, N)
    num_displacements = (2 * h - 1) * (2 * w - 1)
    full = index.new_full((num_prefix_tokens + h * w, num_prefix_tokens + h * w), num_displacements)
    full[num_prefix_tokens:, :num_prefix_tokens] = num_displacements + 1
    full[:num_prefix_tokens, :num_prefix_tokens] = num_displacements + 2
    full[num_prefix_tokens:, num_prefix_tokens:] = index
    return full


def alibi_slopes(num_heads: int) -> list[float]:
    """Return a slope for each head: powers of 2 if ``num_heads`` is a power of 2.

    Example:
        >>> alibi_slopes(4)
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** (num_heads.bit_length() - 1)  # the largest power of two up to num_heads
    slopes = [2.0 ** (-8 * a / power) for a in range(1, power + 1)]
    between = [2.0 ** (-4 * a / power) for a in range(1, 2 * power + 1, 2)]
    return slopes + between[: num_heads - power]


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
            for _ in range(self.num_sets(depth))
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


class Fire(BiasPosEmbed):
    """Biases from an MLP of distances on a bounded log scale: FIRE, Li et al. 2024 (arXiv:2310.04418).

    The paper's bias of query i and key j <= i is f(psi(i - j) / psi(max(T, i))), psi(x) = log(c x + 1), with trained f,
    c and T. Here f takes two such numbers, for rows and columns, with the sign of the offset. As keys lie on both sides
    of a query, its largest distance to a key replaces i. So the MLP sees numbers in [-1, 1] on any grid.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        num_heads: Number of heads A.
        num_prefix_tokens: Number of prefix tokens P; their biases are 0.
        hidden: Hidden width of the MLP.
        c: Initial value of c, above 0.
        threshold: Initial value of T, in cells; ``None`` is the larger side of the grid.

    Example:
        >>> Fire((2, 3), num_heads=2).bias(layer=0).shape
        torch.Size([2, 6, 6])
    """

    joins = ("every_layer_shared",)
    trains = True
    policies: tuple[ResizePolicy, ...] = ("extrapolate",)
    splits_queries = True
    cells: Tensor  # (2, N): y, x

    def __init__(
        self,
        grid_size: Grid,
        num_heads: int,
        num_prefix_tokens: int = 0,
        hidden: int = 32,
        c: float = 0.1,
        threshold: float | None = None,
    ) -> None:
        super().__init__(grid_size, num_prefix_tokens)
        c, start = float(c), float(max(grid_size) if threshold is None else threshold)
        if c <= 0 or start <= 0 or hidden < 1:
            raise ValueError(f"`c`, `threshold` and `hidden` must be above 0 for fire, got {c}, {start} and {hidden}")
        self.mlp = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, num_heads))
        self.c, self.threshold = nn.Parameter(torch.tensor(c)), nn.Parameter(torch.tensor(start))
        self.fill_tables()

    def fill_tables(self) -> None:
        """Compute the coordinates of all patches."""
        h, w = self.grid_size
        cells = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")).flatten(1)
        self.register_buffer("cells", cells.to(self.c), persistent=False)

    def biases(self, layer: int) -> Tensor:
        """Return ``(A, L, L)`` biases, the same in every block."""
        num_prefix, patches = _split(self.queries, self.num_prefix_tokens)
        with without_autocast(self.cells):
            cells = self.cells[:, patches]  # of the queries
            offsets = cells[:, :, None] - self.cells[:, None]  # (2, N, N), query minus key
            opposite = [side - 1 - cell for side, cell in zip(self.grid_size, cells, strict=True)]
            farthest = torch.maximum(cells, torch.stack(opposite))  # (2, N)
            bound = torch.maximum(farthest, self.threshold.abs())[:, :, None]
            parts = offsets.sign() * self._psi(offsets.abs()) / (self._psi(bound) + 1e-12)  # not 0 / 0 where c = 0
            bias = self.mlp(parts.movedim(0, -1)).movedim(-1, 0)  # (A, N, N)
        return F.pad(bias, (self.num_prefix_tokens, 0, num_prefix, 0))

    def _psi(self, x: Tensor) -> Tensor:
        return (self.c.abs() * x + 1).log()


class RelPos1d(PosEmbed):
    """A trained key for each difference of raster positions, whose product with the query is added to the logit.

    The relative embedding of ViT, Dosovitskiy et al. 2021 (arXiv:2010.11929), D.4 and table 8. These products are
    scaled like the logits. Prefix tokens have no offsets: their term is 0.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        head_dim: Width d of a head.
        depth: Number of blocks, each with keys of its own if ``join`` is every_layer.
        num_prefix_tokens: Number of prefix tokens P.
        join: Keys for every block (every_layer), or one set for all (every_layer_shared).

    Example:
        >>> RelPos1d((2, 3), head_dim=8).relate(*torch.randn(2, 1, 2, 6, 8), layer=0).shape
        torch.Size([1, 2, 6, 6])
    """

    joins = ("every_layer", "every_layer_shared")
    trains = True
    policies: tuple[ResizePolicy, ...] = ("interpolate",)
    splits_queries = True
    stacks = MappingProxyType({"keys": 0})
    index: Tensor  # (N, N), rows of the keys

    def __init__(
        self,
        grid_size: Grid,
        head_dim: int,
        depth: int = 1,
        num_prefix_tokens: int = 0,
        join: PosEmbedJoin = "every_layer",
    ) -> None:
        super().__init__(grid_size)
        self.join, self.num_prefix_tokens = join, num_prefix_tokens
        num_offsets = 2 * grid_size[0] * grid_size[1] - 1
        self.keys = nn.Parameter(torch.empty(self.num_sets(depth), num_offsets, head_dim))
        nn.init.trunc_normal_(self.keys, std=0.02)
        self.fill_tables()

    def fill_tables(self) -> None:
        """Compute the index of the offset of each pair of patches."""
        positions = torch.arange(self.grid_size[0] * self.grid_size[1], device=self.keys.device)
        index = positions[:, None] - positions + positions.shape[0] - 1  # len would fix the size of an exported graph
        self.register_buffer("index", index, persistent=False)

    def relate(self, q: Tensor, k: Tensor, layer: int) -> Tensor | None:
        """Return ``(B, A, L, L)`` products of scaled queries and offset keys; None if ``q`` has only prefix tokens."""
        num_prefix, patches = _split(self.queries, self.num_prefix_tokens)
        if q.shape[2] <= num_prefix:
            return None
        order = self.order
        index = self.index[patches] if order is None else self.index[order[..., None], order[..., None, :]]
        index = index if index.ndim == 2 else index[:, None]  # (B, 1, K, K): each image keeps other tokens
        products = q[:, :, num_prefix:] @ self.keys[layer % len(self.keys)].to(q.dtype).t()  # (B, A, N, 2 N - 1)
        related = products.gather(-1, index.expand(*q.shape[:2], -1, -1))
        return F.pad(related, (self.num_prefix_tokens, 0, num_prefix, 0))

    def _resized_state(
        self, state: dict[str, Tensor], old_grid: Grid, policy: ResizePolicy, antialias: bool
    ) -> dict[str, Tensor]:
        return state | {"keys": resize_axis(state["keys"], 2 * self.grid_size[0] * self.grid_size[1] - 1)}


def _split(queries: slice, num_prefix_tokens: int) -> tuple[int, slice]:
    """Return how many of the queries are of prefix tokens, and which patches the others are of."""
    start, stop = (None if end is None else max(end - num_prefix_tokens, 0) for end in (queries.start, queries.stop))
    return len(range(num_prefix_tokens)[queries]), slice(start, stop)
