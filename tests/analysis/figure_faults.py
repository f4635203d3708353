"""What is wrong with the text of a figure, by matplotlib's own extents; independent of how the figure was set."""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation, Text

from vitlab.analysis.typeset import INCHES, printed


def texts_of(figure):
    """Return the texts that are drawn, with their extents in pixels."""
    canvas = figure.canvas if isinstance(figure.canvas, FigureCanvasAgg) else FigureCanvasAgg(figure)
    drawn = []
    renderer = canvas.get_renderer()

    def keep(text, draw):
        def drawing(renderer, *args, **kwargs):
            if text.get_visible() and text.get_text().strip():
                drawn.append(text)
            draw(renderer, *args, **kwargs)

        return drawing

    found = figure.findobj(Text)
    for text in found:
        text.draw = keep(text, text.draw)
    try:
        canvas.draw()
    finally:
        for text in found:
            del text.draw
    drawn = list({id(text): text for text in drawn}.values())
    extents = [Text.get_window_extent(t, renderer) if isinstance(t, Annotation) else t.get_window_extent(renderer)
               for t in drawn]  # fmt: skip
    return drawn, extents


def faults(figure, least=6.0):
    """Return a line for each text that is below ``least`` points, overlaps another or is cut at the edge."""
    texts, boxes = texts_of(figure)
    wide, tall = figure.get_size_inches() * figure.dpi
    said = []
    for i, (text, box) in enumerate(zip(texts, boxes, strict=True)):
        words = text.get_text()
        if text.get_fontsize() < least:
            said.append(f"{words!r} has {text.get_fontsize():g} pt")
        if box.x0 < -0.5 or box.y0 < -0.5 or box.x1 > wide + 0.5 or box.y1 > tall + 0.5:
            said.append(f"{words!r} is cut: {np.round(box.extents).tolist()} of {wide:.0f} x {tall:.0f}")
        for other, near in zip(texts[:i], boxes[:i], strict=True):
            if min(box.x1, near.x1) - max(box.x0, near.x0) > 0.5 and min(box.y1, near.y1) - max(box.y0, near.y0) > 0.5:
                said.append(f"{words!r} lies on {other.get_text()!r}")
    return said


def fits_a_column(figure):
    """Assert that the figure of an analysis can be read in a journal's column."""
    done = printed(figure, INCHES["column"], "an analysis of a run")
    assert done.get_figwidth() <= 3.3 and not faults(done), faults(done)
