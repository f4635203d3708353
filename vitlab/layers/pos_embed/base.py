"""The neutral position embedding: every hook that a method may override, and what all methods share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

PosEmbedName = Literal[
    "none",
    "learned",
    "factorized",
    "sincos1d",
    "sincos2d",
    "relpos",
    "alibi2d",
    "rope2d",
    "rope_mixed",
    "conv",
]
PosEmbedJoin = Literal["stem", "every_layer", "every_layer_shared"]
Grid = tuple[int, int]


class PosEmbed(nn.Module):
    """No position information, and the base of every class that has some.

    A position embedding can speak in five places, each neutral here: it can add to the patch tokens once
    (:meth:`forward`) or before every block (:meth:`enter`), rotate queries and keys (:meth:`rotate`), bias the attention
    logits (:meth:`bias`), or mix the tokens after a block (:meth:`leave`). Sequences are P prefix tokens, then N patches;
    prefix tokens never move, because their position is a constant that their own vectors can hold.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
    """

    keeps_float32 = False  # whether a cast of the model to half precision leaves this module's tensors alone
    order: Tensor | None = None  # set by permute_positions

    def __init__(self, grid_size: Grid = (0, 0)) -> None:
        super().__init__()
        self.grid_size = grid_size

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, D)`` patch tokens to ``(B, N, D)``, before prefix tokens join them."""
        return x

    def enter(self, x: Tensor, layer: int) -> Tensor:
        """Map the ``(B, L, D)`` tokens that enter block ``layer`` to ``(B, L, D)``."""
        return x

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        """Map ``(B, A, L, d)`` queries or keys of block ``layer`` to ``(B, A, L, d)``."""
        return x

    def bias(self, layer: int) -> Tensor | None:
        """Return ``(A, L, L)`` to add to the scaled attention logits of block ``layer``, or None."""
        return None

    def leave(self, x: Tensor, layer: int) -> Tensor:
        """Map the ``(B, L, D)`` tokens that leave block ``layer`` to ``(B, L, D)``."""
        return x

    @contextmanager
    def permute_positions(self, order: Tensor) -> Iterator[None]:
        """Give patch slot ``i`` the position ``order[i]`` inside a ``with`` block; the tokens stay where they are."""
        num_patches = self.grid_size[0] * self.grid_size[1]
        if num_patches and sorted(order.tolist()) != list(range(num_patches)):
            raise ValueError(f"`order` must be a permutation of the {num_patches} patch positions")
        self.order = order
        try:
            yield
        finally:
            del self.order

    def fill_tables(self) -> None:
        """Compute what follows from the grid by a formula: unsaved buffers, in float32 from float64."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        was_meta = any(buffer.is_meta for buffer in self.buffers())
        super()._apply(self._keeping_float32(fn) if self.keeps_float32 else fn, recurse)
        if was_meta and not any(buffer.is_meta for buffer in self.buffers()):
            self.fill_tables()
        return self

    @staticmethod
    def _keeping_float32(fn: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def moved(x: Tensor) -> Tensor:
            y = fn(x)
            narrowed = x.is_floating_point() and y.dtype.itemsize < x.dtype.itemsize
            return x.to(y.device) if narrowed else y

        return moved


def grid_cells(grid_size: Grid) -> tuple[Tensor, Tensor]:
    """Return row y and column x of each cell in raster order, two ``(N,)`` float64 tensors."""
    h, w = grid_size
    y, x = torch.meshgrid(torch.arange(h, dtype=torch.float64), torch.arange(w, dtype=torch.float64), indexing="ij")
    return y.flatten(), x.flatten()
