"""Position embeddings by the offset of two tokens: a function of it (FIRE), or a trained key for each."""

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.layers.pos_embed.base import PosEmbed, PosEmbedJoin
from vitlab.layers.pos_embed.biases import BiasPosEmbed
from vitlab.layers.precision import without_autocast
from vitlab.layers.resample import Grid, ResizePolicy, resize_axis


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
        start = float(max(grid_size)) if threshold is None else threshold
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

    def _resized_state(
        self, state: dict[str, Tensor], old_grid: Grid, policy: ResizePolicy, antialias: bool
    ) -> dict[str, Tensor]:
        return dict(state)


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
        self.keys = nn.Parameter(torch.empty(depth if join == "every_layer" else 1, num_offsets, head_dim))
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
