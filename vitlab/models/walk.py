"""What passes through a network, caught on its way: nothing in the network knows of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitlab.models.vit import VisionTransformer


@torch.no_grad()
def attention_inputs(net: VisionTransformer, images: Tensor) -> list[Tensor]:
    """Return what the attention of each block gets for ``(B, C, H, W)`` images, ``(B, L, D)`` a block."""
    caught: list[Tensor] = []
    with caught_inputs([block.get_submodule("attn") for block in net.blocks], caught):
        net.forward_features(images)
    return caught


@torch.no_grad()
def attention_maps(net: VisionTransformer, images: Tensor, layer: int) -> Tensor:
    """Return the attention of block ``layer`` for ``(B, C, H, W)`` images, ``(B, A, L, L)``; each row sums to 1."""
    x = attention_inputs(net, images)[layer]
    return net.blocks[layer].attn.weights(x, net.pos_embed, layer)  # type: ignore[operator, union-attr]


@torch.no_grad()
def attention_logits(net: VisionTransformer, images: Tensor) -> Iterator[Tensor]:
    """Yield the logits of each block's attention for ``(B, C, H, W)`` images, ``(B, A, L, L)`` a block."""
    for layer, (block, x) in enumerate(zip(net.blocks, attention_inputs(net, images), strict=True)):
        with torch.no_grad():
            yield block.attn.logits(x, net.pos_embed, layer)  # type: ignore[operator, union-attr]


@torch.no_grad()
def block_tokens(net: VisionTransformer, images: Tensor) -> list[Tensor]:
    """Return the ``(B, L, D)`` tokens that enter the first block, then those that leave each block."""
    caught: list[Tensor] = []
    handles = [block.register_forward_hook(lambda block, args, x: caught.append(x)) for block in net.blocks]
    try:
        with caught_inputs([net.blocks[0]], caught):
            net.forward_features(images)
    finally:
        for handle in handles:
            handle.remove()
    return caught


@torch.no_grad()
def outputs(net: VisionTransformer, images: Tensor) -> Tensor:
    """Map any number of ``(B, C, H, W)`` images to ``(B, K)`` outputs, a few at a time."""
    return torch.cat([net(batch) for batch in images.split(32)])


@contextmanager
def caught_inputs(modules: list[nn.Module], caught: list[Tensor]) -> Iterator[None]:
    """Append the first argument of each call of one of ``modules`` to ``caught`` inside a ``with`` block."""
    handles = [module.register_forward_pre_hook(lambda module, args: caught.append(args[0])) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def changed_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let ``module`` return ``change`` of what it returns inside a ``with`` block."""
    handle = module.register_forward_hook(lambda module, args, output: change(output))
    try:
        yield
    finally:
        handle.remove()
