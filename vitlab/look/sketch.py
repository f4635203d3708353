"""Draw boxes, arrows and skip paths as SVG: how the drawings of networks look, on screens and in print."""

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Literal, NamedTuple

WIDE, HIGH, GAP, SIDE, TOP = 360, 44, 22, 46, 36  # pixels: a row, a box, the way between two, the borders, the title
SMALL = 22  # height of a row that adds
NARROW = 170  # below this width a box has its shape in the second line, and no words
LINE, PLUS = "line", "plus"  # kinds of a cell that are no box
SLIM = " ,.:;'()|fijlt1"  # characters of half the width of others
STYLE = """<style>
.vl{color:#1c2024;background:#fff}@media (prefers-color-scheme:dark){.vl{color:#e6e7ea;background:#14161a}}
.vl text{font:14px system-ui,sans-serif;fill:currentColor}.vl .s{font-size:12px;fill-opacity:.8}.vl .n{text-anchor:end}
.vl rect,.vl circle{stroke:currentColor;stroke-width:1;fill-opacity:.2}.vl path{stroke:currentColor;fill:none}
.vl a{color:inherit}.vl a rect{stroke-width:2.5}
.vl .a{fill:#56B4E9}.vl .b{fill:#E69F00}.vl .c{fill:#009E73}.vl .d{fill:#CC79A7}
.vl .e,.vl .plus{fill:none}@media print{.vl{color:#000;background:none}}
</style>"""


class Box(NamedTuple):
    """A step of a drawing.

    Args:
        name: Its name.
        words: What it does.
        kind: Its color: ``a`` tokenizer and MLP, ``b`` attention, ``c`` positions and reshaping, ``d`` norms and head,
            ``e`` what goes in and out, which has none.
        shape: That of its output.
        link: Address of what shows its inside.
        span: Columns of its row that it takes.
    """

    name: str
    words: str = ""
    kind: str = "e"
    shape: str = ""
    link: str = ""
    span: int = 1


Row = Sequence[Box]  # side by side
THROUGH = Box("", kind=LINE)  # a cell that only passes on what comes in
SUM: Row = [Box("+", kind=PLUS)]  # a row that adds


class Skip(NamedTuple):
    """A residual connection: what leaves row ``start`` is added at row ``end``, a plus."""

    start: int
    end: int
    side: Literal["left", "right"] = "left"  # right starts at the last box of its row


def svg_of(
    title: str, rows: Sequence[Row], skips: Sequence[Skip] = (), key: str = "", turns: Sequence[int] = ()
) -> str:
    """Return rows of boxes from top to bottom as SVG, each joined to those below it.

    Args:
        title: What stands above.
        rows: The rows; the columns of each are of equal width.
        skips: Connections that go round; none from before a turn to behind it.
        key: Id of the drawing and prefix of the ids in it, so that several can stand in a page.
        turns: Rows that go on at the top, to the right of those before.

    Example:
        >>> image, tokens = Box("image", shape="3 x 8 x 8"), Box("tokens", shape="4 x 16")
        >>> drawing = svg_of("two steps", [[image], [tokens]])
        >>> drawing.count("<rect"), "4 x 16" in drawing
        (2, True)
    """
    strips = [(rows[start:end], start) for start, end in pairwise([0, *turns, len(rows)])]
    one = WIDE + 2 * SIDE
    width, height = one * len(strips), max(int(_tops(strip)[-1]) for strip, _ in strips) - GAP + 8
    own = (f'id="{escape(key)}" ' if key else "") + (f'style="--strips:{len(strips)}" ' if len(strips) > 1 else "")
    parts = [
        f'<svg {own}class="vl" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" role="img" aria-label="{escape(title)}">{STYLE}',
        _text(title, SIDE, 20, width - 2 * SIDE),
        f'<defs><marker id="{escape(key or "vl")}-tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L6 3L0 6" /></marker></defs>',
    ]
    tip = f' marker-end="url(#{escape(key or "vl")}-tip)"'
    for n, (strip, start) in enumerate(strips):
        inside = [Skip(s.start - start, s.end - start, s.side) for s in skips if start <= s.start < start + len(strip)]
        drawn = _strip(strip, inside, tip)
        parts.append(f'<g transform="translate({n * one} 0)">{drawn}</g>' if n else drawn)
        if n:  # from the foot of the strip on the left
            foot, middle = _tops(strips[n - 1][0])[-1] - GAP, n * one - SIDE - WIDE / 2
            parts.append(f'<path d="M{middle:g} {foot:g}v5H{n * one}V28H{middle + one:g}V{TOP - 1}"{tip}/>')
    return "".join(parts) + "</svg>"


def _strip(rows: Sequence[Row], skips: Sequence[Skip], tip: str) -> str:
    """Return rows below each other, with their skips."""
    tops, parts = _tops(rows), []
    for i, row in enumerate(rows):
        parts += [_cell(box, *_edges(row, n), tops[i]) for n, box in enumerate(row)]
        for x, end in _joints(row, rows[i + 1]) if i + 1 < len(rows) else []:
            pointed = end not in (LINE, PLUS)
            foot = tops[i] + _height(row)
            parts.append(f'<path d="M{x:g} {foot}V{tops[i + 1] - (2 if pointed else 0)}"{tip if pointed else ""}/>')
    lanes = {"left": 0, "right": 0}
    for skip in skips:
        parts.append(_skip(skip, rows, tops, lanes[skip.side], tip))
        lanes[skip.side] = (lanes[skip.side] + 1) % 2
    return "".join(parts)


def _height(row: Row) -> int:
    return SMALL if row[0].kind == PLUS else HIGH


def _tops(rows: Sequence[Row]) -> list[int]:
    """Return where each row begins, and where one below the last would."""
    found = [TOP]
    for row in rows:
        found.append(found[-1] + _height(row) + GAP)
    return found


def _edges(row: Row, n: int) -> tuple[float, float]:
    """Return where cell ``n`` of a row begins and how wide it is, in pixels."""
    columns = sum(box.span for box in row)
    before = sum(box.span for box in row[:n])
    inset = 4 if len(row) > 1 else 0
    return SIDE + WIDE * before / columns + inset, WIDE * row[n].span / columns - 2 * inset


def width_of(text: str, size: float) -> float:
    """Return how wide a text is in a broad typeface, in pixels."""
    return size * sum(0.36 if letter in SLIM else 0.62 for letter in text)


def _text(text: str, x: float, y: float, room: float, kind: str = "") -> str:
    """Return a text of a class, ``s`` for small or ``n`` for one that ends at x; squeezed where it needs more room."""
    tight = width_of(text, 12 if kind == "s" else 14) > room
    squeezed = f' textLength="{room:g}" lengthAdjust="spacingAndGlyphs"' if tight else ""
    of = f' class="{kind}"' if kind else ""
    return f'<text{of} x="{x:g}" y="{y:g}"{squeezed}>{escape(text)}</text>'


def _cell(box: Box, left: float, width: float, top: float) -> str:
    middle = left + width / 2
    if box.kind == LINE:
        return f'<path d="M{middle:g} {top}v{HIGH}"/>'
    if box.kind == PLUS:
        y = top + SMALL / 2
        cross = f'<path d="M{middle - 6:g} {y:g}h12M{middle:g} {y - 6:g}v12"/>'
        return f'<circle class="plus" cx="{middle:g}" cy="{y:g}" r="11"/>{cross}'
    inner, wide = width - 20, width >= NARROW
    shape = min(width_of(box.shape, 14), inner / 2) if wide else 0
    second = box.words if wide else box.shape
    parts = [
        f'<rect class="{box.kind}" x="{left:g}" y="{top}" width="{width:g}" height="{HIGH}" rx="6"/>',
        _text(box.name, left + 10, top + 18, inner - (shape and shape + 8)),
        _text(second, left + 10, top + 35, inner, "s") if second else "",
    ]
    if wide:
        parts.append(_text(box.shape, left + width - 10, top + 18, inner / 2, "n"))
    drawn = "".join(parts)
    return f'<a href="{escape(box.link)}">{drawn}</a>' if box.link else drawn


def _joints(row: Row, below: Row) -> list[tuple[float, str]]:
    """Return where cells of two rows that share columns are joined, in the middle of the narrower, to which kind."""
    found = []
    for n in range(len(row)):
        left, width = _edges(row, n)
        for m, other in enumerate(below):
            start, wide = _edges(below, m)
            if left < start + wide and start < left + width:
                found.append((left + width / 2 if width <= wide else start + wide / 2, other.kind))
    return found


def _skip(skip: Skip, rows: Sequence[Row], tops: Sequence[int], lane: int, tip: str) -> str:
    left, width = _edges(rows[skip.start], len(rows[skip.start]) - 1 if skip.side == "right" else 0)
    start, end = tops[skip.start] + _height(rows[skip.start]) + 8, tops[skip.end] + SMALL / 2
    sign = -1 if skip.side == "left" else 1
    edge = (SIDE - 14 - 14 * lane) if sign < 0 else (SIDE + WIDE + 14 + 14 * lane)
    inner = SIDE + WIDE / 2 + sign * 12
    return f'<path d="M{left + width / 2:g} {start:g}H{edge}V{end:g}H{inner:g}"{tip}/>'
