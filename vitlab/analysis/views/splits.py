"""The features after each soft split of T2T."""

import numpy as np
import pandas as pd

from vitlab.analysis.catalogue import Analysis
from vitlab.analysis.figures import grid_of_axes, heat, picture
from vitlab.analysis.subject import Finding, Subject
from vitlab.analysis.views.pca import pca_colors
from vitlab.analysis.views.token_layers import split_features, t2t_of

SHOWN = 3  # channels


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
