"""All heads of all layers at one glance."""

import pandas as pd
import torch

from vitlab.analysis.figures import grid_of_axes, overlay, picture
from vitlab.analysis.subject import Finding, Subject
from vitlab.models.walk import attention_inputs


def analyze_heads(subject: Subject) -> Finding:
    """Show where a token looks in each layer, a row each, and each head, a column each, for the first picture.

    Example:
        >>> finding = analyze_heads(subject)
        >>> list(finding.table.columns)
        ['layer', 'head', 'row', 'column', 'weight']
    """
    token = subject.shown_query("heads", "distance or displacement")
    net, images = subject.net, subject.shown(1)
    (h, w), (pixels,) = net.grid_size, subject.pixels(images).numpy()
    with torch.no_grad():
        inputs, positions = attention_inputs(net, images), net.positions(images)
        maps = [net.blocks[i].attn.weights(x, positions, i)[0] for i, x in enumerate(inputs)]  # type: ignore[operator, union-attr]
    rows = []
    figure, axes = grid_of_axes(len(maps), 1 + len(maps[0]), size=1.1)
    for layer, heads in enumerate(maps):
        picture(axes[layer, 0], pixels)
        axes[layer, 0].set_ylabel(f"layer {layer}", fontsize=7)
        for head, values in enumerate(heads[:, token, net.num_prefix_tokens :].view(-1, h, w).cpu()):
            overlay(axes[layer, head + 1], pixels, values.numpy(), f"head {head}" if layer == 0 else "")
            rows += [
                {"layer": layer, "head": head, "row": n // w, "column": n % w, "weight": float(value)}
                for n, value in enumerate(values.flatten())
            ]
    where = "the class token" if subject.query is None else f"the patch at row {subject.query[0]}, {subject.query[1]}"
    return Finding(
        pd.DataFrame(rows), figure, f"attention of {where} in one picture; colours span each map's own range"
    )
