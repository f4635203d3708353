"""The figures of a report: every seed first, its interval beside it; SVG text, the same whenever it is drawn."""

import io
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from vitlab.ablation.verdict.arms import ArmRow
from vitlab.ablation.verdict.measured import Results

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")  # Okabe and Ito
MARKS = "osD^vPX*"
Rows = list[dict[str, Any]]


def look(results: Results, name: str) -> tuple[str, str]:
    """Return colour and mark of an arm, the same in every figure."""
    i = [arm.name for arm in results.ablation.arms].index(name)
    return COLOURS[i % len(COLOURS)], MARKS[(i + i // len(COLOURS)) % len(MARKS)]


def figures(results: Results, rows: list[ArmRow]) -> dict[str, tuple[str, str, Rows]]:
    """Return title, SVG and data of every figure that there are numbers for."""
    primary = results.ablation.primary
    mine = [row for row in rows if row.metric == primary and row.n]
    dots = [
        {"arm": arm.name, "seed": seed, "value": value}
        for arm in results.ablation.arms
        for seed, value in results.by_seed(arm.name, primary)
    ]
    height = 1.1 + 0.34 * len(results.ablation.arms)
    title = f"{primary} of every seed, mean and {results.ablation.stats.ci:.0%} t interval"
    found = {"dots": (title, draw(height, lambda ax: _dots(ax, results, mine)), dots)}
    compared = [row.record() for row in mine if row.test]
    if compared:
        data = [{k: r[k] for k in ("arm", "difference", "difference_low", "difference_high")} for r in compared]
        svg = draw(0.8 + 0.34 * len(compared), lambda ax: _forest(ax, results, compared))
        found["differences"] = (f"difference to the baseline in {primary}, with interval", svg, data)
    curves = _curve_rows(results)
    if curves:
        svg = draw(3.6, lambda ax: _curves(ax, results, curves))
        found["curves"] = (f"validation {primary} during training, every seed", svg, curves)
    axes = list(results.ablation.axes)
    for i, a in enumerate(axes):
        for b in axes[i + 1 :]:
            found[f"interaction_{a}_{b}"] = _interaction(results, a, b)
    return found


def draw(height: float, paint: Callable[..., None], columns: int = 1, rows: int = 1) -> str:
    """Return the SVG of a figure of ``height`` inches whose axes ``paint`` gets, row by row."""
    settings: Any = {"svg.hashsalt": "vitlab", "svg.fonttype": "path", "font.size": 9, "axes.spines.top": False}
    with plt.rc_context({**settings, "axes.spines.right": False}):
        figure, axes = plt.subplots(rows, columns, figsize=(7.2, height), layout="constrained", squeeze=False)
        paint(*axes.flat)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        plt.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _dots(ax: Axes, results: Results, rows: list[ArmRow]) -> None:
    for y, row in enumerate(rows):
        arm = next(a for a in results.ablation.arms if a.name == row.arm)
        values = results.values(arm, results.ablation.primary)
        colour, mark = look(results, arm.name)
        low, high = row.low, row.high
        if low == low:
            ax.plot([low, high], [y, y], color=colour, lw=1.5, zorder=1)
        ax.plot(values, [y] * len(values), mark, color=colour, ms=4.5, alpha=0.75, mew=0)
        ax.plot([row.mean] * 2, [y - 0.28, y + 0.28], color=colour, lw=2)
        if row.verdict.startswith("baseline"):
            ax.axvline(row.mean, color="0.6", lw=0.8, ls="--", zorder=0)
    _arms(ax, [(row.arm, row.n, row.planned) for row in rows])
    ax.set_xlabel(f"{results.ablation.primary} ({results.ablation.evaluate} split); the axis does not begin at zero")


def _forest(ax: Axes, results: Results, rows: Rows) -> None:
    margin = results.ablation.stats.margin
    if margin:
        ax.axvspan(-margin, margin, color="0.9", zorder=0)
    ax.axvline(0, color="0.4", lw=0.8)
    for y, row in enumerate(rows):
        colour, mark = look(results, row["arm"])
        ax.plot([row["difference_low"], row["difference_high"]], [y, y], color=colour, lw=1.5)
        ax.plot([row["difference"]], [y], mark, color=colour)
    _arms(ax, [(row["arm"], row["n"], row["planned"]) for row in rows])
    band = f" (grey: the margin of ±{margin:g})" if margin else ""
    ax.set_xlabel(f"difference in {results.ablation.primary} to the baseline{band}")


def _arms(ax: Axes, rows: list[tuple[str, int, int]]) -> None:
    ax.set_yticks(range(len(rows)), [f"{arm}  ({n}/{planned})" for arm, n, planned in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)


def _curve_rows(results: Results) -> Rows:
    key = f"val/{results.ablation.primary}"
    return [
        {"arm": arm.name, "seed": seed, "epoch": row["epoch"] + 1, "value": row[key]}
        for arm in results.ablation.arms
        for seed in results.ablation.seeds
        if (run := results.runs.get((arm.name, seed)))
        for row in run.rows()
        if key in row
    ]


def _curves(ax: Axes, results: Results, rows: Rows) -> None:
    for arm in results.ablation.arms:
        colour, mark = look(results, arm.name)
        label: str | None = arm.name
        for seed in results.ablation.seeds:
            line = [(r["epoch"], r["value"]) for r in rows if (r["arm"], r["seed"]) == (arm.name, seed)]
            if line:
                ax.plot(*zip(*line, strict=True), mark, ls="-", color=colour, lw=0.9, ms=2.2, alpha=0.8, label=label)
                label = None
    ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("epoch")
    ax.set_ylabel(f"val {results.ablation.primary}")


def _interaction(results: Results, a: str, b: str) -> tuple[str, str, Rows]:
    rows = []
    for level_a in results.ablation.axes[a]:
        for level_b in results.ablation.axes[b]:
            arms = [arm for arm in results.ablation.arms if (arm.levels[a], arm.levels[b]) == (level_a, level_b)]
            values = [v for arm in arms for v in results.values(arm, results.ablation.primary)]
            if values:
                rows.append({a: level_a, b: level_b, "mean": sum(values) / len(values), "n": len(values)})

    def paint(ax: Axes) -> None:
        for i, level in enumerate(results.ablation.axes[b]):
            line = [(r[a], r["mean"]) for r in rows if r[b] == level]
            if line:
                style: Any = {"color": COLOURS[i % len(COLOURS)], "marker": MARKS[i % len(MARKS)]}
                ax.plot(*zip(*line, strict=True), label=f"{b}={level}", **style)
        ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        ax.set_xlabel(a)
        ax.set_ylabel(results.ablation.primary)

    return f"{a} x {b}: mean {results.ablation.primary}; parallel lines mean no interaction", draw(3.0, paint), rows
