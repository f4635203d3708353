"""A stem of overlapping convolutions, the baseline that T2T-ViT compares its tokenizer with."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vitlab.tokenizers.splits import (
    PaddingName,
    soft_splits,
    split_dilations,
    split_grids,
    stage_widths,
    token_step,
)


class ConvStem(nn.Module):
    """Convolutions with the same windows as the soft splits, T2T-ViT_c of Yuan et al. 2021 (arXiv:2101.11986).

    Args:
        img_size: Height and width of the images, in pixels.
        in_chans: Number of image channels C.
        embed_dim: Token width D, also the width of the last convolution.
        t2t_kernels: Window side, or [rows, columns], of each convolution, in cells of the grid before it.
        t2t_strides: Step of each convolution, in the same units; ``None`` is half the window, rounded up.
        t2t_dim: Width of the other convolutions: one for all, or one for each.
        t2t_dilations: Distance between the cells of a window, one for each convolution; ``None`` is 1.
        t2t_padding: Padding of the grid, a quarter of the window wide, rounded up; none adds no padding.

    Example:
        >>> ConvStem((224, 224), in_chans=3, embed_dim=384)(torch.randn(1, 3, 224, 224)).shape
        torch.Size([1, 196, 384])
    """

    def __init__(
        self,
        img_size: tuple[int, int],
        in_chans: int,
        embed_dim: int,
        t2t_kernels: Sequence[int | Sequence[int]] = (7, 3, 3),
        t2t_strides: Sequence[int | Sequence[int]] | None = None,
        t2t_dim: int | Sequence[int] = 64,
        t2t_dilations: Sequence[int | Sequence[int]] | None = None,
        t2t_padding: PaddingName = "zero",
    ) -> None:
        super().__init__()
        self.padding: PaddingName = t2t_padding
        self.splits = splits = soft_splits(t2t_kernels, t2t_strides, t2t_padding)
        self.dilations = dilations = split_dilations(t2t_dilations, len(splits))
        self.grid_size = self.grid_of(img_size)
        self.patch_size = token_step(splits)
        widths = [in_chans, *stage_widths(t2t_dim, len(splits) - 1), embed_dim]
        mode: Any = "zeros" if t2t_padding in ("zero", "none") else t2t_padding
        self.convs = nn.Sequential(
            *(
                nn.Conv2d(widths[i], widths[i + 1], k, s, p, dilations[i], padding_mode=mode)
                for i, (k, s, p) in enumerate(splits)
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(B, C, H, W)`` to ``(B, N, D)``."""
        return self.convs(images).flatten(2).transpose(1, 2)

    def grid_of(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of tokens for this image height and width."""
        return split_grids(img_size, self.splits, self.dilations, self.padding)[-1]
