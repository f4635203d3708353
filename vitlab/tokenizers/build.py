"""From the name of a tokenizer to the module."""

from collections.abc import Sequence
from typing import Literal, get_args

from vitlab.tokenizers.conv import ConvStem
from vitlab.tokenizers.patch import PatchEmbed
from vitlab.tokenizers.splits import pair
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
    patch_size: int | Sequence[int],
    t2t_attn: T2TAttn,
    t2t_kernels: Sequence[int],
    t2t_strides: Sequence[int] | None,
    t2t_dim: int,
    norm_eps: float,
) -> Tokenizer:
    """Build the tokenizer called ``tokenizer``; the others' arguments are passed over.

    Example:
        >>> t2t = {"t2t_attn": "performer", "t2t_kernels": [7, 3, 3], "t2t_strides": None, "t2t_dim": 64}
        >>> build_tokenizer("patch", (32, 32), 3, 8, patch_size=4, norm_eps=1e-6, **t2t).grid_size
        (8, 8)
    """
    pair("patch_size", patch_size)  # a value that cannot be is refused also where it has no meaning
    match tokenizer:
        case "patch":
            return PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        case "t2t":
            return T2TTokenizer(img_size, in_chans, embed_dim, t2t_attn, t2t_kernels, t2t_strides, t2t_dim, norm_eps)
        case "conv":
            return ConvStem(img_size, in_chans, embed_dim, t2t_kernels, t2t_strides, t2t_dim)
    raise ValueError(f"`tokenizer` must be one of {', '.join(get_args(TokenizerName))}, got {tokenizer!r}")
