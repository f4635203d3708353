"""The position embedding that mixes neighboring tokens."""

import torch
from torch import Tensor, nn

from vitlab.layers.pos_embed.base import PosEmbed, PosEmbedJoin
from vitlab.layers.resample import Grid


class ConvPosEmbed(PosEmbed):
    """A depthwise 3 x 3 convolution of the patch tokens after a block, Chu et al. 2021 (arXiv:2102.10882), "PEG".

    Only the zero padding at the border encodes absolute position.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        embed_dim: Token width D.
        depth: Number of blocks.
        join: One convolution, after the first block (stem), or one after each block (every_layer).

    Example:
        >>> peg = ConvPosEmbed((2, 3), embed_dim=8)
        >>> peg.leave(torch.randn(1, 1 + 6, 8), layer=0).shape, peg.acts_after(0), peg.acts_after(1)
        (torch.Size([1, 7, 8]), True, False)
    """

    joins = ("stem", "every_layer")
    trains = True

    def __init__(self, grid_size: Grid, embed_dim: int, depth: int = 1, join: PosEmbedJoin = "stem") -> None:
        super().__init__(grid_size)
        self.join = join
        self.convs = nn.ModuleList(
            nn.Conv2d(embed_dim, embed_dim, 3, padding=1, groups=embed_dim) for _ in range(self.num_sets(depth))
        )

    def block_parameters(self, layer: int) -> list[nn.Parameter]:
        """Return the parameters of the convolution after block ``layer``."""
        return list(self.convs[layer].parameters()) if self.acts_after(layer) else []

    def acts_after(self, layer: int) -> bool:
        """Return whether a convolution follows block ``layer``."""
        return layer < len(self.convs)

    def leave(self, x: Tensor, layer: int) -> Tensor:
        """Map the ``(B, L, D)`` tokens that leave block ``layer`` to ``(B, L, D)``; prefix tokens are unchanged."""
        if not self.acts_after(layer):
            return x
        h, w = self.grid_size
        prefix, patches = x.split([x.shape[1] - h * w, h * w], dim=1)
        cells = patches if self.order is None else patches[:, self.order.argsort()]  # each token at its position
        mixed = self.convs[layer](cells.transpose(1, 2).unflatten(2, (h, w)))  # (B, D, h, w)
        mixed = mixed.flatten(2).transpose(1, 2)
        mixed = mixed if self.order is None else mixed[:, self.order]
        return torch.cat([prefix, patches + mixed], dim=1)
