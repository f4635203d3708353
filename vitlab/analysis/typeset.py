"""Figures set for print: one width, one size of text, and no text that is cut or lies on another."""

import io
import pickle
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec, GridSpecFromSubplotSpec
from matplotlib.lines import Line2D
from matplotlib.text import Text

from vitlab.analysis.figures import COLORS
from vitlab.errors import UsageError, did_you_mean

Width = Literal["column", "page"]
Format = Literal["pdf", "svg", "png"]
INCHES: dict[Width, float] = {"column": 3.3, "page": 6.9}  # of a journal's column and page
POINTS, SMALL = 7.0, 6.5  # of text, and of numbers at ticks and names of lines
TALLEST, LOWEST = 9.0, 1.35  # inches of a figure, and of a row of curves with its title where they are many
MANY = 40  # panels, which take seconds to lay out
SETTINGS: Any = {"svg.hashsalt": "vitlab", "svg.fonttype": "none", "pdf.fonttype": 42}  # text stays text
BAR = 0.7  # inches that a color bar beside maps needs with its numbers and its name
LINE = 1.25 * SMALL / 72  # inches between two lines of text
PICTURE, BARRED, PANEL, LABELED = 0.42, 0.7, 1.6, 2.2  # inches that a map, one with a bar, and curves need
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
    copy: Figure = pickle.loads(pickle.dumps(figure))
    FigureCanvasAgg(copy)
    copy.set_layout_engine("constrained", w_pad=0.03, h_pad=0.03, wspace=0.0, hspace=0.0, rect=(0.01, 0, 0.985, 1))
    if title:
        copy.suptitle(title, x=0.01, ha="left")
    _dress(copy)
    wide = min(width, copy.get_figwidth())
    legends = _legends(copy)
    groups = [_PanelGrid(copy, axes, wide, bool(legends)) for axes in _gridspecs(copy)]
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


def _settle(figure: Figure, groups: Sequence["_PanelGrid"]) -> None:
    """Lay the figure out, and let its texts and its height follow."""
    figure.draw_without_rendering()
    _thin(figure)
    before = sum(group.words for group in groups)
    _wrap_all(figure, groups)
    _set_height(figure, groups, sum(group.words for group in groups) - before)


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
            found += [axis.label, axis.offsetText, *(label for _, label in _tick_labels(axis))]
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


class _PanelGrid:
    """Panels of one grid, in as many columns as have room."""

    def __init__(self, figure: Figure, axes: list[Axes], width: float, has_legend: bool) -> None:
        specs: Any = [ax.get_subplotspec() for ax in axes]
        rows, columns = specs[0].get_gridspec().get_geometry()
        self.axes, self.rows, self.columns = axes, rows, columns
        self.is_pictures = any(ax.images for ax in axes)
        least = as_turned = self._least(has_legend)
        if self.is_pictures:
            least = max(least, *(_widest_word(ax.title) + 0.1 for ax in axes))
        width -= BAR if self.is_pictures and any(ax.get_label() == "<colorbar>" for ax in figure.axes) else 0.0
        cells = [(spec.rowspan.start, spec.colspan.start) for spec in specs]
        if width / columns < least * 0.98:
            high = columns * width / rows / 1.2  # inches of pictures that shrink by a sixth
            are_headed = not any(ax.get_title() for ax, at in zip(axes, cells, strict=True) if all(at))
            can_turn = self.is_pictures and are_headed and rows < columns and as_turned <= width / rows
            if can_turn and high < TALLEST - 1:
                self._turn(cells)
                cells, self.rows, self.columns = [(column, row) for row, column in cells], columns, rows
            else:
                fewer = max(1, min(columns, int(width / least)))
                lines = -(-columns // fewer)
                fewer = -(-columns // lines)  # as even as they go
                if not self.is_pictures or rows * lines * width / fewer <= TALLEST:
                    cells = [(row * lines + column // fewer, column % fewer) for row, column in cells]
                    self.rows, self.columns = rows * lines, fewer
            self._move(figure, specs[0].get_gridspec(), cells)
        self.cells, self.cell = cells, width / self.columns

    def _least(self, has_legend: bool) -> float:
        """Return the inches that a panel needs."""
        if not self.is_pictures:
            return LABELED if has_legend and self.rows == 1 else PANEL
        if any(len(ax.texts) > 1 for ax in self.axes):  # numbers in cells
            return 2.5
        return BARRED if any(ax.child_axes for ax in self.axes) else PICTURE

    def _turn(self, cells: list[tuple[int, int]]) -> None:
        """Let the titles of columns name rows."""
        for ax, (row, column) in zip(self.axes, cells, strict=True):
            if row == 0 and column and not ax.get_ylabel():
                ax.set_ylabel(ax.get_title(), fontsize=POINTS)
                ax.set_title("")
        for ax, (row, column) in zip(self.axes, cells, strict=True):
            if row and column == 0 and ax.get_ylabel():
                ax.set_title(ax.get_ylabel(), fontsize=POINTS)
                ax.set_ylabel("")

    def _move(self, figure: Figure, old: Any, cells: list[tuple[int, int]]) -> None:
        size = (self.rows, self.columns)
        inside = isinstance(old, GridSpecFromSubplotSpec)
        new: Any = (
            GridSpecFromSubplotSpec(*size, subplot_spec=old._subplot_spec) if inside else GridSpec(*size, figure=figure)
        )
        for ax, cell in zip(self.axes, cells, strict=True):
            ax.set_subplotspec(new[cell])
            if not self.is_pictures:
                ax.tick_params(labelbottom=True, labelleft=True)

    def short_by(self, figure: Figure) -> float:
        """Return by how many inches the figure should be taller for these panels."""
        missing: dict[int, float] = {}
        for ax, (row, _) in zip(self.axes, self.cells, strict=True):
            box = ax.get_position(original=True)
            wide, tall = box.width * figure.get_figwidth(), box.height * figure.get_figheight()
            more = self._height(ax, wide) - tall
            if more < 0 and ax.images:  # its words already stand in what is left above and below
                more = sum(min(0.0, more / 2 + words) for words in _words_about(ax))
            missing[row] = max(missing.get(row, -99.0), more)
        return sum(missing.values())

    def _height(self, ax: Axes, wide: float) -> float:
        if ax.images:
            (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
            return wide * abs(high - low) / max(abs(right - left), 1e-9)
        if listed := self._listed(ax):
            return listed
        return min(max(0.6 * wide, 0.9), 2.0 if self.rows == 1 else 1.5)

    def _listed(self, ax: Axes) -> float:
        """Return the height of a list of names, in inches; 0 for curves."""
        names = [label.get_text() for _, label in _tick_labels(ax.yaxis)]
        is_list = self.is_pictures or any(c.isalpha() for name in names for c in name)
        return max(0.8, 1.4 * LINE * len(names)) if is_list else 0.0

    @property
    def words(self) -> float:
        """The inches of titles and names of axes above and below the panels, row by row."""
        rows: dict[tuple[int, int], float] = {}
        for ax, (row, _) in zip(self.axes, self.cells, strict=True):
            for i, high in enumerate(_words_about(ax)):
                rows[row, i] = max(rows.get((row, i), 0.0), high)
        return sum(rows.values())

    @property
    def lowest(self) -> float:
        """The inches below which curves are no curves any more; 0 for pictures."""
        rows = {row: 0.0 if self.is_pictures else LOWEST for row, _ in self.cells}
        for ax, (row, _) in zip(self.axes, self.cells, strict=True):
            rows[row] = max(rows[row], 0.0 if self.is_pictures else self._listed(ax) + 0.5)
        return sum(rows.values())


def _first_height(groups: Sequence[_PanelGrid]) -> float:
    return min(TALLEST, sum(group.rows * min(group.cell, 2.5) for group in groups) + 0.6)


def _set_height(figure: Figure, groups: Sequence[_PanelGrid], more: float) -> None:
    height = figure.get_figheight() + sum(group.short_by(figure) for group in groups) + more
    named = sum(legend.get_window_extent().height / figure.dpi for legend in figure.legends)
    least = sum(group.lowest for group in groups) + max(named, 0.6) + 0.4  # curves stay curves
    figure.set_figheight(round(min(max(height, 1.0), max(TALLEST, least)), 2))


def _size(text: Text) -> tuple[float, float]:
    """Return width and height of a text in inches."""
    figure: Any = text.get_figure(root=True)
    box = text.get_window_extent(figure.canvas.get_renderer())
    return box.width / figure.dpi, box.height / figure.dpi


def _words_about(ax: Axes) -> tuple[float, float]:
    """Return the inches of what is written above and below a panel, between numbers at ticks and other panels."""
    title, name = (_size(text)[1] if text.get_text() else 0.0 for text in (ax.title, ax.xaxis.label))
    return title, max(name, 2 * LINE if ax.child_axes else 0.0)  # a bar below has numbers, and a name


def _widest_word(text: Text) -> float:
    """Return the inches of the longest word of a text, which cannot be broken."""
    whole, widest = text.get_text(), 0.0
    for word in whole.split():
        text.set_text(word)
        widest = max(widest, _size(text)[0])
    text.set_text(whole)
    return widest


def _wrapped(text: Text, width: float) -> bool:
    """Break a text between words so that it is at most ``width`` inches wide; return whether that went."""
    words_of = getattr(text, "unbroken", None) or text.get_text()
    text.unbroken = words_of  # type: ignore[attr-defined]
    turned = text.get_rotation()
    text.set_rotation(0)
    text.set_text(words_of)
    lines: list[str] = []
    if _size(text)[0] <= width:
        text.set_rotation(turned)
        return True
    for part in words_of.split("\n"):
        line = ""
        for word in part.split(" "):
            text.set_text(longer := f"{line} {word}".strip() if line else word)
            if line and _size(text)[0] > width:
                lines.append(line)
                longer = word
            line = longer
        lines.append(line)
    text.set_text("\n".join(lines))
    fits = _size(text)[0] <= width * 1.01
    text.set_rotation(turned)
    return fits


def _wrap_all(figure: Figure, groups: Sequence[_PanelGrid]) -> None:
    wide, tall = figure.get_size_inches()
    if figure._suptitle:  # type: ignore[attr-defined]
        title: Text = figure._suptitle  # type: ignore[attr-defined]
        title.unbroken = getattr(title, "unbroken", " ".join(title.get_text().split()))  # type: ignore[attr-defined]
        _wrapped(title, wide * 0.97)
    for group in groups:
        boxes = [ax.get_position() for ax in group.axes]
        lefts = sorted({round(box.x0 * wide, 2) for box in boxes})
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
    below: dict[str, Any] = {}
    beside = []
    for ax, named in legends:
        names = _beside(figure, ax, named) if is_single and len(named) > 1 else []
        beside += [(ax, names)] if names else []
        below |= {} if names else named
    if not below:
        return beside
    probe, widest = figure.text(0, 0, "", fontsize=SMALL), 0.0
    for name in below:
        probe.set_text(name)
        widest = max(widest, _size(probe)[0])
    probe.remove()
    columns = max(1, min(len(below), int((figure.get_figwidth() - 0.1) / (widest + 0.45))))
    style: Any = {"fontsize": SMALL, "frameon": False, "handlelength": 2.2, "columnspacing": 1.0, "borderpad": 0.1}
    title = next((title for ax, _ in legends if (title := getattr(ax, "legend_named", ""))), None)
    style |= {"title": title, "title_fontsize": SMALL, "alignment": "left"}
    figure.legend(list(below.values()), list(below), loc="outside lower left", ncols=columns, **style)
    return beside


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
    """Move names at the ends of lines apart."""
    tall = ax.get_position().height * figure.get_figheight()
    order = sorted(names, key=lambda text: text.xy[1])
    heights = [(Text.get_window_extent(text).height / figure.dpi + 0.015) / tall for text in order]
    starts = np.cumsum([0.0, *((a + b) / 2 for a, b in pairwise(heights))])
    places = _apart([text.xy[1] - start for text, start in zip(order, starts, strict=True)], 0.0)
    for text, place, start in zip(order, places, starts, strict=True):
        text.xyann = (1.06, place + start)


def _apart(places: list[float], gap: float) -> list[float]:
    """Move sorted places so far that neighbors are ``gap`` apart, with the least squares of the moves.

    Example:
        >>> [round(place, 2) for place in _apart([0.5, 0.5, 0.9], 0.1)]
        [0.45, 0.55, 0.9]
    """
    blocks: list[tuple[float, int]] = []  # sum of places less their offsets, and count
    for i, place in enumerate(places):
        total, count = place - i * gap, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            before = blocks.pop()
            total, count = total + before[0], count + before[1]
        blocks.append((total, count))
    means = [total / count for total, count in blocks for _ in range(count)]
    return [mean + i * gap for i, mean in enumerate(means)]


def _tick_labels(axis: Any) -> list[tuple[float, Text]]:
    """Return the places and labels of the major ticks that are drawn."""
    low, high = sorted(axis.get_view_interval())
    room = 1e-9 * max(high - low, 1e-300)
    ticks = [tick for tick in axis.get_major_ticks() if low - room <= tick.get_loc() <= high + room]
    labels = [(tick.get_loc(), tick.label1) for tick in ticks if tick.label1.get_visible()]
    return [(place, label) for place, label in labels if label.get_text().strip()] if axis.get_visible() else []


def _thin(figure: Figure) -> None:
    """Wrap or turn words at ticks that touch, and leave out as many numbers as needed."""
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis) if ax.axison else ():
            if _touch(label for _, label in _tick_labels(axis)):
                _relax(figure, ax, axis)


def _relax(figure: Figure, ax: Axes, axis: Any) -> None:
    found = _tick_labels(axis)
    names = [label.get_text() for _, label in found]
    has_words = any(any(c.isalpha() for c in name) for name in names)
    if axis is ax.xaxis and has_words:
        pitch = ax.get_position().width * figure.get_figwidth() / len(found) - 0.04
        fits = [_wrapped(label, pitch) for _, label in found]  # each is wrapped
        if all(fits):
            axis.set_ticks([place for place, _ in found], [label.get_text() for _, label in found], fontsize=SMALL)
            return
        axis.set_ticks([place for place, _ in found], names, rotation=90, fontsize=SMALL)
        figure.draw_without_rendering()
    for step in range(2, len(found) + 1):
        if not _touch(label for _, label in _tick_labels(axis)):
            return
        chosen = found[::step]
        axis.set_ticks([place for place, _ in chosen], names[::step], fontsize=SMALL)
        figure.draw_without_rendering()


def _touch(texts: Iterable[Text], room: float = 1.0) -> bool:
    return bool(_touching(list(texts), room))


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
