"""Position embeddings: how patch tokens come to know where they are."""

from vitlab.layers.pos_embed.base import PosEmbed, PosEmbedJoin, PosEmbedName
from vitlab.layers.pos_embed.build import build_pos_embed

__all__ = ["PosEmbed", "PosEmbedJoin", "PosEmbedName", "build_pos_embed"]
