"""The figures of a report: every seed, with intervals, and what analyses have measured."""

import itertools
import textwrap
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitlab.ablation.execution.cells import validation_key
from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.inference.analyses import drawing_of
from vitlab.ablation.inference.baselines import ArmRow
from vitlab.ablation.inference.findings import Findings
from vitlab.ablation.inference.measured import CellResults
from vitlab.ablation.inference.words import percent
from vitlab.analysis import ANALYSES, Curve
from vitlab.analysis.catalogue import Rows
from vitlab.analysis.figures import COLORS as SEVEN_COLORS
from vitlab.analysis.figures import MARKERS
from vitlab.runs.records import bounds_of
from vitlab.stats import interval

COLORS = (*SEVEN_COLORS, "#8C6D1F", "#7F7F7F", "#882255", "#117733", "#332288")  # and Tol's
MARKS = f"{MARKERS}*"
STYLES = ("-", "--", ":", "-.")
ABREAST, MOST = 4, 24  # panels side by side, and of a figure
SETTINGS: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


class Drawn(NamedTuple):
    """A figure of a report."""

    title: str
    figure: Figure
    rows: Rows  # the numbers in it


class ArmStyle(NamedTuple):
    """How an arm is drawn, in every figure of a report."""

    color: str  # by its level of the compared axis
    mark: str  # by its levels of the others; by that level, too, where there are no others
    line: str  # by its levels of the others


def arm_style(ablation: Ablation, name: str) -> ArmStyle:
    """Return how an arm is drawn."""
    axis, levels = next(iter(ablation.baseline)), next(arm for arm in ablation.arms if arm.name == name).levels
    others = [arms for _, arms in families(ablation)]
    i, j = list(ablation.axes[axis]).index(levels[axis]), next(j for j, arms in enumerate(others) if name in arms)
    mark = (j if len(others) > 1 else i) + i // len(COLORS)
    return ArmStyle(COLORS[i % len(COLORS)], MARKS[mark % len(MARKS)], STYLES[j % len(STYLES)])


def families(ablation: Ablation) -> list[tuple[str, list[str]]]:
    """Return the rows of panels: the levels of the axes that are not compared, and their arms."""
    compared = next(iter(ablation.baseline))
    found: dict[tuple[str, ...], list[str]] = {}
    for arm in ablation.arms:
        others = tuple(level for axis, level in arm.levels.items() if axis != compared)
        found.setdefault(others, []).append(arm.name)
    return [(", ".join(levels), arms) for levels, arms in found.items()]


def figures(results: CellResults, rows: list[ArmRow]) -> dict[str, Drawn]:
    """Return every figure with numbers, by its name."""
    primary = results.ablation.primary
    mine = [row for row in rows if row.metric == primary and row.n]
    dots = [
        {"arm": arm.name, "seed": seed, "value": value}
        for arm in results.ablation.arms
        for seed, value in results.by_seed(arm.name, primary)
    ]
    height = 1.1 + 0.34 * len(results.ablation.arms)
    ci, split = percent(results.ablation.stats.ci), results.ablation.split_of(primary)
    title = f"{primary} on the {split} split: every seed, mean and {ci} t interval of the mean (n of planned seeds)"
    found = {"dots": Drawn(title, draw(height, lambda ax: _dots(ax, results, mine), title), dots)} if mine else {}
    compared = [row.record() for row in mine if row.test]
    if compared:
        data = [{k: r[k] for k in ("arm", "difference", "difference_low", "difference_high")} for r in compared]
        title = f"Difference to the baseline in {primary}, with the interval of its test (n of planned seeds)"
        drawing = draw(0.8 + 0.34 * len(compared), lambda ax: _forest(ax, results, compared), title)
        found["differences"] = Drawn(title, drawing, data)
    if curves := _curve_rows(results):
        seen = [key for key in ("train/loss", validation_key(primary)) if any(row["metric"] == key for row in curves)]
        count = len({row["seed"] for row in curves})
        title = f"During training: {' and '.join(seen)}, a line for each of {count} seeds"
        rows_ = len(families(results.ablation))
        drawing = draw(
            0.6 + 2.4 * rows_, lambda *axes: _curves(axes, results, curves, seen), title, columns=len(seen), rows=rows_
        )
        found["curves"] = Drawn(title, drawing, curves)
    axes = list(results.ablation.axes)
    for a, b in itertools.combinations(axes, 2):
        if drawn := _interaction(results, a, b):
            found[f"interaction_{a}_{b}"] = drawn
    return found


def draw(height: float, paint: Callable[..., None], title: str, columns: int = 1, rows: int = 1) -> Figure:
    """Return a figure of ``height`` inches below its title, whose axes ``paint`` gets, row by row."""
    with matplotlib.rc_context(SETTINGS):
        lines = textwrap.fill(title, 100)
        figure = Figure(figsize=(7.2, height + 0.22 * (1 + lines.count("\n"))), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        figure.suptitle(lines, x=0.01, ha="left", fontsize=9, fontweight="bold")
        paint(*axes.flat)
    return figure


def _dots(ax: Axes, results: CellResults, rows: list[ArmRow]) -> None:
    for y, row in enumerate(rows):
        arm = next(a for a in results.ablation.arms if a.name == row.arm)
        values = results.values(arm, results.ablation.primary)
        color, mark, _ = arm_style(results.ablation, arm.name)
        low, high = row.low, row.high
        if low == low:
            ax.plot([low, high], [y, y], color=color, lw=1.5, zorder=1)
        ax.plot(values, [y + off for off in _apart(values)], mark, color=color, ms=4.5, alpha=0.75, mew=0)
        ax.plot([row.mean] * 2, [y - 0.28, y + 0.28], color=color, lw=2)
        if row.verdict.startswith("baseline"):
            of = [results.ablation.baseline_of(a) for a in results.ablation.arms]
            theirs = [a.name for a, base in zip(results.ablation.arms, of, strict=True) if base is arm]
            reach = [i for i, other in enumerate(rows) if other.arm in (arm.name, *theirs)]
            ends = [min(reach) - 0.4, max(reach) + 0.4]
            ax.plot([row.mean] * 2, ends, color=color, lw=0.8, ls="--", zorder=0, alpha=0.7)
            place: Any = {"xy": (row.mean, y), "xytext": (4, 4), "textcoords": "offset points"}
            ax.annotate(row.arm, **place, fontsize=7, color=color)
    _arms(ax, [(row.arm, row.n, row.planned) for row in rows])
    scale = "; the axis does not begin at zero" if ax.get_xlim()[0] > 0 else ""
    ax.set_xlabel(f"{results.ablation.primary} ({results.ablation.split_of(results.ablation.primary)} split){scale}")


def _apart(values: list[float]) -> list[float]:
    """Return how far each seed stands off the line of its arm: equal values would hide one another.

    >>> [round(off, 2) for off in _apart([0.5, 0.25, 0.5])]
    [-0.1, 0.0, 0.1]
    """
    same = {value: values.count(value) for value in values}
    steps = {value: min(0.2, 0.56 / n) for value, n in same.items()}
    return [steps[v] * (values[:i].count(v) - (same[v] - 1) / 2) for i, v in enumerate(values)]


def _forest(ax: Axes, results: CellResults, rows: Rows) -> None:
    margin = results.ablation.stats.margin
    if margin:
        ax.axvspan(-margin, margin, color="0.9", zorder=0)
    ax.axvline(0, color="0.4", lw=0.8)
    for y, row in enumerate(rows):
        color, mark, _ = arm_style(results.ablation, row["arm"])
        ax.plot([row["difference_low"], row["difference_high"]], [y, y], color=color, lw=1.5)
        ax.plot([row["difference"]], [y], mark, color=color)
    _arms(ax, [(row["arm"], row["pairs" if row["test"] == "paired" else "n"], row["planned"]) for row in rows])
    band = f" (gray: the margin of ±{margin:g})" if margin else ""
    base = ", ".join(results.ablation.baseline.values())
    ax.set_xlabel(f"difference in {results.ablation.primary} to {base}{band}")


def _arms(ax: Axes, rows: list[tuple[str, int, int]]) -> None:
    ax.set_yticks(range(len(rows)), [f"{arm}  ({n}/{planned})" for arm, n, planned in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)


def _curve_rows(results: CellResults) -> Rows:
    keys = ("train/loss", validation_key(results.ablation.primary))
    return [
        {"arm": arm.name, "seed": seed, "metric": key, "step": row["step"], "value": row[key]}
        for arm in results.ablation.arms
        for seed in results.ablation.seeds
        for row in results.rows(arm.name, seed)
        for key in keys
        if key in row
    ]


def _curves(axes: tuple[Axes, ...], results: CellResults, rows: Rows, keys: list[str]) -> None:
    shown = [(name, arms, key) for name, arms in families(results.ablation) for key in keys]
    for ax, (name, arms, key) in zip(axes, shown, strict=True):
        for arm in arms:
            color, mark, dashes = arm_style(results.ablation, arm)
            line: Any = {"color": color, "ls": dashes, "label": arm, "lw": 0.9, "alpha": 0.8}
            for seed in results.ablation.seeds:
                mine = [r for r in rows if (r["arm"], r["seed"], r["metric"]) == (arm, seed, key)]
                if mine:
                    dots: Any = {"marker": mark, "ms": 2.4} if len(mine) <= 12 else {}
                    ax.plot([r["step"] for r in mine], [r["value"] for r in mine], **line, **dots)
                    line["label"] = None
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.set_title(name, fontsize=9)
        ax.set_xlabel("optimizer step")
        ax.set_ylabel(key)
        if key == keys[-1]:
            legend(ax)


def legend(ax: Axes, title: str | None = None) -> None:
    """Add a legend beside the axes."""
    place: Any = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "handlelength": 2.8}
    ax.legend(frameon=False, fontsize=8, title=title, **place)


def _seed_means(results: CellResults, a: str, b: str) -> dict[tuple[str, str], list[float]]:
    """Return the mean of each seed at each pair of levels, over the other axes' levels that every pair has."""
    arms: dict[tuple[str, str], dict[tuple[str, ...], str]] = {}
    for arm in results.ablation.arms:
        others = tuple(level for name, level in arm.levels.items() if name not in (a, b))
        arms.setdefault((arm.levels[a], arm.levels[b]), {})[others] = arm.name
    common = set.intersection(*map(set, arms.values()))
    found = {}
    for levels, names in arms.items():
        balanced = [name for others, name in names.items() if others in common]
        each = [dict(results.by_seed(name, results.ablation.primary)) for name in balanced]
        seeds = [seed for seed in results.ablation.seeds if each and all(seed in values for values in each)]
        found[levels] = [fmean(values[seed] for values in each) for seed in seeds]
    return found


def _interaction(results: CellResults, a: str, b: str) -> Drawn | None:
    """Return the figure of two axes; None if no levels of the others are balanced in them."""
    ablation = results.ablation
    rows: Rows = []
    compared = next(iter(ablation.baseline))
    a, b = (b, a) if a == compared else (a, b)  # the compared axis has the lines
    means = _seed_means(results, a, b)
    if not any(means.values()):
        return None
    for i, level_b in enumerate(ablation.axes[b]):
        for level_a in ablation.axes[a]:
            values = means.get((level_a, level_b), [])
            low, high = interval(values, ablation.stats.ci, within=bounds_of(ablation.primary, values))
            base = {a: level_a, b: level_b, "line": i, "n": len(values)}
            rows += [{**base, "value": v, "mean": sum(values) / len(values), "low": low, "high": high} for v in values]

    def paint(ax: Axes) -> None:
        levels = list(ablation.axes[a])
        for i, level in enumerate(ablation.axes[b]):
            mine = [row for row in rows if row["line"] == i]
            shift = 0.07 * (i - (len(ablation.axes[b]) - 1) / 2)
            means = {row[a]: row for row in mine}
            x = [levels.index(name) + shift for name in means]
            shown: Any = {"color": COLORS[i % len(COLORS)]}
            ax.plot(
                x, [r["mean"] for r in means.values()], marker=MARKS[i % len(MARKS)], ms=5, lw=1, label=level, **shown
            )
            ax.vlines(x, [r["low"] for r in means.values()], [r["high"] for r in means.values()], lw=1, **shown)
            seeds = [levels.index(row[a]) + shift + 0.015 for row in mine]
            ax.plot(seeds, [row["value"] for row in mine], ".", ms=3, alpha=0.6, **shown)
        ax.set_xticks(range(len(levels)), levels)
        legend(ax, b)
        ax.set_xlabel(a)
        ax.set_ylabel(ablation.primary)

    over = ", ".join(name for name in ablation.axes if name not in (a, b))
    what = f"mean {ablation.primary}{f' over {over}' if over else ''}"
    what += f", {percent(ablation.stats.ci)} t interval and seeds ({_counts(rows)})"
    title = f"{a} x {b}: {what}; parallel lines mean no interaction"
    return Drawn(title, draw(3.0, paint, title), rows)


def _counts(rows: Rows) -> str:
    """Return of how many seeds rows are, at least and at most."""
    counts = sorted({int(row["n"]) for row in rows})
    return "n = " + " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))


def panels(found: Findings) -> dict[str, Drawn]:
    """Return the figures of each analysis with numbers: ``probe``, ``probe_2`` and so on."""
    drawn = {}
    for name in found.results.ablation.analyses:
        rows, curve = [row for row in found.curves if row["analysis"] == name], ANALYSES[name].curve
        if not rows or not curve or not curve.x:
            continue
        groups = families(found.results.ablation)
        sheets = _sheets(curve.panels(curve, rows), max(1, MOST // len(groups)))
        band = f"band: {percent(found.results.ablation.stats.ci)} t interval"
        words = f"{name}: mean over seeds ({_counts(rows)}), {band}"
        for number, parts in enumerate(sheets, 1):
            shown = [
                [
                    ("\n".join(filter(None, (group, title))), [row for row in mine if row["arm"] in arms])
                    for title, mine in parts
                ]
                for group, arms in groups
            ]
            title = words + (f"; figure {number} of {len(sheets)}" if len(sheets) > 1 else "")
            lines = -(-len(parts) // ABREAST)  # of the panels of a group
            columns = -(-len(parts) // lines)
            paint = partial(_panel_curves, found, curve, shown)
            figure = draw(0.5 + 2.4 * len(groups) * lines, paint, title, columns=columns, rows=len(groups) * lines)
            numbers = rows if len(sheets) == 1 else [row for _, mine in parts for row in mine]
            drawn[name if number == 1 else f"{name}_{number}"] = Drawn(title, figure, numbers)
        if maps := drawing_of(found.results, name, curve):
            figure = draw(maps.height, maps.paint, maps.title, columns=maps.columns, rows=maps.rows)
            drawn[f"{name}_maps"] = Drawn(maps.title, figure, maps.data)
    return drawn


def _sheets(parts: list[tuple[str, Rows]], most: int) -> list[list[tuple[str, Rows]]]:
    """Return the panels of each figure: all in one if there are ``most`` at most, else each measure by itself."""
    parts = [part for part in parts if part[1]]
    if len(parts) <= most:
        return [parts]
    measures: dict[str, list[tuple[str, Rows]]] = {}
    for part in parts:
        measures.setdefault(part[1][0]["measure"], []).append(part)
    return [mine[i : i + most] for mine in measures.values() for i in range(0, len(mine), most)]


def _panel_curves(found: Findings, curve: Curve, groups: list[list[tuple[str, Rows]]], *axes: Axes) -> None:
    columns = axes[0].get_subplotspec().get_gridspec().ncols  # type: ignore[union-attr]
    room, places = len(axes) // len(groups), []  # axes of a group
    for start, parts in zip(range(0, len(axes), room), groups, strict=True):
        mine = axes[start : start + room]
        for spare in mine[len(parts) :]:
            spare.remove()
        for first, ax in zip(axes, mine[: len(parts)] if start else (), strict=False):
            ax.sharey(first)  # a panel has one scale in all groups
        last = {len(parts) - 1, *range(columns - 1, len(parts), columns)}  # of its line
        places += [(ax, *part, i in last) for i, (ax, part) in enumerate(zip(mine, parts, strict=False))]
    for ax, title, rows, is_last in places:
        if not rows:  # nothing of these arms yet
            ax.set_axis_off()
            continue
        for arm in dict.fromkeys(row["arm"] for row in rows):
            line = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["x"])
            color, mark, dashes = arm_style(found.results.ablation, arm)
            x, means = [row["x"] for row in line], [row["mean"] for row in line]
            ax.plot(x, means, mark, ls=dashes, color=color, lw=1.1, ms=3.5, label=arm)
            if all(row["n"] > 1 for row in line):
                low, high = ([row[end] for row in line] for end in ("low", "high"))
                ax.fill_between(x, low, high, color=color, alpha=0.13, lw=0)
        measure = rows[0]["measure"]
        _scale(ax, curve, measure, sorted({row["x"] for row in rows}))
        ax.set_title(title, fontsize=9 if columns < 3 else 7.5)
        ax.set_ylabel(curve.measures[measure])
        if is_last:
            legend(ax)


def _scale(ax: Axes, curve: Curve, measure: str, points: list[float]) -> None:
    if curve.log2:
        ax.set_xscale("log", base=2)
    ax.set_xticks(points, [f"{point:g}" for point in points])
    ax.minorticks_off()
    ax.set_xlabel(curve.x_label or curve.x)
    if bounds_of(measure) == (0.0, 1.0):
        ax.set_ylim(-0.03, 1.03)  # an interval may exceed the possible range
