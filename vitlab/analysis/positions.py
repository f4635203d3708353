"""What a network knows about position: similarities of the table, and logits by displacement."""

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from scipy.stats import t as student
from torch import Tensor

from vitlab.analysis.figures import grid_of_axes, heat
from vitlab.analysis.intervals import over_images
from vitlab.analysis.scramble import shuffled_tokens
from vitlab.analysis.subject import Finding, Subject
from vitlab.errors import UsageError
from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.layers.resample import Grid
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import attention_logits


def similarity(table: Tensor) -> Tensor:
    """Map ``(N, D)`` positions to their cosine similarities ``(N, N)``, as in figure 7 of ViT (arXiv:2010.11929).

    Example:
        >>> similarity(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        tensor([[1., 0.],
                [0., 1.]])
    """
    table = F.normalize(table, dim=-1)
    return table @ table.T


def mosaic(tiles: np.ndarray) -> np.ndarray:
    """Map ``(h, w, h', w')`` tiles to one picture in which tile (y, x) stands in row y, column x, NaN between them.

    Example:
        >>> mosaic(np.zeros((2, 3, 2, 3))).shape  # 2 x 3 tiles of 2 x 3 with a line between them
        (5, 11)
    """
    h, w = tiles.shape[:2]
    framed = np.pad(tiles, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=np.nan)
    return framed.swapaxes(1, 2).reshape(h * framed.shape[2], w * framed.shape[3])[:-1, :-1]


def displacement_profile(logits: Tensor, grid_size: Grid) -> Tensor:
    """Map ``(A, N, N)`` logits to their mean over pairs at each displacement, ``(A, 2h - 1, 2w - 1)``.

    Entry (h - 1 + dy, w - 1 + dx) is for keys dy rows below and dx columns right of their query. Each head's mean over
    all pairs is taken away, since the softmax does not see it.

    Example:
        >>> displacement_profile(torch.randn(2, 15, 15), (3, 5)).shape
        torch.Size([2, 5, 9])
    """
    h, w = grid_size
    y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    y, x = y.flatten().to(logits.device), x.flatten().to(logits.device)
    index = (y - y[:, None] + h - 1) * (2 * w - 1) + x - x[:, None] + w - 1  # (N, N): key minus query
    count = torch.bincount(index.flatten(), minlength=(2 * h - 1) * (2 * w - 1))
    centered = logits - logits.mean(dim=(1, 2), keepdim=True)
    sums = logits.new_zeros(len(logits), len(count)).index_add_(1, index.flatten(), centered.flatten(1))
    return (sums / count).unflatten(1, (2 * h - 1, 2 * w - 1))


def profiles(net: VisionTransformer, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, int]:
    """Return the mean over images of each head's profile, its standard error, and the number of images.

    Both are ``(depth, A, 2h - 1, 2w - 1)``; the error is NaN for a single image.
    """
    total, squares, n = torch.zeros(()), torch.zeros(()), 0
    with torch.no_grad():
        for images, _ in batches:
            layers = []
            for logits in attention_logits(net, images):
                patches = logits[:, :, net.num_prefix_tokens :, net.num_prefix_tokens :].double().flatten(0, 1)
                layers.append(displacement_profile(patches, net.grid_size).unflatten(0, logits.shape[:2]).cpu())
            each = torch.stack(layers, dim=1)  # (B, depth, A, 2h - 1, 2w - 1)
            total, squares, n = total + each.sum(dim=0), squares + each.square().sum(dim=0), n + len(images)
    mean = total / n
    spread = (squares / n - mean.square()).clamp(min=0) * n / (n - 1) if n > 1 else torch.full_like(mean, math.nan)
    return mean, (spread / n).sqrt(), n


def analyze_position(subject: Subject) -> Finding:
    """Compare the table's vectors of all cells with each other.

    Example:
        >>> finding = analyze_position(subject)
        >>> list(finding.table.columns)
        ['row', 'column', 'other_row', 'other_column', 'cosine', 'norm_ratio', 'norm_ratio_low', 'norm_ratio_high']
    """
    net, pos_embed = subject.net, subject.net.pos_embed
    if not isinstance(pos_embed, AddedPosEmbed):
        raise UsageError(
            f"position compares the rows of a table, and pos_embed={subject.pos_embed} has none; use displacement, "
            "which works for every method"
        )
    layer = subject.layer or 0
    with torch.no_grad():
        table = pos_embed.table(layer).detach().float()
        lengths = net.tokenizer(subject.shown(32)).norm(dim=-1).mean(dim=1)
        ratios = over_images("norm_ratio", (table.norm(dim=-1).mean() / lengths).cpu().numpy())
    h, w = net.grid_size
    cosines = similarity(table).cpu().view(h, w, h, w)
    figure, axes = grid_of_axes(1, 1, size=5, bar=True)
    shown = heat(axes[0, 0], mosaic(cosines.numpy()))
    axes[0, 0].set_axis_off()
    figure.colorbar(shown, ax=axes, shrink=0.8, label="cosine similarity")
    rows = [
        {"row": n // w, "column": n % w, "other_row": m // w, "other_column": m % w, "cosine": float(value)}
        for n, values in enumerate(cosines.view(h * w, h * w))
        for m, value in enumerate(values)
    ]
    where = f"table of layer {layer}" if pos_embed.join == "every_layer" else "the table"
    note = f"{where} of pos_embed={subject.pos_embed}, whose vectors are {ratios['norm_ratio']:.2f} "
    note += (
        f"[{ratios['norm_ratio_low']:.2f}, {ratios['norm_ratio_high']:.2f}] times as long as an image's patch tokens"
    )
    return Finding(pd.DataFrame(rows).assign(**ratios), figure, note)


def analyze_displacement(subject: Subject) -> Finding:
    """Show how the logits of each head depend on the offset of the key from the query, averaged over content.

    ``logit`` is of the images as they are; neighbors look alike, so that content alone draws a pattern there.
    ``position`` is of the same images with their tokens shuffled, each image's by a draw of its own, before positions:
    content is spread evenly over places, and what is left above ``error`` is knowledge of position.

    Example:
        >>> finding = analyze_displacement(subject)
        >>> list(finding.table.columns)[:8]
        ['layer', 'head', 'dy', 'dx', 'logit', 'logit_low', 'logit_high', 'position']
    """
    net, (h, w) = subject.net, subject.net.grid_size
    logit, logit_error, n = profiles(net, subject.batches())
    with shuffled_tokens(net):
        position, error, _ = profiles(net, subject.batches())
    depth, heads = position.shape[:2]
    figure, axes = grid_of_axes(depth, 2 * heads, size=1.3, bar=True)
    most = float(torch.cat([logit, position]).abs().max()) or 1.0
    for layer, head in np.ndindex(depth, heads):
        found, floor = spread_above(position[layer, head], error[layer, head])
        for kind, values in enumerate((position, logit)):
            ax = axes[layer, kind * heads + head]
            title = f"head {head}, " + (f"position\n{found:.2g} over {floor:.2g}" if kind == 0 else "content too")
            shown = heat(ax, values[layer, head].numpy(), title, diverging=True, vmin=-most, vmax=most)
            ax.plot(w - 1, h - 1, "+", color="black", markersize=5)
        axes[layer, 0].set_ylabel(f"layer {layer}", fontsize=8)
    figure.colorbar(shown, ax=axes, shrink=0.8, label="mean logit")
    reach = float(student.ppf(0.975, max(n - 1, 1)))  # half an interval over images, in standard errors
    columns = {"logit": logit, "logit_low": logit - reach * logit_error, "logit_high": logit + reach * logit_error}
    columns |= {
        "position": position,
        "position_low": position - reach * error,
        "position_high": position + reach * error,
    }
    columns["error"] = error
    cells = [
        {"layer": layer, "head": head, "dy": dy - h + 1, "dx": dx - w + 1}
        | {name: float(values[layer, head, dy, dx]) for name, values in columns.items()}
        for layer, head, dy, dx in np.ndindex(depth, heads, 2 * h - 1, 2 * w - 1)
    ]
    note = f"{n} images, patch to patch, mean of each head subtracted; left: tokens shuffled before positions, with "
    note += (
        "the spread above noise and the noise floor; right: images as they are, with content; the cross is the query"
    )
    return Finding(pd.DataFrame(cells), figure, note)


def spread_above(mean: Tensor, error: Tensor) -> tuple[float, float]:
    """Return the spread of a profile beyond its standard errors, and the spread that they explain.

    Example:
        >>> spread_above(torch.tensor([3.0, -3.0]), torch.tensor([0.1, 0.1]))[0] > 2.9
        True
    """
    floor = float(error.square().mean())
    return math.sqrt(max(0.0, float(mean.var(correction=0)) - floor)), math.sqrt(floor)
