"""Resize images with antialiasing. It stands alone: data and networks use it, and neither imports the other."""

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor


def resize_images(
    images: Tensor, size: Sequence[int], mode: Literal["bilinear", "bicubic"], antialias: bool = True
) -> Tensor:
    """Map ``(B, C, H, W)`` images to ``(B, C, *size)``, as ``F.interpolate`` does without ``align_corners``.

    On a CPU torch (2.14) gets a single column of another height wrong when it smooths; transposed, it is one row.
    onnxruntime makes no such mistake, and graphs of torch.export that leave the width open never see one column.

    Args:
        images: Images, ``(B, C, H, W)``.
        size: The new height and width.
        mode: The filter.
        antialias: Whether it widens where images shrink, so that it averages all their pixels.

    Example:
        >>> resize_images(torch.ones(2, 3, 8, 8), (5, 1), "bilinear").shape
        torch.Size([2, 3, 5, 1])
    """
    if isinstance(size[1], int) and size[1] == 1:
        return F.interpolate(images.mT, size[::-1], mode=mode, antialias=antialias).mT
    return F.interpolate(images, size, mode=mode, antialias=antialias)
