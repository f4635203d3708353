"""Position embeddings at another grid."""

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from vitlab.layers.pos_embed.base import PosEmbed

ResizePolicy = Literal["interpolate", "rescale", "extrapolate"]
Grid = tuple[int, int]


def resample_pos_embed(
    state_dict: dict[str, Tensor],
    model: nn.Module,
    old_grid: Grid,
    policy: ResizePolicy | None,
    antialias: bool = True,
) -> tuple[dict[str, Tensor], list[str]]:
    """Return a model's state dict as the grid of ``model`` needs it, and a sentence for each change.

    Nothing is computed in ``model``: what a fixed method needs to know about the old grid travels in the state dict, is
    picked up by ``load_state_dict`` and is saved with the model from then on.

    Args:
        state_dict: State dict of a vitlab network that was trained at ``old_grid``.
        model: The network that will load it; has a ``pos_embed``.
        old_grid: Patch tokens per column and per row, (h, w), in training.
        policy: How to carry positions over; must be given where the grids differ.
        antialias: Whether bicubic interpolation smooths when the grid shrinks.
    """
    prefix = "pos_embed."
    pos_embed: PosEmbed = model.pos_embed  # type: ignore[assignment]
    old = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    new = pos_embed.resized_state(old, (old_grid[0], old_grid[1]), policy, antialias)
    if new is old:
        return state_dict, []
    others = {key: value for key, value in state_dict.items() if not key.startswith(prefix)}
    (h, w), (new_h, new_w) = old_grid, pos_embed.grid_size
    sentence = f"positions: {policy} from {h} x {w} to {new_h} x {new_w}"
    ratio = _norm_ratio(old, new)
    sentences = [sentence if ratio is None else f"{sentence}, norm of a position x {ratio:.2f}"]
    return others | {prefix + key: value for key, value in new.items()}, sentences


def resize_table(table: Tensor, old_grid: Grid, grid: Grid, antialias: bool = True) -> Tensor:
    """Interpolate ``(J, N, D)`` tables to ``(J, N', D)`` by bicubic splines, as published ViTs are fine-tuned."""
    if old_grid == grid:
        return table
    images = table.float().transpose(1, 2).unflatten(2, old_grid)  # (J, D, h, w)
    images = F.interpolate(images, size=grid, mode="bicubic", antialias=antialias, align_corners=False)
    return images.flatten(2).transpose(1, 2).contiguous().to(table.dtype)


def resize_axis(table: Tensor, size: int) -> Tensor:
    """Interpolate ``(J, h, D)`` tables of one axis linearly to ``(J, size, D)``."""
    if table.shape[1] == size:
        return table
    resized = F.interpolate(table.float().transpose(1, 2), size=size, mode="linear", align_corners=False)
    return resized.transpose(1, 2).contiguous().to(table.dtype)


def resize_bias_table(table: Tensor, old_grid: Grid, grid: Grid) -> Tensor:
    """Interpolate ``(J, R + 3, A)`` relative position biases; the three entries of prefix tokens, if any, are copied.

    BEiT's rule, Bao et al. 2022 (arXiv:2106.08254): the old offsets are spread over the new range in steps that grow
    geometrically from 1, so the entries next to the diagonal stay as they are, and linear interpolation fills in.
    """
    if old_grid == grid:
        return table
    (h, w), (num_dy, num_dx) = old_grid, (2 * old_grid[0] - 1, 2 * old_grid[1] - 1)
    offsets, prefix = table.float().split([num_dy * num_dx, table.shape[1] - num_dy * num_dx], dim=1)
    field = offsets.unflatten(1, (num_dy, num_dx))  # (J, 2h - 1, 2w - 1, A)
    field = torch.einsum("yi, xj, kija -> kyxa", _offset_weights(h, grid[0]), _offset_weights(w, grid[1]), field)
    return torch.cat([field.flatten(1, 2), prefix], dim=1).to(table.dtype)


def _offset_weights(old: int, new: int) -> Tensor:
    """Return the ``(2 new - 1, 2 old - 1)`` linear interpolation matrix of offsets along one axis."""
    places = _geometric_places(old - 1, new - 1)  # where the old offsets 0, 1, ... lie in the new range
    weights = torch.zeros(2 * new - 1, 2 * old - 1)
    for offset in range(new):
        above = next((k for k, place in enumerate(places) if place >= offset), old - 1)
        below = max(above - 1, 0)
        gap = places[above] - places[below]
        share = min(1.0, (offset - places[below]) / gap) if gap else 1.0
        for sign in (-1, 1):
            row = new - 1 + sign * offset
            weights[row, old - 1 + sign * below] = 1 - share
            weights[row, old - 1 + sign * above] = share  # the same entry, once more, where above is 0
    return weights


def _geometric_places(old: int, new: int) -> list[float]:
    """Return 0, 1, 1 + q, 1 + q + q^2, ...: ``old`` steps, with the ratio q that ends them at ``new``."""

    def places(q: float) -> list[float]:
        return [sum(q**i for i in range(k)) for k in range(old + 1)]

    low, high = 0.0, float(max(new, 1))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if places(middle)[-1] > new else (middle, high)
    return places(low)


def _norm_ratio(old: dict[str, Tensor], new: dict[str, Tensor]) -> float | None:
    """Return the mean norm of a position's vector in a table after resizing over the one before."""
    if "weight" in old and "weight" in new:
        return float(new["weight"].float().norm(dim=-1).mean() / old["weight"].float().norm(dim=-1).mean())
    if "interpolated" in new:  # from a table of sines: every squared norm was D / 2
        return float(new["interpolated"].norm(dim=-1).mean() / (new["interpolated"].shape[-1] / 2) ** 0.5)
    return None
