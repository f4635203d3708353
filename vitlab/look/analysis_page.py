"""One HTML page with the figures of all analyses."""

import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path

from vitlab.analysis import ANALYSES
from vitlab.runs.directory import atomic_write

_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
img {{ max-width: 100%; height: auto }}
.note {{ color: #555; font-size: .9rem }}
:root {{ color-scheme: light dark }}
@media (prefers-color-scheme: dark) {{ body {{ color: #ddd; background: #16181d }} .note {{ color: #aaa }} }}
</style>
<h1>{title}</h1>
"""


def as_html(text: str) -> str:
    """Return text as HTML, with backticks as code.

    Example:
        >>> as_html("p < `q`")
        'p &lt; <code>q</code>'
    """
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def write_page(folder: Path, title: str, sections: Sequence[tuple[str, str, bytes]]) -> Path:
    """Write ``analysis.html``: for each analysis how to read it, its figure, its note and the name of its table.

    Args:
        folder: Folder of the page.
        title: Name of the run or network.
        sections: Name, note and PNG image of each analysis; no image for one that does not apply.
    """
    parts = [_HEAD.format(title=html.escape(f"What {title} has learned"))]
    for name, note, png in sections:
        parts.append(f'<h2 id="{name}">{name}</h2>\n<p>{as_html(ANALYSES[name].reading)}</p>\n')
        parts.append(f"<p><b>Not shown:</b> {as_html(ANALYSES[name].limits)}</p>\n")
        if png:
            source = base64.b64encode(png).decode()
            parts.append(f'<p><img alt="figure of {name}" src="data:image/png;base64,{source}"></p>\n')
            note = f"{note}. Numbers: {name}.csv"
        parts.append(f'<p class="note">{as_html(note)}</p>\n')
    path = folder / "analysis.html"
    with atomic_write(path) as beside:
        beside.write_text("".join(parts) + "</html>\n", encoding="utf-8")
    return path
