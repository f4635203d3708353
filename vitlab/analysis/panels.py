"""Panels and words of a figure in print: how many columns have room, and how high they must be for their words."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec, GridSpecFromSubplotSpec
from matplotlib.text import Text

POINTS, SMALL = 7.0, 6.5  # of text, and of numbers at ticks and names of lines
TALLEST, LOWEST = 9.0, 1.35  # inches of a figure, and of a row of curves with its title where they are many
BAR = 0.7  # inches that a color bar beside maps needs with its numbers and its name
LINE = 1.25 * SMALL / 72  # inches between two lines of text
PICTURE, BARRED, PANEL, LABELED = 0.42, 0.7, 1.6, 2.2  # inches that a map, one with a bar, and curves need


class PanelGrid:
    """Panels of one grid, in as many columns as have room."""

    def __init__(self, figure: Figure, axes: list[Axes], width: float, has_legend: bool) -> None:
        specs: Any = [ax.get_subplotspec() for ax in axes]
        self.axes, (self.rows, self.columns) = axes, specs[0].get_gridspec().get_geometry()
        self.cells = [(spec.rowspan.start, spec.colspan.start) for spec in specs]
        self.is_pictures = any(ax.images for ax in axes)
        width -= BAR if self.is_pictures and any(ax.get_label() == "<colorbar>" for ax in figure.axes) else 0.0
        least = least_turned = self._least(has_legend)
        if self.is_pictures:
            least = max(least, *(widest_word(ax.title) + 0.1 for ax in axes))
        if width / self.columns < least * 0.98:
            if self._can_turn(width, least_turned):
                self._turn()
            else:
                self._stack(width, least)
            self._move(figure, specs[0].get_gridspec())
        self.cell = width / self.columns

    def _least(self, has_legend: bool) -> float:
        """Return the inches that a panel needs."""
        if not self.is_pictures:
            return LABELED if has_legend and self.rows == 1 else PANEL
        if any(len(ax.texts) > 1 for ax in self.axes):  # numbers in cells
            return 2.5
        return BARRED if any(ax.child_axes for ax in self.axes) else PICTURE

    def _can_turn(self, width: float, least: float) -> bool:
        """Return whether there is room for pictures whose columns become rows; only the first ones may have titles."""
        high = self.columns * width / self.rows / 1.2  # inches of pictures that shrink by a sixth
        are_headed = not any(ax.get_title() for ax, cell in zip(self.axes, self.cells, strict=True) if all(cell))
        has_room = self.rows < self.columns and least <= width / self.rows and high < TALLEST - 1
        return self.is_pictures and are_headed and has_room

    def _turn(self) -> None:
        """Let columns become rows, which the titles of columns then name."""
        for ax, (row, column) in zip(self.axes, self.cells, strict=True):
            if row == 0 and column and not ax.get_ylabel():
                ax.set_ylabel(ax.get_title(), fontsize=POINTS)
                ax.set_title("")
        for ax, (row, column) in zip(self.axes, self.cells, strict=True):
            if row and column == 0 and ax.get_ylabel():
                ax.set_title(ax.get_ylabel(), fontsize=POINTS)
                ax.set_ylabel("")
        self.cells = [(column, row) for row, column in self.cells]
        self.rows, self.columns = self.columns, self.rows

    def _stack(self, width: float, least: float) -> None:
        """Put the columns that have no room below the others, unless pictures would become too high."""
        lines = -(-self.columns // max(1, min(self.columns, int(width / least))))
        columns = -(-self.columns // lines)  # as even as they go
        if not self.is_pictures or self.rows * lines * width / columns <= TALLEST:
            self.cells = [(row * lines + column // columns, column % columns) for row, column in self.cells]
            self.rows, self.columns = self.rows * lines, columns

    def _move(self, figure: Figure, old: Any) -> None:
        """Give the panels their cells in a grid in place of the old one."""
        size = (self.rows, self.columns)
        inside = isinstance(old, GridSpecFromSubplotSpec)
        new: Any = (
            GridSpecFromSubplotSpec(*size, subplot_spec=old._subplot_spec) if inside else GridSpec(*size, figure=figure)
        )
        for ax, cell in zip(self.axes, self.cells, strict=True):
            ax.set_subplotspec(new[cell])
            if not self.is_pictures:
                ax.tick_params(labelbottom=True, labelleft=True)

    def wrap(self, figure: Figure) -> None:
        """Break titles and names of axes between words; turn those of which a word has no room."""
        wide, tall = figure.get_size_inches()
        boxes = [ax.get_position() for ax in self.axes]
        cells = [ax.get_position(original=True).x0 for ax in self.axes]  # a picture is narrower, by its shape
        lefts = sorted({round(x0 * wide, 2) for x0 in cells})
        pitch = min(np.diff(lefts), default=wide) - 0.09 if self.columns > 1 else wide
        centers = [min(box.x0 + box.x1, 2 - box.x0 - box.x1) * wide - 0.06 for box in boxes]
        rooms = [min(pitch, room) for room in centers]  # of what stands at the center of the panel
        self._wrap_titles(rooms)
        for ax, box, room in zip(self.axes, boxes, rooms, strict=True):
            if ax.get_xlabel() and not wrap_words(ax.xaxis.label, room) and self.is_pictures:
                ax.set_xlabel("")  # the ranges of maps, which stand in the table
            label = ax.yaxis.label
            high = box.height * tall if self.is_pictures else max(0.6, box.height * tall)
            if label.get_rotation() == 90 and label.get_text() and not wrap_words(label, high):
                label.set(rotation=0, ha="right", va="center", text=label.unbroken)  # type: ignore[attr-defined]

    def _wrap_titles(self, rooms: list[float]) -> None:
        """Break the titles of each row of panels, or turn all of a row."""
        for row in sorted({row for row, _ in self.cells}):
            there = zip(self.axes, rooms, self.cells, strict=True)
            titles = [(ax.title, room) for ax, room, (at, _) in there if at == row and ax.title.get_text()]
            fits = [wrap_words(title, room) for title, room in titles]  # each is wrapped
            if not all(fits):
                for title, _ in titles:
                    title.set_text(title.unbroken)  # type: ignore[attr-defined]
                    title.set_rotation(90)

    def short_by(self, figure: Figure) -> float:
        """Return by how many inches the figure should be taller for these panels."""
        missing: dict[int, float] = {}
        for ax, (row, _) in zip(self.axes, self.cells, strict=True):
            box = ax.get_position(original=True)
            wide, tall = box.width * figure.get_figwidth(), box.height * figure.get_figheight()
            more = self._height(ax, wide) - tall
            if more < 0 and ax.images:  # its words already stand in what is left above and below
                more = sum(min(0.0, more / 2 + words) for words in words_about(ax))
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
        names = [label.get_text() for _, label in tick_labels(ax.yaxis)]
        is_list = self.is_pictures or any(c.isalpha() for name in names for c in name)
        return max(0.8, 1.4 * LINE * len(names)) if is_list else 0.0

    @property
    def words(self) -> float:
        """The inches of titles and names of axes above and below the panels, row by row."""
        rows: dict[tuple[int, int], float] = {}
        for ax, (row, _) in zip(self.axes, self.cells, strict=True):
            for i, high in enumerate(words_about(ax)):
                rows[row, i] = max(rows.get((row, i), 0.0), high)
        return sum(rows.values())

    @property
    def lowest(self) -> float:
        """The inches below which curves are no curves any more; 0 for pictures."""
        rows = {row: 0.0 if self.is_pictures else LOWEST for row, _ in self.cells}
        for ax, (row, _) in zip(self.axes, self.cells, strict=True):
            rows[row] = max(rows[row], 0.0 if self.is_pictures else self._listed(ax) + 0.5)
        return sum(rows.values())


def size_of(text: Text) -> tuple[float, float]:
    """Return width and height of a text in inches."""
    figure: Any = text.get_figure(root=True)
    box = text.get_window_extent(figure.canvas.get_renderer())
    return box.width / figure.dpi, box.height / figure.dpi


def words_about(ax: Axes) -> tuple[float, float]:
    """Return the inches of what is written above and below a panel, between numbers at ticks and other panels."""
    title, name = (size_of(text)[1] if text.get_text() else 0.0 for text in (ax.title, ax.xaxis.label))
    return title, max(name, 2 * LINE if ax.child_axes else 0.0)  # a bar below has numbers, and a name


def widest_word(text: Text) -> float:
    """Return the inches of the longest word of a text, which cannot be broken."""
    whole, widest = text.get_text(), 0.0
    for word in whole.split():
        text.set_text(word)
        widest = max(widest, size_of(text)[0])
    text.set_text(whole)
    return widest


def wrap_words(text: Text, width: float) -> bool:
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


def tick_labels(axis: Any) -> list[tuple[float, Text]]:
    """Return the places and labels of the major ticks that are drawn."""
    low, high = sorted(axis.get_view_interval())
    room = 1e-9 * max(high - low, 1e-300)
    ticks = [tick for tick in axis.get_major_ticks() if low - room <= tick.get_loc() <= high + room]
    labels = [(tick.get_loc(), tick.label1) for tick in ticks if tick.label1.get_visible()]
    return [(place, label) for place, label in labels if label.get_text().strip()] if axis.get_visible() else []
