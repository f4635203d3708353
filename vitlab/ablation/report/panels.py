"""Figures of the analyses: one line per arm with its interval over seeds as a band, and an analysis's own drawing."""

from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitlab.ablation.inference.analyses import drawing_of
from vitlab.ablation.inference.findings import Findings
from vitlab.ablation.inference.measured import bounds_of
from vitlab.ablation.report.drawings import Rows, arm_style, draw, families, legend, style
from vitlab.analysis import ANALYSES, Curve

ABREAST, MOST = 4, 24  # panels side by side, and of a figure


def panels(found: Findings) -> dict[str, tuple[str, Figure, Rows]]:
    """Return title, figure and data of the figures of each analysis with numbers: ``probe``, ``probe_2`` and so on."""
    drawn = {}
    for name in found.results.ablation.analyses:
        rows, curve = [row for row in found.curves if row["analysis"] == name], ANALYSES[name].curve
        if not rows or not curve or not curve.x:
            continue
        groups = families(found.results.ablation)
        sheets = _sheets(curve.panels(curve, rows), max(1, MOST // len(groups)))
        counts = sorted({int(row["n"]) for row in rows})
        n = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        words = f"{name}: mean over seeds (n = {n}), band: {found.results.ablation.stats.ci:.0%} t interval"
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
            paint = partial(_curves, found, curve, shown)
            svg = draw(0.5 + 2.4 * len(groups) * lines, paint, title, columns=columns, rows=len(groups) * lines)
            numbers = rows if len(sheets) == 1 else [row for _, mine in parts for row in mine]
            drawn[name if number == 1 else f"{name}_{number}"] = (title, svg, numbers)
        if maps := drawing_of(found.results, name, curve):
            svg = draw(maps.height, maps.paint, maps.title, columns=maps.columns, rows=maps.rows)
            drawn[f"{name}_maps"] = (maps.title, svg, maps.data)
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


def _curves(found: Findings, curve: Curve, groups: list[list[tuple[str, Rows]]], *axes: Axes) -> None:
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
            color, mark = arm_style(found.results, arm)
            x = [row["x"] for row in line]
            ax.plot(
                x,
                [row["mean"] for row in line],
                mark,
                ls=style(found.results, arm),
                color=color,
                lw=1.1,
                ms=3.5,
                label=arm,
            )
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
