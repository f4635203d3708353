"""The layers of a Vision Transformer: attention, block, position embeddings, pooling."""

from vitlab.layers.attention import Attention
from vitlab.layers.block import Block, LayerScale
from vitlab.layers.drop_path import DropPath
from vitlab.layers.linear import Linear
from vitlab.layers.mlp import Mlp
from vitlab.layers.norm import build_norm
from vitlab.layers.pool import AttentionPool
from vitlab.layers.pos_embed import (
    POS_EMBEDS,
    PosEmbed,
    PosEmbedChoice,
    PosEmbedJoin,
    PosEmbedName,
    build_pos_embed,
    grid_cells,
    resample_pos_embed,
)
from vitlab.layers.pos_embed.added import AddedPosEmbed, Factorized, Learned, SinCos1d, SinCos2d
from vitlab.layers.pos_embed.biases import Alibi2d, BiasPosEmbed, RelPos
from vitlab.layers.pos_embed.conv import ConvPosEmbed
from vitlab.layers.pos_embed.rotary import RoPE2d, RoPEMixed, RotaryPosEmbed

__all__ = [
    "POS_EMBEDS",
    "AddedPosEmbed",
    "Alibi2d",
    "Attention",
    "AttentionPool",
    "BiasPosEmbed",
    "Block",
    "ConvPosEmbed",
    "DropPath",
    "Factorized",
    "LayerScale",
    "Learned",
    "Linear",
    "Mlp",
    "PosEmbed",
    "PosEmbedChoice",
    "PosEmbedJoin",
    "PosEmbedName",
    "RelPos",
    "RoPE2d",
    "RoPEMixed",
    "RotaryPosEmbed",
    "SinCos1d",
    "SinCos2d",
    "build_norm",
    "build_pos_embed",
    "grid_cells",
    "resample_pos_embed",
]
