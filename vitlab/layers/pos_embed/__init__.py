"""Position embeddings: how a patch token encodes its place in the grid."""

from vitlab.layers.pos_embed.base import PosEmbed, PosEmbedJoin
from vitlab.layers.pos_embed.build import POS_EMBEDS, PosEmbedChoice, PosEmbedName, build_pos_embed
from vitlab.layers.pos_embed.resizable import grid_cells, resample_pos_embed

__all__ = [
    "POS_EMBEDS",
    "PosEmbed",
    "PosEmbedChoice",
    "PosEmbedJoin",
    "PosEmbedName",
    "build_pos_embed",
    "grid_cells",
    "resample_pos_embed",
]
