"""Figures of the analyses: one line per arm with its interval over seeds as a band, and maps of displacement."""

from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitlab.ablation.inference.analyses import CURVES, is_without_itself, mean_profiles
from vitlab.ablation.inference.findings import Findings
from vitlab.ablation.report.drawings import Rows, arm_style, draw, families, legend, style

WORDS = {
    "acc1": "accuracy",
    "above_null": "above the null",
    "change_mean": "change of an output",
    "flipped": "share of other predictions",
    "spread": "sd of the logit",
}
AXES = {"size": "height of the image, pixels", "blocks": "blocks that change places", "pixels": "shift, pixels"}


def panels(found: Findings) -> dict[str, tuple[str, Figure, Rows]]:
    """Return title, figure and data of a figure for each analysis with numbers."""
    drawn = {}
    for name in found.results.ablation.analyses:
        rows = [row for row in found.curves if row["analysis"] == name]
        if not rows or not CURVES[name].x:
            continue
        parts, groups = _parts(name, rows), families(found.results.ablation)
        shown = [
            ("\n".join(filter(None, (group, title))), [row for row in mine if row["arm"] in arms])
            for group, arms in groups
            for title, mine in parts
        ]
        counts = sorted({int(row["n"]) for row in rows})
        n = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        title = f"{name}: mean over seeds (n = {n}), band: {found.results.ablation.stats.ci:.0%} t interval"
        width, height = len(parts), 0.5 + 2.4 * len(groups)
        svg = draw(height, partial(_curves, found, shown, width), title, columns=width, rows=len(groups))
        drawn[name] = (title, svg, rows)
        if name == "displacement":
            drawn["displacement_maps"] = _maps(found)
    return drawn


def _parts(name: str, rows: Rows) -> list[tuple[str, Rows]]:
    """Return title and rows of each panel; of several ways to resample positions, each arm's default."""
    if name == "resolution":
        titles = {"resize": "the whole image, resized", "canvas": "the same scale, on a larger canvas"}
        first: dict[tuple[str, str], str] = {}
        for row in rows:
            first.setdefault((row["arm"], row["line"].split(", ")[0]), row["line"])
        parts = [
            (title, [row for row in rows if first.get((row["arm"], protocol)) == row["line"]])
            for protocol, title in titles.items()
        ]
        return [part for part in parts if part[1]]
    lines = list(dict.fromkeys(row["line"] for row in rows))[:1] if name == "shift" else None
    kept = [row for row in rows if lines is None or row["line"] in lines]
    parts = []
    for measure in CURVES[name].measures:
        for line in dict.fromkeys(row["line"] for row in kept):
            mine = [row for row in kept if (row["measure"], row["line"]) == (measure, line)]
            values = line.split(", ", len(CURVES[name].lines) - 1) if line else []
            parts.append(("\n".join(map(": ".join, zip(CURVES[name].lines, values, strict=False))), mine))
    return parts[:4]


def _curves(found: Findings, parts: list[tuple[str, Rows]], columns: int, *axes: Axes) -> None:
    for column in range(columns):  # panels of one measure have one scale
        for ax in axes[column + columns :: columns]:
            ax.sharey(axes[column])
    for i, (ax, (title, rows)) in enumerate(zip(axes, parts, strict=True)):
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
        curve, measure = CURVES[rows[0]["analysis"]], rows[0]["measure"]
        _scale(ax, curve.x, measure, sorted({row["x"] for row in rows}))
        ax.set_title(title, fontsize=9 if columns < 3 else 7.5)
        ax.set_ylabel(WORDS.get(measure, str(measure)))
        if i % columns == columns - 1:
            legend(ax)


def _scale(ax: Axes, x: str, measure: str, points: list[float]) -> None:
    if x in ("blocks", "shots"):
        ax.set_xscale("log", base=2)
    ax.set_xticks(points, [f"{point:g}" for point in points])
    ax.minorticks_off()
    ax.set_xlabel(AXES.get(x, x))
    if measure in ("acc1", "flipped", "accuracy"):
        ax.set_ylim(-0.03, 1.03)  # an interval may exceed the possible range


def _maps(found: Findings) -> tuple[str, Figure, Rows]:
    profiles = mean_profiles(found.results)
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

    rows = [{"arm": arm, **row} for arm, table in profiles.items() for row in table.to_dict("records")]
    title = "Mean logit of a key by its offset, tokens shuffled before positions; mean over heads and seeds"
    title += "; the offset (0, 0), a token and itself, is left out" if is_without_itself(found.results) else ""
    svg = draw(0.4 + 1.1 * len(profiles), paint, title, columns=len(layers), rows=len(profiles))
    return title, svg, rows
