"""Attention between the soft splits of T2T-ViT, and the features after each."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from vitlab.analysis.catalogue import Analysis, Curve
from vitlab.analysis.figures import by_cell, grid_of_axes, heat, picture
from vitlab.analysis.head_attention import distances, row_distances
from vitlab.analysis.intervals import over_images
from vitlab.analysis.subject import Finding, Subject
from vitlab.analysis.views.pca import pca_colors
from vitlab.class_paths import choice_text
from vitlab.errors import UsageError
from vitlab.tokenizers.t2t import T2TTokenizer
from vitlab.tokenizers.token_layers import TokenMlp, TokenPerformer, TokenTransformer

SHOWN = 3  # channels of a split


@torch.no_grad()
def split_features(tokenizer: T2TTokenizer, images: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the windows ``(B, N_i, C k k)`` that enter each token layer for ``(B, C, H, W)`` images, and the features
    ``(B, t2t_dim, h_i, w_i)`` that leave it; last the windows of the last split and the tokens on their grid.

    Example:
        >>> tokenizer = T2TTokenizer((32, 32), in_chans=3, embed_dim=16)
        >>> [tuple(features.shape) for _, features in split_features(tokenizer, torch.randn(1, 3, 32, 32))]
        [(1, 64, 8, 8), (1, 64, 4, 4), (1, 16, 2, 2)]
    """
    found, x = [], images
    for i, (layer, grid) in enumerate(zip([*tokenizer.layers(), tokenizer.project], tokenizer.grids, strict=True)):
        windows = tokenizer.windows(x, i)
        x = layer(windows).transpose(1, 2).unflatten(2, grid)
        found.append((windows, x))
    return found


@torch.no_grad()
def token_layer_maps(tokenizer: T2TTokenizer, images: Tensor) -> list[Tensor]:
    """Return the attention of each token layer for ``(B, C, H, W)`` images, ``(B, N_i, N_i)`` on its own grid.

    A performer never computes its map. Its random features imply phi(q) phi(k)^T, with rows divided by their sums.
    Where all features of a token vanish, the token reads nothing, and its row is 0. Without attention, a token reads
    itself.

    Example:
        >>> tokenizer = T2TTokenizer((32, 32), in_chans=3, embed_dim=16)
        >>> [tuple(maps.shape) for maps in token_layer_maps(tokenizer, torch.randn(1, 3, 32, 32))]
        [(1, 64, 64), (1, 16, 16)]
    """
    maps = []
    for layer, (windows, _) in zip(tokenizer.layers(), split_features(tokenizer, images), strict=False):
        if isinstance(layer, TokenTransformer):
            maps.append(layer.attn.weights(layer.norm1(windows)).mean(dim=1))
            continue
        if isinstance(layer, TokenMlp):
            maps.append(torch.eye(windows.shape[1]).to(windows).expand(len(windows), -1, -1))
            continue
        assert isinstance(layer, TokenPerformer)
        k, q, _ = layer.kqv(layer.norm1(windows)).float().chunk(3, dim=-1)
        products = layer.features(q) @ layer.features(k).transpose(-2, -1)
        maps.append(products / (products.sum(dim=-1, keepdim=True) + 1e-8))  # as TokenPerformer.attend divides
    return maps


def t2t_of(subject: Subject, name: str) -> T2TTokenizer:
    """Return the T2T tokenizer; refuse a network with another tokenizer."""
    tokenizer = subject.transformer(name, "T2T's token layers").tokenizer
    if not isinstance(tokenizer, T2TTokenizer) or len(tokenizer.splits) < 2:
        kind = choice_text(subject.arguments.get("tokenizer", type(tokenizer).__name__))
        raise UsageError(f"{name} needs T2T's token layers, and tokenizer={kind} has none; use attention")
    return tokenizer


@Analysis(
    reading="Where a token between T2T's soft splits attends, on the finer grids there; a performer's weights are "
    "those that its random features imply.",
    limits="What the token receives: these layers add values, not inputs.",
    curve=Curve(
        x="layer",
        measures={"mean_distance": "mean_distance"},
        words="Mean distance of attention between the splits, in cells.",
    ),
)
def analyze_token_layers(subject: Subject) -> Finding:
    """Show the attention of a token between the soft splits.

    Example:
        >>> finding = analyze_token_layers(t2t_subject)
        >>> list(finding.table.columns)[:6]
        ['image', 'layer', 'row', 'column', 'weight', 'mean_distance']
    """
    tokenizer = t2t_of(subject, "token_layers")
    images = subject.shown()
    each = [token_layer_maps(tokenizer, image[None]) for image in images]  # one by one: a map has 10^7 weights at 224
    maps = [torch.cat(parts) for parts in zip(*each, strict=True)]
    note = "attention of the cell at the cross; layers add values, not inputs, to it; colors span each map's own range"
    rows: list[dict[str, Any]] = []
    figure, axes = grid_of_axes(len(images), 1 + len(maps), size=1.8)
    for i, pixels in enumerate(subject.pixels(images).numpy()):
        picture(axes[i, 0], pixels, "image" if i == 0 else "")
    for layer, attention in enumerate(maps):
        h, w = tokenizer.grids[layer]
        (y, x), pairs = _query(subject, (h, w)), distances((h, w))
        reach = torch.stack([row_distances(one, (h, w)) for one in attention]).cpu()  # (B, N)
        blind, means = float(reach.isnan().float().mean()), reach.nanmean(dim=1)
        known = means[means.isfinite()].double().numpy() if blind < 1 else [np.nan]
        far, uniform = over_images("mean_distance", known, (0, float(pairs.max()))), float(pairs.mean())
        said = f"distance {far['mean_distance']:.1f}, uniform {uniform:.1f}" if blind < 1 else "its weights vanish"
        note += f"; {blind:.1%} of the tokens of layer {layer + 1} read nothing" if blind else ""
        for i, values in enumerate(attention[:, y * w + x].view(-1, h, w).cpu()):
            title = f"layer {layer + 1}, {h} x {w}\n{said}"
            faint: Any = {"vmin": 0.0, "vmax": 1 / (h * w)} if reach[i, y * w + x].isnan() else {}
            heat(axes[i, layer + 1], values.numpy(), title if i == 0 else "", **faint)
            axes[i, layer + 1].plot(x, y, "+", color="white", markeredgecolor="#D55E00", markersize=7)
            rows += [
                {"image": i, "layer": layer + 1, **at, "weight": float(value), **far, "uniform": uniform}
                for at, value in by_cell(values.flatten(), w)
            ]
    return Finding(pd.DataFrame(rows), figure, note)


def _query(subject: Subject, grid_size: tuple[int, int]) -> tuple[int, int]:
    """Return the cell of a token layer's grid at the query patch; the center without a query."""
    if subject.query is None:
        return grid_size[0] // 2, grid_size[1] // 2
    y, x = (int((q + 0.5) * n / m) for q, n, m in zip(subject.query, grid_size, subject.net.grid_size, strict=True))
    return y, x


@Analysis(
    reading="The features after each soft split of T2T as colors and as single channels, like figure 2 of T2T-ViT.",
    limits="Which channels matter: those shown have the largest variance.",
)
def analyze_splits(subject: Subject) -> Finding:
    """Show the features after each soft split: principal components as colors, and the channels that vary most.

    As figure 2 of Yuan et al. 2021 (arXiv:2101.11986).

    Example:
        >>> finding = analyze_splits(t2t_subject)
        >>> list(finding.table.columns)
        ['split', 'channel', 'row', 'column', 'value']
    """
    tokenizer, images = t2t_of(subject, "splits"), subject.shown(1)
    figure, axes = grid_of_axes(len(tokenizer.grids), 2 + SHOWN, size=1.7)
    rows = []
    for i, (_, features) in enumerate(split_features(tokenizer, images)):
        (h, w), maps = tokenizer.grids[i], features[0].cpu().numpy()
        colors, shares = pca_colors(features.flatten(2).transpose(1, 2))
        picture(axes[i, 0], subject.pixels(images).numpy()[0], "image" if i == 0 else "")
        title = f"after split {i + 1}, {h} x {w}\n{float(shares.sum()):.0%} of variance"
        picture(axes[i, 1], colors.view(h, w, 3).numpy(), title)
        for j, channel in enumerate(np.argsort(-maps.var(axis=(1, 2)))[:SHOWN].tolist()):
            heat(axes[i, 2 + j], maps[channel], f"channel {channel}")
            rows += [
                {"split": i + 1, "channel": channel, "row": y, "column": x, "value": float(value)}
                for (y, x), value in np.ndenumerate(maps[channel])
            ]
    note = f"one image, {', '.join(f'{h} x {w}' for h, w in tokenizer.grids)} cells after the splits; own range each"
    return Finding(pd.DataFrame(rows), figure, note)
