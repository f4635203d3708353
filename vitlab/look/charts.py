"""Curves and matrices as inline SVG that takes the page's colors."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from vitlab.analysis.figures import COLORS as FIGURES

COLORS = FIGURES[:6]  # without black, which a dark page would hide
DASHES = ("", "6 3", "2 2", "8 2 2 2")
MOST_CONFUSIONS = 20  # rows of a table of confusions
Points = Sequence[tuple[float, float]]


def ticks(low: float, high: float) -> list[float]:
    """Return two to six round numbers from ``low`` to ``high``, the same distance apart; ``low`` must be smaller.

    Example:
        >>> [label(tick, 0.0005) for tick in ticks(0.9876, 0.9881)]
        ['0.9876', '0.9877', '0.9878', '0.9879', '0.988', '0.9881']
    """
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(m * power for m in (1, 2, 5, 10) if m * power * 5 >= (high - low) * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [k * step for k in range(first, last + 1)]


def label(value: float, span: float) -> str:
    """Return a number in as few digits as put it within a thousandth of an axis of this length.

    Example:
        >>> label(1004.6667, 10.0), label(2e-05, 2e-05), label(0.98763, 0.5)
        ('1004.67', '2e-05', '0.988')
    """
    shown = (float(f"{value:.{digits}g}") for digits in range(1, 18))
    return f"{next(near for near in shown if abs(near - value) <= span / 1000):.15g}"


def line_chart(title: str, lines: Mapping[str, Points], x: str = "epoch") -> str:
    """Return curves with axes, a color and dashes for each name; points show their value as tooltips.

    Points that are not finite are left out.

    Example:
        >>> line_chart("loss", {"val": [(0.0, 2.0), (1.0, 1.0)]}).count("<circle")
        2
    """
    lines = {name: [p for p in line if all(map(math.isfinite, p))] for name, line in lines.items()}
    lines = {name: line for name, line in lines.items() if line}
    points = [p for line in lines.values() for p in line]
    if not points:
        return ""
    (x0, x1), (y0, y1) = ((min(v), max(v)) for v in zip(*points, strict=True))
    y0, y1 = _apart(y0, y1)
    x1 = x1 if x1 > x0 else x0 + 1

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return 52 + (point[0] - x0) / (x1 - x0) * 300, 190 - (point[1] - y0) / (y1 - y0) * 155

    height = 214 + 12 * -(-len(lines) // 2)
    parts = [f'<svg class="chart" viewBox="0 0 370 {height}" role="img" aria-label="{escape(title)}">']
    parts.append(f'<text x="52" y="18" class="t">{escape(title)}</text><path d="M52 30V190H358" class="axis"/>')
    for value in ticks(y0, y1):
        parts.append(f'<text x="47" y="{place((x0, value))[1] + 4:.1f}" class="r">{label(value, y1 - y0)}</text>')
    ends = [label(end, x1 - x0) for end in (x0, x1)]
    parts.append(f'<text x="52" y="206">{ends[0]}</text><text x="358" y="206" class="r">{ends[1]}</text>')
    parts.append(f'<text x="205" y="206" class="m">{escape(x)}</text>')
    for i, (name, line) in enumerate(lines.items()):
        color, dash = COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % len(DASHES)]
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in map(place, line))
        parts.append(f'<path d="M{path}" stroke="{color}" stroke-dasharray="{dash}" class="line"/>')
        dots = line if len(line) <= 60 else [line[0], line[-1]]
        for point in dots:
            a, b = place(point)
            said = escape(f"{name}: {point[1]:.5g} at {point[0]:.5g}")
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{color}"><title>{said}</title></circle>')
        if len(lines) > 1:
            where = f'x="{52 + 155 * (i % 2)}" y="{220 + 12 * (i // 2)}"'
            parts.append(f'<text {where} class="k" style="fill:{color}">{escape(name[:24])}</text>')
    return "".join(parts) + "</svg>"


def _apart(low: float, high: float) -> tuple[float, float]:
    """Return the ends of an axis; around a value where there is but one, which nothing tells from another."""
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    return low - (abs(low) / 2 or 0.5), low + (abs(low) / 2 or 0.5)


def matrix_chart(rows: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Return a confusion matrix, shaded by the share of each row; cells show classes and count as tooltips.

    Rows that are lower than a line of text have a label each time there is room for one.

    Example:
        >>> matrix_chart([[3, 1], [0, 4]], ["cat", "dog"]).count("<rect")
        4
    """
    n = len(rows)
    side = max(6, min(28, 420 // max(n, 1)))
    parts = [
        f'<svg class="chart" viewBox="0 0 {100 + n * side} {24 + n * side}" style="max-width:{2 * (100 + n * side)}px">'
    ]
    for i, row in enumerate(rows):
        total = sum(row) or 1
        if i % -(-10 // side) == 0:
            parts.append(f'<text x="96" y="{24 + i * side + side * 0.7:.0f}" class="r">{escape(names[i][:14])}</text>')
        for j, count in enumerate(row):
            said = escape(f"{names[i]} predicted as {names[j]}: {count} of {sum(row)}")
            look = f'x="{100 + j * side}" y="{20 + i * side}" width="{side - 1}" height="{side - 1}"'
            look += f' fill="{COLORS[int(i != j)]}" fill-opacity="{0.06 + 0.94 * count / total:.2f}"'
            parts.append(f"<rect {look}><title>{said}</title></rect>")
            if side >= 24 and count:
                where = f'x="{100 + j * side + side / 2:.0f}" y="{20 + i * side + side * 0.65:.0f}"'
                parts.append(f'<text {where} class="m">{count}</text>')
    return "".join(parts) + '<text x="100" y="14">rows: class, columns: predicted</text></svg>'


def confusions_table(counts: Mapping[tuple[int, int], int], totals: Sequence[int], names: Sequence[str]) -> str:
    """Return the confusions of many classes as a table, the most frequent first.

    Args:
        counts: Images by their class and the class that they were taken for.
        totals: Images of each class.
        names: Of the classes.

    Example:
        >>> confusions_table({(0, 1): 1, (1, 0): 3}, [2, 4], ["cat", "dog"]).partition("<td>")[2][:22]
        'dog</td><td>cat</td><t'
    """
    most = sorted(counts.items(), key=lambda pair: -pair[1])[:MOST_CONFUSIONS]
    rows = [
        f"<tr><td>{escape(names[a])}</td><td>{escape(names[b])}</td><td>{count} of {totals[a]}</td></tr>"
        for (a, b), count in most
    ]
    left = f"<p class='note'>{len(most)} of {len(counts)} pairs of classes that are confused.</p>"
    return f"<table><tr><th>class</th><th>taken for</th><th>images</th></tr>{''.join(rows)}</table>{left}"


def pair_chart(title: str, rows: Sequence[Mapping[str, Any]], names: tuple[str, str]) -> str:
    """Return the values of two runs on one axis: discs of the first run, squares of the second, a line for each row.

    Args:
        title: What is measured.
        rows: ``where``, and ``first`` and ``second`` with their ends ``_low`` and ``_high``, NaN where there are none.
        names: Of the two runs.

    Example:
        >>> ends = {"first_low": 0.8, "first_high": 1.2, "second_low": 1.7, "second_high": 2.3}
        >>> row = {"where": "head 0", "first": 1.0, "second": 2.0, **ends}
        >>> pair_chart("distance", [row], ("a", "b")).count("<circle")
        1
    """
    keys = [f"{side}{end}" for side in ("first", "second") for end in ("", "_low", "_high")]
    values = [float(row[key]) for row in rows for key in keys if math.isfinite(row[key])]
    if not values:
        return ""
    low, high = min(values), max(values)
    low, high = _apart(low, high)
    bottom = 40 + 22 * len(rows)

    def at(value: float) -> float:
        return 150 + (value - low) / (high - low) * 205

    parts = [f'<svg class="chart" viewBox="0 0 370 {bottom + 34}" role="img" aria-label="{escape(title)}">']
    parts.append(f'<text x="0" y="16" class="t">{escape(title)}</text><path d="M150 {bottom}H355" class="axis"/>')
    for y, row in enumerate(rows):
        line = 40 + 22 * y
        where = row["where"] if len(row["where"]) <= 24 else f"{row['where'][:23]}…"
        parts.append(f'<text x="142" y="{line + 4}" class="r">{escape(where)}</text>')
        for side, color, shift in (("first", COLORS[0], -3), ("second", COLORS[1], 3)):
            value, ends = float(row[side]), (float(row[f"{side}_low"]), float(row[f"{side}_high"]))
            name, has_ends = names[side == "second"], ends[0] == ends[0]
            said = f"{row['where']}, {name}: {value:.4g}" + (f" [{ends[0]:.4g}, {ends[1]:.4g}]" if has_ends else "")
            if has_ends:
                parts.append(f'<path d="M{at(ends[0]):.1f} {line + shift}H{at(ends[1]):.1f}" stroke="{color}"/>')
            place = f'cx="{at(value):.1f}" cy="{line + shift}" r="3.5"'
            if side == "second":
                place = f'x="{at(value) - 3:.1f}" y="{line + shift - 3}" width="6" height="6"'
            shape = "circle" if side == "first" else "rect"
            parts.append(f'<{shape} {place} fill="{color}"><title>{escape(said)}</title></{shape}>')
    parts.append(f'<text x="150" y="{bottom + 13}">{label(low, high - low)}</text>')
    parts.append(f'<text x="355" y="{bottom + 13}" class="r">{label(high, high - low)}</text>')
    for i, (name, mark) in enumerate(zip(names, "\u25cf\u25a0", strict=True)):
        look = f'x="{185 * i}" y="{bottom + 30}" style="fill:{COLORS[i]}" class="k"'
        parts.append(f"<text {look}>{mark} {escape(name[:26])}</text>")
    return "".join(parts) + "</svg>"
