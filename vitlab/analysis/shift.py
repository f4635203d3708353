"""The effect of shifting the image."""

from typing import Literal, get_args

import numpy as np
import pandas as pd
import torch.nn.functional as F
from torch import Tensor

from vitlab.analysis.catalogue import Analysis, Curve, Pair, Rows, each_line
from vitlab.analysis.figures import curves, finish, one_axes
from vitlab.analysis.intervals import over_several
from vitlab.analysis.scramble import MEASURES, NO_CLASSES, changes_of, labels_known, means_of
from vitlab.analysis.subject import Finding, Subject
from vitlab.models.walk import outputs, token_steps
from vitlab.tables import shape_text

Fill = Literal["black", "reflect", "circular"]
DIRECTIONS = {"down": (1, 0), "up": (-1, 0), "right": (0, 1), "left": (0, -1)}
MEAN = "mean"  # of the four, each image for itself


def shifted(images: Tensor, dy: int, dx: int, fill: Fill, black: Tensor | float = 0.0) -> Tensor:
    """Shift ``(B, C, H, W)`` images down and right by pixels; ``fill`` decides what enters at the border."""
    if fill == "circular":
        return images.roll((dy, dx), dims=(2, 3))
    (H, W), (top, left) = images.shape[2:], (max(dy, 0), max(dx, 0))
    border = (left, max(-dx, 0), top, max(-dy, 0))
    padded = F.pad(images, border, mode="reflect") if fill == "reflect" else F.pad(images - black, border) + black
    return padded[:, :, top - dy : top - dy + H, left - dx : left - dx + W]


def shift_sizes(stride: int, side: int) -> list[int]:
    """Return the shifts in pixels: up to a patch, then two patches, less than the side of the image."""
    small = range(1, stride) if stride <= 4 else [2**i for i in range(stride.bit_length()) if 2**i < stride]
    return [pixels for pixels in (*small, stride, 2 * stride) if pixels < side]


def shifts(img_size: Pair, grid_size: Pair, steps: Pair) -> list[int]:
    """Return all shifts in pixels, of both sides of a patch, and none.

    >>> shifts((8, 8), (4, 4), (2, 2)), shifts((16, 32), (2, 8), (8, 4))
    ([0, 1, 2, 4], [0, 1, 2, 3, 4, 8])
    """
    return sorted({0}.union(*(shift_sizes(step, min(img_size)) for step in steps)))


def of_black(table: pd.DataFrame) -> dict[str, float]:
    """Return accuracy and agreement at each shift with a black border as metrics of an ablation, ``acc1@4``."""
    return {
        f"{column}@{pixels}": float(part[column].mean())
        for pixels, part in table[table["fill"] == "black"].groupby("pixels")
        for column in ("acc1", "agreement")
    }


def first_filling(curve: Curve, rows: Rows) -> list[tuple[str, Rows]]:
    """Return a panel for each measure, of the first of the fillings."""
    first = next((row["line"] for row in rows), None)
    return each_line(curve, [row for row in rows if row["line"] == first])


@Analysis(
    reading="How often the prediction survives a shift of the image: cyclic shifts by whole patches are exact only "
    "for the patch tokenizer without positions.",
    limits="The shift separately from what enters at the border: compare the three fillings.",
    curve=Curve(
        x="pixels",
        x_label="shift, pixels",
        measures=MEASURES,
        lines=("fill",),
        words="The image moves; mean of four directions.",
        panels=first_filling,
    ),
    metrics=of_black,
    metric_names=("acc1@*", "agreement@*"),
    numbers=shifts,
)
def analyze_shift(subject: Subject) -> Finding:
    """Shift the images by pixels and by whole patches, in four directions and in the mean of these.

    Example:
        >>> finding = analyze_shift(subject)
        >>> list(finding.table.columns)[:6]
        ['fill', 'pixels', 'direction', 'acc1', 'acc1_low', 'acc1_high']
    """
    has_labels = labels_known(subject, "shift")
    net, (images, classes), before, black = subject.net, subject.labeled(), subject.outputs(), subject.black()
    labels = classes if has_labels else None
    strides = sorted(set(token_steps(net)))  # one of square patches
    rows = []
    for fill in get_args(Fill):
        for pixels in shifts(net.img_size, net.grid_size, token_steps(net)):
            where, each = {"fill": fill, "pixels": pixels}, []
            for direction, (dy, dx) in DIRECTIONS.items():
                after = outputs(net, shifted(images, pixels * dy, pixels * dx, fill, black))
                each.append(changes_of(before, after, labels))
                rows.append({**where, "direction": direction, **means_of(each[-1])})
            together = {name: np.stack([changes[name] for changes in each]) for name in each[0]}  # (4, images)
            rows.append({**where, "direction": MEAN, **means_of(together, over_several)})
    table = pd.DataFrame(rows).assign(n=len(images))
    table["agreement"] = 1 - table["flipped"]
    table["agreement_low"], table["agreement_high"] = 1 - table["flipped_high"], 1 - table["flipped_low"]
    shown = {"acc1": "accuracy"} if has_labels else {}
    shown |= {"agreement": "same prediction"}
    figure, axes = one_axes(columns=len(shown), width=4.0)
    mean = table[table["direction"] == MEAN]
    for ax, (column, name) in zip(axes, shown.items(), strict=True):
        curves(ax, mean, "pixels", column, by="fill")
        ax.set_ylim(0, 1.05)
        ax.set_xticks(table["pixels"].unique())
        for stride in strides:
            ax.axvline(stride, color="0.7", linewidth=0.8, zorder=0)
        finish(ax, "shift, pixels (gray line: a patch)", name)
    what = "validation images" if has_labels else NO_CLASSES
    patches = strides[0] if len(strides) == 1 else shape_text(token_steps(net))
    note = f"{len(images)} {what}, mean of four directions, patches of {patches} pixels"
    return Finding(table, figure, note)
