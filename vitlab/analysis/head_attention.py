"""Attention of a network: maps, rollout, distance, entropy."""

import math
from collections.abc import Callable, Iterable, Sequence

import pandas as pd
import torch
from torch import Tensor

from vitlab.analysis.catalogue import Analysis, Curve
from vitlab.analysis.figures import (
    COLORS,
    beside,
    by_cell,
    dashed,
    dots_per_head,
    finish,
    grid_of_axes,
    one_axes,
    overlay,
    picture,
)
from vitlab.analysis.intervals import over_images
from vitlab.analysis.scramble import shuffled_tokens
from vitlab.analysis.subject import Finding, Subject
from vitlab.errors import UsageError
from vitlab.layers.resample import Grid
from vitlab.models.foreign import AnyNetwork
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import all_attention_maps, attention_maps, heads_of
from vitlab.stats import ROUNDING

TINY = 1e-6  # a negative weight up to this is rounding


def rollout(maps: Iterable[Tensor]) -> Tensor:
    """Map the ``(B, A, L, L)`` attention of each block to ``(B, L, L)``: how much of each input reaches each output.

    Attention rollout, Abnar and Zuidema 2020 (arXiv:2005.00928): the mean over heads and the residual path count half
    each; rows sum to 1. It leaves out the MLPs and what values and projections do.

    Raises:
        UsageError: Weights are negative, as those of differential attention: what cancels is no share of an input.

    Example:
        >>> maps = [torch.full((1, 2, 5, 5), 0.2), torch.full((1, 2, 5, 5), 0.2)]  # even attention in two blocks
        >>> rollout(maps).shape, round(float(rollout(maps).sum(dim=-1).mean()), 4)
        (torch.Size([1, 5, 5]), 1.0)
    """
    total: Tensor | None = None
    for layer, attention in enumerate(maps):
        if (least := float(attention.min())) < -TINY:
            raise UsageError(
                f"rollout multiplies shares, and layer {layer} has negative weights of attention, down to {least:.3g}: "
                "look at `attention`, or at the other maps of `attribution`"
            )
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


def shares_of_rows(maps: Tensor) -> Tensor:
    """Return the share of each of ``(..., L, L)`` weights in its row, by size: they may be negative, or not sum to 1.

    A row that vanishes is NaN: what it reads is lost in the rounding of float32.

    Example:
        >>> shares_of_rows(torch.tensor([[1.0, -3.0], [1e-9, 0.0]]))
        tensor([[0.2500, 0.7500],
                [   nan,    nan]])
    """
    sizes = maps.abs()
    sums = sizes.sum(dim=-1, keepdim=True)
    return torch.where(sums > torch.finfo(torch.float32).eps, sizes / sums, torch.nan)


def row_distances(maps: Tensor, grid_size: Grid) -> Tensor:
    """Map ``(..., N, N)`` weights of patches to the mean distance of each row, ``(..., N)`` in cells.

    Example:
        >>> row_distances(torch.tensor([[0.5, 0.5], [0.0, 0.0]]), (1, 2))
        tensor([0.5000,    nan])
    """
    return (shares_of_rows(maps) * distances(grid_size).to(maps)).sum(dim=-1)


def mean_distance(maps: Tensor, grid_size: Grid, num_prefix_tokens: int) -> Tensor:
    """Map ``(B, A, L, L)`` attention to its mean distance from patch to patch, ``(B, A)`` in cells.

    As in ViT's appendix (Dosovitskiy et al. 2021, arXiv:2010.11929), with rows renormalized after the columns of
    prefix tokens are dropped; otherwise a head that attends to the class token would look local. It is the mean over
    the rows that :func:`shares_of_rows` knows, and NaN where it knows none.

    Example:
        >>> mean_distance(torch.eye(9)[None, None], (3, 3), num_prefix_tokens=0)  # each looks at itself
        tensor([[0.]])
    """
    patches = maps[..., num_prefix_tokens:, num_prefix_tokens:]  # (B, A, N, N)
    return row_distances(patches, grid_size).nanmean(dim=-1)


def entropy(maps: Tensor) -> Tensor:
    """Map ``(B, A, L, L)`` attention to the mean entropy of its rows, ``(B, A)`` in nats; at most log L.

    It is the mean over the rows that :func:`shares_of_rows` knows, and NaN where it knows none.

    Example:
        >>> entropy(torch.full((1, 1, 4, 4), 0.25)).exp()  # each looks at four tokens alike
        tensor([[4.]])
    """
    return torch.special.entr(shares_of_rows(maps)).sum(dim=-1).nanmean(dim=-1)


def per_head(
    net: VisionTransformer, batches: Iterable[tuple[Tensor, Tensor]], measure: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Return ``measure``, from ``(B, A, L, L)`` to ``(B, A)``, of each image and head, ``(n, A)`` for each layer."""
    parts = ([measure(maps).cpu() for maps in all_attention_maps(net, images)] for images, _ in batches)
    return [torch.cat(of_layer) for of_layer in zip(*parts, strict=True)]


def _table(name: str, values: list[Tensor], null: list[Tensor], uniform: float, most: float) -> pd.DataFrame:
    """Return a row for each layer and head of ``(n, A)`` values of layers and of those of the null, image by image."""
    rows = []
    for layer, (own, others) in enumerate(zip(values, null, strict=True)):
        above = own.double() - others.double()
        above[above.abs() <= 4 * ROUNDING * uniform] = 0  # of sums in another order
        for head in range(own.shape[1]):
            one, other, more = (each[:, head].double().numpy() for each in (own, others, above))
            found = over_images(name, one, (0, most)) | over_images("null", other, (0, most))
            found |= over_images("above_null", more)
            rows.append({"layer": layer, "head": head, **found, "uniform": uniform})
    return pd.DataFrame(rows)


def _heads(
    subject: Subject, name: str, measure: Callable[[Tensor], Tensor], uniform: float, most: float, unit: str
) -> Finding:
    """Measure each head's attention, and that of the same network with shuffled tokens as the null."""
    net = subject.transformer(name, "tokens that can be shuffled before positions, as a null")
    values = per_head(net, subject.batches(), measure)
    with shuffled_tokens(net):
        null = per_head(net, subject.batches(), measure)
    table = _table(name, values, null, uniform, most)
    figure, (axes,) = one_axes()
    dots_per_head(axes, table, name)
    axes.scatter(table["layer"] + 0.12, table["null"], s=18, facecolors="none", edgecolors=COLORS[1], label="null")
    dashed(axes, uniform, f"uniform attention, {uniform:.2f}")
    ends = pd.concat([table[[name, f"{name}_low", f"{name}_high", "null"]].stack(), pd.Series([uniform])])
    room = 0.08 * (ends.max() - ends.min()) or 0.1
    axes.set_ylim(ends.min() - room, ends.max() + room)  # from 0, heads near the null would lie on it
    finish(axes, "layer", unit)
    beyond = int(((table["above_null_low"] > 0) | (table["above_null_high"] < 0)).sum())
    note = f"{(n := len(values[0]))} images; null: shuffled tokens"
    if n < 2:
        return Finding(
            table, figure, "one image, which has no interval: whether heads differ from the null is not known"
        )
    tested = f"{beyond} of {len(table)} heads differ from it (95 % interval over images"
    return Finding(table, figure, f"{note}; {tested}, not adjusted for {len(table)} heads)")


@Analysis(
    reading="Where the class token attends in each head: bright patches have the largest weights.",
    limits="The reason for a decision: deleting the most attended patches may hurt no more than deleting random ones; "
    "`faithfulness` measures that.",
)
def analyze_attention(subject: Subject) -> Finding:
    """Show where a token attends, in each head of one layer.

    Example:
        >>> finding = analyze_attention(subject)
        >>> list(finding.table.columns)
        ['image', 'map', 'row', 'column', 'weight']
    """
    token = shown_token(subject, "attention")
    net, images = subject.net, subject.shown()
    depth = len(heads_of(net))
    layer = depth - 1 if subject.layer is None else subject.layer
    maps = attention_maps(net, images, layer)[:, :, token, net.num_prefix_tokens :]  # (B, A, N)
    if subject.head is not None and subject.head >= maps.shape[1]:
        raise UsageError(
            f"layer {layer} of {subject.name} has heads 0..{maps.shape[1] - 1}, and `--head` is {subject.head}"
        )
    heads = range(maps.shape[1]) if subject.head is None else [subject.head]
    named = {f"head {head}": maps[:, head] for head in heads}
    if len(heads) > 1:
        named["mean of heads"] = maps.mean(dim=1)
    note = f"{token_name(subject)} in layer {layer} of 0..{depth - 1}"
    return maps_of_images(subject, images, named, f"attention of the {note}")


@Analysis(
    reading="The product of the attention of all layers, with the residual path as half: what can reach the class "
    "token.",
    limits="The effect of MLPs, values and T2T's token layers; which class a patch supports.",
)
def analyze_rollout(subject: Subject) -> Finding:
    """Show which patches reach a token's output through all layers.

    Example:
        >>> finding = analyze_rollout(subject)
        >>> list(finding.table.columns)
        ['image', 'map', 'row', 'column', 'weight']
    """
    token = shown_token(subject, "rollout")
    net, images = subject.net, subject.shown()
    reached = rollout(all_attention_maps(net, images))
    named = {"rollout": reached[:, token, net.num_prefix_tokens :]}
    return maps_of_images(
        subject, images, named, f"rollout to the {token_name(subject)} over {len(heads_of(net))} layers"
    )


@Analysis(
    reading="The mean distance of each head's attention: compare a dot with the hollow one, the same head with "
    "shuffled tokens.",
    limits="The cause: a head may be local because it knows positions or because neighbors have similar content.",
    curve=Curve(
        x="layer",
        measures={"distance": "distance", "above_null": "above the null"},
        words="Mean attention distance in patches, and its excess over that of the same images with shuffled tokens; "
        "mean over heads.",
    ),
)
def analyze_distance(subject: Subject) -> Finding:
    """Measure the mean attention distance of each head between patches, in rows renormalized without prefix tokens.

    Example:
        >>> finding = analyze_distance(subject)
        >>> list(finding.table.columns)[:6]
        ['layer', 'head', 'distance', 'distance_low', 'distance_high', 'null']
    """
    grid, prefix = subject.net.grid_size, subject.net.num_prefix_tokens
    far, unit = distances(grid), "mean attention distance, patches"
    uniform, most = float(far.mean()), float(far.max())
    return _heads(subject, "distance", lambda maps: mean_distance(maps, grid, prefix), uniform, most, unit)


@Analysis(
    reading="How widely each head attends: near the dashed line evenly to all tokens, near 0 to a single one.",
    limits="Whether the attended tokens matter.",
    curve=Curve(
        x="layer",
        measures={"entropy": "entropy", "above_null": "above the null"},
        words="Entropy of attention in nats, and its excess over that of shuffled tokens; mean over heads.",
    ),
)
def analyze_entropy(subject: Subject) -> Finding:
    """Measure how widely each head attends, over all tokens.

    Example:
        >>> finding = analyze_entropy(subject)
        >>> list(finding.table.columns)[:6]
        ['layer', 'head', 'entropy', 'entropy_low', 'entropy_high', 'null']
    """
    most = math.log(subject.net.num_prefix_tokens + math.prod(subject.net.grid_size))
    return _heads(subject, "entropy", entropy, most, most, "entropy of attention, nats")


def shown_token(subject: Subject, name: str) -> int:
    """Return the token whose attention is shown: the class token, or the patch of ``query``.

    Refuses a network without attention weights, or without the layer that is asked for.
    """
    net, query = subject.net, subject.query
    if not (heads := heads_of(net)):
        unseen = net.unseen if isinstance(net, AnyNetwork) else []
        where = f" in {len(unseen)} of its {len(net.blocks)} layers, such as {unseen[0]}" if unseen else ""
        raise UsageError(
            f"{name} needs a weight of attention for each pair of tokens, and {subject.kind} has none{where}"
        )
    if subject.layer is not None and subject.layer >= len(heads):
        raise UsageError(f"{subject.kind} shows the attention of {len(heads)} layers, and `--layer` is {subject.layer}")
    if query is not None:
        return net.num_prefix_tokens + query[0] * net.grid_size[1] + query[1]
    if net.cls_token is None:
        raise UsageError(
            f"{name} shows the class token's row and {subject.name} has no class token; "
            "choose a patch with --query ROW,COLUMN, or use distance or displacement"
        )
    return 0


def token_name(subject: Subject) -> str:
    """Return the name of the token whose attention is shown."""
    return "class token" if subject.query is None else f"patch at row {subject.query[0]}, column {subject.query[1]}"


def maps_of_images(
    subject: Subject,
    images: Tensor,
    named: dict[str, Tensor],
    note: str,
    titles: Sequence[str] = (),
    signed: Sequence[str] = (),
) -> Finding:
    """Return named ``(B, N)`` maps as a table, and a figure: over their images, or beside them if they have a sign."""
    h, w = subject.net.grid_size
    rows = [
        {"image": i, "map": name, **at, "weight": float(value)}
        for name, maps in named.items()
        for i, values in enumerate(maps)
        for at, value in by_cell(values, w)
    ]
    figure, axes = grid_of_axes(len(images), 1 + len(named))
    for i, pixels in enumerate(subject.pixels(images).numpy()):
        picture(axes[i, 0], pixels, titles[i] if titles else "image" if i == 0 else "")
        height, width = pixels.shape[0] / h, pixels.shape[1] / w
        for j, (name, maps) in enumerate(named.items(), start=1):
            values, title = maps[i].view(h, w).cpu().numpy(), name if i == 0 else ""
            if name in signed:
                beside(axes[i, j], pixels.shape, values, title)
            else:
                overlay(axes[i, j], pixels, values, title)
        for ax, (y, x) in ((ax, subject.query) for ax in axes[i] if subject.query is not None):
            ax.plot((x + 0.5) * width - 0.5, (y + 0.5) * height - 0.5, "+", color="#D55E00", markersize=7)
    ranges = "written below it" + (", or on its bar, where white is 0" if signed else "")
    return Finding(pd.DataFrame(rows), figure, f"{note}; colors span each map's own range, {ranges}")


@Analysis(
    reading="The attention of every layer and head on one image, one row per layer.",
    limits="What a head does with the tokens it attends to, and other images.",
)
def analyze_heads(subject: Subject) -> Finding:
    """Show the attention of a token in each layer (rows) and head (columns), for the first image.

    Example:
        >>> finding = analyze_heads(subject)
        >>> list(finding.table.columns)
        ['layer', 'head', 'row', 'column', 'weight']
    """
    token = shown_token(subject, "heads")
    net, images = subject.net, subject.shown(1)
    (h, w), (pixels,) = net.grid_size, subject.pixels(images).numpy()
    maps = [each[0] for each in all_attention_maps(net, images)]
    rows = []
    figure, axes = grid_of_axes(len(maps), 1 + max(map(len, maps)), size=1.1)
    for layer, heads in enumerate(maps):
        picture(axes[layer, 0], pixels)
        axes[layer, 0].set_ylabel(f"layer {layer}", fontsize=7)
        for head, values in enumerate(heads[:, token, net.num_prefix_tokens :].view(-1, h, w).cpu()):
            overlay(axes[layer, head + 1], pixels, values.numpy(), f"head {head}" if layer == 0 else "")
            rows += [
                {"layer": layer, "head": head, **at, "weight": float(value)}
                for at, value in by_cell(values.flatten(), w)
            ]
    note = f"attention of the {token_name(subject)} in one image; colors span each map's own range"
    return Finding(pd.DataFrame(rows), figure, note)
