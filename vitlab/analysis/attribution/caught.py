"""Maps of attention as a network applies them in a forward pass, and the gradients of its outputs by them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.layers.attention import Attention
from vitlab.layers.pos_embed import PosEmbed
from vitlab.models.foreign import AnyNetwork, gradients_of
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import Asked, attentions, refuse_other_counts


@contextmanager
def caught_maps(net: VisionTransformer) -> Iterator[list[Tensor]]:
    """Let the blocks apply maps that can be looked at; yield a list that each forward pass fills, gradients included.

    Example:
        >>> net = VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2).eval()
        >>> with caught_maps(net) as maps:
        ...     _ = net(torch.randn(1, 3, 8, 8))
        >>> [tuple(each.shape) for each in maps]
        [(1, 2, 5, 5), (1, 2, 5, 5)]
    """
    caught: list[Tensor] = []
    layers = list(dict.fromkeys(attentions(net)))  # one of several blocks is caught each time that it is called
    if others := [layer for layer in layers if not isinstance(layer, Attention)]:
        what = f"{type(others[0]).__name__} does not let its weights be caught"
        raise UsageError(f"{what}: subclass vitlab.layers.Attention and override `score`, `weigh` or `project`")
    own = [layer.kernel for layer in layers]

    def kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: float | None = None) -> Tensor:
        logits = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        caught.append((logits if bias is None else logits + bias).softmax(dim=-1))
        return caught[-1] @ v

    def catching(weigh: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def kept(q: Tensor, k: Tensor, pos_embed: PosEmbed, layer: int) -> Tensor:
            caught.append(weigh(q, k, pos_embed, layer))
            return caught[-1]

        return kept

    skips, net.skips_unread_tokens = net.skips_unread_tokens, False  # whole maps, of the last block too
    try:
        for layer in layers:  # a `mix` of one's own may call either
            layer.kernel, layer.weigh = kernel, catching(layer.weigh)
        yield caught
    finally:
        for layer in layers:
            layer.__dict__.pop("weigh", None)
        net.skips_unread_tokens = skips
        for layer, before in zip(layers, own, strict=True):
            layer.kernel = before


def _refuse_uncaught(net: VisionTransformer, maps: list[Tensor]) -> None:
    if len(maps) < len(layers := attentions(net)):
        name = next((type(each).__name__ for each in layers if type(each).mix is not Attention.mix), "a block")
        raise UsageError(f"{name} does not let its weights be caught: its `mix` must call `weigh` or `kernel`")
    refuse_other_counts([each.shape[-1] for each in maps])


@torch.no_grad()
def plain_maps(net: Asked, images: Tensor) -> list[Tensor]:
    """Return the ``(B, A, L, L)`` maps that all blocks apply."""
    if isinstance(net, AnyNetwork):
        return net.attention(images)
    with caught_maps(net) as maps:
        net(images)
    _refuse_uncaught(net, maps)
    return maps


def graded_maps(net: Asked, images: Tensor, classes: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the ``(B, A, L, L)`` maps of all blocks, and the gradient of the classes' outputs by each."""
    if isinstance(net, AnyNetwork):
        with torch.enable_grad():
            found, theirs = net.graded_attention(images.detach().requires_grad_())
            slopes = gradients_of(score_of(found, classes, "a map of attention"), theirs)
        return [each.detach() for each in theirs], [slope for slope in slopes if slope is not None]
    with torch.enable_grad(), caught_maps(net) as maps:
        found = net(images.detach().requires_grad_())
        _refuse_uncaught(net, maps)
        gradients = torch.autograd.grad(score_of(found, classes, "a map of attention"), maps)
    return [each.detach() for each in maps], list(gradients)


def score_of(found: Tensor, classes: Tensor, name: str) -> Tensor:
    """Return the sum of the classes' outputs; refuse outputs without a gradient."""
    if not found.requires_grad:
        raise UsageError(f"{name} needs an output with a gradient, and this network gives none")
    return found.gather(1, classes[:, None]).sum()
