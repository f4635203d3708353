"""Accuracy at other image sizes, for each way to resample positions."""

import copy
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.analysis.catalogue import Analysis, Curve, Rows
from vitlab.analysis.figures import curves, finish, one_axes
from vitlab.analysis.intervals import over_images
from vitlab.analysis.shift import shifted
from vitlab.analysis.subject import Finding, Subject
from vitlab.errors import UsageError
from vitlab.layers.resample import ResizePolicy
from vitlab.models.foreign import AnyNetwork
from vitlab.models.walk import all_finite, token_steps
from vitlab.tables import shape_text

FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
Size = tuple[int, int]


def sizes(img_size: Size, grid_size: Size, steps: Size) -> list[Size]:
    """Return image sizes from half to twice ``img_size``, in whole ``steps`` of the grid, in pixels.

    Of those with one height, by which sizes are named, it is the one whose shape is nearest to that of ``img_size``.

    Example:
        >>> sizes((37, 53), (3, 4), (16, 16))  # and not 32 x 32, too
        [(32, 48), (37, 53), (64, 96), (96, 128)]
    """
    found = [(round(grid_size[0] * f) * steps[0], round(grid_size[1] * f) * steps[1]) for f in FACTORS if f != 1.0]
    shape = img_size[0] / img_size[1]
    by_height = {img_size[0]: img_size}
    for size in sorted(filter(all, found), key=lambda size: abs(math.log(size[0] / size[1] / shape))):
        by_height.setdefault(size[0], size)
    return sorted(by_height.values())


def sizes_taken(subject: Subject) -> list[Size]:
    """Return those of :func:`sizes` that the network takes; refuse one that takes no other size than its own."""
    net = subject.net
    found = sizes(net.img_size, net.grid_size, token_steps(net))
    if isinstance(net, AnyNetwork):
        found = [size for size in found if net.takes(size)]
        if found == [net.img_size]:
            own = shape_text(net.img_size)
            raise UsageError(
                f"resolution needs a network that takes several sizes, and {subject.kind} takes only {own}"
            )
    return found


def policies(subject: Subject) -> tuple[ResizePolicy | None, ...]:
    """Return the ways to resample the network's positions, the usual first; (None,) if there is nothing to do.

    The usual is None, too, where the methods of a list have different ones.
    """
    if isinstance(subject.net, AnyNetwork):
        return (None,)
    pos_embed = subject.net.pos_embed
    state = pos_embed.state_dict()
    allowed, text = pos_embed.policies_for(state), pos_embed.policy_text(state, "usual")
    usual = next((policy for policy in allowed if pos_embed.policy_text(state, policy) == text), None)
    return (usual, *(policy for policy in allowed if policy != usual))


def _in_words(policy: ResizePolicy | None, policies: Sequence[ResizePolicy | None]) -> str:
    return policy or ("usual" if len(policies) > 1 else "nothing to resize")


def canvas(images: Tensor, size: Size, black: Tensor, steps: Size = (1, 1)) -> Tensor:
    """Center ``(B, C, H, W)`` images on a black canvas of ``size``, or crop their center.

    They move by multiples of ``steps`` pixels, so that patches stay whole.
    """
    (H, W), (height, width) = images.shape[2:], size
    ground = black.expand(len(images), -1, max(H, height), max(W, width)).clone()
    ground[:, :, :H, :W] = images
    down, right = (int((new - old) / 2 / step) * step for new, old, step in zip(size, (H, W), steps, strict=True))
    return shifted(ground, down, right, "circular")[:, :, :height, :width]


def measure(subject: Subject) -> Iterator[dict[str, object]]:
    """Yield accuracy at each size, for each policy and two ways to make larger images; the network runs at each."""
    net, ways = subject.net, policies(subject)
    own = net.pos_embed_resize
    try:
        for size, policy, protocol in itertools.product(sizes_taken(subject), ways, ("resize", "canvas")):
            net.pos_embed_resize = policy
            right = right_at(subject, size, protocol)
            yield {
                "run": subject.name,
                "protocol": protocol,
                "size": size[0],
                "policy": _in_words(policy, ways),
                "metric": f"resolution/acc1@{size[0]}" + ("" if policy == ways[0] else f"/{policy}"),
                **over_images("acc1", right),
                "n": len(right),
            }
    finally:
        net.pos_embed_resize = own


@torch.no_grad()
def right_at(subject: Subject, size: Size, protocol: str) -> NDArray[np.bool_]:
    """Return which images are classified right, ``(n,)``, when they are resized to ``size``, or on its black canvas."""
    steps, right = token_steps(subject.net), list[Tensor]()
    pipeline = copy.copy(subject.data.pipeline)
    pipeline.img_size = size
    for images, labels in subject.batches(pipeline=pipeline if protocol == "resize" else None):
        images = images if protocol == "resize" else canvas(images, size, subject.black(), steps)
        found = all_finite(subject.net(images)).argmax(dim=1)
        if found.shape != labels.shape:  # which would broadcast
            what = f"{len(found)} outputs for {len(labels)} images of {shape_text(size)}"
            raise UsageError(f"resolution: the network gives {what}")
        right.append((found == labels).cpu())
    return torch.cat(right).numpy()


def accuracies(table: pd.DataFrame) -> dict[str, float]:
    """Return the accuracy at each size as metrics of an ablation: ``acc1@12``, ``acc1@12/canvas``."""
    found: dict[str, float] = {}
    for protocol, suffix in (("resize", ""), ("canvas", "/canvas")):
        part = table[table["protocol"] == protocol]
        names = [f"{name.removeprefix('resolution/')}{suffix}" for name in part["metric"]]
        found |= dict(zip(names, part["acc1"].astype(float).tolist(), strict=True))
    return found


def by_protocol(curve: Curve, rows: Rows) -> list[tuple[str, Rows]]:
    """Return a panel for each way to make larger images; of several policies each arm's default, its first."""
    titles = {"resize": "the whole image, resized", "canvas": "the same scale, on a larger canvas"}
    first: dict[tuple[str, str], str] = {}
    for row in rows:
        first.setdefault((row["arm"], row["line"].split(", ")[0]), row["line"])
    parts = [
        (title, [row for row in rows if first.get((row["arm"], protocol)) == row["line"]])
        for protocol, title in titles.items()
    ]
    return [part for part in parts if part[1]]


@Analysis(
    reading="Accuracy at other image sizes for each way to resample positions: compare with a run without positions "
    "(--against).",
    limits="The effect of positions alone: objects change size too.",
    curve=Curve(
        x="size",
        x_label="height of the image, pixels",
        measures={"acc1": "accuracy"},
        lines=("protocol", "policy"),
        words="Accuracy at other image sizes; `none` is the part that positions do not explain.",
        panels=by_protocol,
    ),
    metrics=accuracies,
    metric_names=("acc1@*",),
    numbers=lambda img_size, grid_size, steps: [height for height, _ in sizes(img_size, grid_size, steps)],
)
def analyze_resolution(subject: Subject) -> Finding:
    """Measure accuracy from half to twice the training size.

    Example:
        >>> finding = analyze_resolution(subject)
        >>> list(finding.table.columns)
        ['run', 'protocol', 'size', 'policy', 'metric', 'acc1', 'acc1_low', 'acc1_high', 'n']
    """
    rows = []
    for each in (subject, subject.rival):
        if each is not None:
            each.need_classes("resolution")
            rows += list(measure(each))
    table = pd.DataFrame(rows)
    table["line"] = table["policy"] if subject.other is None else table["run"] + ", " + table["policy"]
    figure, axes = one_axes(columns=2, width=4.0)
    names = {"resize": "the whole image, resized", "canvas": "the same scale on a black canvas"}
    for ax, (protocol, name) in zip(axes, names.items(), strict=True):
        curves(ax, table[table["protocol"] == protocol], "size", "acc1", by="line")
        ax.set_title(name, fontsize=9)
        ax.set_ylim(0, 1.05)
        ax.set_xticks(table["size"].unique())
        ax.axvline(subject.net.img_size[0], color="0.7", linewidth=0.8, zorder=0)
        finish(ax, "height of the image, pixels (gray line: training)", "accuracy")
    ways = policies(subject)
    usual = _in_words(ways[0], ways)
    note = f"{table['n'].iloc[0]} validation images, pos_embed={subject.pos_embed}, usual policy: {usual}"
    return Finding(table.drop(columns="line"), figure, note)
