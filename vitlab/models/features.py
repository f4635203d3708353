"""What beside its forward pass must be known of a network: shortcuts, packed images, blocks; nearest neighbors."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.layers.attention import Attention, Ghost, SqueezeExcite, attend, products, sdpa
from vitlab.layers.block import Block, DenseBlock, DropPath, LayerScale
from vitlab.layers.custom import PerToken
from vitlab.layers.mlp import Mlp, QuickGELU
from vitlab.layers.plain import all_are_hooked, calls_plainly, has_plain_tensors, is_sharded
from vitlab.layers.pos_embed import PosEmbed
from vitlab.tokenizers.patch import PatchEmbed

Tokens = Tensor | tuple[Tensor, Tensor]  # patches, or patches and prefix tokens
ELEMENTWISE = {
    nn.GELU,
    nn.SiLU,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Mish,
}
ELEMENTWISE |= {nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid, QuickGELU}
PER_TOKEN: set[type[nn.Module]] = {Block, DenseBlock, Attention, Ghost, Mlp, LayerScale, DropPath, *ELEMENTWISE}
PER_TOKEN |= {nn.Linear, nn.Identity, nn.Dropout, nn.LayerNorm, nn.RMSNorm, nn.Sequential}
PER_QUERY = ("rotate", "bias", "relate", "leave")


def block_numbers(depth: int, indices: int | Sequence[int] | None) -> set[int]:
    """Return the block indices that ``indices`` stands for: a number of last blocks, a list, or None for all.

    Example:
        >>> sorted(block_numbers(12, 3)), sorted(block_numbers(12, [0, -1]))
        ([9, 10, 11], [0, 11])
    """
    if isinstance(indices, int):
        numbers = set(range(depth - indices, depth))
    else:
        numbers = {i + depth if i < 0 else i for i in (range(depth) if indices is None else indices)}
    if not numbers or min(numbers) < 0 or max(numbers) >= depth:
        raise ValueError(f"the network has {depth} blocks, 0 to {depth - 1}, got {indices}")
    return numbers


def check_packed(net: Any, in_chans: int, patch: tuple[int, ...]) -> None:
    """Raise a ValueError if ``net`` cannot take packed images with patches of ``in_chans`` channels and this size.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> check_packed(VisionTransformer(embed_dim=48, depth=1, num_heads=3), in_chans=3, patch=(16, 16))
    """
    what, tokenizer = "images of their own sizes", net.tokenizer
    if not isinstance(tokenizer, PatchEmbed):
        raise ValueError(
            f"{what} are cut into patches, but the windows of {type(tokenizer).__name__} overlap: use tokenizer=patch"
        )
    if tokenizer.flexi_patch:
        raise ValueError(f"{what} are cut into patches of one size, but `flexi_patch` draws others: leave it out")
    if (in_chans, patch) != (net.in_chans, tokenizer.patch_size):
        sizes = [f"{c} x {h} x {w}" for c, (h, w) in ((in_chans, patch), (net.in_chans, tokenizer.patch_size))]
        raise ValueError(f"{what} are cut into patches of {sizes[0]}, but the network takes {sizes[1]}")
    if any(isinstance(module, SqueezeExcite) for module in net.modules()):
        raise ValueError(f"{what} share rows, but `se_reduction` averages over rows: leave it out")
    if net.training and any(isinstance(module, PerToken) for module in net.modules()):
        raise ValueError(f"{what} share rows, whose statistics `norm_layer` would mix: choose layernorm or rmsnorm")
    if drops_rows(net):
        raise ValueError(f"{what} share rows, but `drop_path_subset` drops rows: leave it out")


def drops_rows(net: Any) -> bool:
    """Return whether blocks leave out a part of the batch in training.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> drops_rows(VisionTransformer(embed_dim=48, depth=2, num_heads=3, drop_path_rate=0.1, drop_path_subset=True))
        True
    """
    return any(isinstance(module, DropPath) and module.subset and module.rate for module in net.blocks.modules())


def class_token_is_enough(net: Any) -> bool:
    """Return whether the last block may compute the class token alone, where the head reads nothing else.

    The outputs are the same to rounding: each layer after the keys and values acts on one token at a time, the class
    token is not rotated, and each module is called as vitlab wrote it. A subclass, a wrapper, a hook or a position
    embedding of one's own could tell the difference. Here alone this is decided; :class:`Attention` and :class:`Block`
    trust it.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, embed_dim=48, depth=1, num_heads=3)
        >>> class_token_is_enough(net)
        True
        >>> hook = net.blocks[-1].register_forward_hook(lambda block, args, y: 2 * y)
        >>> class_token_is_enough(net)
        False
    """
    if all_are_hooked() or _is_overridden(net):
        return False
    block, pos_embed, last = net.blocks[-1], net.pos_embed, len(net.blocks) - 1
    after = [*block.modules(), *net.norm.modules()]
    return (
        calls_plainly(block, {Block, DenseBlock})
        and calls_plainly(block.attn, {Attention})
        and block.attn.kernel in (attend, sdpa, products)
        and all(calls_plainly(module, PER_TOKEN) for module in after)
        and _splits(net, block, block.attn.qkv)
        and all(map(_leaves_class_token, getattr(pos_embed, "parts", {"": pos_embed}).values()))
        and not pos_embed.acts_after(last)
    )


def _is_overridden(net: Any) -> bool:
    """Return whether a subclass of the network, or a method put into it, may read other tokens."""
    own = type(net).__module__ == "vitlab.models.vit" or is_sharded(net)
    return not own or any(name in vars(net) for name in ("pool", "run_block", "forward_head", "_tokens"))


def _splits(net: Any, block: nn.Module, qkv: nn.Module) -> bool:
    """Return whether the weight of ``qkv`` can be split: that of FSDP2 is whole only where its block gathers it."""
    if is_sharded(qkv):
        return False
    return has_plain_tensors(qkv) or any(map(is_sharded, (net, block, block.get_submodule("attn"))))


def _leaves_class_token(method: PosEmbed) -> bool:
    """Return whether queries of the class token are not rotated, and can be treated without those of the patches."""
    changes = [name for name in PER_QUERY if getattr(type(method), name) is not getattr(PosEmbed, name)]
    ours = type(method).__module__.startswith("vitlab.layers.pos_embed.")
    return (ours or not changes) and not any(name in vars(method) for name in PER_QUERY)


def knn(features: Tensor, labels: Tensor, queries: Tensor, k: int, num_classes: int) -> Tensor:
    """Classify ``(m, D)`` queries by their k nearest of ``(n, D)`` features with ``(n,)`` labels: ``(m,)`` classes.

    The k neighbors vote, each weighted by exp(cosine / 0.07), Wu et al. 2018 (arXiv:1805.01978).

    Example:
        >>> knn(torch.eye(2), torch.tensor([5, 3]), torch.tensor([[0.1, 1.0]]), k=1, num_classes=6)
        tensor([3])
    """
    features, classes = F.normalize(features, dim=1), []
    for part in F.normalize(queries, dim=1).split(1024):
        cosine, index = (part @ features.T).topk(min(k, len(features)), dim=1)
        votes = part.new_zeros(len(part), num_classes).scatter_add_(1, labels[index], (cosine / 0.07).exp())
        classes.append(votes.argmax(dim=1))
    return torch.cat(classes)
