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
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, LogFormatterMathtext

from vitlab.analysis.legends import name_lines, place_names, take_legends
from vitlab.analysis.panels import (
    POINTS,
    SMALL,
    TALLEST,
    PanelGrid,
    tick_labels,
    wrap_words,
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
    legends = take_legends(copy)
    groups = [PanelGrid(copy, axes, wide, bool(legends)) for axes in _gridspecs(copy)]
    copy.set_size_inches(wide, _first_height(groups))
    is_single = bool(groups) and all(group.columns == 1 for group in groups)
    rounds = 3 if len(copy.axes) < MANY else 2
    for _ in range(rounds - 1):
        _settle(copy, groups)
    beside = name_lines(copy, legends, is_single)
    for _ in range(rounds - 1):
        _settle(copy, groups)
        for ax, names in beside:
            place_names(copy, ax, names)
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
    if figure._suptitle:  # type: ignore[attr-defined]
        title: Text = figure._suptitle  # type: ignore[attr-defined]
        title.unbroken = getattr(title, "unbroken", " ".join(title.get_text().split()))  # type: ignore[attr-defined]
        wrap_words(title, figure.get_figwidth() * 0.97)
    for group in groups:
        group.wrap(figure)
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
        fits = [wrap_words(label, pitch) for _, label in found]  # each is wrapped
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
