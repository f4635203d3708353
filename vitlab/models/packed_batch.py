"""The forward pass of images of different sizes, whose tokens share rows, and what cannot be combined with it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from vitlab.layers.block import DropPath
from vitlab.layers.channels import SqueezeExcite
from vitlab.layers.custom import PerToken
from vitlab.layers.pos_embed.packed_batch import PackedPosEmbed
from vitlab.packed_batch import PackedBatch
from vitlab.tokenizers.patch import PatchEmbed
from vitlab.tokenizers.splits import pair


def forward_packed(net: Any, images: PackedBatch) -> Tensor:
    """Map B packed images of any sizes to ``(B, K)`` outputs, the same as for each image alone.

    Example:
        >>> import torch
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, num_classes=10, embed_dim=48, depth=2, num_heads=3)
        >>> net(PackedBatch.of([torch.randn(3, 32, 32), torch.randn(3, 16, 48)], patch=16)).shape
        torch.Size([2, 10])
    """
    pos_embed: PackedPosEmbed = packed_positions(net, images).for_batch()
    x = net.embed(images, pos_embed)  # (R, L, D)
    for i in range(len(net.blocks)):
        x = net.run_block(i, x, pos_embed)
    outputs: Tensor = net.head(net.fc_norm(pos_embed.of_images(net.norm(x), net.pool)))
    return outputs


def packed_images(net: Any, images: Sequence[Tensor]) -> PackedBatch:
    """Return a list of ``(C, H, W)`` images of any sizes as one batch for ``net``.

    Raises:
        ValueError: The list is empty, an image has another shape or size than patches fill, or ``net`` cannot take it.

    Example:
        >>> import torch
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, num_classes=10, embed_dim=48, depth=1, num_heads=3)
        >>> net([torch.randn(3, 32, 32), torch.randn(3, 16, 48)]).shape
        torch.Size([2, 10])
    """
    for i, image in enumerate(images):
        if not isinstance(image, Tensor) or image.ndim != 3 or image.shape[0] != net.in_chans:
            got = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(f"a list holds ({net.in_chans}, height, width) images, got {got} as number {i}")
    if not images:
        raise ValueError("a list of images must hold at least one")
    (patch, across), in_chans = pair("patch_size", net.patch_size), net.in_chans
    check_packed(net, in_chans, (patch, across))
    if patch != across:
        raise ValueError(f"a list of images is cut into square patches, but the network has {patch} x {across}")
    for image in images:
        net.tokenizer.grid_of(image.shape[1:])  # names the nearest size that patches fill
    return PackedBatch.of(images, patch)


def packed_positions(net: Any, images: PackedBatch) -> PackedPosEmbed:
    """Return the position embedding of ``net`` for packed images.

    Raises:
        ValueError: The network cannot take packed images, see :func:`check_packed`.

    Example:
        >>> import torch
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, embed_dim=48, depth=1, num_heads=3)
        >>> packed_positions(net, PackedBatch.of([torch.randn(3, 32, 16)], patch=16)).owner
        tensor([[0, 0, 0]])
    """
    check_packed(net, images.patches.shape[1], tuple(images.patches.shape[2:]))
    return PackedPosEmbed(net.pos_embed, images.grids, net.num_prefix_tokens, device=images.device)


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
