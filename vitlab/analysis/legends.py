"""Names of lines and marks of a figure in print: at the ends of lines where there is room, else in one legend."""

import itertools
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgba_array
from matplotlib.container import Container
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from vitlab.analysis.figures import COLORS
from vitlab.analysis.panels import LINE, SMALL, size_of, wrap_words


def take_legends(figure: Figure) -> list[tuple[Axes, dict[str, Any]]]:
    """Take the legends away, and return their axes with names and marks."""
    found = []
    for ax in figure.axes:
        if legend := ax.get_legend():
            handles, labels = ax.get_legend_handles_labels()
            found.append((ax, dict(zip(labels, handles, strict=True))))
            ax.legend_named = legend.get_title().get_text()  # type: ignore[attr-defined]
            legend.remove()
    for legend in list(figure.legends):
        labels = [text.get_text() for text in legend.get_texts()]
        found.append((figure.axes[-1], dict(zip(labels, legend.legend_handles, strict=True))))
        legend.remove()
    return found


def name_lines(
    figure: Figure, legends: list[tuple[Axes, dict[str, Any]]], is_single: bool
) -> list[tuple[Axes, list[Any]]]:
    """Write the names of lines at their ends, or of all marks below the figure; return those at ends."""
    merged, beside = [], []
    for ax, named in legends:
        names = _beside(figure, ax, named) if is_single and len(named) > 1 else []
        beside += [(ax, names)] if names else []
        merged += [] if names else [(ax, name, handle) for name, handle in named.items()]
    below = {_of_panel(figure, merged, *entry): entry[2] for entry in merged}
    if not below:
        return beside
    probe, widest = figure.text(0, 0, "", fontsize=SMALL), 0.0
    for name in below:
        probe.set_text(name)
        widest = max(widest, size_of(probe)[0])
    probe.remove()
    columns = max(1, min(len(below), int((figure.get_figwidth() - 0.1) / (widest + 0.45))))
    style: Any = {"fontsize": SMALL, "frameon": False, "handlelength": 2.2, "columnspacing": 1.0, "borderpad": 0.1}
    title = next((title for ax, _ in legends if (title := getattr(ax, "legend_named", ""))), None)
    style |= {"title": title, "title_fontsize": SMALL, "alignment": "left"}
    figure.legend(list(below.values()), list(below), loc="outside lower left", ncols=columns, **style)
    return beside


def _of_panel(figure: Figure, merged: list[tuple[Axes, str, Any]], ax: Axes, name: str, handle: Any) -> str:
    """Return the name of a mark in a legend of all panels: with its panel, where another one has the mark or the name
    for something else."""
    others = [(word, _look(mark)) for where, word, mark in merged if where is not ax]
    if all((word == name) == (look == _look(handle)) for word, look in others):
        return name
    panels = [" ".join(each.get_title().split()) or each.get_ylabel() for each in figure.axes]
    panel = panels[k := figure.axes.index(ax)]
    return f"{panel if panel and panels.count(panel) == 1 else f'panel {k + 1}'}: {name}"


def _look(mark: Any) -> tuple[Any, ...]:
    """Return what the eye tells marks apart by."""
    if isinstance(mark, Container):
        return "container", *(_look(part) for part in mark.get_children()[:1])
    if isinstance(mark, Line2D):
        colors = [to_hex(color, keep_alpha=True) for color in (mark.get_color(), mark.get_markerfacecolor())]
        return *colors, str(mark.get_marker()), mark.get_linestyle()
    shades = [to_rgba_array(color)[:1].ravel() for color in (mark.get_facecolor(), mark.get_edgecolor())]
    return type(mark).__name__, *(tuple(shade.round(3).tolist()) for shade in shades)


def _beside(figure: Figure, ax: Axes, named: dict[str, Any]) -> list[Any]:
    """Write names of lines beside their ends; none if there is no room."""
    if len(named) > len(COLORS) or not all(isinstance(handle, Line2D) for handle in named.values()):
        return []  # names are told apart by color
    ends = {}
    for name, line in named.items():
        points = np.column_stack(line.get_data()).astype(float)
        points = points[np.isfinite(points).all(axis=1)]
        if not len(points):
            return []
        ends[name] = line.get_transform().transform(points[points[:, 0].argmax()])
    ends = {name: np.clip(ax.transAxes.inverted().transform(end), 0, 1) for name, end in ends.items()}
    if (len(ends) - 1) * LINE > ax.get_position().height * figure.get_figheight():
        return []
    names = []
    for name, end in ends.items():
        color = named[name].get_color()
        style: Any = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 0}
        where: Any = {"xycoords": "axes fraction", "textcoords": "axes fraction", "annotation_clip": False}
        text: Any = ax.annotate(name, tuple(end), (1.06, end[1]), arrowprops=style, color=color, va="center", **where)
        text.set_fontsize(SMALL)
        wrap_words(text, 0.3 * figure.get_figwidth())
        names.append(text)
    if sum(Text.get_window_extent(text).height for text in names) > 1.1 * ax.get_window_extent().height:
        for text in names:
            text.remove()
        return []
    place_names(figure, ax, names)
    return names


def place_names(figure: Figure, ax: Axes, names: list[Any]) -> None:
    """Move names at the ends of lines apart, with the least squares of the moves."""
    from scipy.optimize import isotonic_regression

    tall = ax.get_position().height * figure.get_figheight()
    order = sorted(names, key=lambda text: text.xy[1])
    heights = [(Text.get_window_extent(text).height / figure.dpi + 0.015) / tall for text in order]
    starts = np.cumsum([0.0, *((a + b) / 2 for a, b in itertools.pairwise(heights))])
    places = isotonic_regression([text.xy[1] - start for text, start in zip(order, starts, strict=True)]).x
    for text, place, start in zip(order, places, starts, strict=True):
        text.xyann = (1.06, place + start)
