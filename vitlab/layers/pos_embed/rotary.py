"""Position embeddings that rotate queries and keys."""

import math
from types import MappingProxyType

import torch
from torch import Tensor, nn

from vitlab.layers.pos_embed.base import PosEmbed, PosEmbedJoin
from vitlab.layers.pos_embed.resizable import grid_cells
from vitlab.layers.resample import Grid, ResizePolicy


class RotaryPosEmbed(PosEmbed):
    """Turn each pair of channels (2i, 2i + 1) of a query or key by an angle that its cell gives.

    Prefix tokens turn by 0. With an unturned class token attention can tell absolute positions: its query meets a key
    at the angle of the key's cell.

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
    keeps_float32 = True  # angles in bfloat16 are wrong by a percent

    def __init__(self, grid_size: Grid, num_prefix_tokens: int) -> None:
        super().__init__(grid_size)
        self.num_prefix_tokens = num_prefix_tokens

    def cos_sin(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of block ``layer``, ``(L, d / 2)`` or ``(A, L, d / 2)`` each."""
        raise NotImplementedError

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        """Map ``(B, A, L, d)`` queries or keys to ``(B, A, L, d)``, in float32 inside."""
        cos, sin = self.cos_sin(layer)
        if (order := self.token_order(self.num_prefix_tokens)) is not None:
            cos, sin = cos[..., order, :], sin[..., order, :]
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)  # (B, A, L, d / 2) each
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)

    def _cells(self) -> Tensor:
        """Return y and x of every token, ``(2, L)`` in float64: zeros for prefix tokens."""
        cells = torch.stack(grid_cells(self.grid_size, self.trained_grid))
        return torch.cat([cells.new_zeros(2, self.num_prefix_tokens), cells], dim=1)


class RoPE2d(RotaryPosEmbed):
    """Axial rotation, Heo et al. 2024 (arXiv:2403.13298): half of the channels turn with the column, half with the row.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        head_dim: Width d of a head, divisible by 4.
        num_prefix_tokens: Number of prefix tokens P.
        theta: Base of the frequencies, above 1.

    Example:
        >>> RoPE2d((2, 3), head_dim=8).rotate(torch.randn(1, 2, 6, 8), layer=0).shape
        torch.Size([1, 2, 6, 8])
    """

    joins = ("every_layer_shared",)
    cos: Tensor  # (L, d / 2)
    sin: Tensor  # (L, d / 2)

    def __init__(self, grid_size: Grid, head_dim: int, num_prefix_tokens: int = 0, theta: float = 100.0) -> None:
        super().__init__(grid_size, num_prefix_tokens)
        _check("rope2d", head_dim, theta)
        self.head_dim = head_dim
        self.theta = theta
        self.fill_tables()

    def fill_tables(self) -> None:
        """Compute cosines and sines."""
        quarter = self.head_dim // 4
        freqs = self.theta ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
        y, x = self._cells()
        angles = torch.cat([x[:, None] * freqs, y[:, None] * freqs], dim=1)  # (L, d / 2)
        like = self.cos if hasattr(self, "cos") else torch.empty(0, dtype=torch.float32)
        self.register_buffer("cos", angles.cos().to(like), persistent=False)
        self.register_buffer("sin", angles.sin().to(like), persistent=False)

    def cos_sin(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return ``(L, d / 2)`` cosines and sines, the same in every block."""
        return self.cos, self.sin


class RoPEMixed(RotaryPosEmbed):
    """Rotation by trained mixtures of column and row, one for each channel pair, Heo et al. 2024 (arXiv:2403.13298).

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        head_dim: Width d of a head, divisible by 4.
        num_heads: Number of heads A, each with frequencies of its own.
        depth: Number of blocks, each with frequencies of its own if ``join`` is every_layer.
        num_prefix_tokens: Number of prefix tokens P.
        theta: Base of the frequencies at the start, above 1.
        join: Own frequencies in every block (every_layer), or one set for all (every_layer_shared).

    Example:
        >>> RoPEMixed((2, 3), head_dim=8, num_heads=2).rotate(torch.randn(1, 2, 6, 8), layer=0).shape
        torch.Size([1, 2, 6, 8])
    """

    joins = ("every_layer", "every_layer_shared")
    trains = True
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
        _check("rope_mixed", head_dim, theta)
        self.join = join
        num_sets = depth if join == "every_layer" else 1
        turn = 2 * math.pi * torch.rand(num_sets, num_heads, 1, dtype=torch.float32)
        self.freqs = nn.Parameter(mixed_freqs(turn, head_dim, theta))
        self.fill_tables()

    def fill_tables(self) -> None:
        """Compute the coordinates of all tokens."""
        self.register_buffer("cells", self._cells().to(self.freqs), persistent=False)

    def cos_sin(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return ``(A, L, d / 2)`` cosines and sines of block ``layer``."""
        fx, fy = self.freqs[:, layer % self.freqs.shape[1], :, None]  # (A, 1, d / 2) each
        y, x = self.cells[..., None]  # (L, 1) each
        angles = x * fx + y * fy  # products, not a matmul: autocast leaves them in float32
        return angles.cos(), angles.sin()


def mixed_freqs(turn: Tensor, head_dim: int, theta: float) -> Tensor:
    """Return ``(2, J, A, d / 2)`` frequencies of x and y: two orthogonal directions, turned by ``(J, A, 1)``.

    Example:
        >>> mixed_freqs(torch.zeros(12, 6, 1), head_dim=64, theta=10.0).shape
        torch.Size([2, 12, 6, 32])
    """
    size = theta ** -(4 * torch.arange(head_dim // 4, dtype=torch.float32) / head_dim)
    directions = [turn, turn + math.pi / 2]
    fx = torch.cat([size * angle.cos() for angle in directions], dim=-1)  # (J, A, d / 2)
    fy = torch.cat([size * angle.sin() for angle in directions], dim=-1)
    return torch.stack([fx, fy])


def _check(name: str, head_dim: int, theta: float) -> None:
    if head_dim % 4:
        raise ValueError(
            f"`embed_dim` / `num_heads` must be divisible by 4 for pos_embed={name!r}, got a head width of {head_dim}"
        )
    if not theta > 1:
        raise ValueError(f"`rope_theta` must be above 1, got rope_theta={theta}")
