"""The neutral position embedding: every hook that a method may override, and what all methods share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitlab.layers.resample import Grid, ResizePolicy

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


class PosEmbed(nn.Module):
    """No position information, and the base of every class that has some.

    A position embedding can speak in five places, each neutral here: it can add to the patch tokens once
    (:meth:`forward`) or before every block (:meth:`enter`), rotate queries and keys (:meth:`rotate`), bias the
    attention logits (:meth:`bias`), or mix the tokens after a block (:meth:`leave`). Tokens are P prefix tokens, then N
    patches. Prefix tokens have no position here: theirs is a constant, which their own vectors can hold.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
    """

    policies: tuple[ResizePolicy, ...] = ()  # what resized_state can do, the usual one first
    keeps_float32 = False  # whether a cast of the model to half precision passes this module by
    trained_grid: Tensor | None  # (2,), saved; set where coordinates are rescaled to those of another grid
    order: Tensor | None = None  # (N,), inside permute_positions

    def __init__(self, grid_size: Grid = (0, 0)) -> None:
        super().__init__()
        self.grid_size = grid_size
        self.register_buffer("trained_grid", None)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, D)`` patch tokens to ``(B, N, D)``, before prefix tokens join them."""
        return x

    def enter(self, x: Tensor, layer: int) -> Tensor:
        """Map the ``(B, L, D)`` tokens that enter block ``layer`` to ``(B, L, D)``."""
        return x

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        """Map ``(B, A, L, d)`` queries or keys of block ``layer``; those of prefix tokens stay as they are."""
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
            self.order = None

    def token_order(self, num_prefix_tokens: int) -> Tensor | None:
        """Return ``order`` for all ``(L,)`` tokens, prefix tokens in their places."""
        if self.order is None:
            return None
        prefix = torch.arange(num_prefix_tokens, device=self.order.device)
        return torch.cat([prefix, self.order + num_prefix_tokens])

    def resized_state(
        self, state: dict[str, Tensor], old_grid: Grid, policy: ResizePolicy | None, antialias: bool = True
    ) -> dict[str, Tensor]:
        """Return the state dict of such a module at ``old_grid`` as this module, at its own grid, can load it.

        The same dictionary comes back where there is nothing to do: equal grids, or a method without a grid.
        """
        if old_grid == self.grid_size:
            return state
        allowed = self.policies_for(state)
        if not allowed and policy is None:
            return state
        if policy is None or policy not in allowed:
            choices = ", ".join(allowed) + f"; usual is {allowed[0]}" if allowed else "null: there is nothing to resize"
            (h, w), (new_h, new_w) = old_grid, self.grid_size
            raise ValueError(
                f"the positions were trained on a {h} x {w} grid and the model has {new_h} x {new_w}: "
                f"the resize policy must be one of {choices}; got {policy}"
            )
        return self._resized_state(state, old_grid, policy, antialias)

    def policies_for(self, state: dict[str, Tensor]) -> tuple[ResizePolicy, ...]:
        """Return the policies that ``state`` allows: coordinates that were rescaled once can only be so again."""
        return ("rescale",) if "trained_grid" in state else self.policies

    def _resized_state(
        self, state: dict[str, Tensor], old_grid: Grid, policy: ResizePolicy, antialias: bool
    ) -> dict[str, Tensor]:
        return {"trained_grid": torch.tensor(old_grid)} | state if policy == "rescale" else dict(state)

    def fill_tables(self) -> None:
        """Compute the unsaved buffers, which follow from the grids by a formula."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if "rescale" in self.policies and prefix + "trained_grid" in state_dict:
            self.trained_grid = state_dict[prefix + "trained_grid"].clone()
            self.fill_tables()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        was_meta = any(buffer.is_meta for buffer in self.buffers())
        super()._apply(_keeping_float32(fn) if self.keeps_float32 else fn, recurse)
        if was_meta and not any(buffer.is_meta for buffer in self.buffers()):
            self.fill_tables()
        return self


def _keeping_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return ``fn``, a move or a cast of tensors, without its casts to half precision."""

    def moved(x: Tensor) -> Tensor:
        y = fn(x)
        return x.to(y.device) if x.is_floating_point() and y.dtype.itemsize < x.dtype.itemsize else y

    return moved


def grid_cells(grid_size: Grid, trained_grid: Tensor | None = None, half_cell: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return row y and column x of each cell in raster order, two ``(N,)`` float64 tensors.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        trained_grid: Where given, cells are measured in cells of this grid over the same image.
        half_cell: Where in a cell its zero lies: 0.0 keeps the first cell's at 0, 0.5 aligns the centres of the grids.
    """
    old = grid_size if trained_grid is None else trained_grid.tolist()
    sides = [
        (torch.arange(side, dtype=torch.float64) + half_cell) * (trained / side) - half_cell
        for side, trained in zip(grid_size, old, strict=True)
    ]
    y, x = torch.meshgrid(*sides, indexing="ij")
    return y.flatten(), x.flatten()
