"""Feature extraction: positions for images of any size, intermediate tokens, pooling, nearest neighbors."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.layers.attention import Attention, Ghost, SqueezeExcite, attend, products, sdpa
from vitlab.layers.block import Block, DropPath, LayerScale
from vitlab.layers.custom import PerToken
from vitlab.layers.mlp import Mlp, QuickGELU
from vitlab.layers.plain import all_are_hooked, calls_plainly, has_plain_tensors, is_sharded
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.packed import PackedPosEmbed
from vitlab.packed import Packed
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
PER_TOKEN: set[type[nn.Module]] = {Block, Attention, Ghost, Mlp, LayerScale, DropPath, *ELEMENTWISE}
PER_TOKEN |= {nn.Linear, nn.Identity, nn.Dropout, nn.LayerNorm, nn.RMSNorm, nn.Sequential}
PER_QUERY = ("rotate", "bias", "relate", "leave")


def forward_intermediates(
    net: Any,
    images: Tensor,
    indices: int | Sequence[int] | None = None,
    return_prefix_tokens: bool = False,
    norm: bool = False,
    stop_early: bool = False,
    output_fmt: Literal["NCHW", "NLC"] = "NCHW",
    intermediates_only: bool = False,
) -> list[Tokens] | tuple[Tensor, list[Tokens]]:
    """Map ``(B, C, H, W)`` images to the normalized ``(B, P + N, D)`` tokens and the outputs of chosen blocks.

    Args:
        net: The :class:`VisionTransformer` whose method this is.
        images: The images.
        indices: Indices of blocks, negative ones from the end, or how many of the last blocks; None is all.
        return_prefix_tokens: Whether each output is ``(patches, prefix tokens)``, the latter ``(B, P, D)``.
        norm: Whether to apply the final normalization to each output.
        stop_early: Whether to stop after the last chosen block; the first result is then its output.
        output_fmt: Patches as ``(B, D, h, w)`` maps ("NCHW") or ``(B, N, D)`` tokens ("NLC").
        intermediates_only: Whether to return only the list of outputs.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, patch_size=4, embed_dim=48, depth=4, num_heads=3)
        >>> tokens, maps = net.forward_intermediates(torch.randn(2, 3, 32, 32), indices=[0, 3])
        >>> tokens.shape, maps[0].shape
        (torch.Size([2, 65, 48]), torch.Size([2, 48, 8, 8]))
    """
    if output_fmt not in ("NCHW", "NLC"):
        raise ValueError(f"`output_fmt` must be NCHW or NLC, got {output_fmt!r}")
    chosen = block_numbers(len(net.blocks), indices)
    outputs: list[Tokens] = []
    pos_embed = net.positions(images)
    x = net.embed(images, pos_embed)
    for i in range(max(chosen) + 1 if stop_early else len(net.blocks)):
        x = net.run_block(i, x, pos_embed=pos_embed)
        if i in chosen:
            y = net.norm(x) if norm else x
            prefix, patches = y[:, : net.num_prefix_tokens], y[:, net.num_prefix_tokens :]
            if output_fmt == "NCHW":
                patches = patches.transpose(1, 2).unflatten(2, pos_embed.grid_size)  # (B, D, h, w)
            outputs.append((patches, prefix) if return_prefix_tokens else patches)
    return outputs if intermediates_only else (net.norm(x), outputs)


def get_intermediate_layers(
    net: Any,
    images: Tensor,
    n: int | Sequence[int] = 1,
    reshape: bool = False,
    return_prefix_tokens: bool = False,
    norm: bool = False,
) -> list[Tokens]:
    """Return the patch tokens after the last ``n`` blocks, or after the blocks with indices ``n``, ``(B, N, D)`` each.

    Args:
        net: The :class:`VisionTransformer` whose method this is.
        images: The images.
        n: How many of the last blocks, or indices of blocks.
        reshape: Whether to return ``(B, D, h, w)`` maps.
        return_prefix_tokens: Whether to return pairs ``(patches, prefix tokens)``.
        norm: Whether to apply the final normalization to each; DINO's code does, timm's does not.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, patch_size=4, embed_dim=48, depth=4, num_heads=3)
        >>> [tokens.shape for tokens in net.get_intermediate_layers(torch.randn(2, 3, 32, 32), n=2)]
        [torch.Size([2, 64, 48]), torch.Size([2, 64, 48])]
    """
    output_fmt: Literal["NCHW", "NLC"] = "NCHW" if reshape else "NLC"
    outputs = forward_intermediates(
        net, images, n, return_prefix_tokens, norm, output_fmt=output_fmt, intermediates_only=True
    )
    assert isinstance(outputs, list)
    return outputs


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


def forward_packed(net: Any, images: Packed) -> Tensor:
    """Map B packed images of any sizes to ``(B, K)`` outputs, the same as for each image alone.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=10)
        >>> net(Packed.of([torch.randn(3, 24, 40), torch.randn(3, 32, 16)], patch=8)).shape
        torch.Size([2, 10])
    """
    pos_embed = net.positions(images)
    x = net.embed(images, pos_embed)  # (R, L, D)
    for i in range(len(net.blocks)):
        x = net.run_block(i, x, pos_embed=pos_embed)
    return net.head(net.fc_norm(pos_embed.of_images(net.norm(x), net.pool)))


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
    if any(block.drop_path.subset and block.drop_path.rate for block in net.blocks):
        raise ValueError(f"{what} share rows, but `drop_path_subset` drops rows: leave it out")


def positions(net: Any, images: Tensor | Packed, keep: Tensor | None = None) -> PosEmbed:
    """Return the position embedding for the grid of ``(B, C, H, W)`` images, or for packed images of any sizes.

    With ``keep``, ``(B, K)`` indices of patch tokens, it is that of these tokens at their original positions.

    At ``net.img_size`` it is ``net.pos_embed`` itself. At another size it shares the parameters, resampled by
    ``net.pos_embed_resize`` (None: the default of the method); gradients flow to them.

    Raises:
        ValueError: The tokenizer or the position embedding does not support that size, or a subset of the tokens.

    Example:
        >>> import torch
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=10)
        >>> net.positions(torch.randn(1, 3, 48, 40)).grid_size, net(torch.randn(1, 3, 48, 40)).shape
        ((6, 5), torch.Size([1, 10]))
    """
    if isinstance(images, Packed):
        check_packed(net, images.patches.shape[1], tuple(images.patches.shape[2:]))
        sizes = (images.grids, net.num_prefix_tokens, net.pos_embed_resize)
        return PackedPosEmbed(net.pos_embed, *sizes, images.device)
    size = tuple(images.shape[2:])
    if images.ndim != 4 or images.shape[1] != net.in_chans:
        raise ValueError(f"images must be (B, {net.in_chans}, height, width), got {tuple(images.shape)}")
    if keep is not None:
        if keep.ndim != 2 or len(keep) != len(images) or not keep.shape[1] or keep.dtype != torch.long:
            shape = f"({len(images)}, K) int64 indices of patch tokens, K at least 1"
            raise ValueError(f"`keep` must be {shape}, got {tuple(keep.shape)} of {keep.dtype}")
        if net.training and any(block.drop_path.subset and block.drop_path.rate for block in net.blocks):
            raise ValueError(
                "`drop_path_subset` drops images from the batch, but `keep` has other tokens for each: leave it out"
            )
        return positions(net, images).kept(keep)
    if size == net.img_size and getattr(net.tokenizer, "patch", None) in (None, net.tokenizer.patch_size):
        return net.pos_embed
    if not hasattr(net.tokenizer, "grid_of"):
        name, (H, W) = type(net.tokenizer).__name__, net.img_size
        raise ValueError(f"{name} takes only images of {H} x {W}, got {size[0]} x {size[1]}: it has no `grid_of(size)`")
    return net.pos_embed.at(net.tokenizer.grid_of(size), net.pos_embed_resize)


def reads_class_token_only(net: Any) -> bool:
    """Return whether the last block may compute the class token alone, because the outputs are the same to rounding.

    The head reads nothing else, each layer after the keys and values acts on one token at a time, the class token is
    not rotated, and each module is called as vitlab wrote it: a subclass, a wrapper, a hook or a position embedding of
    one's own could tell the difference. Here alone this is decided; :class:`Attention` and :class:`Block` trust it.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, embed_dim=48, depth=1, num_heads=3)
        >>> net.reads_class_token_only()
        True
        >>> hook = net.blocks[-1].register_forward_hook(lambda block, args, y: 2 * y)
        >>> net.reads_class_token_only()
        False
    """
    if net.global_pool != "token" or all_are_hooked() or _is_overridden(net):
        return False
    block, pos_embed, last = net.blocks[-1], net.pos_embed, len(net.blocks) - 1
    after = [*block.modules(), *net.norm.modules()]
    return (
        calls_plainly(block, {Block})
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


def pool(net: Any, x: Tensor) -> Tensor:
    """Pool ``(B, P + N, D)`` tokens to ``(B, D)``: the class token, or a function of the patch tokens.

    Example:
        >>> import torch
        >>> from vitlab.models import VisionTransformer
        >>> VisionTransformer(embed_dim=48, depth=1, num_heads=3).pool(torch.randn(2, 197, 48)).shape
        torch.Size([2, 48])
    """
    patches = x[:, net.num_prefix_tokens :]  # (B, N, D)
    match net.global_pool:
        case "token":
            return x[:, 0]
        case "avg":
            return patches.mean(dim=1)
        case "max":
            return patches.amax(dim=1)
    pooled: Tensor = net.attn_pool(patches)
    return pooled


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
