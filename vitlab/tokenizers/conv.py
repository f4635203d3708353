"""A stem of overlapping convolutions: what T2T-ViT compares its tokenizer with."""

from collections.abc import Sequence

from torch import Tensor, nn

from vitlab.tokenizers.splits import soft_splits, split_grids, token_step


class ConvStem(nn.Module):
    """Convolutions with the windows of the soft splits, T2T-ViT_c of Yuan et al. 2021 (arXiv:2101.11986).

    Args:
        img_size: Height and width of the images, in pixels.
        in_chans: Number of image channels C.
        embed_dim: Token width D, the width of the last convolution.
        t2t_kernels: Window side of each convolution, in cells of the grid before it; the first in pixels.
        t2t_strides: Step of each convolution, in the same units; ``None`` is half the window, rounded up.
        t2t_dim: Width of all other convolutions.

    Example:
        >>> ConvStem((224, 224), in_chans=3, embed_dim=384)(torch.randn(1, 3, 224, 224)).shape
        torch.Size([1, 196, 384])
    """

    def __init__(
        self,
        img_size: tuple[int, int],
        in_chans: int,
        embed_dim: int,
        t2t_kernels: Sequence[int] = (7, 3, 3),
        t2t_strides: Sequence[int] | None = None,
        t2t_dim: int = 64,
    ) -> None:
        super().__init__()
        splits = soft_splits(t2t_kernels, t2t_strides)
        self.grid_size = split_grids(img_size, splits)[-1]
        self.patch_size = token_step(splits)
        widths = [in_chans, *[t2t_dim] * (len(splits) - 1), embed_dim]
        self.convs = nn.Sequential(
            *(nn.Conv2d(widths[i], widths[i + 1], k, stride=s, padding=p) for i, (k, s, p) in enumerate(splits))
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(B, C, H, W)`` to ``(B, N, D)``."""
        return self.convs(images).flatten(2).transpose(1, 2)
