"""Figures set for print: one width, one size of text, and no text that is cut or lies on another."""

import copyreg
import io
import itertools
import pickle
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgba_array
from matplotlib.container import Container
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, LogFormatterMathtext

from vitlab.analysis.figures import COLORS
from vitlab.analysis.panels import (
    LINE,
    POINTS,
    SMALL,
    TALLEST,
    PanelGrid,
    size_of,
    tick_labels,
)
from vitlab.errors import UsageError, did_you_mean

Width = Literal["column", "page"]
Format = Literal["pdf", "svg", "png"]
INCHES: dict[Width, float] = {"column": 3.3, "page": 6.9}  # of a journal's column and page
MANY = 40  # panels, which take seconds to lay out
LITERAL: Any = {"text.parse_math": False}  # names of classes and runs may have dollar signs
SETTINGS: Any = {"svg.hashsalt": "vitlab", "svg.fonttype": "none", "pdf.fonttype": 42, **LITERAL}  # text stays text
METADATA: Any = {"svg": {"Date": None}, "pdf": {"CreationDate": None, "ModDate": None}, "png": {}}


def formats_of(text: str) -> tuple[Format, ...]:
    """Return the formats that ``pdf,svg,png`` names.

    Example:
        >>> formats_of("pdf,png")
        ('pdf', 'png')
    """
    known: tuple[Format, ...] = get_args(Format)
    for name in (names := text.split(",")):
        if name not in known:
            raise UsageError(f'no format "{name}"{did_you_mean(name, known) or ""}; choose from {", ".join(known)}')
    return tuple(form for form in dict.fromkeys(names) if form in known)


def figure_bytes(figure: Figure, form: Format) -> bytes:
    """Return the file of a figure, its text as text and its fonts embedded; equal figures give equal files.

    Example:
        >>> figure_bytes(Figure(), "pdf")[:5]
        b'%PDF-'
    """
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(file := io.BytesIO(), format=form, dpi=200, metadata=METADATA[form])
    return file.getvalue()


def _copied(figure: Figure) -> Figure:
    """Return a copy of a figure, as matplotlib allows it: through a pickle.

    An axis of categories counts them with an ``itertools.count``, which Python 3.14 no longer pickles.
    """
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.dispatch_table = copyreg.dispatch_table | {
        itertools.count: lambda counter: (itertools.count, (int(repr(counter)[len("count(") : -1]),))
    }
    pickler.dump(figure)
    copy: Figure = pickle.loads(file.getvalue())
    return copy


def make_literal(figure: Figure) -> None:
    """Show the texts of a figure as they are: names between dollar signs are no formulas.

    Example:
        >>> figure = Figure()
        >>> _ = figure.text(0, 0, "US$5, $x_$")
        >>> make_literal(figure)
        >>> figure.texts[0].get_parse_math()
        False
    """
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            if isinstance(axis.get_major_formatter(), LogFormatterMathtext):  # whose powers are formulas
                axis.set_major_formatter(LogFormatter())
            if isinstance(axis.get_minor_formatter(), LogFormatterMathtext):
                axis.set_minor_formatter(LogFormatter())
    for text in figure.findobj(Text):
        text.set_parse_math(False)


@matplotlib.rc_context(LITERAL)
def printed(figure: Figure, width: float, title: str = "") -> Figure:
    """Return a copy of a figure that is at most ``width`` inches wide at print size, with text of 7 points.

    Panels that are too narrow then go below each other; titles are wrapped, or turned where a word is too long; lines
    have their names at their ends, or in one legend below; numbers at ticks are thinned.

    Example:
        >>> figure = Figure(figsize=(8, 3), layout="constrained")
        >>> axes = figure.subplots(1, 4)
        >>> float(printed(figure, 3.3).get_figwidth())
        3.3
    """
    copy = _copied(figure)
    FigureCanvasAgg(copy)
    make_literal(copy)
    copy.set_layout_engine("constrained", w_pad=0.03, h_pad=0.03, wspace=0.0, hspace=0.0, rect=(0.01, 0, 0.985, 1))
    if title:
        copy.suptitle(title, x=0.01, ha="left")
    _dress(copy)
    wide = min(width, copy.get_figwidth())
    legends = _legends(copy)
    groups = [PanelGrid(copy, axes, wide, bool(legends)) for axes in _gridspecs(copy)]
    copy.set_size_inches(wide, _first_height(groups))
    is_single = bool(groups) and all(group.columns == 1 for group in groups)
    rounds = 3 if len(copy.axes) < MANY else 2
    for _ in range(rounds - 1):
        _settle(copy, groups)
    beside = _name_lines(copy, legends, is_single)
    for _ in range(rounds - 1):
        _settle(copy, groups)
        for ax, names in beside:
            _place(copy, ax, names)
    copy.draw_without_rendering()
    if sum(group.short_by(copy) for group in groups) > 0.1:
        _set_height(copy, groups, 0.0)
        copy.draw_without_rendering()
    _fix(copy)
    _clear(copy, {id(text) for _, names in beside for text in names})
    return copy


def _fix(figure: Figure) -> None:
    """Leave the axes where they are, without the last digits of the layout, which differ from run to run."""
    figure.set_layout_engine("none")
    for ax in figure.axes:
        ax.set_position(np.round(ax.get_position(original=True).bounds, 5).tolist())


def _settle(figure: Figure, groups: Sequence["PanelGrid"]) -> None:
    """Lay the figure out, and let its texts and its height follow."""
    _lay_out(figure)
    _thin(figure)
    before = sum(group.words for group in groups)
    _wrap_all(figure, groups)
    _set_height(figure, groups, sum(group.words for group in groups) - before)


def _lay_out(figure: Figure) -> None:
    """Place the panels and choose their ticks as a drawing does, in two thirds of its time."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    if figure.axes:
        with warnings.catch_warnings():  # the height that comes first may be too small for titles: the next is not
            warnings.filterwarnings("ignore", "constrained_layout not applied")
            figure.get_layout_engine().execute(figure)  # type: ignore[union-attr]
    for ax in figure.axes:
        locator: Any = ax.get_axes_locator()  # None, or that of a color bar
        ax.apply_aspect(locator(ax, renderer) if locator else None)
        axes: Any = (ax.xaxis, ax.yaxis) if ax.axison else ()
        for axis in axes:
            axis._update_ticks()


def shown_texts(figure: Figure) -> list[Text]:
    """Return the texts that are drawn: not those of hidden axes, nor of ticks outside of what is shown.

    Example:
        >>> figure = Figure()
        >>> axes = figure.subplots()
        >>> _ = axes.set_title("a"), axes.set_axis_off(), figure.text(0, 0, "b")
        >>> [text.get_text() for text in shown_texts(figure)]
        ['b', 'a']
    """
    found = [text for part in (*figure.texts, *figure.legends) for text in part.findobj(Text)]
    found += [text for text in (figure._suptitle, figure._supxlabel, figure._supylabel) if text]  # type: ignore[attr-defined]
    for ax in figure.axes:
        if not ax.get_visible():
            continue
        found += [ax.title, *ax.texts]
        found += ax.legend_.findobj(Text) if ax.legend_ else []
        for axis in (ax.xaxis, ax.yaxis) if ax.axison else ():
            found += [axis.label, axis.offsetText, *(label for _, label in tick_labels(axis))]
    seen: dict[int, Text] = {id(text): text for text in found if text.get_visible() and text.get_text().strip()}
    return list(seen.values())


def _dress(figure: Figure) -> None:
    """Give all texts, lines and marks their size."""
    for text in figure.findobj(Text):
        text.set_fontsize(POINTS)
    for ax in figure.axes:
        ax.tick_params(which="both", labelsize=SMALL, length=2.5, pad=2)
        for text in (*ax.texts, *ax.get_xticklabels(), *ax.get_yticklabels()):
            text.set_fontsize(SMALL)
        for line in ax.lines:
            line.set_markersize(min(float(line.get_markersize()), 4.0))
            line.set_linewidth(min(float(line.get_linewidth()), 1.2))


def _gridspecs(figure: Figure) -> list[list[Axes]]:
    found: dict[int, list[Axes]] = {}
    for ax in figure.axes:
        if (spec := ax.get_subplotspec()) and ax.get_label() != "<colorbar>":
            found.setdefault(id(spec.get_gridspec()), []).append(ax)
    return list(found.values())


def _first_height(groups: Sequence[PanelGrid]) -> float:
    return min(TALLEST, sum(group.rows * min(group.cell, 2.5) for group in groups) + 0.6)


def _set_height(figure: Figure, groups: Sequence[PanelGrid], more: float) -> None:
    height = figure.get_figheight() + sum(group.short_by(figure) for group in groups) + more
    named = sum(legend.get_window_extent().height / figure.dpi for legend in figure.legends)
    least = sum(group.lowest for group in groups) + max(named, 0.6) + 0.4  # curves stay curves
    figure.set_figheight(round(min(max(height, 1.0), max(TALLEST, least)), 2))


def _wrapped(text: Text, width: float) -> bool:
    """Break a text between words so that it is at most ``width`` inches wide; return whether that went."""
    words_of = getattr(text, "unbroken", None) or text.get_text()
    text.unbroken = words_of  # type: ignore[attr-defined]
    turned = text.get_rotation()
    text.set_rotation(0)
    text.set_text(words_of)
    lines: list[str] = []
    if size_of(text)[0] <= width:
        text.set_rotation(turned)
        return True
    for part in words_of.split("\n"):
        line = ""
        for word in part.split(" "):
            text.set_text(longer := f"{line} {word}".strip() if line else word)
            if line and size_of(text)[0] > width:
                lines.append(line)
                longer = word
            line = longer
        lines.append(line)
    text.set_text("\n".join(lines))
    fits = size_of(text)[0] <= width * 1.01
    text.set_rotation(turned)
    return fits


def _wrap_all(figure: Figure, groups: Sequence[PanelGrid]) -> None:
    wide, tall = figure.get_size_inches()
    if figure._suptitle:  # type: ignore[attr-defined]
        title: Text = figure._suptitle  # type: ignore[attr-defined]
        title.unbroken = getattr(title, "unbroken", " ".join(title.get_text().split()))  # type: ignore[attr-defined]
        _wrapped(title, wide * 0.97)
    for group in groups:
        boxes = [ax.get_position() for ax in group.axes]
        cells = [ax.get_position(original=True).x0 for ax in group.axes]  # a picture is narrower, by its shape
        lefts = sorted({round(x0 * wide, 2) for x0 in cells})
        pitch = min(np.diff(lefts), default=wide) - 0.09 if group.columns > 1 else wide
        rooms = [2 * min(box.x0 + box.x1, 2 - box.x0 - box.x1) / 2 * wide - 0.06 for box in boxes]
        rooms = [min(pitch, room) for room in rooms]  # of what stands at the center of the panel
        for row in sorted({row for row, _ in group.cells}):
            there = zip(group.axes, rooms, group.cells, strict=True)
            titles = [(ax.title, room) for ax, room, (at, _) in there if at == row and ax.title.get_text()]
            fits = [_wrapped(title, room) for title, room in titles]  # each is wrapped
            if not all(fits):
                for title, _ in titles:
                    title.set_text(title.unbroken)  # type: ignore[attr-defined]
                    title.set_rotation(90)
        for ax, box, room in zip(group.axes, boxes, rooms, strict=True):
            if ax.get_xlabel() and not _wrapped(ax.xaxis.label, room) and group.is_pictures:
                ax.set_xlabel("")  # the ranges of maps, which stand in the table
            label = ax.yaxis.label
            high = box.height * tall if group.is_pictures else max(0.6, box.height * tall)
            if label.get_rotation() == 90 and label.get_text() and not _wrapped(label, high):
                label.set(rotation=0, ha="right", va="center", text=label.unbroken)  # type: ignore[attr-defined]


def _legends(figure: Figure) -> list[tuple[Axes, dict[str, Any]]]:
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


def _name_lines(
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
        _wrapped(text, 0.3 * figure.get_figwidth())
        names.append(text)
    if sum(Text.get_window_extent(text).height for text in names) > 1.1 * ax.get_window_extent().height:
        for text in names:
            text.remove()
        return []
    _place(figure, ax, names)
    return names


def _place(figure: Figure, ax: Axes, names: list[Any]) -> None:
    """Move names at the ends of lines apart, with the least squares of the moves."""
    from scipy.optimize import isotonic_regression

    tall = ax.get_position().height * figure.get_figheight()
    order = sorted(names, key=lambda text: text.xy[1])
    heights = [(Text.get_window_extent(text).height / figure.dpi + 0.015) / tall for text in order]
    starts = np.cumsum([0.0, *((a + b) / 2 for a, b in itertools.pairwise(heights))])
    places = isotonic_regression([text.xy[1] - start for text, start in zip(order, starts, strict=True)]).x
    for text, place, start in zip(order, places, starts, strict=True):
        text.xyann = (1.06, place + start)


def _thin(figure: Figure) -> None:
    """Wrap or turn words at ticks that touch, and leave out as many numbers as needed."""
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis) if ax.axison else ():
            if _touch(label for _, label in tick_labels(axis)):
                _relax(figure, ax, axis)


def _relax(figure: Figure, ax: Axes, axis: Any) -> None:
    found = tick_labels(axis)
    names = [label.get_text() for _, label in found]
    has_words = any(any(c.isalpha() for c in name) for name in names)
    if axis is ax.yaxis and has_words and not ax.images:
        return  # a list of names, for which the figure becomes taller
    if axis is ax.xaxis and has_words:
        pitch = ax.get_position().width * figure.get_figwidth() / len(found) - 0.04
        fits = [_wrapped(label, pitch) for _, label in found]  # each is wrapped
        if all(fits):
            axis.set_ticks([place for place, _ in found], [label.get_text() for _, label in found], fontsize=SMALL)
            return
        axis.set_ticks([place for place, _ in found], names, rotation=90, fontsize=SMALL)
        _lay_out(figure)
    for step in range(2, len(found) + 1):
        if not _touch(label for _, label in tick_labels(axis)):
            return
        chosen = found[::step]
        axis.set_ticks([place for place, _ in chosen], names[::step], fontsize=SMALL)
        _lay_out(figure)


def _touch(texts: Iterable[Text]) -> bool:
    return bool(_touching(list(texts), room=1.0))


def _touching(texts: Sequence[Text], room: float = 0.0) -> list[tuple[Text, Text]]:
    """Return the pairs of texts whose extents, with ``room`` pixels about them, overlap."""
    boxes = [text.get_window_extent().padded(room / 2) for text in texts]
    pairs = [(i, j) for i in range(len(boxes)) for j in range(i) if boxes[i].overlaps(boxes[j])]
    return [(texts[i], texts[j]) for i, j in pairs]


def _clear(figure: Figure, kept: set[int]) -> None:
    """Leave out what is written into panels where it lies on something: numbers in cells all together."""
    for ax in figure.axes:
        if ax.images and _touch(ax.texts):
            for text in ax.texts:
                text.set_visible(False)
    shown = shown_texts(figure)
    inside = {id(text) for ax in figure.axes for text in ax.texts} - kept
    for one, other in _touching(shown):
        for text in (one, other):
            if id(text) in inside and one.get_visible() and other.get_visible():
                text.set_visible(False)
