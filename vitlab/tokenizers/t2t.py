"""Overlapping splits with token layers between: the tokenizer of T2T-ViT."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.tokenizers.splits import soft_split, split_linear
from vitlab.tokenizers.token_layers import T2TAttn, build_token_layer


class T2TTokenizer(nn.Module):
    """Soft splits with a token layer after all but the last, Yuan et al. 2021 (arXiv:2101.11986).

    Two ways lead to the same tokens with the same parameters: convolutions and views (fused), or windows, step by step,
    which is the reference and has the attention maps. ``fused`` can be set at any time.

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
        widths = [in_chans, *[t2t_dim] * (len(self.splits) - 1)]
        token_dims = [width * k * k for width, (k, _, _) in zip(widths, self.splits, strict=True)]
        for i, token_dim in enumerate(token_dims[:-1], start=1):
            self.add_module(f"attention{i}", build_token_layer(t2t_attn, token_dim, t2t_dim, norm_eps))
        self.project = nn.Linear(token_dims[-1], embed_dim)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(B, C, H, W)`` to ``(B, N, D)``."""
        if not self.is_fused(images):
            return self._by_windows(images)
        x = images
        for i, split in enumerate(self.splits[:-1]):
            layer: Any = self.get_submodule(f"attention{i + 1}")
            x = layer.from_map(x, split, is_image=i == 0)  # (B, h w, t2t_dim)
            x = x.unflatten(1, self.grids[i]).permute(0, 3, 1, 2)  # (B, t2t_dim, h, w), channels last
        return split_linear(x, self.splits[-1], self.project)

    def is_fused(self, images: Tensor) -> bool:
        """Return whether :meth:`forward` takes the fast way for ``images``."""
        return self.fused and images.device.type in ("cpu", "cuda") and not torch.compiler.is_exporting()

    def _by_windows(self, images: Tensor) -> Tensor:
        x = soft_split(images, *self.splits[0])
        for i, split in enumerate(self.splits[1:], start=1):
            x = self.get_submodule(f"attention{i}")(x)  # (B, h w, t2t_dim)
            x = x.transpose(1, 2).unflatten(2, self.grids[i - 1])  # (B, t2t_dim, h, w)
            x = soft_split(x, *split)
        return self.project(x)


def soft_splits(kernels: Sequence[int], strides: Sequence[int] | None = None) -> list[tuple[int, int, int]]:
    """Return kernel, stride and padding of each split: stride ceil(k / 2) unless given, padding ceil(k / 4)."""
    strides = [-(-k // 2) for k in kernels] if strides is None else strides
    if not kernels or len(strides) != len(kernels):
        raise ValueError(
            f"`t2t_kernels` needs at least one entry and `t2t_strides` as many, got t2t_kernels={list(kernels)} "
            f"and t2t_strides={list(strides)}"
        )
    if min(*kernels, *strides) < 1:
        raise ValueError(f"`t2t_kernels` and `t2t_strides` must be at least 1, got {list(kernels)} and {list(strides)}")
    return [(k, s, -(-k // 4)) for k, s in zip(kernels, strides, strict=True)]


def split_grids(img_size: tuple[int, int], splits: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Return the ``(h, w)`` grid after each split of an image of ``img_size``."""
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
