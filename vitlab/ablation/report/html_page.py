"""The report as one self-contained HTML file without scripts."""

import html
import re

VIEW = '<meta name="viewport" content="width=device-width, initial-scale=1">'  # as wide as a phone is
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}
h1{font-size:1.6rem}h2{font-size:1.15rem;margin-top:2.2rem;border-bottom:1px solid #ddd}
table{border-collapse:collapse;font-size:13px;margin:.8rem 0;display:block;overflow-x:auto}
td,th{padding:.25rem .5rem;text-align:left;border-bottom:1px solid #e4e4e4;white-space:nowrap}
td:first-child,th:first-child{position:sticky;left:0;background:#fff}
th{font-weight:600;border-bottom:2px solid #999}figure{margin:1.2rem 0;overflow-x:auto}ul{padding-left:1.2rem}
svg{max-width:100%;height:auto}svg text{font-family:system-ui,sans-serif!important}
@media(max-width:40rem){body{margin:.8rem auto;padding:0 .6rem}figure svg{max-width:none;width:38rem}}
pre{background:#f6f6f6;padding:1rem;overflow-x:auto;font-size:12.5px}code{font-size:.92em}
"""


def page(
    name: str, sections: list[tuple[str, list[str], list[list[list[str]]]]], drawn: list[tuple[str, str]], source: str
) -> str:
    """Return the page: answers and main table, then the figures, then the rest."""
    head, rest = sections[:2], sections[2:]
    body = [f"<h1>{html.escape(name)}</h1>", *(_section(*section) for section in head), "<h2>Figures</h2>"]
    for i, (title, svg) in enumerate(drawn):
        body.append(f'<figure role="img" aria-label="{html.escape(title)}">{_own_ids(svg, f"f{i}")}</figure>')
    body += [_section(*section) for section in rest]
    body.append(f"<h2>The file</h2><pre>{html.escape(source)}</pre>")
    start = f'<!doctype html><html lang="en"><head><meta charset="utf-8">{VIEW}<title>{html.escape(name)}</title>'
    return f"{start}<style>{STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"


def _section(title: str, sentences: list[str], tables: list[list[list[str]]]) -> str:
    parts = [f"<h2>{html.escape(title)}</h2>"]
    if sentences:
        parts.append("<ul>" + "".join(f"<li>{_inline(sentence)}</li>" for sentence in sentences) + "</ul>")
    for head, *rows in tables:
        cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        lines = ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
        parts.append(f"<table><tr>{cells}</tr>{''.join(lines)}</table>")
    return "\n".join(parts)


def _inline(text: str) -> str:
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))
    return re.sub(r"\*\*([^*]*)\*\*", r"<strong>\1</strong>", text)


def _own_ids(svg: str, prefix: str) -> str:
    """Prefix the ids of a figure, so that they are unique on the page."""
    svg = re.sub(r' id="image[0-9a-f]+"', "", svg)  # not referenced, and equal for equal images
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'((?:xlink:)?href="#)', rf"\1{prefix}-", svg).replace("url(#", f"url(#{prefix}-")
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
