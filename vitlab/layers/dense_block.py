"""A block that makes the tokens wider, and the stages that narrow them again."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Unpack

import torch
from torch import Tensor, nn

from vitlab.layers.attention import Place
from vitlab.layers.block import ALONE, Block, BlockArgs
from vitlab.layers.linear import Linear
from vitlab.layers.mlp import ActChoice, build_act
from vitlab.layers.pos_embed import PosEmbed
from vitlab.named_kwargs import Named


class DenseBlock(Named, Block):
    """A block that appends channels to its input, as in DenseNet, Huang et al. 2017 (arXiv:1608.06993).

    The blocks of a network form stages, between which the width is halved: the width of a block follows from its place.

    Args:
        dim: Width of the tokens that enter the first block of the network.
        num_heads: Number of attention heads A; divides the width of every block.
        dense_blocks: Number of blocks of each stage; they sum to the number of blocks of the network.
        dense_growth: Number of channels that each block appends, a linear map of the rest.
        place: As in :class:`Block`.
        **block: Passed to :class:`Block`.

    Example:
        >>> block = DenseBlock(16, num_heads=2, dense_blocks=[1, 2], dense_growth=8, place=Place(layer=2, depth=3))
        >>> block(torch.randn(3, 5, 20), PosEmbed(), layer=2).shape  # 16, 24 halved, 20
        torch.Size([3, 5, 28])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        dense_blocks: Sequence[int] = (),
        dense_growth: int = 64,
        place: Place = ALONE,
        **block: Unpack[BlockArgs],
    ) -> None:
        if min(*dense_blocks, dense_growth, 1) < 1 or sum(dense_blocks) != place.depth:
            raise ValueError(
                "`dense_blocks` must be numbers of blocks that sum to `depth`, and `dense_growth` at least 1, got "
                f"{list(dense_blocks)}, {place.depth} and {dense_growth}"
            )
        starts, width = set(accumulate(dense_blocks)), dim
        for i in range(place.layer + 1):
            self.widths = (width, width // 2 if i in starts else width, dense_growth)
            width = sum(self.widths[1:])
        inner = self.widths[1]
        try:
            super().__init__(inner, num_heads, place=place, **block)
        except ValueError as error:
            if inner == dim or inner % num_heads == 0:
                raise
            what = f"the width of block {place.layer}: choose another `dense_growth` than {dense_growth}"
            raise ValueError(f"{error}, {what}") from error
        self.out_dim = width

    def add_layers(self, dim: int, act_layer: ActChoice) -> None:
        """Add the layer that halves the width, where a stage begins, and the one that makes new channels."""
        entering, _, growth = self.widths
        halves = entering != dim
        self.transition = nn.Sequential(Linear(entering, dim), build_act(act_layer, dim)) if halves else None
        self.dense_linear = Linear(dim, growth)

    def forward(self, x: Tensor, pos_embed: PosEmbed, layer: int, first_only: bool = False) -> Tensor:
        """Map ``(B, L, D)`` tokens as wide as this place has them to ``(B, L, out_dim)``, or to the first of them."""
        x = pos_embed.enter(x if self.transition is None else self.transition(x), layer)
        y = self.branches(x, pos_embed, layer, first_only)
        y = torch.cat([x[:, : y.shape[1]], self.dense_linear(y)], dim=2)
        return y if first_only else pos_embed.leave(y, layer)
