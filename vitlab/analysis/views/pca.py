"""Patch features as colors."""

import math

import pandas as pd
from torch import Tensor

from vitlab.analysis.catalogue import Analysis
from vitlab.analysis.figures import by_cell, grid_of_axes, picture
from vitlab.analysis.probes import principal
from vitlab.analysis.subject import Finding, Subject
from vitlab.errors import UsageError
from vitlab.layers.resample import Grid
from vitlab.models.walk import Asked, placed_tokens


def pca_colors(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Map ``(B, N, D)`` tokens to colors ``(B, N, 3)`` in [0, 1], and to the components' shares of variance ``(3,)``.

    The first three principal components over all patches of all images, as DINOv2 shows them (Oquab et al. 2024,
    arXiv:2304.07193); each spans its 2nd to 98th percentile, and its sign is that of its largest weight.

    Example:
        >>> colors, shares = pca_colors(torch.randn(2, 16, 8))
        >>> colors.shape, bool(shares.sum() <= 1)
        (torch.Size([2, 16, 3]), True)
    """
    values, shares = principal(tokens.detach().flatten(0, 1).cpu(), count=3)
    low, high = values.quantile(0.02, dim=0), values.quantile(0.98, dim=0)
    colors = ((values - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return colors.view(*tokens.shape[:2], 3).float(), shares


def placed_by_blocks(net: Asked, images: Tensor) -> dict[int, tuple[Tensor, Grid]]:
    """Return the tokens of two places or more in the image, ``(B, N, D)``, with their grid, by how many blocks passed.

    Example:
        >>> from vitlab.models.vit import VisionTransformer
        >>> net = VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2).eval()
        >>> {passed: grid for passed, (_, grid) in placed_by_blocks(net, torch.zeros(1, 3, 8, 8)).items()}
        {0: (2, 2), 1: (2, 2), 2: (2, 2)}
    """
    layers = placed_tokens(net, images)
    first = len(net.blocks) + 1 - len(layers)
    return {i: found for i, found in enumerate(layers, first) if found is not None and math.prod(found[1]) > 1}


@Analysis(
    reading="The first three principal components of patch features as colors: similar colors are similar features.",
    limits="The other components: the title of each layer gives the share of variance shown.",
)
def analyze_pca(subject: Subject) -> Finding:
    """Show the patch features before the blocks and after some of them, as colors.

    Example:
        >>> finding = analyze_pca(subject)
        >>> list(finding.table.columns)
        ['image', 'layer', 'row', 'column', 'red', 'green', 'blue', 'share']
    """
    net, images = subject.net, subject.shown(8)
    tokens = placed_by_blocks(net, images)
    there = list(tokens)
    layers = sorted({there[k * (len(there) - 1) // 3] for k in range(4)}) if there else []
    if subject.layer is not None:
        layers = [subject.layer + 1] if subject.layer + 1 in tokens else []
    if not layers:
        raise UsageError(f"pca needs features that have a place in the image, and {subject.kind} shows none there")
    figure, axes = grid_of_axes(len(images), 1 + len(layers), size=1.6)
    rows = []
    for i, pixels in enumerate(subject.pixels(images).numpy()):
        picture(axes[i, 0], pixels, "image" if i == 0 else "")
    for j, layer in enumerate(layers, start=1):
        features, (h, w) = tokens[layer]
        colors, shares = pca_colors(features)
        for i, each in enumerate(colors):
            title = f"{layer} blocks passed\n{float(shares.sum()):.0%} of variance" if i == 0 else ""
            picture(axes[i, j], each.view(h, w, 3).numpy(), title, net.img_size)
            rows += [
                {"image": i, "layer": layer, **at, "red": r, "green": g, "blue": b, "share": float(shares.sum())}
                for at, (r, g, b) in by_cell(each.tolist(), w)
            ]
    note = (
        f"{len(images)} pictures together, each layer with components of its own: colors of two layers do not compare"
    )
    return Finding(pd.DataFrame(rows), figure, note)
