"""Features of a network: the outputs of chosen blocks, and nearest neighbors."""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

Tokens = Tensor | tuple[Tensor, Tensor]  # patches, or patches and prefix tokens


class IntermediateArgs(TypedDict, total=False):
    """How :func:`block_outputs` returns the outputs of blocks; each is False, or NCHW, if not given.

    Args:
        return_prefix_tokens: Whether each output is ``(patches, prefix tokens)``, the latter ``(B, P, D)``.
        norm: Whether to apply the final normalization to each output.
        stop_early: Whether to stop after the last chosen block; the first result is then its output.
        output_fmt: Patches as ``(B, D, h, w)`` maps ("NCHW") or ``(B, N, D)`` tokens ("NLC").
        intermediates_only: Whether to return only the list of outputs.

    >>> options: IntermediateArgs = {"norm": True, "output_fmt": "NLC"}
    """

    return_prefix_tokens: bool
    norm: bool
    stop_early: bool
    output_fmt: Literal["NCHW", "NLC"]
    intermediates_only: bool


def block_outputs(
    net: Any, images: Tensor, indices: int | Sequence[int] | None = None, **options: Unpack[IntermediateArgs]
) -> list[Tokens] | tuple[Tensor, list[Tokens]]:
    """Map ``(B, C, H, W)`` images to the normalized ``(B, P + N, D)`` tokens and the outputs of chosen blocks.

    Args:
        net: A :class:`vitlab.models.VisionTransformer`.
        images: The images.
        indices: Indices of blocks, negative ones from the end, or how many of the last blocks; None is all.
        **options: See :class:`IntermediateArgs`.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, patch_size=4, embed_dim=48, depth=4, num_heads=3)
        >>> tokens, maps = block_outputs(net, torch.randn(2, 3, 32, 32), indices=[0, 3])
        >>> tokens.shape, maps[0].shape
        (torch.Size([2, 65, 48]), torch.Size([2, 48, 8, 8]))
    """
    output_fmt = options.get("output_fmt", "NCHW")
    if output_fmt not in ("NCHW", "NLC"):
        raise ValueError(f"`output_fmt` must be NCHW or NLC, got {output_fmt!r}")
    chosen = block_numbers(len(net.blocks), indices)
    outputs: list[Tokens] = []
    pos_embed = net.positions(images)
    x = net.embed(images, pos_embed)
    for i in range(max(chosen) + 1 if options.get("stop_early") else len(net.blocks)):
        x = net.run_block(i, x, pos_embed)
        if i in chosen:
            y = net.norm(x) if options.get("norm") else x
            prefix, patches = y[:, : net.num_prefix_tokens], y[:, net.num_prefix_tokens :]
            if output_fmt == "NCHW":
                patches = patches.transpose(1, 2).unflatten(2, pos_embed.grid_size)  # (B, D, h, w)
            outputs.append((patches, prefix) if options.get("return_prefix_tokens") else patches)
    return outputs if options.get("intermediates_only") else (net.norm(x), outputs)


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
