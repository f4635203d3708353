"""The soft split of T2T-ViT: overlapping windows, and the grids of tokens after them."""

import math
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from vitlab.ranges import check_word

Side = int | tuple[int, int]  # for both axes, or (rows, columns)
Split = tuple[Side, Side, Side]  # kernel, stride, padding
PaddingName = Literal["zero", "reflect", "replicate", "circular", "none"]


def pair(name: str, value: int | Sequence[int], unit: str = "pixels") -> tuple[int, int]:
    """Return ``value``, one side or [height, width], as a pair; ``unit`` is what an error counts it in.

    Example:
        >>> pair("img_size", 224), pair("img_size", [400, 100])
        ((224, 224), (400, 100))
    """
    sides = tuple(value) if isinstance(value, Iterable) else (value, value)
    if len(sides) != 2 or not all(isinstance(side, Integral) for side in sides) or min(sides) < 1:
        raise ValueError(f"`{name}` must be one side or [height, width], in whole {unit}, got {value}")
    return int(sides[0]), int(sides[1])


def soft_split(
    x: Tensor, kernel: Side, stride: Side, padding: Side, dilation: Side = 1, mode: PaddingName = "zero"
) -> Tensor:
    """Map ``(B, C, h, w)`` to ``(B, N, C kernel kernel)``: overlapping windows in raster order, padded by ``mode``.

    Example:
        >>> soft_split(torch.randn(1, 3, 224, 224), kernel=7, stride=4, padding=2).shape
        torch.Size([1, 3136, 147])
    """
    if mode not in ("zero", "none"):
        (down, across), padding = both(padding), 0
        x = F.pad(x, (across, across, down, down), mode=mode)
    return F.unfold(x, kernel, dilation=dilation, stride=stride, padding=padding).transpose(1, 2)


def soft_splits(
    kernels: Sequence[int | Sequence[int]],
    strides: Sequence[int | Sequence[int]] | None = None,
    mode: PaddingName = "zero",
) -> list[Split]:
    """Return kernel, stride and padding of each split: stride ceil(k / 2) unless given, padding ceil(k / 4) or none.

    Example:
        >>> soft_splits([7, 3, 3])
        [(7, 4, 2), (3, 2, 1), (3, 2, 1)]
        >>> soft_splits([[7, 3]])  # rows, columns
        [((7, 3), (4, 2), (2, 1))]
    """
    check_word("t2t_padding", mode, get_args(PaddingName))
    windows = check_sides("t2t_kernels", kernels)
    steps = [_ceil_div(k, 2) for k in windows] if strides is None else check_sides("t2t_strides", strides)
    if not windows or len(steps) != len(windows):
        raise ValueError(
            f"`t2t_kernels` needs at least one entry and `t2t_strides` as many, got t2t_kernels={list(kernels)} "
            f"and t2t_strides={list(steps)}"
        )
    return [(k, s, 0 if mode == "none" else _ceil_div(k, 4)) for k, s in zip(windows, steps, strict=True)]


def split_grids(
    img_size: tuple[int, int],
    splits: Sequence[Split],
    dilations: Sequence[Side] | None = None,
    mode: PaddingName = "zero",
) -> list[tuple[int, int]]:
    """Return the ``(h, w)`` grid after each split of an image of ``img_size``.

    Example:
        >>> split_grids((224, 160), soft_splits([7, 3, 3]))
        [(56, 40), (28, 20), (14, 10)]
    """
    grids: list[tuple[int, int]] = []
    for (kernel, stride, padding), dilation in zip(splits, dilations or [1] * len(splits), strict=True):
        sides = grids[-1] if grids else img_size
        axes = list(zip(sides, both(kernel), both(stride), both(padding), both(dilation), strict=True))
        # in the form in which unfold counts them, so that a graph of any size sees that they are equal
        h, w = ((side + 2 * p - d * (k - 1) - 1 + s) // s for side, k, s, p, d in axes)
        if min(h, w) < 1:
            raise ValueError(
                f"`img_size` must leave every split at least one token, but a window of {kernel} does not fit on "
                f"{sides[0]} x {sides[1]} cells, got img_size={list(img_size)} and "
                f"t2t_kernels={[k for k, _, _ in splits]}; "
                f"use larger images, or smaller `t2t_kernels` or `t2t_strides`"
            )
        if mode in ("reflect", "circular") and any(p > side - int(mode == "reflect") for side, _, _, p, _ in axes):
            raise ValueError(
                f"`t2t_padding={mode}` takes {padding} cells around a grid of {sides[0]} x {sides[1]}, too few: "
                f"use larger images, smaller `t2t_kernels`, or zero or replicate"
            )
        grids.append((h, w))
    return grids


def split_dilations(dilations: Sequence[int | Sequence[int]] | None, num_splits: int) -> list[Side]:
    """Return the dilation of each split, 1 unless given.

    Example:
        >>> split_dilations(None, 3), split_dilations([2, 1, [1, 2]], 3)
        ([1, 1, 1], [2, 1, (1, 2)])
    """
    sides = check_sides("t2t_dilations", [1] * num_splits if dilations is None else dilations)
    if len(sides) != num_splits:
        raise ValueError(f"`t2t_dilations` needs an entry for each of {num_splits} splits, got {dilations}")
    return sides


def stage_widths(t2t_dim: int | Sequence[int], num_layers: int) -> list[int]:
    """Return the width of each token layer.

    Example:
        >>> stage_widths(64, 2), stage_widths([32, 64], 2)
        ([64, 64], [32, 64])
    """
    widths = [t2t_dim] * num_layers if isinstance(t2t_dim, int) else list(t2t_dim)
    if len(widths) != num_layers or min(widths, default=1) < 1:
        raise ValueError(f"`t2t_dim` must be one width of at least 1 or {num_layers}, one a token layer, got {t2t_dim}")
    return widths


def token_step(splits: Sequence[Split]) -> tuple[int, int]:
    """Return the distance of neighboring tokens in pixels, (down, across): the product of all strides.

    Example:
        >>> token_step(soft_splits([7, 3, 3]))
        (16, 16)
    """
    down, across = zip(*(both(stride) for _, stride, _ in splits), strict=True)
    return math.prod(down), math.prod(across)


def both(side: Side) -> tuple[int, int]:
    """Return a side as (rows, columns).

    Example:
        >>> both(7), both((7, 3))
        ((7, 7), (7, 3))
    """
    return (side, side) if isinstance(side, int) else side


def check_sides(name: str, values: Sequence[int | Sequence[int]]) -> list[Side]:
    """Return the sides with pairs as tuples; refuse values other than whole numbers from 1 or pairs of them.

    Example:
        >>> check_sides("t2t_kernels", [7, [3, 5]])
        [7, (3, 5)]
    """
    sides = [tuple(side) if isinstance(side, Sequence) else side for side in values]
    for side in sides:
        lengths = side if isinstance(side, tuple) else (side, side)
        if len(lengths) != 2 or not all(isinstance(length, int) for length in lengths):
            raise ValueError(f"`{name}` must be whole numbers or pairs of them, [rows, columns], got {list(values)}")
        if min(lengths) < 1:
            raise ValueError(f"`{name}` must be at least 1, got {list(values)}")
    return sides  # type: ignore[return-value]


def _ceil_div(side: Side, divisor: int) -> Side:
    """Divide each axis, rounding up."""
    return -(-side // divisor) if isinstance(side, int) else (-(-side[0] // divisor), -(-side[1] // divisor))
