"""The tokenizer of T2T-ViT: overlapping splits with token layers between them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.layers.linear import LINEAR, Linear
from vitlab.layers.plain import is_plain
from vitlab.layers.precision import convolves_as_products
from vitlab.tokenizers.fused import covers, fused_tokens, goes_round_nothing
from vitlab.tokenizers.splits import (
    PaddingName,
    both,
    soft_split,
    soft_splits,
    split_dilations,
    split_grids,
    stage_widths,
    token_step,
)
from vitlab.tokenizers.token_layers import T2TAttn, build_token_layer


class T2TTokenizer(nn.Module):
    """Soft splits with a token layer after all but the last, Yuan et al. 2021 (arXiv:2101.11986).

    This class is the reference, window by window. :mod:`vitlab.tokenizers.fused` computes the same tokens faster from
    the same parameters, for the options that it supports; ``fused`` can be set at any time.

    Args:
        img_size: Height and width of the images, in pixels.
        in_chans: Number of image channels C.
        embed_dim: Token width D.
        t2t_attn: Attention of the layer between two splits: linear with exponential or ReLU features, softmax, or none.
        t2t_kernels: Window side, or [rows, columns], of each split, in cells of the grid before it, at first pixels.
        t2t_strides: Step of each split, in the same units; None is half the window, rounded up.
        t2t_dilations: Distance between the cells of a window, one for each split; None is 1.
        t2t_padding: Padding of the grid, a quarter of the window wide, rounded up; none adds no padding.
        t2t_dim: Token width between the splits: one for all token layers, or one for each.
        norm_eps: Epsilon of the normalizations in the token layers.
        fused: Whether to use the fast path where it is as precise; exports use the reference.
        **layer: Options of the token layers, see :func:`vitlab.tokenizers.token_layers.build_token_layer`.

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
        t2t_kernels: Sequence[int | Sequence[int]] = (7, 3, 3),
        t2t_strides: Sequence[int | Sequence[int]] | None = None,
        t2t_dim: int | Sequence[int] = 64,
        t2t_dilations: Sequence[int | Sequence[int]] | None = None,
        t2t_padding: PaddingName = "zero",
        norm_eps: float = 1e-5,
        fused: bool = True,
        **layer: Any,
    ) -> None:
        super().__init__()
        self.fused = fused
        self.padding: PaddingName = t2t_padding
        self.splits = soft_splits(t2t_kernels, t2t_strides, t2t_padding)
        self.dilations = split_dilations(t2t_dilations, len(self.splits))
        self.grids = self.grids_of(img_size)
        self.grid_size = self.grids[-1]
        self.patch_size = token_step(self.splits)
        dims = stage_widths(t2t_dim, len(self.splits) - 1)
        token_dims = [c * math.prod(both(k)) for c, (k, _, _) in zip([in_chans, *dims], self.splits, strict=True)]
        for i, dim in enumerate(dims):
            attention = build_token_layer(t2t_attn, token_dims[i], dim, norm_eps, **layer)
            self.add_module(f"attention{i + 1}", attention)
        self.project = Linear(token_dims[-1], embed_dim)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(B, C, H, W)`` to ``(B, N, D)``."""
        grids = self.grids_of(images.shape[2:])
        if self.is_fused(images):
            return fused_tokens(images, self.splits, grids, self.layers(), self.project)
        x = self.windows(images, 0)
        for i, layer in enumerate(self.layers()):
            x = layer(x)  # (B, h w, t2t_dim)
            x = x.transpose(1, 2).unflatten(2, grids[i])  # (B, t2t_dim, h, w)
            x = self.windows(x, i + 1)  # (B, N, t2t_dim k k)
        return self.project(x)

    def grids_of(self, img_size: Sequence[int]) -> list[tuple[int, int]]:
        """Return the rows and columns of tokens after each split, for this image height and width."""
        return split_grids((img_size[0], img_size[1]), self.splits, self.dilations, self.padding)

    def grid_of(self, img_size: Sequence[int]) -> tuple[int, int]:
        """Return the rows and columns of tokens that enter the backbone, for this image height and width."""
        return self.grids_of(img_size)[-1]

    def layers(self) -> list[nn.Module]:
        """Return the token layers, in the order of the splits that they follow."""
        return [self.get_submodule(f"attention{i}") for i in range(1, len(self.splits))]

    def windows(self, x: Tensor, i: int) -> Tensor:
        """Map ``(B, C, h, w)`` to the ``(B, N, C k k)`` windows of split ``i``."""
        return soft_split(x, *self.splits[i], self.dilations[i], self.padding)

    def is_fused(self, images: Tensor) -> bool:
        """Return whether :meth:`forward` uses the fast path for ``images``."""
        can = images.device.type in ("cpu", "cuda") and not torch.compiler.is_exporting()
        if not (self.fused and can and convolves_as_products(images)) or self.unfused_options():
            return False
        return is_plain(self.project, *LINEAR) and all(map(goes_round_nothing, self.layers()))

    def unfused_options(self) -> list[str]:
        """Return the names of the options that the fast path does not support."""
        return covers(self.splits, self.dilations, self.padding, self.layers())
