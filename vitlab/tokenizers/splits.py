"""The soft split of T2T-ViT: overlapping windows, and the grids that they leave."""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

Split = tuple[int, int, int]  # kernel, stride, padding


def pair(name: str, value: int | Sequence[int]) -> tuple[int, int]:
    """Return height and width, in pixels, of a side or of the two.

    Example:
        >>> pair("img_size", 224), pair("img_size", [400, 100])
        ((224, 224), (400, 100))
    """
    sides = (value, value) if isinstance(value, int) else tuple(value)
    if len(sides) != 2 or not all(isinstance(side, int) for side in sides) or min(sides) < 1:
        raise ValueError(f"`{name}` must be one side or [height, width], in pixels, got {value}")
    return sides


def soft_split(x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """Map ``(B, C, h, w)`` to ``(B, N, C kernel kernel)``: overlapping windows in raster order, zeros outside.

    Example:
        >>> soft_split(torch.randn(1, 3, 224, 224), kernel=7, stride=4, padding=2).shape
        torch.Size([1, 3136, 147])
    """
    return F.unfold(x, kernel, stride=stride, padding=padding).transpose(1, 2)


def soft_splits(kernels: Sequence[int], strides: Sequence[int] | None = None) -> list[Split]:
    """Return kernel, stride and padding of each split: stride ceil(k / 2) unless given, padding ceil(k / 4).

    Example:
        >>> soft_splits([7, 3, 3])
        [(7, 4, 2), (3, 2, 1), (3, 2, 1)]
    """
    strides = [-(-k // 2) for k in kernels] if strides is None else strides
    if not kernels or len(strides) != len(kernels):
        raise ValueError(
            f"`t2t_kernels` needs at least one entry and `t2t_strides` as many, got t2t_kernels={list(kernels)} "
            f"and t2t_strides={list(strides)}"
        )
    if not all(isinstance(side, int) for side in (*kernels, *strides)):
        raise ValueError(f"`t2t_kernels` and `t2t_strides` must be whole numbers, got {kernels} and {strides}")
    if min(*kernels, *strides) < 1:
        raise ValueError(f"`t2t_kernels` and `t2t_strides` must be at least 1, got {list(kernels)} and {list(strides)}")
    return [(k, s, -(-k // 4)) for k, s in zip(kernels, strides, strict=True)]


def split_grids(img_size: tuple[int, int], splits: list[Split]) -> list[tuple[int, int]]:
    """Return the ``(h, w)`` grid after each split of an image of ``img_size``.

    Example:
        >>> split_grids((224, 160), soft_splits([7, 3, 3]))
        [(56, 40), (28, 20), (14, 10)]
    """
    grids: list[tuple[int, int]] = []
    for k, s, p in splits:
        h, w = grids[-1] if grids else img_size
        grids.append(((h + 2 * p - k) // s + 1, (w + 2 * p - k) // s + 1))
        if min(grids[-1]) < 1:
            raise ValueError(
                f"`img_size` must leave every split at least one token, but a window of {k} does not fit on "
                f"{h} x {w} cells, got img_size={list(img_size)} and t2t_kernels={[k for k, _, _ in splits]}; "
                f"use larger images, or smaller `t2t_kernels` or `t2t_strides`"
            )
    return grids


def token_step(splits: Sequence[Split]) -> tuple[int, int]:
    """Return the pixels from one token to the next, down and across: the product of all strides.

    Example:
        >>> token_step(soft_splits([7, 3, 3]))
        (16, 16)
    """
    step = math.prod(stride for _, stride, _ in splits)
    return step, step
