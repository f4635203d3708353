"""The attention of all heads in all layers."""

import pandas as pd

from vitlab.analysis.attention import token_name
from vitlab.analysis.catalogue import Analysis
from vitlab.analysis.figures import grid_of_axes, overlay, picture
from vitlab.analysis.subject import Finding, Subject
from vitlab.models.walk import all_attention_maps


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
    token = subject.shown_query("heads", "distance or displacement")
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
                {"layer": layer, "head": head, "row": n // w, "column": n % w, "weight": float(value)}
                for n, value in enumerate(values.flatten())
            ]
    note = f"attention of the {token_name(subject)} in one image; colors span each map's own range"
    return Finding(pd.DataFrame(rows), figure, note)
