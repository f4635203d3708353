"""Writes what the pages show: `python docs/render.py notebooks|diagrams [FILE ...]`, from the root of the repository.

Notebooks are run from top to bottom and become pages in docs/notebooks/ with their figures beside them. The articles'
picture of mountains, 60 x 100 grey values, joins where VITLAB_MOUNTAINS names its .npy file.
"""

import base64
import io
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES, IMAGES = ROOT / "docs" / "notebooks", ROOT / "docs" / "images"
DRAWN = ("t2t_vit_14", "vit_s16")
MOST = 4000  # characters of an output


def render(path):
    """Run a notebook and write its page and figures."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(path.parent)}}).execute()
    PAGES.mkdir(exist_ok=True)
    for old in PAGES.glob(f"{path.stem}_[0-9]*.*"):
        old.unlink()
    link = f"[`notebooks/{path.name}`](../../notebooks/{path.name})"
    parts, figures = [], 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            if len(parts) == 1:
                parts.append(f"*This is {link} with what it printed and drew, written by `make pages`.*")
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            kind = next((kind for kind in ("image/png", "image/svg+xml") if kind in data), None)
            if kind:
                figures += 1
                place = PAGES / f"{path.stem}_{figures}.{kind[6:9]}"
                if kind == "image/png":
                    small_png(base64.b64decode(data[kind]), place)
                else:
                    place.write_text(data[kind], encoding="utf-8")
                parts.append(f"![Figure {figures} of notebook {path.stem[0]}]({place.name})")
            elif text := text_of(output):
                parts.append(text)
    (PAGES / f"{path.stem}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def text_of(output):
    """Return what a cell said as Markdown: errors and progress are left out, what plays is named."""
    data = output.get("data", {})
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()[:MOST]}\n```" if output.name == "stdout" else ""
    if "text/html" in data and "<script" in data["text/html"]:
        return "*(What plays here plays in the notebook.)*"
    if "text/markdown" in data:
        return "````markdown\n" + data["text/markdown"].rstrip() + "\n````"
    return f"```text\n{data['text/plain'].rstrip()[:MOST]}\n```" if "text/plain" in data else ""


def small_png(content, path):
    """Write a figure with 128 colours: a third of the bytes."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        image.convert("RGB").quantize(128).save(path, optimize=True)


def diagram(name):
    """Return the drawing of a network as the README and the pages show it."""
    import torch

    from vitlab.look.diagram import architecture
    from vitlab.models.create import create_model

    with torch.device("meta"):  # shapes need no weights
        return architecture(create_model(name), name)


def main(kind, *files):
    """Write notebooks or diagrams."""
    if kind == "diagrams":
        for name in DRAWN:
            (IMAGES / f"{name}.svg").write_text(diagram(name), encoding="utf-8")
        return
    for path in map(Path, files or sorted(ROOT.glob("notebooks/*.ipynb"))):
        render(path.absolute())


if __name__ == "__main__":
    main(*sys.argv[1:])
