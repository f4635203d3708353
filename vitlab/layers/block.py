"""The pre-norm transformer block and its small parts."""

from functools import partial
from typing import Literal, TypedDict

import torch
from torch import Tensor, nn

from vitlab.class_paths import ClassSpec
from vitlab.layers.attention import Attention, AttnChoice, Place, build_attn
from vitlab.layers.channels import Ghost
from vitlab.layers.drop_path import DropPath
from vitlab.layers.linear import LINEAR
from vitlab.layers.mlp import ActChoice, Mlp, MlpChoice, build_mlp
from vitlab.layers.norm import NormArgs, NormChoice, build_norm
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.recompute import recomputed

BlockName = Literal["plain", "dense"]
BlockChoice = BlockName | str | ClassSpec
ALONE = Place()  # of a block outside a network


class LayerScale(nn.Module):
    """Scale each channel by a trained factor, Touvron et al. 2021 (arXiv:2103.17239).

    Args:
        dim: Token width D.
        layer_scale: Value all factors start at.

    Example:
        >>> LayerScale(3, layer_scale=0.1)(torch.ones(1, 3)).tolist()[0][0]
        0.10000000149011612
    """

    def __init__(self, dim: int, layer_scale: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), float(layer_scale)))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., D)`` to ``(..., D)``."""
        return x * self.gamma


class BlockArgs(TypedDict, total=False):
    """Arguments of :class:`Block` that all blocks of a network share.

    >>> shared: BlockArgs = {"attn": "gated", "mlp_ratio": 3.0}
    """

    attn: AttnChoice
    mlp_ratio: float
    qkv_bias: bool
    act_layer: ActChoice
    mlp_layer: MlpChoice
    norm_layer: NormChoice
    norm_eps: float
    layer_scale: float | None
    dropout: float
    drop_path_rate: float
    drop_path_subset: bool


class Block(nn.Module):
    """Pre-norm transformer block: attention, then an MLP, each with a residual connection.

    Args:
        dim: Token width D.
        num_heads: Number of attention heads A; divides ``dim``.
        attn: The attention: a word, or a class path with arguments of its own.
        mlp_ratio: Hidden width of the MLP, in units of ``dim``.
        qkv_bias: Whether the query, key and value projections have a bias.
        act_layer: Activation of the MLP.
        mlp_layer: The MLP: mlp (two layers), swiglu (gated), ghost (cheap channels), or a class path.
        norm_layer: Kind of normalization.
        norm_eps: Epsilon of every normalization.
        layer_scale: Initial value of both :class:`LayerScale`; ``None`` leaves them out.
        dropout: Dropout rate after each linear layer except qkv, 0 to 1.
        drop_path_rate: Share of samples for which a branch of this block is dropped in training, 0 to 1.
        drop_path_subset: Whether a fixed number of samples is dropped, whose branches are not computed.
        place: Where the block stands in its network.

    Example:
        >>> block = Block(16, num_heads=2, layer_scale=1e-5)
        >>> block(torch.randn(3, 5, 16), PosEmbed(), layer=0).shape
        torch.Size([3, 5, 16])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        attn: AttnChoice = "softmax",
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        act_layer: ActChoice = "gelu",
        mlp_layer: MlpChoice = "mlp",
        norm_layer: NormChoice = "layernorm",
        norm_eps: float = 1e-6,
        layer_scale: float | None = None,
        dropout: float = 0.0,
        drop_path_rate: float = 0.0,
        drop_path_subset: bool = False,
        place: Place = ALONE,
    ) -> None:
        super().__init__()
        self.add_layers(dim, act_layer)
        norms: NormArgs = {"norm_layer": norm_layer, "norm_eps": norm_eps}
        self.norm1 = build_norm(dim=dim, **norms)
        self.attn = build_attn(attn, dim, num_heads, place, qkv_bias=qkv_bias, dropout=dropout, **norms)
        self.ls1 = nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale)
        self.norm2 = build_norm(dim=dim, **norms)
        self.mlp = build_mlp(mlp_layer, dim, int(dim * mlp_ratio), act_layer, dropout)
        self.ls2 = nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale)
        self.drop_path = DropPath(drop_path_rate, drop_path_subset)

    def add_layers(self, dim: int, act_layer: ActChoice) -> None:
        """Add the layers of a subclass that come first; they are initialized before the others."""

    def forward(self, x: Tensor, pos_embed: PosEmbed, layer: int, first_only: bool = False) -> Tensor:
        """Map ``(B, L, D)`` to ``(B, L, D)``; ``layer`` is the index of this block, from 0.

        With ``first_only`` return only the first token, ``(B, 1, D)``, and skip ``pos_embed.leave``.
        """
        y = self.branches(pos_embed.enter(x, layer), pos_embed, layer, first_only)
        return y if first_only else pos_embed.leave(y, layer)

    def branches(self, x: Tensor, pos_embed: PosEmbed, layer: int, first_only: bool) -> Tensor:
        """Map the ``(B, L, D)`` tokens that have entered to those that leave, or to the first of them."""
        owner = pos_embed.owner
        shared = first_only or _reads_twice(self.attn)
        attn = partial(self.attn, pos_embed=pos_embed, layer=layer, **({"first_only": True} if first_only else {}))
        y = self.drop_path(x, lambda x: self.ls1(recomputed(self.norm1, x, attn, shared)), owner)
        return self.drop_path(y, lambda x: self.ls2(recomputed(self.norm2, x, self.mlp, _reads_twice(self.mlp))), owner)


def _reads_twice(part: nn.Module) -> bool:
    """Return whether more than one linear layer may read the input of a part, so that it must not be cast for one."""
    first = part.qkv if type(part) is Attention and part.gate is None else part.fc1 if type(part) is Mlp else None
    return type(first) not in (*LINEAR, Ghost)
