"""Tokenizers map ``(B, C, H, W)`` images to ``(B, N, D)`` patch tokens."""

from vitlab.tokenizers.build import Tokenizer, TokenizerName, build_tokenizer
from vitlab.tokenizers.conv import ConvStem
from vitlab.tokenizers.patch import PatchEmbed
from vitlab.tokenizers.splits import soft_split, soft_splits, split_grids
from vitlab.tokenizers.t2t import T2TTokenizer
from vitlab.tokenizers.token_layers import TokenAttention, TokenMlp, TokenPerformer, TokenTransformer

__all__ = [
    "ConvStem",
    "PatchEmbed",
    "T2TTokenizer",
    "TokenAttention",
    "TokenMlp",
    "TokenPerformer",
    "TokenTransformer",
    "Tokenizer",
    "TokenizerName",
    "build_tokenizer",
    "soft_split",
    "soft_splits",
    "split_grids",
]
