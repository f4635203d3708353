"""From the name of a tokenizer to the module."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from vitlab.tokenizers.conv import ConvStem
from vitlab.tokenizers.patch import PatchEmbed
from vitlab.tokenizers.splits import pair
from vitlab.tokenizers.t2t import T2TTokenizer

TokenizerName = Literal["patch", "t2t", "conv"]
Tokenizer = PatchEmbed | T2TTokenizer | ConvStem


def build_tokenizer(
    tokenizer: TokenizerName,
    img_size: tuple[int, int],
    in_chans: int,
    embed_dim: int,
    *,
    patch_size: int | Sequence[int],
    norm_eps: float,
    **t2t: Any,
) -> Tokenizer:
    """Build the tokenizer called ``tokenizer``; ``t2t`` are the arguments of T2T, of which others take what they know.

    Example:
        >>> build_tokenizer("patch", (32, 32), 3, 8, patch_size=4, norm_eps=1e-6).grid_size
        (8, 8)
    """
    pair("patch_size", patch_size)  # a value that cannot be is refused also where it has no meaning
    match tokenizer:
        case "patch":
            return PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        case "t2t":
            return T2TTokenizer(img_size, in_chans, embed_dim, norm_eps=norm_eps, fused=True, **t2t)
        case "conv":
            windows = ("t2t_kernels", "t2t_strides", "t2t_dilations", "t2t_padding", "t2t_dim")
            known = {name: t2t[name] for name in windows if name in t2t}
            return ConvStem(img_size, in_chans, embed_dim, **known)
    raise ValueError(f"`tokenizer` must be one of {', '.join(get_args(TokenizerName))}, got {tokenizer!r}")
