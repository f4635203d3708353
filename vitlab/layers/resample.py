"""Interpolate tables of positions to another grid."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.resized import resize_images

ResizePolicy = Literal["interpolate", "rescale", "extrapolate"]
Grid = tuple[int, int]


def same_size(size: Sequence[int], own: Sequence[int]) -> bool:
    """Return whether a height and width are ``own``; never for sizes that a graph of torch.export leaves open.

    Example:
        >>> same_size((14, 14), (14, 14)), same_size((14, 16), (14, 14))
        (True, False)
    """
    return all(isinstance(side, int) for side in (*size, *own)) and tuple(size) == tuple(own)


def resize_table(table: Tensor, old_grid: Grid, grid: Grid, antialias: bool = True) -> Tensor:
    """Interpolate ``(J, N, D)`` tables to ``(J, N', D)`` by bicubic splines, as is usual when ViTs are fine-tuned.

    Example:
        >>> resize_table(torch.randn(1, 14 * 14, 8), (14, 14), (16, 12)).shape
        torch.Size([1, 192, 8])
    """
    if same_size(old_grid, grid):
        return table
    images = table.float().transpose(1, 2).unflatten(2, old_grid)  # (J, D, h, w)
    images = resize_images(images, grid, "bicubic", antialias)
    return images.flatten(2).transpose(1, 2).contiguous().to(table.dtype)


def resize_axis(table: Tensor, size: int) -> Tensor:
    """Interpolate ``(J, h, D)`` tables of one axis linearly to ``(J, size, D)``.

    Example:
        >>> resize_axis(torch.randn(1, 14, 8), 16).shape
        torch.Size([1, 16, 8])
    """
    if same_size((size,), table.shape[1:2]):
        return table
    resized = F.interpolate(table.float().transpose(1, 2), size=size, mode="linear", align_corners=False)
    return resized.transpose(1, 2).contiguous().to(table.dtype)


def resize_bias_table(table: Tensor, old_grid: Grid, grid: Grid) -> Tensor:
    """Interpolate ``(J, R + 3, A)`` relative position biases; the three entries of prefix tokens, if any, are copied.

    BEiT's rule, Bao et al. 2022 (arXiv:2106.08254): the old offsets are spread over the new range in steps that grow
    geometrically from 1, so biases of offsets 0 and 1 do not change; the rest is interpolated linearly.

    Example:
        >>> resize_bias_table(torch.randn(1, 27 * 27 + 3, 6), (14, 14), (16, 16)).shape
        torch.Size([1, 964, 6])
    """
    if same_size(old_grid, grid):
        return table
    (h, w), (num_dy, num_dx) = old_grid, (2 * old_grid[0] - 1, 2 * old_grid[1] - 1)
    offsets, prefix = table.float().split([num_dy * num_dx, table.shape[1] - num_dy * num_dx], dim=1)
    field = offsets.unflatten(1, (num_dy, num_dx))  # (J, 2h - 1, 2w - 1, A)
    field = torch.einsum("yi, xj, kija -> kyxa", _offset_weights(h, grid[0]), _offset_weights(w, grid[1]), field)
    return torch.cat([field.flatten(1, 2), prefix], dim=1).to(table.dtype)


def _offset_weights(old: int, new: int) -> Tensor:
    """Return the ``(2 new - 1, 2 old - 1)`` linear interpolation matrix of offsets along one axis."""
    places = _geometric_places(old - 1, new - 1)  # where the old offsets 0, 1, ... lie in the new range
    offsets, columns = torch.arange(1 - new, new), torch.arange(1 - old, old)
    size, sign = offsets.abs().double(), torch.where(offsets < 0, -1, 1)
    above = (places[:, None] < size).sum(dim=0).clamp(max=old - 1)  # the first place that is not below
    below = (above - 1).clamp(min=0)
    gap = places[above] - places[below]
    share = torch.where(gap > 0, ((size - places[below]) / gap).clamp(max=1), 1.0).float()[:, None]
    at_above, at_below = columns == (sign * above)[:, None], columns == (sign * below)[:, None]
    return torch.where(at_above, share, torch.where(at_below, 1 - share, 0.0))  # that above, where both are 0


def _geometric_places(old: int, new: int) -> Tensor:
    """Return 0, 1, 1 + q, 1 + q + q^2, ... in float64: ``old`` steps, with the q for which the last one is ``new``.

    All of it is tensors, so that a graph can compute it for any ``new``.
    """
    powers = torch.arange(old, dtype=torch.float64)
    low = torch.zeros((), dtype=torch.float64)
    end = low + new
    high = end.clamp(min=1)
    for _ in range(60):
        middle = (low + high) / 2
        is_above = (middle**powers).sum() > end
        low, high = torch.where(is_above, low, middle), torch.where(is_above, middle, high)
    return F.pad((low**powers).cumsum(0), (1, 0))
