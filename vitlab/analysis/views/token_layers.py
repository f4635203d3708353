"""Attention between the soft splits of T2T-ViT."""

import pandas as pd
import torch
from torch import Tensor

from vitlab.analysis.attention import distances, uniform_distance
from vitlab.analysis.catalogue import Analysis, Curve
from vitlab.analysis.figures import grid_of_axes, heat, picture
from vitlab.analysis.intervals import over_images
from vitlab.analysis.subject import Finding, Subject
from vitlab.class_paths import choice_text
from vitlab.errors import UsageError
from vitlab.tokenizers.performer import TokenPerformer
from vitlab.tokenizers.t2t import T2TTokenizer
from vitlab.tokenizers.token_layers import TokenTransformer


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

    A performer never makes its map; the one that its random features imply is phi(q) phi(k)^T, rows divided by sums.
    Where all features of a token vanish, it reads nothing, and its row is 0.

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
    rows = []
    figure, axes = grid_of_axes(len(images), 1 + len(maps), size=1.8)
    for i, pixels in enumerate(subject.pixels(images).numpy()):
        picture(axes[i, 0], pixels, "image" if i == 0 else "")
    for layer, attention in enumerate(maps):
        h, w = tokenizer.grids[layer]
        (y, x), uniform = _query(subject, (h, w)), uniform_distance((h, w))
        each_far = (attention * distances((h, w)).to(attention)).sum(dim=-1).mean(dim=1)
        far = over_images("mean_distance", each_far.cpu().numpy())
        for i, values in enumerate(attention[:, y * w + x].view(-1, h, w).cpu()):
            title = f"layer {layer + 1}, {h} x {w}\ndistance {far['mean_distance']:.1f}, uniform {uniform:.1f}"
            heat(axes[i, layer + 1], values.numpy(), title if i == 0 else "")
            axes[i, layer + 1].plot(x, y, "+", color="white", markeredgecolor="#D55E00", markersize=7)
            rows += [
                {"image": i, "layer": layer + 1, "row": n // w, "column": n % w, "weight": float(value)}
                | {**far, "uniform": uniform}
                for n, value in enumerate(values.flatten())
            ]
    note = "attention of the cell at the cross; layers add values, not inputs, to it; colors span each map's own range"
    return Finding(pd.DataFrame(rows), figure, note)


def _query(subject: Subject, grid_size: tuple[int, int]) -> tuple[int, int]:
    """Return the cell of a token layer's grid at the query patch; the center without a query."""
    if subject.query is None:
        return grid_size[0] // 2, grid_size[1] // 2
    y, x = (int((q + 0.5) * n / m) for q, n, m in zip(subject.query, grid_size, subject.net.grid_size, strict=True))
    return y, x
