"""One HTML page with the figures of all analyses."""

import base64
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path

from vitlab.analysis import ANALYSES
from vitlab.runs.atomic import atomic_write

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


def data_url(content: bytes, kind: str = "png") -> str:
    """Return the file of an image as an address that holds all of it.

    Example:
        >>> data_url(b"GIF89a", "gif")
        'data:image/gif;base64,R0lGODlh'
    """
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


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
            parts.append(f'<p><img alt="figure of {name}" src="{data_url(png)}"></p>\n')
            note = f"{note}. Numbers: {name}.csv"
        parts.append(f'<p class="note">{as_html(note)}</p>\n')
    path = folder / "analysis.html"
    with atomic_write(path) as beside:
        beside.write_text("".join(parts) + "</html>\n", encoding="utf-8")
    return path


_LEAVES = """<p>{reading}</p>
<p><b>Not shown:</b> {limits}</p>
<p class="note">{note}. Numbers: {name}.csv</p>
<p><button id="back">back</button> <span id="place"></span> <button id="on">on</button>
<span class="note">or the arrow keys; a click marks an image</span></p>
<div id="leaf" style="display: flex; flex-wrap: wrap; gap: 1rem"></div>
<p>Marked:</p>
<textarea id="marked" rows="6" style="width: 100%" readonly></textarea>
<script>
const images = {images}, most = 24, marked = new Set(), $ = id => document.getElementById(id);
let first = 0;
function show() {{
  $("leaf").replaceChildren(...images.slice(first, first + most).map(one => {{
    const box = document.createElement("figure"), picture = new Image();
    box.style.cssText = "margin: 0; width: 8.5rem; cursor: pointer; font-size: .8rem; overflow-wrap: anywhere";
    box.style.border = "3px solid " + (marked.has(one.name) ? "#D55E00" : "transparent");
    picture.src = one.picture;
    picture.alt = one.name;
    picture.style.width = "100%";
    box.append(picture, ...Object.entries(one.words).map(([key, value]) =>
      Object.assign(document.createElement("div"), {{textContent: key === "name" ? value : key + ": " + value}})));
    box.onclick = () => {{ marked.delete(one.name) || marked.add(one.name); show(); }};
    return box;
  }}));
  const end = Math.min(first + most, images.length);
  $("place").textContent = (images.length ? first + 1 : 0) + " to " + end + " of " + images.length;
  $("marked").value = [...marked].join("\\n");
}}
function turn(by) {{ if (first + by >= 0 && first + by < images.length) first += by; show(); }}
$("back").onclick = () => turn(-most);
$("on").onclick = () => turn(most);
addEventListener("keydown", event => {{
  if (event.key === "ArrowLeft") turn(-most);
  if (event.key === "ArrowRight") turn(most);
}});
show();
</script>
"""


def write_leaves(
    folder: Path, title: str, name: str, note: str, gallery: Sequence[tuple[bytes, dict[str, str]]]
) -> Path:
    """Write ``NAME.html``: a page to leaf through the images of an analysis, 24 at a time, and to mark some by name.

    Args:
        folder: Folder of the page.
        title: Name of the run or network.
        name: Name of the analysis.
        note: What its numbers depend on.
        gallery: Images as PNG, each with what to say of it; `name` is what it is called.
    """
    images = [{"name": words["name"], "words": words, "picture": data_url(png)} for png, words in gallery]
    analysis = ANALYSES[name]
    words = {
        "reading": as_html(analysis.reading),
        "limits": as_html(analysis.limits),
        "note": as_html(note),
        "name": name,
    }
    content = json.dumps(images).replace("<", "\\u003c")  # a name must not end the script
    path = folder / f"{name}.html"
    with atomic_write(path) as beside:
        head = _HEAD.format(title=html.escape(f"{name} of {title}"))
        beside.write_text(head + _LEAVES.format(images=content, **words) + "</html>\n", encoding="utf-8")
    return path
