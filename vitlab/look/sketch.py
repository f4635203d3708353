"""Draw boxes, arrows and skip paths as SVG: how the drawings of networks look."""

from collections.abc import Sequence
from html import escape
from typing import Literal, NamedTuple

WIDE, HIGH, GAP, SIDE = 400, 46, 26, 46  # pixels: a row, a box, the way between two, the borders
NARROW = 180  # below this width a box has its shape in the second line, and no words
LINE, PLUS = "line", "plus"  # kinds of a cell that are no box
STYLE = """<style>
.vl{color:#1c2024}@media (prefers-color-scheme:dark){.vl{color:#e6e7ea}}
.vl text{font:13px system-ui,sans-serif;fill:currentColor}.vl .s{font-size:11px;opacity:.75}.vl .n{text-anchor:end}
.vl rect,.vl circle{stroke:currentColor;stroke-width:1;rx:6}.vl path{stroke:currentColor;fill:none}
.vl a rect{stroke-width:2.5}.vl .a{fill:#56B4E933}.vl .b{fill:#E69F0033}.vl .c{fill:#009E7333}.vl .d{fill:#CC79A733}
.vl .e,.vl .plus{fill:none}
</style>"""


class Box(NamedTuple):
    """A step: its name, description, color, output shape, and the address of what shows its inside."""

    name: str
    words: str = ""
    kind: str = "e"
    shape: str = ""
    link: str = ""


Row = Sequence[tuple[Box, int]]  # boxes side by side, each with the number of columns that it spans


class Skip(NamedTuple):
    """A residual connection: what leaves row ``start`` is added at row ``end``, a plus."""

    start: int
    end: int
    side: Literal["left", "right"] = "left"  # right starts at the last box of its row


def through() -> Box:
    """Return a cell that only passes on what comes in."""
    return Box("", kind=LINE)


def plus() -> list[tuple[Box, int]]:
    """Return a row that adds."""
    return [(Box("+", kind=PLUS), 1)]


def svg_of(title: str, rows: Sequence[Row], skips: Sequence[Skip] = (), key: str = "vl") -> str:
    """Return rows of boxes from top to bottom as SVG, each joined to those below it.

    Args:
        title: What stands above.
        rows: The rows; the columns of each are of equal width.
        skips: Connections that go round.
        key: Prefix of the ids in the drawing, so that several can stand in a page.

    Example:
        >>> image, tokens = Box("image", shape="3 x 8 x 8"), Box("tokens", shape="4 x 16")
        >>> drawing = svg_of("two steps", [[(image, 1)], [(tokens, 1)]])
        >>> drawing.count("<rect"), "4 x 16" in drawing
        (2, True)
    """
    title, width = escape(title), WIDE + 2 * SIDE
    height = 40 + len(rows) * (HIGH + GAP)
    parts = [
        f'<svg class="vl" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" role="img" aria-label="{title}">{STYLE}',
        f'<text x="{SIDE}" y="20">{title}</text>',
        f'<defs><marker id="{key}-tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L6 3L0 6" /></marker></defs>',
    ]
    tip = f' marker-end="url(#{key}-tip)"'
    for i, row in enumerate(rows):
        parts += [_cell(box, *_edges(row, n), _top(i)) for n, (box, _) in enumerate(row)]
        below = rows[i + 1] if i + 1 < len(rows) else []
        parts += [_joint(*ends, _top(i), tip if kinds[1] != LINE else "", kinds) for ends, kinds in _joints(row, below)]
    lanes = {"left": 0, "right": 0}
    for skip in skips:
        parts.append(_skip(skip, rows, lanes[skip.side], tip))
        lanes[skip.side] = (lanes[skip.side] + 1) % 2
    return "".join(parts) + "</svg>"


def _top(i: int) -> float:
    return 36 + i * (HIGH + GAP)


def _edges(row: Row, n: int) -> tuple[float, float]:
    """Return where cell ``n`` of a row begins and how wide it is, in pixels."""
    columns = sum(span for _, span in row)
    before = sum(span for _, span in row[:n])
    inset = 5 if len(row) > 1 else 0
    return SIDE + WIDE * before / columns + inset, WIDE * row[n][1] / columns - 2 * inset


def _cell(box: Box, left: float, width: float, top: float) -> str:
    middle = left + width / 2
    if box.kind == LINE:
        return f'<path d="M{middle:g} {top}v{HIGH}"/>'
    if box.kind == PLUS:
        y = top + HIGH / 2
        return (
            f'<circle class="plus" cx="{middle:g}" cy="{y:g}" r="11"/><path d="M{middle - 6:g} {y:g}h12M{middle:g} '
            f'{y - 6:g}v12M{middle:g} {top}v{HIGH / 2 - 11:g}M{middle:g} {y + 11:g}v{HIGH / 2 - 11:g}"/>'
        )
    second = box.shape if width < NARROW else box.words
    parts = [
        f'<rect class="{box.kind}" x="{left:g}" y="{top}" width="{width:g}" height="{HIGH}"/>',
        f'<text x="{left + 10:g}" y="{top + 19}">{escape(box.name)}</text>',
        f'<text class="s" x="{left + 10:g}" y="{top + 36}">{escape(second)}</text>' if second else "",
    ]
    if width >= NARROW:
        parts.append(f'<text class="n" x="{left + width - 10:g}" y="{top + 19}">{escape(box.shape)}</text>')
    drawn = "".join(parts)
    return f'<a href="{escape(box.link)}">{drawn}</a>' if box.link else drawn


def _joints(row: Row, below: Row) -> list[tuple[tuple[float, float], tuple[str, str]]]:
    """Return where cells of two rows that share columns are joined, at the middle of the narrower, and their kinds."""
    found = []
    for n, (box, _) in enumerate(row):
        left, width = _edges(row, n)
        for m, (other, _) in enumerate(below):
            start, wide = _edges(below, m)
            if left < start + wide and start < left + width:
                x = left + width / 2 if width <= wide else start + wide / 2
                found.append(((x, x), (box.kind, other.kind)))
    return found


def _joint(x: float, y: float, top: float, tip: str, kinds: tuple[str, str]) -> str:
    length = GAP - (2 if tip and kinds[1] != PLUS else 0)
    tip = "" if kinds[1] == PLUS else tip
    return f'<path d="M{x:g} {top + HIGH}L{y:g} {top + HIGH + length}"{tip}/>'


def _skip(skip: Skip, rows: Sequence[Row], lane: int, tip: str) -> str:
    left, width = _edges(rows[skip.start], len(rows[skip.start]) - 1 if skip.side == "right" else 0)
    start, end = _top(skip.start) + HIGH + 8, _top(skip.end) + HIGH / 2
    sign = -1 if skip.side == "left" else 1
    edge = (SIDE - 14 - 14 * lane) if sign < 0 else (SIDE + WIDE + 14 + 14 * lane)
    inner = SIDE + WIDE / 2 + sign * 12
    return f'<path d="M{left + width / 2:g} {start:g}H{edge}V{end:g}H{inner:g}"{tip}/>'
