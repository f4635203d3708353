"""Overlapping splits with token layers between: the tokenizer of T2T-ViT."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitlab.tokenizers.fused import fused_tokens
from vitlab.tokenizers.splits import soft_split, soft_splits, split_grids, token_step
from vitlab.tokenizers.token_layers import T2TAttn, build_token_layer


class T2TTokenizer(nn.Module):
    """Soft splits with a token layer after all but the last, Yuan et al. 2021 (arXiv:2101.11986).

    What follows is the reference, window by window. The same tokens come faster, out of the same parameters, from
    :mod:`vitlab.tokenizers.fused`; ``fused`` can be set at any time.

    Args:
        img_size: Height and width of the images, in pixels.
        in_chans: Number of image channels C.
        embed_dim: Token width D.
        t2t_attn: Which token layer stands between two splits.
        t2t_kernels: Window side of each split, in cells of the grid before it; the first in pixels.
        t2t_strides: Step of each split, in the same units; ``None`` is half the window, rounded up.
        t2t_dim: Token width between the splits.
        norm_eps: Epsilon of the normalisations in the token layers.
        fused: Whether to take the fast way, on CPU and CUDA; exported graphs are the plain one's, which others can run.

    Example:
        >>> tokenizer = T2TTokenizer((224, 224), in_chans=3, embed_dim=384)
        >>> tokenizer(torch.randn(1, 3, 224, 224)).shape, tokenizer.grid_size
        (torch.Size([1, 196, 384]), (14, 14))
    """

    def __init__(
        self,
        img_size: tuple[int, int],
        in_chans: int,
        embed_dim: int,
        t2t_attn: T2TAttn = "performer",
        t2t_kernels: Sequence[int] = (7, 3, 3),
        t2t_strides: Sequence[int] | None = None,
        t2t_dim: int = 64,
        norm_eps: float = 1e-5,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.fused = fused
        self.splits = soft_splits(t2t_kernels, t2t_strides)
        self.grids = split_grids(img_size, self.splits)
        self.grid_size = self.grids[-1]
        self.patch_size = token_step(self.splits)
        widths = [in_chans, *[t2t_dim] * (len(self.splits) - 1)]
        token_dims = [width * k * k for width, (k, _, _) in zip(widths, self.splits, strict=True)]
        for i, token_dim in enumerate(token_dims[:-1], start=1):
            self.add_module(f"attention{i}", build_token_layer(t2t_attn, token_dim, t2t_dim, norm_eps))
        self.project = nn.Linear(token_dims[-1], embed_dim)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(B, C, H, W)`` to ``(B, N, D)``."""
        if self.is_fused(images):
            layers = [self.get_submodule(f"attention{i}") for i in range(1, len(self.splits))]
            return fused_tokens(images, self.splits, self.grids, layers, self.project)
        x = soft_split(images, *self.splits[0])
        for i, split in enumerate(self.splits[1:], start=1):
            x = self.get_submodule(f"attention{i}")(x)  # (B, h w, t2t_dim)
            x = x.transpose(1, 2).unflatten(2, self.grids[i - 1])  # (B, t2t_dim, h, w)
            x = soft_split(x, *split)  # (B, N, t2t_dim k k)
        return self.project(x)

    def is_fused(self, images: Tensor) -> bool:
        """Return whether :meth:`forward` takes the fast way for ``images``."""
        return self.fused and images.device.type in ("cpu", "cuda") and not torch.compiler.is_exporting()
