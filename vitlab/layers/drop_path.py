"""Stochastic depth: residual branches that a random share of the samples skips."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """Drop a residual branch for a random share of samples: stochastic depth, Huang et al. 2016 (arXiv:1603.09382).

    A sample's branch is either dropped or kept and scaled up, so that the expected value does not change. By default
    each sample is drawn independently and all branches are computed. With ``subset``, as in Oquab et al. 2024
    (arXiv:2304.07193), a fixed number of samples is drawn and only their branches are computed. If that
    number is not whole, chance decides on the last of them, so that small batches are dropped from at the same rate.

    Args:
        rate: Share of samples whose branch is dropped in training, in [0, 1).
        subset: Whether to draw a fixed number of samples and compute only their branches.

    Example:
        >>> x = DropPath(0.5)(torch.zeros(1000, 1, 1), torch.ones_like)  # in training: 0 or 2, 1 on average
        >>> sorted(set(x.flatten().tolist()))
        [0.0, 2.0]
    """

    def __init__(self, rate: float, subset: bool = False) -> None:
        super().__init__()
        self.rate = rate
        self.subset = subset

    @property
    def rate(self) -> float:
        """Share of samples whose branch is dropped in training; it can be set at any time."""
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self._rate, self.drops = rate, rate > 0  # torch compiles a graph for each number that an `if` reads

    def forward(self, x: Tensor, branch: Callable[[Tensor], Tensor], owner: Tensor | None = None) -> Tensor:
        """Map ``(B, L, D)`` to ``x + branch(x)``, cut to the first token if ``branch`` returns only that.

        ``owner``, ``(B, L)``, is the image of each token where images share a row: each image is dropped or kept.
        """
        if self.training and self.drops and self.subset:
            return self._forward_subset(x, branch)
        y = branch(x)
        if self.training and self.drops:
            factor = self._factors(y if owner is None else y.flatten(0, 1))  # no more images than tokens
            y = y * (factor if owner is None else factor[owner, 0])
        return (x if x.shape[1] == y.shape[1] else x[:, : y.shape[1]]) + y  # a slice of all is an operator, too

    def _factors(self, y: Tensor) -> Tensor:
        """Return ``(B, 1, 1)``: 0 for a sample whose branch is dropped, 1 / (1 - rate) for the others."""
        if torch.compiler.is_compiling():
            # bernoulli_ and `1 - self.rate` would compile one graph per rate; this compiles one for all
            kept = torch.ones(1, 1, 1, device=y.device) - self.rate
            return ((torch.rand(len(y), 1, 1, device=y.device) < kept) / kept).to(y.dtype)
        return y.new_empty(len(y), 1, 1).bernoulli_(1 - self.rate) / (1 - self.rate)

    def _forward_subset(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        num_kept = len(x) * (1 - self.rate)
        most = math.ceil(num_kept - 1e-6)  # 1 - rate is rounded
        rows = torch.randperm(len(x), device=x.device)[:most]
        y = branch(x[rows])
        last = torch.rand(1, device=x.device) < num_kept - most + 1
        kept = torch.cat([last.new_ones(most - 1), last])[:, None, None]
        return x[:, : y.shape[1]].index_add(0, rows, (y * kept).to(x.dtype), alpha=1 / (1 - self.rate))

    def extra_repr(self) -> str:
        """Show the arguments when the module is printed."""
        return f"rate={self.rate:.3g}, subset={self.subset}"
