"""Where a network looks: attention maps, rollout, distance, entropy."""

from collections.abc import Callable, Iterable

import pandas as pd
import torch
from torch import Tensor

from vitlab.analysis.figures import COLORS, dots_per_head, finish, grid_of_axes, heat, one_axes, picture
from vitlab.analysis.subject import Finding, Subject
from vitlab.layers.resample import Grid
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import attention_inputs, attention_maps


def rollout(maps: Iterable[Tensor]) -> Tensor:
    """Map the ``(B, A, L, L)`` attention of each block to ``(B, L, L)``: how much of each input reaches each output.

    Attention rollout, Abnar and Zuidema 2020 (arXiv:2005.00928): the mean over heads and the residual path count half
    each; rows sum to 1. It leaves out the MLPs and what values and projections do.

    Example:
        >>> maps = [torch.full((1, 2, 5, 5), 0.2), torch.full((1, 2, 5, 5), 0.2)]  # even attention in two blocks
        >>> rollout(maps).shape, round(float(rollout(maps).sum(dim=-1).mean()), 4)
        (torch.Size([1, 5, 5]), 1.0)
    """
    total: Tensor | None = None
    for attention in maps:
        mixed = attention.mean(dim=1)  # (B, L, L)
        mixed = (mixed + torch.eye(mixed.shape[-1], device=mixed.device, dtype=mixed.dtype)) / 2
        mixed = mixed / mixed.sum(dim=-1, keepdim=True)
        total = mixed if total is None else mixed @ total
    if total is None:
        raise ValueError("`maps` must hold the attention of at least one block")
    return total


def distances(grid_size: Grid) -> Tensor:
    """Return the ``(N, N)`` Euclidean distances between the cells of a grid, in cells.

    Example:
        >>> distances((1, 3))
        tensor([[0., 1., 2.],
                [1., 0., 1.],
                [2., 1., 0.]])
    """
    y, x = torch.meshgrid(*(torch.arange(side, dtype=torch.float32) for side in grid_size), indexing="ij")
    return torch.cdist(cells := torch.stack([y.flatten(), x.flatten()], dim=1), cells)


def uniform_distance(grid_size: Grid) -> float:
    """Return the mean distance of attention that is the same everywhere, in cells.

    Example:
        >>> round(uniform_distance((14, 14)), 2)
        7.28
    """
    return float(distances(grid_size).mean())


def mean_distance(maps: Tensor, grid_size: Grid, num_prefix_tokens: int) -> Tensor:
    """Map ``(B, A, L, L)`` attention to its mean distance from patch to patch, ``(B, A)`` in cells.

    As in ViT's appendix (Dosovitskiy et al. 2021, arXiv:2010.11929), with rows renormalised after the columns of
    prefix tokens are dropped: else a head that attends to the class token looks local.

    Example:
        >>> mean_distance(torch.eye(9)[None, None], (3, 3), num_prefix_tokens=0)  # each looks at itself
        tensor([[0.]])
    """
    patches = maps[..., num_prefix_tokens:, num_prefix_tokens:]  # (B, A, N, N)
    patches = patches / patches.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)
    return (patches * distances(grid_size).to(maps)).sum(dim=-1).mean(dim=-1)


def entropy(maps: Tensor) -> Tensor:
    """Map ``(B, A, L, L)`` attention to the mean entropy of its rows, ``(B, A)`` in nats; at most log L.

    Example:
        >>> entropy(torch.full((1, 1, 4, 4), 0.25)).exp()  # each looks at four tokens alike
        tensor([[4.]])
    """
    return torch.special.entr(maps).sum(dim=-1).mean(dim=-1)


def per_head(
    net: VisionTransformer, batches: Iterable[tuple[Tensor, Tensor]], measure: Callable[[Tensor], Tensor]
) -> tuple[pd.DataFrame, int]:
    """Return the mean over images of ``measure``, ``(B, A, L, L)`` to ``(B, A)``, for each layer and head; and n."""
    values: list[list[Tensor]] = [[] for _ in net.blocks]
    with torch.no_grad():
        for images, _ in batches:
            for layer, x in enumerate(attention_inputs(net, images)):
                maps = net.blocks[layer].attn.weights(x, net.positions(images), layer)  # type: ignore[operator, union-attr]
                values[layer].append(measure(maps).cpu())
    rows = [
        {"layer": layer, "head": head, "value": float(column.mean()), "sd_over_images": float(column.std(correction=0))}
        for layer, parts in enumerate(values)
        for head, column in enumerate(torch.cat(parts).T)
    ]
    return pd.DataFrame(rows), sum(map(len, values[0]))


def analyze_attention(subject: Subject) -> Finding:
    """Show where a token looks, in each head of one layer.

    Example:
        >>> finding = analyze_attention(subject)
        >>> list(finding.table.columns)
        ['image', 'map', 'row', 'column', 'weight']
    """
    token = subject.shown_query("attention", "distance or displacement")
    net, images = subject.net, subject.shown()
    layer = len(net.blocks) - 1 if subject.layer is None else subject.layer
    maps = attention_maps(net, images, layer)[:, :, token, net.num_prefix_tokens :]  # (B, A, N)
    heads = range(maps.shape[1]) if subject.head is None else [subject.head]
    named = {f"head {head}": maps[:, head] for head in heads}
    if len(heads) > 1:
        named["mean of heads"] = maps.mean(dim=1)
    note = f"{_token_name(subject)} in layer {layer} of 0..{len(net.blocks) - 1}"
    return _maps_of_images(subject, images, named, f"attention of the {note}")


def analyze_rollout(subject: Subject) -> Finding:
    """Show which patches reach a token's output through all layers.

    Example:
        >>> finding = analyze_rollout(subject)
        >>> list(finding.table.columns)
        ['image', 'map', 'row', 'column', 'weight']
    """
    token = subject.shown_query("rollout", "distance or displacement")
    net, images = subject.net, subject.shown()
    reached = rollout(attention_maps(net, images, layer) for layer in range(len(net.blocks)))
    named = {"rollout": reached[:, token, net.num_prefix_tokens :]}
    return _maps_of_images(
        subject, images, named, f"rollout to the {_token_name(subject)} over {len(net.blocks)} layers"
    )


def analyze_distance(subject: Subject) -> Finding:
    """Measure how far each head looks.

    Example:
        >>> finding = analyze_distance(subject)
        >>> list(finding.table.columns)
        ['layer', 'head', 'distance', 'sd_over_images', 'uniform']
    """
    net, grid = subject.net, subject.net.grid_size
    table, n = per_head(net, subject.batches(), lambda maps: mean_distance(maps, grid, net.num_prefix_tokens))
    table = table.rename(columns={"value": "distance"}).assign(uniform=uniform_distance(grid))
    figure, (axes,) = one_axes()
    dots_per_head(axes, table, "distance")
    uniform = uniform_distance(grid)
    axes.axhline(uniform, color=COLORS[6], linestyle="--", linewidth=1, label=f"uniform attention, {uniform:.2f}")
    axes.set_ylim(0, 1.1 * max(uniform, table["distance"].max()))
    finish(axes, "layer", "mean attention distance, patches")
    return Finding(table, figure, f"{n} validation images, patch to patch, renormalised without prefix tokens")


def analyze_entropy(subject: Subject) -> Finding:
    """Measure how widely each head looks.

    Example:
        >>> finding = analyze_entropy(subject)
        >>> list(finding.table.columns)
        ['layer', 'head', 'entropy', 'sd_over_images', 'uniform']
    """
    net = subject.net
    table, n = per_head(net, subject.batches(), entropy)
    most = float(torch.tensor(net.num_prefix_tokens + net.grid_size[0] * net.grid_size[1]).log())
    table = table.rename(columns={"value": "entropy"}).assign(uniform=most)
    figure, (axes,) = one_axes()
    dots_per_head(axes, table, "entropy")
    axes.axhline(most, color=COLORS[6], linestyle="--", linewidth=1, label=f"uniform attention, {most:.2f}")
    axes.set_ylim(0, 1.1 * most)
    finish(axes, "layer", "entropy of attention, nats")
    return Finding(table, figure, f"{n} validation images, all tokens")


def _token_name(subject: Subject) -> str:
    return "class token" if subject.query is None else f"patch at row {subject.query[0]}, column {subject.query[1]}"


def _maps_of_images(subject: Subject, images: Tensor, named: dict[str, Tensor], note: str) -> Finding:
    """Return ``(B, N)`` maps under their names as a table, and beside their images as a figure."""
    h, w = subject.net.grid_size
    rows = [
        {"image": i, "map": name, "row": n // w, "column": n % w, "weight": float(value)}
        for name, maps in named.items()
        for i, values in enumerate(maps)
        for n, value in enumerate(values)
    ]
    figure, axes = grid_of_axes(len(images), 1 + len(named))
    for i, pixels in enumerate(subject.pixels(images).numpy()):
        picture(axes[i, 0], pixels, "image" if i == 0 else "")
        for j, (name, maps) in enumerate(named.items(), start=1):
            heat(axes[i, j], maps[i].view(h, w).cpu().numpy(), name if i == 0 else "")
            if subject.query is not None:
                axes[i, j].plot(subject.query[1], subject.query[0], "+", color="#D55E00", markersize=7)
    return Finding(pd.DataFrame(rows), figure, f"{note}; colours span each map's own range")
