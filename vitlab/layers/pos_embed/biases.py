"""Position embeddings that bias the attention logits."""

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.layers.pos_embed.base import PosEmbed, PosEmbedJoin
from vitlab.layers.pos_embed.resizable import grid_cells
from vitlab.layers.resample import Grid, ResizePolicy, resize_bias_table


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
        num_tables = depth if join == "every_layer" else 1
        num_rows = (2 * grid_size[0] - 1) * (2 * grid_size[1] - 1) + (3 if num_prefix_tokens else 0)
        self.bias_table = nn.Parameter(torch.empty(num_tables, num_rows, num_heads, dtype=torch.float32))
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
