"""Faithfulness of a map: the effect of deleting or inserting its best patches first."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from vitlab.analysis.attribution.maps import METHODS, cells, predicted
from vitlab.analysis.figures import curves, finish, one_axes
from vitlab.analysis.intervals import over_images
from vitlab.analysis.subject import Finding, Subject
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import outputs

SHARES = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)  # of the patches
Change = Callable[..., Tensor]
MOST = 48  # images; each takes a hundred forward passes, and one for each patch


def deleted(net: VisionTransformer, images: Tensor, values: Tensor, count: int) -> Tensor:
    """Return ``(B, C, H, W)`` images whose ``count`` patches of the largest of ``(B, N)`` values have the mean color.

    Example:
        >>> net = VisionTransformer(img_size=4, patch_size=2, embed_dim=16, depth=1, num_heads=2)
        >>> deleted(net, torch.ones(1, 1, 4, 4), torch.tensor([[0.0, 3.0, 1.0, 2.0]]), 2)[0, 0]
        tensor([[1., 1., 0., 0.],
                [1., 1., 0., 0.],
                [1., 1., 0., 0.],
                [1., 1., 0., 0.]])
    """
    return images * (1 - _best(net, values, count))


def inserted(net: VisionTransformer, images: Tensor, values: Tensor, count: int) -> Tensor:
    """Return the mean color but for the ``count`` best patches, the opposite of :func:`deleted`."""
    return images * _best(net, values, count)


def _best(net: VisionTransformer, values: Tensor, count: int) -> Tensor:
    order = values.argsort(dim=1, descending=True, stable=True)
    return cells(net, torch.zeros_like(values).scatter(1, order[:, :count], 1.0))


def probabilities(net: VisionTransformer, images: Tensor, values: Tensor, classes: Tensor, change: Change) -> Tensor:
    """Return the classes' probabilities at each of :data:`SHARES` of the patches, ``(B, shares)``."""
    counts = [round(share * values.shape[1]) for share in SHARES]
    found = [outputs(net, change(net, images, values, count)).softmax(dim=1) for count in counts]
    return torch.stack([each.gather(1, classes[:, None])[:, 0] for each in found], dim=1).double().cpu()


def analyze_faithfulness(subject: Subject) -> Finding:
    """Delete and insert the patches that each map finds most important (Petsiuk et al. 2018, arXiv:1806.07421).

    Example:
        >>> finding = analyze_faithfulness(subject)
        >>> list(finding.table.columns)[:4]
        ['kind', 'map', 'share', 'probability']
    """
    net = subject.net
    images = torch.cat([batch for batch, _ in subject.batches(limit=min(subject.num_images, MOST))])
    classes = predicted(subject, images, "faithfulness")
    maps = {"random": torch.rand(len(images), np.prod(net.grid_size), generator=torch.Generator().manual_seed(0))}
    maps |= {name: _in_parts(net, images, classes, method).cpu() for name, method in METHODS.items()}
    rows, verdicts = [], {}
    for kind, change in (("deletion", deleted), ("insertion", inserted)):
        found = {name: probabilities(net, images, m.to(images), classes, change) for name, m in maps.items()}
        areas = {name: torch.trapezoid(each, torch.tensor(SHARES).double()) for name, each in found.items()}
        for name, each in found.items():
            better = (areas[name] - areas["random"]) * (-1 if kind == "deletion" else 1)
            facts = over_images("area", areas[name].numpy()) | over_images("above_random", better.numpy())
            verdicts[kind, name] = facts["above_random_low"] > 0
            for share, column in zip(SHARES, each.T, strict=True):
                point = {"kind": kind, "map": name, "share": share, **over_images("probability", column.numpy())}
                rows.append({**point, **facts, "n": len(images)})
    table = pd.DataFrame(rows)
    figure, axes = one_axes(columns=2, width=4.4)
    for ax, kind in zip(axes, ("deletion", "insertion"), strict=True):
        curves(ax, table[table["kind"] == kind], "share", "probability", by="map")
        ax.set_ylim(bottom=0)
        finish(ax, f"share of patches {'deleted' if kind == 'deletion' else 'inserted'}", "probability of the class")
    no = [f"{name} ({kind})" for (kind, name), is_better in verdicts.items() if not is_better and name != "random"]
    lost = f"NO BETTER THAN RANDOM: {', '.join(no)}" if no else "all maps are better than random"
    note = f"{len(images)} images, deleted patches have the mean color, bands are 95 % intervals over images; {lost}"
    return Finding(table, figure, note)


def _in_parts(net: VisionTransformer, images: Tensor, classes: Tensor, method: Change) -> Tensor:
    return torch.cat([method(net, x, k) for x, k in zip(images.split(16), classes.split(16), strict=True)])
