"""What a network knows about position: similarities of the table, and logits by displacement."""

import math
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from scipy.stats import t as student
from torch import Tensor

from vitlab.analysis.catalogue import Analysis, Curve, Drawing, Tables
from vitlab.analysis.figures import by_cell, finish, grid_of_axes, heat, one_axes
from vitlab.analysis.intervals import over_images
from vitlab.analysis.parts import positions_added, similarity
from vitlab.analysis.scramble import shuffled_tokens
from vitlab.analysis.subject import Finding, Subject
from vitlab.errors import UsageError
from vitlab.layers.resample import Grid
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import attention_logits

MANY, ABREAST = 20, 4  # panels, and heads: more are tiles of two pictures, which a column of print has room for
OLD_TABLES = (
    "Its tables are of an earlier version, where a token met itself at the offset (0, 0), which is content: that "
    "offset is left out. All seeds share one draw of the shuffles, whose noise the interval does not hold."
)


def mosaic(tiles: np.ndarray) -> np.ndarray:
    """Map ``(h, w, h', w')`` tiles to one picture in which tile (y, x) stands in row y, column x, NaN between them.

    Example:
        >>> mosaic(np.zeros((2, 3, 2, 3))).shape  # 2 x 3 tiles of 2 x 3 with a line between them
        (5, 11)
    """
    h, w = tiles.shape[:2]
    framed = np.pad(tiles, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=np.nan)
    return framed.swapaxes(1, 2).reshape(h * framed.shape[2], w * framed.shape[3])[:-1, :-1]


def pairs_at(grid_size: Grid) -> Tensor:
    """Return the number of pairs of query and key at each displacement, ``(2h - 1, 2w - 1)``.

    Example:
        >>> pairs_at((1, 3))
        tensor([[1, 2, 3, 2, 1]])
    """
    rows, columns = (side - torch.arange(1 - side, side).abs() for side in grid_size)
    return rows[:, None] * columns


def displacement_profile(logits: Tensor, grid_size: Grid) -> Tensor:
    """Map ``(A, N, N)`` logits to their mean over pairs at each displacement, ``(A, 2h - 1, 2w - 1)``.

    Entry (h - 1 + dy, w - 1 + dx) is for keys dy rows below and dx columns right of their query. Each head's mean over
    all pairs is subtracted, since the softmax ignores it. Pairs that a mask of -inf forbids do not count; an offset of
    such pairs alone is NaN.

    Example:
        >>> displacement_profile(torch.randn(2, 15, 15), (3, 5)).shape
        torch.Size([2, 5, 9])
    """
    h, w = grid_size
    y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    y, x = y.flatten().to(logits.device), x.flatten().to(logits.device)
    index = (y - y[:, None] + h - 1) * (2 * w - 1) + x - x[:, None] + w - 1  # (N, N): key minus query
    seen = logits != -math.inf
    means = torch.where(seen, logits, torch.nan).nanmean(dim=(1, 2), keepdim=True)
    centered = torch.where(seen, logits - means, 0.0)
    sums = logits.new_zeros(len(logits), (2 * h - 1) * (2 * w - 1))
    count = sums.index_add(1, index.flatten(), seen.flatten(1).to(sums))
    sums = sums.index_add(1, index.flatten(), centered.flatten(1))
    return (sums / count).unflatten(1, (2 * h - 1, 2 * w - 1))


def profiles(
    net: VisionTransformer, batches: Iterable[tuple[Tensor, Tensor]], two_passes: bool = False
) -> tuple[Tensor, Tensor, int]:
    """Return the mean over images of each head's profile, its standard error, and the number of images.

    Both are ``(depth, A, 2h - 1, 2w - 1)``, NaN for heads that a layer of one's own lacks; the error is NaN for a
    single image. With ``two_passes`` queries and keys are of two passes, see :func:`vitlab.models.attention_logits`.
    """
    total, squares, n = torch.zeros(()), torch.zeros(()), 0
    with torch.no_grad():
        for images, _ in batches:
            layers = []
            for logits in attention_logits(net, images, two_passes=two_passes):
                patches = logits[:, :, net.num_prefix_tokens :, net.num_prefix_tokens :].double().flatten(0, 1)
                layers.append(displacement_profile(patches, net.grid_size).unflatten(0, logits.shape[:2]).cpu())
            most = max(layer.shape[1] for layer in layers)
            padded = [F.pad(layer, (0, 0, 0, 0, 0, most - layer.shape[1]), value=math.nan) for layer in layers]
            each = torch.stack(padded, dim=1)  # (B, depth, A, 2h - 1, 2w - 1)
            total, squares, n = total + each.sum(dim=0), squares + each.square().sum(dim=0), n + len(images)
    mean = total / n
    spread = (squares / n - mean.square()).clamp(min=0) * n / (n - 1) if n > 1 else torch.full_like(mean, math.nan)
    return mean, (spread / n).sqrt(), n


@Analysis(
    reading="Each tile compares the position vector of its cell with those of all cells: bright neighbors mean that "
    "the table encodes the grid; fixed sines do so by construction.",
    limits="Whether the network uses the table: see `scramble` and `displacement`.",
    curve=Curve(
        measures={"norm_ratio": "norm_ratio"},
        words="Length of the table's vectors relative to that of the patch tokens.",
    ),
)
def analyze_position(subject: Subject) -> Finding:
    """Compare the table's vectors of all cells with each other.

    Example:
        >>> finding = analyze_position(subject)
        >>> list(finding.table.columns)
        ['row', 'column', 'other_row', 'other_column', 'cosine', 'norm_ratio', 'norm_ratio_low', 'norm_ratio_high']
    """
    net = subject.transformer("position", "a table of positions")
    pos_embed = positions_added(net.pos_embed.for_batch())
    if pos_embed is None:
        raise UsageError(
            f"position compares the rows of a table, and pos_embed={subject.pos_embed} has none; use displacement, "
            "which works for every method"
        )
    layer = subject.layer or 0
    with torch.no_grad():
        table = pos_embed.added(layer).detach().float()
        lengths = net.tokenizer(subject.shown(min(subject.num_images, 32))).norm(dim=-1).mean(dim=1)
        ratios = over_images("norm_ratio", (table.norm(dim=-1).mean() / lengths).cpu().numpy(), (0, math.inf))
    h, w = net.grid_size
    cosines = similarity(table).cpu().view(h, w, h, w)
    figure, axes = grid_of_axes(1, 1, size=5, bar=True)
    shown = heat(axes[0, 0], mosaic(cosines.numpy()))
    axes[0, 0].set_axis_off()
    figure.colorbar(shown, ax=axes, shrink=0.8, label="cosine similarity")
    rows = [
        {**at, "other_row": to["row"], "other_column": to["column"], "cosine": float(value)}
        for at, values in by_cell(cosines.view(h * w, h * w), w)
        for to, value in by_cell(values, w)
    ]
    where = f"table of layer {layer}" if pos_embed.join == "every_layer" else "the table"
    low, high = ratios["norm_ratio_low"], ratios["norm_ratio_high"]
    between = f" [{low:.2f}, {high:.2f}]" if low == low else ""  # of one image there is no interval
    note = f"{where} of pos_embed={subject.pos_embed}, whose vectors are {ratios['norm_ratio']:.2f}{between} "
    note += "times as long as an image's patch tokens"
    return Finding(pd.DataFrame(rows).assign(**ratios), figure, note)


def is_without_itself(tables: Iterable[pd.DataFrame]) -> bool:
    """Return whether one of the tables was of an earlier version, and lacks the offset (0, 0)."""
    return any(((table["pairs"] == 0) & (table["dy"] == 0) & (table["dx"] == 0)).any() for table in tables)


def caution_of(tables: Tables) -> str:
    """Return a sentence on older tables; "" if there is none."""
    return OLD_TABLES if is_without_itself(tables.values()) else ""


def as_today(table: pd.DataFrame) -> pd.DataFrame | None:
    """Return a table of ``displacement`` with ``pairs``, NaN and none at the offset (0, 0) of a table of before.

    The mean that was taken from each head held that offset, as 1 / N of all N^2 pairs. Taking it out again moves
    all others by the same amount, and the share of their errors that came with it is independent of theirs. None of the
    first tables, which had no null.
    """
    if "position" not in table:
        return None
    if "pairs" in table:
        return table
    h, w = table["dy"].max() + 1, table["dx"].max() + 1
    itself = (table["dy"] == 0) & (table["dx"] == 0)
    pairs = (h - table["dy"].abs()) * (w - table["dx"].abs())
    same = table[itself].set_index(["layer", "head"])
    heads = pd.MultiIndex.from_frame(table[["layer", "head"]])
    moved, error = (same[name].reindex(heads).to_numpy() / (h * w - 1) for name in ("position", "error"))
    changed = {
        "position": (table["position"] + moved).mask(itself),
        "error": (table["error"] ** 2 - error**2).clip(lower=0).mask(itself) ** 0.5,
    }
    return table.assign(**changed, pairs=pairs.mask(itself, 0))


def spread_of_layers(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean over heads of the spread of their logits over pairs beyond noise, for each layer.

    A variance below that of the noise gives a spread below 0: cut off at 0, noise would look like knowledge.
    """
    keys = [table["layer"], table["head"]]
    weights = table["pairs"] / table["pairs"].groupby(keys).transform("sum")
    beyond = (weights * (table["position"] ** 2 - table["error"] ** 2)).groupby(keys).sum(min_count=1)
    spread = np.sign(beyond) * beyond.abs() ** 0.5
    return spread.groupby("layer").mean().rename("spread").reset_index()


def mean_maps(tables: dict[str, list[pd.DataFrame]]) -> Drawing:
    """Return maps of each arm's mean logit over heads and seeds at each layer and offset."""
    profiles = {
        arm: pd.concat(parts).groupby(["layer", "dy", "dx"])["position"].mean().reset_index()
        for arm, parts in tables.items()
    }
    layers = sorted({int(layer) for table in profiles.values() for layer in table["layer"]})
    most = max(float(table["position"].abs().max()) for table in profiles.values()) or 1.0

    def paint(*axes: Any) -> None:
        for ax, (arm, layer) in zip(axes, ((a, layer) for a in profiles for layer in layers), strict=True):
            table = profiles[arm][profiles[arm]["layer"] == layer].pivot(index="dy", columns="dx", values="position")
            shown = ax.imshow(table.to_numpy(), cmap="PuOr_r", vmin=-most, vmax=most)
            ax.plot((table.shape[1] - 1) / 2, (table.shape[0] - 1) / 2, "+", color="black", ms=5)
            ax.set_xticks([])
            ax.set_yticks([])
            if layer == layers[0]:
                ax.set_ylabel(arm, rotation=0, ha="right", va="center", labelpad=4)
            if arm == next(iter(profiles)):
                ax.set_title(f"layer {layer}", fontsize=9)
        axes[0].figure.colorbar(shown, ax=axes, shrink=0.8, label="mean logit")

    title = "Mean logit of a key by its offset, tokens shuffled before positions; mean over heads and seeds"
    left_out = is_without_itself(table for parts in tables.values() for table in parts)
    title += "; the offset (0, 0), a token and itself, is left out" if left_out else ""
    data = [{"arm": arm, **row} for arm, table in profiles.items() for row in table.to_dict("records")]
    return Drawing(title, paint, len(profiles), len(layers), 0.4 + 1.1 * len(profiles), data)


@Analysis(
    reading="How a logit depends on the offset of the key from the query at the cross. Left: shuffled tokens, queries "
    "and keys apart, so a pattern above the noise floor comes from positions. Right: patterns may come from content.",
    limits="The effect of values and later layers.",
    curve=Curve(
        x="layer",
        measures={"spread": "sd of the logit"},
        words="Standard deviation over pairs of query and key of what their offset alone tells of a head's logit, "
        "tokens shuffled before positions, less the noise of the images: 0 knows nothing of position, and noise alone "
        "falls below 0 as often as above. Mean of the heads.",
        summary=spread_of_layers,
        older=as_today,
        caution=caution_of,
        drawing=mean_maps,
    ),
)
def analyze_displacement(subject: Subject) -> Finding:
    """Show how the logits of each head depend on the offset of the key from the query, averaged over content.

    ``logit`` is of the images as they are; neighbors look alike, so that content alone draws a pattern there.
    ``position`` is of the same images with their tokens shuffled before positions, the queries by one draw and the
    keys by another: at every offset, (0, 0) included, each token meets each token of its image equally often, and
    what is left above ``error`` is knowledge of position. One draw for both would leave a token to meet itself at
    (0, 0), which is content. ``pairs`` is how many pairs of query and key stand at the offset, 0 where all are masked.

    Example:
        >>> finding = analyze_displacement(subject)
        >>> list(finding.table.columns)[:8]
        ['layer', 'head', 'dy', 'dx', 'logit', 'logit_low', 'logit_high', 'position']
    """
    net = subject.transformer("displacement", "logits of attention")
    h, w = net.grid_size
    logit, logit_error, n = profiles(net, subject.batches())
    with shuffled_tokens(net, seed=_draw_of(net)):
        position, error, _ = profiles(net, subject.batches(), two_passes=True)
    (depth, heads), pairs = position.shape[:2], pairs_at((h, w))
    is_tiled = 2 * depth * heads > MANY or heads > ABREAST
    figure = _tiles(logit, position) if is_tiled else _panels(logit, position, error, pairs)
    reach = float(student.ppf(0.975, max(n - 1, 1)))  # half an interval over images, in standard errors
    columns = dict[str, Tensor]()
    for name, mean, spread in (("logit", logit, logit_error), ("position", position, error)):
        columns |= {name: mean, f"{name}_low": mean - reach * spread, f"{name}_high": mean + reach * spread}
    columns["error"] = error
    cells = [
        {"layer": layer, "head": head, "dy": dy - h + 1, "dx": dx - w + 1}
        | {name: float(values[layer, head, dy, dx]) for name, values in columns.items()}
        | {"pairs": 0 if position[layer, head, dy, dx].isnan() else int(pairs[dy, dx])}
        for layer, head, dy, dx in np.ndindex(depth, heads, 2 * h - 1, 2 * w - 1)
        if not position[layer, head].isnan().all()
    ]
    floor = "" if is_tiled or n == 1 else ", with the spread above noise and the noise floor"
    note = f"{n} images, patch to patch, mean of each head subtracted; left: tokens shuffled before positions, queries "
    note += f"and keys apart{floor}; right: images as they are, with content; "
    note += "the query is the center of each tile" if is_tiled else "the cross is the query"
    return Finding(pd.DataFrame(cells), figure, note)


def _panels(logit: Tensor, position: Tensor, error: Tensor, pairs: Tensor) -> Figure:
    """Return a figure with two panels for each head, with the spread above noise and the noise floor."""
    (depth, heads, h, w), most = position.shape, _most(logit, position)
    figure, axes = grid_of_axes(depth, 2 * heads, size=1.3, bar=True)
    for layer, head in np.ndindex(depth, heads):
        if position[layer, head].isnan().all():
            for ax in axes[layer, [head, heads + head]]:
                ax.set_axis_off()
            continue
        found, floor = spread_above(position[layer, head], error[layer, head], pairs)
        for kind, values in enumerate((position, logit)):
            ax = axes[layer, kind * heads + head]
            spread = f"\n{found:.2g} over {floor:.2g}" if found == found else ""  # of one image no error is known
            title = f"head {head}, " + (f"position{spread}" if kind == 0 else "content too")
            shown = heat(ax, values[layer, head].numpy(), title, diverging=True, vmin=-most, vmax=most)
            ax.plot(w // 2, h // 2, "+", color="black", markersize=5)
        axes[layer, 0].set_ylabel(f"layer {layer}", fontsize=8)
    figure.colorbar(shown, ax=axes, shrink=0.8, label="mean logit")
    return figure


def _tiles(logit: Tensor, position: Tensor) -> Figure:
    """Return a figure of two panels with a tile for each head: hundreds of panels take half a minute to lay out."""
    (depth, heads, h, w), most = position.shape, _most(logit, position)
    figure, axes = one_axes(max(3.4, 0.3 * heads), max(3.0, 0.3 * depth * h / w) + 0.6, columns=2)
    for ax, values, title in zip(axes, (position, logit), ("position", "content too"), strict=True):
        shown = ax.imshow(mosaic(values.numpy()), cmap="PuOr_r", vmin=-most, vmax=most, interpolation="nearest")
        ax.set_title(title, fontsize=8)
        ax.set_xticks(np.arange(heads) * (w + 1) + w // 2, [str(head) for head in range(heads)])
        ax.set_yticks(np.arange(depth) * (h + 1) + h // 2, [str(layer) for layer in range(depth)])
        finish(ax, "head", "layer", legend=False)
    figure.colorbar(shown, ax=list(axes), shrink=0.8, label="mean logit")
    return figure


def _most(*values: Tensor) -> float:
    return float(torch.cat(values).abs().nan_to_num().max()) or 1.0


def spread_above(mean: Tensor, error: Tensor, pairs: Tensor) -> tuple[float, float]:
    """Return the spread of a profile over pairs of query and key beyond its errors, and the spread that these explain.

    Over ``pairs`` a profile has mean 0 for each image, so that the errors account for all of its noise.

    Example:
        >>> mean, error, pairs = torch.tensor([[3.0, -3.0], [0.1, 0.1], [1.0, 1.0]])
        >>> spread_above(mean, error, pairs)[0] > 2.9
        True
    """
    mean, error, pairs = (each[~mean.isnan()] for each in (mean, error, pairs))  # NaN where a mask forbids all pairs
    weights = pairs / pairs.sum()
    floor, mean = float((weights * error.square()).sum()), mean - (weights * mean).sum()
    beyond = float((weights * mean.square()).sum()) - floor
    return math.sqrt(max(beyond, 0.0)), math.sqrt(floor)  # NaN without errors: max returns its first argument then


def _draw_of(net: VisionTransformer) -> int:
    """Return a seed that the weights give: networks that are compared do not share the noise of one draw."""
    found = 0
    for parameter in net.parameters():
        found = zlib.crc32(parameter.detach().float().cpu().numpy().tobytes(), found)
    return found
