"""Layers that an attention takes by `ghost` and `se_reduction`, as T2T-ViT's variants do: both act on channels."""

import torch
from torch import Tensor, nn

from vitlab.layers.linear import Linear


class Ghost(nn.Module):
    """A linear layer that computes half of the channels of each part and scales them to get the other half.

    From Han et al. 2020 (arXiv:1911.11907), with a factor per channel instead of a convolution, as in T2T-ViT-Ghost.

    Args:
        in_dim: Width of the input.
        parts: Number of parts of the output, such as 3 for queries, keys and values.
        dim: Width of a part; even.
        bias: Whether the linear layer has a bias.

    Example:
        >>> Ghost(8, parts=3, dim=8)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 24])
    """

    def __init__(self, in_dim: int, parts: int, dim: int, bias: bool = True) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"`embed_dim` must be even for `ghost`, got {dim}")
        self.linear = Linear(in_dim, parts * dim // 2, bias=bias)
        self.cheap = nn.Parameter(torch.empty(parts, dim // 2).uniform_(-1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., in_dim)`` to ``(..., parts dim)``."""
        y = self.linear(x).unflatten(-1, self.cheap.shape)
        return torch.cat([y, y * self.cheap], dim=-1).flatten(-2)


class SqueezeExcite(nn.Module):
    """Gate each channel by a small MLP of the mean token, Hu et al. 2018 (arXiv:1709.01507).

    Args:
        dim: Token width D.
        reduction: Factor by which the hidden layer is narrower than ``dim``.

    Example:
        >>> SqueezeExcite(32, reduction=16)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(self, dim: int, reduction: int) -> None:
        super().__init__()
        if reduction < 1 or dim < reduction:
            raise ValueError(f"`se_reduction` must be from 1 to `embed_dim`, got {reduction} and {dim}")
        narrow, wide = Linear(dim, dim // reduction, bias=False), Linear(dim // reduction, dim, bias=False)
        self.fc = nn.Sequential(narrow, nn.ReLU(), wide, nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, L, D)`` to ``(B, L, D)``."""
        return x * self.fc(x.mean(dim=1, keepdim=True))
