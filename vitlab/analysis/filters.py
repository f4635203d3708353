"""The filters of the first layer."""

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from vitlab.analysis.catalogue import Analysis
from vitlab.analysis.figures import bare, grid_of_axes, heat
from vitlab.analysis.subject import Finding, Subject
from vitlab.errors import UsageError
from vitlab.models.foreign import AnyNetwork
from vitlab.models.vit import VisionTransformer
from vitlab.tokenizers.t2t import T2TTokenizer

MOST = 28  # as many as figure 7 of ViT shows


def filter_components(filters: Tensor) -> tuple[Tensor, Tensor]:
    """Map ``(D, C, p, p)`` filters to their principal components ``(M, C, p, p)`` and shares of variance ``(M,)``."""
    flat = filters.detach().double().flatten(1)
    _, singular, components = torch.linalg.svd(flat - flat.mean(dim=0), full_matrices=False)
    return components.view(-1, *filters.shape[1:]), singular.square() / singular.square().sum()


def first_filters(net: VisionTransformer | AnyNetwork, kind: str) -> Tensor:
    """Return the filters of the first convolution of a network or its tokenizer, ``(D, C, p, p)``.

    Raises:
        UsageError: It does not begin with a convolution of the image.
    """
    begins = net if isinstance(net, AnyNetwork) else net.tokenizer
    if isinstance(begins, T2TTokenizer):
        raise UsageError(
            "filters shows linear maps of pixels, and the windows of tokenizer=t2t pass a token layer first; "
            "use token_layers"
        )
    first = next((layer for layer in begins.modules() if isinstance(layer, nn.Conv2d)), None)
    if first is None or first.in_channels != net.in_chans:
        what = kind if begins is net else f"tokenizer={type(begins).__name__}"
        raise UsageError(f"filters shows linear maps of pixels, and {what} does not begin with a convolution")
    return first.weight


@Analysis(
    reading="Principal components of the filters on pixels, largest first: smooth ones are learned, noisy ones are "
    "still random.",
    limits="What later layers use.",
)
def analyze_filters(subject: Subject) -> Finding:
    """Show the principal components of the filters, as figure 7 of ViT does.

    Example:
        >>> finding = analyze_filters(subject)
        >>> list(finding.table.columns)
        ['component', 'share', 'channel', 'row', 'column', 'weight']
    """
    filters = first_filters(subject.net, subject.kind)
    components, shares = filter_components(filters)
    components, shares = components[:MOST].cpu(), shares[:MOST].cpu()
    columns = min(7, len(components))
    figure, axes = grid_of_axes(-(-len(components) // columns), columns, size=1.1)
    for ax in axes.flat:
        ax.set_axis_off()
    for i, (ax, component) in enumerate(zip(axes.flat, components.numpy(), strict=False)):
        ax.set_axis_on()
        if len(component) == 3:
            ax.imshow(_stretched(component).transpose(1, 2, 0))
            bare(ax, f"{shares[i]:.1%}")
        else:
            heat(ax, component.mean(axis=0), f"{shares[i]:.1%}", diverging=True)
    rows = [
        {"component": i, "share": float(shares[i]), "channel": c, "row": y, "column": x, "weight": float(value)}
        for i, component in enumerate(components.numpy())
        for (c, y, x), value in np.ndenumerate(component)
    ]
    note = f"{len(filters)} filters; titles are shares of their variance, signs are arbitrary"
    return Finding(pd.DataFrame(rows), figure, note)


def _stretched(component: np.ndarray) -> np.ndarray:
    low, high = component.min(), component.max()
    return (component - low) / max(high - low, 1e-12)
