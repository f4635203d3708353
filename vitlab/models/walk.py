"""Read tokens, attention maps and logits of a network with hooks, which leave the network unchanged.

With ``gradients=True`` the results are part of the autograd graph.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.errors import UsageError, not_finite
from vitlab.interface import own_parts
from vitlab.layers.resample import Grid
from vitlab.models.convert_peers import peer_file
from vitlab.models.create import same_network
from vitlab.models.foreign import AnyNetwork
from vitlab.models.hooks import caught_inputs
from vitlab.models.timm_networks import NoCounterpart, timm_file
from vitlab.models.vit import VisionTransformer
from vitlab.tokenizers.patch import PatchEmbed
from vitlab.tokenizers.splits import pair

Asked = VisionTransformer | AnyNetwork  # what analyses ask
CELLS_LOST = "which cell one stands for is not known after that"  # where blocks merge or drop tokens


def as_transformer(theirs: nn.Module, name: str) -> VisionTransformer:
    """Return a network of vitlab as it is, and convert one of timm, transformers or torchvision to its equivalent here.

    Raises:
        NoCounterpart: For a network of another library, or one without an equivalent here.

    Example:
        >>> from vitlab.models.timm_networks import timm_model
        >>> as_transformer(timm_model("timm:test_vit", pretrained=False), "timm:test_vit").grid_size
        (10, 10)
    """
    theirs = getattr(theirs, "_orig_mod", theirs)  # of a compiled one
    if isinstance(theirs, VisionTransformer):
        return theirs
    library, kind = type(theirs).__module__.partition(".")[0], type(theirs).__name__
    if library not in ("timm", "transformers", "torchvision"):
        known = "vitlab, timm, transformers or torchvision"
        raise NoCounterpart(f"{name} must be a Vision Transformer of {known}, and is a {kind}", theirs)
    try:
        file = timm_file(theirs, name) if library == "timm" else peer_file(theirs, name)
        return same_network(theirs, file, {}).train(theirs.training)
    except NoCounterpart:
        raise
    except ValueError as error:
        raise NoCounterpart(str(error), theirs) from error


def as_asked(theirs: nn.Module, name: str, img_size: tuple[int, int], in_chans: int) -> Asked:
    """Return a network as :func:`as_transformer` does, and one without equivalent as :class:`AnyNetwork`.

    Args:
        theirs: The network.
        name: What it is called in messages.
        img_size: Height and width of its images.
        in_chans: Channels of its images.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))
        >>> as_asked(net, "mine", (8, 8), 3).num_classes
        10
    """
    if isinstance(theirs, AnyNetwork):
        return theirs
    try:
        return as_transformer(theirs, name)
    except NoCounterpart:
        return AnyNetwork(theirs, name, img_size, in_chans)


def attention_inputs(net: VisionTransformer, images: Tensor, gradients: bool = False) -> list[Tensor]:
    """Return the input of each block's attention for ``(B, C, H, W)`` images, ``(B, L, D)`` per block.

    Raises:
        UsageError: Blocks of one's own do not call it once each, or change the number of tokens.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)
        >>> [x.shape for x in attention_inputs(net, torch.randn(1, 3, 32, 32))]
        [torch.Size([1, 17, 48]), torch.Size([1, 17, 48])]
    """
    inputs: list[Tensor] = []
    with torch.set_grad_enabled(gradients), caught_inputs(attentions(net), inputs):
        net.forward_features(images)
    if len(inputs) != len(net.blocks):
        called = f"{len(net.blocks)} blocks call their attention `attn` {len(inputs)} times"
        raise UsageError(f"{called}, and what each block attends to is known of one call a block")
    refuse_other_counts([x.shape[1] for x in inputs])
    return inputs


def refuse_other_counts(counts: Sequence[int]) -> None:
    """Refuse layers that have another number of tokens each, as blocks of one's own that merge or drop some leave.

    Example:
        >>> refuse_other_counts([17, 15])
        Traceback (most recent call last):
            ...
        vitlab.errors.UsageError: the blocks change the number of tokens, from 17 to 15: which cell one stands for is \
not known after that
    """
    other = next((count for count in counts if count != counts[0]), None)
    if other is not None:
        what = f"the blocks change the number of tokens, from {counts[0]} to {other}"
        raise UsageError(f"{what}: {CELLS_LOST}")


def keeps_tokens(net: Asked) -> bool:
    """Return whether every block gives as many tokens as it takes; blocks of one's own are tried on a black image.

    Example:
        >>> keeps_tokens(VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3))
        True
    """
    if isinstance(net, AnyNetwork) or not own_parts(net.blocks):
        return True
    image = next(net.parameters()).new_zeros(1, net.in_chans, *net.img_size)
    return len({x.shape[1] for x in block_tokens(net, image)}) == 1


def _is_placed(net: VisionTransformer, x: Tensor, grid_size: Grid) -> bool:
    """Return whether ``(B, L, D)`` tokens are one for each cell, after the prefix: none was merged or dropped."""
    return x.shape[1] == net.num_prefix_tokens + grid_size[0] * grid_size[1]


def attentions(net: VisionTransformer, shows: str = "weights") -> list[Any]:
    """Return the attention of each block, whose ``weights`` or ``logits`` can be shown.

    Raises:
        UsageError: A block or an attention of one's own has none.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)
        >>> [type(attention).__name__ for attention in attentions(net)]
        ['Attention', 'Attention']
    """
    found = []
    for block in net.blocks:
        attention = getattr(block, "attn", None)
        if attention is None:
            raise UsageError(f"{type(block).__name__} has no attention `attn` to look at")
        if not callable(getattr(attention, shows, None)):
            what = f"{type(attention).__name__} does not show its {shows}"
            raise UsageError(f"{what}: give it {shows}(x, pos_embed, layer), or subclass vitlab.layers.Attention")
        found.append(attention)
    return found


def attention_maps(net: Asked, images: Tensor, layer: int, gradients: bool = False) -> Tensor:
    """Return the attention of block ``layer`` for ``(B, C, H, W)`` images, ``(B, A, L, L)``; each row sums to 1.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)
        >>> maps = attention_maps(net, torch.randn(1, 3, 32, 32), layer=1, gradients=True)
        >>> maps.shape, maps.requires_grad
        (torch.Size([1, 3, 17, 17]), True)
    """
    if isinstance(net, AnyNetwork):
        return net.attention(images)[layer]
    x = attention_inputs(net, images, gradients)[layer]
    with torch.set_grad_enabled(gradients):
        maps: Tensor = attentions(net)[layer].weights(x, net.positions(images), layer)
    return maps


def all_attention_maps(net: Asked, images: Tensor) -> Iterator[Tensor]:
    """Yield the attention of each block for ``(B, C, H, W)`` images in one pass, ``(B, A, L, L)`` per block.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)
        >>> [maps.shape for maps in all_attention_maps(net, torch.randn(1, 3, 32, 32))]
        [torch.Size([1, 3, 17, 17]), torch.Size([1, 3, 17, 17])]
    """
    if isinstance(net, AnyNetwork):
        yield from net.attention(images)
        return
    positions = net.positions(images)
    for layer, (attention, x) in enumerate(zip(attentions(net), attention_inputs(net, images), strict=True)):
        with torch.no_grad():
            maps = attention.weights(x, positions, layer)
        yield maps


def attention_logits(
    net: VisionTransformer, images: Tensor, gradients: bool = False, two_passes: bool = False
) -> Iterator[Tensor]:
    """Yield the logits of each block's attention for ``(B, C, H, W)`` images, ``(B, A, L, L)`` per block.

    With ``two_passes`` the queries of one pass meet the keys of another. They differ where something draws, as
    :func:`vitlab.analysis.scramble.shuffled_tokens` does.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)
        >>> [logits.shape for logits in attention_logits(net, torch.randn(1, 3, 32, 32))]
        [torch.Size([1, 3, 17, 17]), torch.Size([1, 3, 17, 17])]
    """
    inputs = attention_inputs(net, images, gradients)
    others = attention_inputs(net, images, gradients) if two_passes else [None] * len(inputs)
    with torch.set_grad_enabled(gradients):
        positions = net.positions(images)
    for layer, (attention, x, keys) in enumerate(zip(attentions(net, "logits"), inputs, others, strict=True)):
        with torch.set_grad_enabled(gradients):
            logits = attention.logits(x, positions, layer, *([] if keys is None else [keys]))
        yield logits


def block_tokens(net: Asked, images: Tensor, gradients: bool = False) -> list[Tensor]:
    """Return the ``(B, L, D)`` tokens that enter the first block, then those that leave each block.

    In a network that is not a Vision Transformer, L and D differ between layers.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)
        >>> [x.shape for x in block_tokens(net, torch.randn(1, 3, 32, 32))]
        [torch.Size([1, 17, 48]), torch.Size([1, 17, 48]), torch.Size([1, 17, 48])]
    """
    if isinstance(net, AnyNetwork):
        return net.tokens(images)
    with torch.set_grad_enabled(gradients):
        pos_embed = net.positions(images)
        tokens = [net.embed(images, pos_embed)]
        for i in range(len(net.blocks)):
            tokens.append(net.run_block(i, tokens[-1], pos_embed=pos_embed))
    return tokens


def prefix_counts(net: Asked) -> list[int]:
    """Return how many tokens of each layer of :func:`block_tokens` stand before the patches, such as a class token.

    Example:
        >>> prefix_counts(VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3))
        [1, 1, 1]
    """
    if isinstance(net, AnyNetwork):
        return [stage.num_prefix_tokens for stage in net.stages]
    return [net.num_prefix_tokens] * (len(net.blocks) + 1)


def placed_tokens(net: Asked, images: Tensor) -> list[tuple[Tensor, Grid] | None]:
    """Return the patch tokens of :func:`block_tokens`, ``(B, h w, D)``, with their grid (h, w); None without places.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=1, num_heads=3)
        >>> [(tokens.shape, grid) for tokens, grid in placed_tokens(net, torch.randn(1, 3, 32, 32))]
        [(torch.Size([1, 16, 48]), (4, 4)), (torch.Size([1, 16, 48]), (4, 4))]
    """
    tokens = block_tokens(net, images)
    if isinstance(net, AnyNetwork):
        grids = [stage.seen for stage in net.stages]
    else:
        grid_size = net.positions(images).grid_size
        grids = [grid_size if _is_placed(net, x, grid_size) else None for x in tokens]
    parts = zip(tokens, grids, prefix_counts(net), strict=True)
    return [None if grid is None else (x[:, prefix:], grid) for x, grid, prefix in parts]


def graded_tokens(net: Asked, images: Tensor) -> tuple[Tensor, list[tuple[Tensor, Callable[[Tensor], Tensor]]]]:
    """Return the ``(B, K)`` outputs and the tokens they come from, layer by layer, in their graph.

    The tokens of each layer come with a function that maps them, or their gradient, to ``(B, D, h, w)``; layers without
    cells are left out.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=10)
        >>> found, layers = graded_tokens(net, torch.randn(1, 3, 32, 32))
        >>> found.shape, [as_map(tokens).shape for tokens, as_map in layers][-1]
        (torch.Size([1, 10]), torch.Size([1, 48, 4, 4]))
    """
    if isinstance(net, AnyNetwork):
        with torch.enable_grad():
            found, returned = net.returned(images.detach().requires_grad_())
        layers = zip(returned, net.stages, strict=True)
        return found, [(x, layer.as_map) for x, layer in layers if layer.has_cells and x.requires_grad]
    tokens = block_tokens(net, images.detach().requires_grad_(), gradients=True)
    with torch.enable_grad():
        found = net.forward_head(net.norm(tokens[-1]))
    grid_size = net.positions(images).grid_size

    def as_map(x: Tensor) -> Tensor:
        return x[:, net.num_prefix_tokens :].transpose(1, 2).unflatten(2, grid_size)

    return found, [(x, as_map) for x in tokens if _is_placed(net, x, grid_size)]


def pooled_features(net: Asked, images: Tensor) -> Tensor:
    """Return the features that the head reads, ``(B, D)``.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)
        >>> pooled_features(net, torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 48])
    """
    if isinstance(net, AnyNetwork):
        return net.features(images)
    features: Tensor = net.fc_norm(net.pool(net.forward_features(images)))
    return features


def heads_of(net: Asked) -> list[int]:
    """Return the number of heads of each layer whose attention can be seen; 0 for a block that shows none.

    Example:
        >>> heads_of(VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3))
        [3, 3]
    """
    if isinstance(net, AnyNetwork):
        return net.attention_heads
    attentions = [getattr(block, "attn", None) for block in net.blocks]  # a block of one's own may have none
    shown = [callable(getattr(attn, "weights", None)) for attn in attentions]  # not a parameter of this name
    return [int(getattr(a, "num_heads", net.num_heads)) if has else 0 for a, has in zip(attentions, shown, strict=True)]


def outputs(net: Asked, images: Tensor) -> Tensor:
    """Map ``(B, C, H, W)`` images to ``(B, K)`` outputs, 32 at a time, without gradients.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=10)
        >>> outputs(net, torch.randn(40, 3, 32, 32)).shape
        torch.Size([40, 10])
    """
    with torch.no_grad():
        return torch.cat([net(batch) for batch in images.split(32)])


def all_finite(found: Tensor, what: str = "outputs") -> Tensor:
    """Return ``(n, ...)`` numbers of n images; refuse some that are not finite, the largest of which is none.

    Example:
        >>> all_finite(torch.tensor([[1.0, 2.0], [torch.nan, torch.nan]]))
        Traceback (most recent call last):
            ...
        vitlab.errors.UsageError: the outputs of 1 of 2 images are not finite, as of a network that has diverged or \
overflows in 16 bits: take an earlier checkpoint, or --trainer.precision=32-true
    """
    if lost := int((~found.flatten(1).isfinite()).any(dim=1).sum()):
        raise UsageError(not_finite(lost, len(found), what))
    return found


def token_steps(net: Asked) -> tuple[int, int]:
    """Return height and width, in pixels, from one token to the next; of a network of another library, of a cell.

    T2T's windows reach beyond an image, so 3 tokens of 16 pixels may be of 37 pixels.

    Example:
        >>> token_steps(VisionTransformer(img_size=(37, 53), tokenizer="t2t", embed_dim=48, depth=1, num_heads=3))
        (16, 16)
    """
    if isinstance(net, AnyNetwork):
        return net.img_size[0] // net.grid_size[0], net.img_size[1] // net.grid_size[1]
    tokenizer: Any = net.tokenizer
    return pair("patch_size", tokenizer.patch if isinstance(tokenizer, PatchEmbed) else tokenizer.patch_size)


def probabilities(net: Asked, outputs: Tensor) -> Tensor:
    """Map ``(B, K)`` outputs to probabilities: of classes, or of each label for itself if ``net.predicts_labels``.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=2)
        >>> probabilities(net, torch.zeros(1, 2))
        tensor([[0.5000, 0.5000]])
    """
    return outputs.sigmoid() if net.predicts_labels else outputs.softmax(dim=1)
