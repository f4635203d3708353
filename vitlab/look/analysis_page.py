"""HTML pages with the figures of analyses, and what fills in any page of this package."""

import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, Template
from markupsafe import Markup

from vitlab.analysis import ANALYSES
from vitlab.runs.atomic import write_text

HOME = Path(__file__).parent


def template(name: str) -> Template:
    """Return a file of this folder to fill in: texts are escaped, and the filter ``code`` is :func:`as_html`."""
    found = Environment(loader=FileSystemLoader(HOME), autoescape=True, trim_blocks=True)
    found.policies["json.dumps_kwargs"] = {"sort_keys": False}  # curves and menus in their own order
    found.filters["code"] = lambda text: Markup(as_html(text))
    return found.get_template(name)


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
    shown = [
        {"analysis": ANALYSES[name], "note": note, "figure": png and data_url(png)} for name, note, png in sections
    ]
    path = folder / "analysis.html"
    write_text(path, template("analysis.html").render(title=f"What {title} has learned", sections=shown))
    return path


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
    facts = {"title": f"{name} of {title}", "analysis": ANALYSES[name], "note": note, "images": images}
    path = folder / f"{name}.html"
    write_text(path, template("leaves.html").render(facts))
    return path
