"""From the name of a tokenizer to the module."""

from collections.abc import Sequence
from typing import Literal, get_args

from vitlab.tokenizers.conv import ConvStem
from vitlab.tokenizers.patch import PatchEmbed
from vitlab.tokenizers.t2t import T2TTokenizer
from vitlab.tokenizers.token_layers import T2TAttn

TokenizerName = Literal["patch", "t2t", "conv"]
Tokenizer = PatchEmbed | T2TTokenizer | ConvStem


def build_tokenizer(
    tokenizer: TokenizerName,
    img_size: tuple[int, int],
    in_chans: int,
    embed_dim: int,
    *,
    patch_size: int,
    t2t_attn: T2TAttn,
    t2t_kernels: Sequence[int],
    t2t_strides: Sequence[int] | None,
    t2t_dim: int,
    norm_eps: float,
) -> Tokenizer:
    """Build the tokenizer called ``tokenizer``."""
    if tokenizer != "patch" and patch_size < 1:
        raise ValueError(f"`patch_size` must be at least 1, also where it has no meaning, got {patch_size}")
    match tokenizer:
        case "patch":
            return PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        case "t2t":
            return T2TTokenizer(img_size, in_chans, embed_dim, t2t_attn, t2t_kernels, t2t_strides, t2t_dim, norm_eps)
        case "conv":
            return ConvStem(img_size, in_chans, embed_dim, t2t_kernels, t2t_strides, t2t_dim)
    raise ValueError(f"`tokenizer` must be one of {', '.join(get_args(TokenizerName))}, got {tokenizer!r}")
