"""Latency of one image with one thread on a CPU: a network in torch, and its graphs of float32 and int8 in onnxruntime.

See ``COMMAND``. FOLDER has test photos in a folder for each class; the trained networks answer all of them.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.pairs import compare, interleave
from bench.report import machine_line
from vitlab.config.images import find_images
from vitlab.data.files.decode import Decoding, decode
from vitlab.jobs import formats
from vitlab.jobs.load import exported_card, load_trained
from vitlab.jobs.quantize import quantize
from vitlab.models.create import create_model
from vitlab.runs.machine import facts
from vitlab.shipped import find_weights

COMMAND = "python benchmarks/predict.py benchmarks/predict.md [FOLDER]"
TRAINED = ("vitlab:photos64_vit", "vitlab:photos64_t2t")
OTHERS = ("vit_s16", "t2t_vit_14")  # with random weights, at 224 pixels
ROUNDS = 41
HEADINGS = ("network", "torch", "`net.onnx` by vitlab", "int8 by vitlab", "onnxruntime, ms", "float32, MB", "int8, MB")


def graphs(net: Any, folder: Path) -> dict[str, Path]:
    """Write the graphs of a network, as ``vitlab export`` does; return them by format."""
    paths = {form: folder / f"{form}.onnx" for form in ("onnx", "onnx-int8")}
    write, _ = formats.FORMATS["onnx"]
    write(net, {}, paths["onnx"])
    quantize(paths["onnx"], paths["onnx-int8"])
    return paths


def row(name: str, net: nn.Module, image: Tensor, paths: dict[str, Path]) -> str:
    """Return a row of the table: times relative to onnxruntime's own, medians of pairs with intervals of 95 %."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session, fed = onnxruntime.InferenceSession(paths["onnx"], options), {"images": image.numpy()}
    works = {"onnxruntime": lambda: session.run(None, fed), "torch": lambda: net(image)}
    for form, path in paths.items():
        read = formats.FORMATS[form][1](path, {})
        works[form] = lambda read=read: read(image)
    with torch.inference_mode():
        found = compare(interleave(works, ROUNDS), "onnxruntime")
    cells = [f"`{name}`"]
    for form in ("torch", "onnx", "onnx-int8"):
        low, high = found[form]["interval"]
        cells.append(f"{1 / found[form]['ratio']:.2f} [{1 / high:.2f}, {1 / low:.2f}]")
    cells.append(f"{found['onnxruntime']['seconds'] * 1e3:.1f}")
    cells += [f"{path.stat().st_size / 1e6:.1f}" for path in paths.values()]
    return f"| {' | '.join(cells)} |"


def answers(name: str, net: Any, transform: Any, path: Path, folder: str) -> str:
    """Return how many photos a network classifies correctly, in float32 and in int8, one by one."""
    names, quantized = exported_card(Path(find_weights(name)))["outputs"], formats.FORMATS["onnx"][1](path, {})
    files, other, right = find_images([folder])[0], 0, [0, 0]
    for file in files:
        image = transform(decode(file, Decoding("RGB", None, color_profile="srgb")))[None]
        with torch.inference_mode():
            found = [names[int(one(image).argmax())] for one in (net, quantized)]
        right = [count + (answer == Path(file).parent.name) for count, answer in zip(right, found, strict=True)]
        other += found[0] != found[1]
    counts = f"{right[0]} of {len(files)} photos right in float32, {right[1]} in int8"
    return f"`{name}`: {counts}; {other} get another answer."


def main() -> None:
    """Measure, and write the page."""
    torch.set_num_threads(1)
    rows, told = [], []
    for name in (*TRAINED, *OTHERS):
        net, transform = load_trained(name) if name in TRAINED else (create_model(name).eval(), None)
        with tempfile.TemporaryDirectory() as folder:
            paths = graphs(net, Path(folder))
            rows.append(row(name, net, torch.randn(1, net.in_chans, *net.img_size), paths))
            print(rows[-1], flush=True)
            if transform and sys.argv[2:]:
                told.append(answers(name, net, transform, paths["onnx-int8"], sys.argv[2]))
                print(told[-1], flush=True)
    lines = [
        f"`{COMMAND}`",
        "",
        machine_line(facts()),
        "",
        "Time for one image with one thread, relative to onnxruntime's own call with the float32 graph: the median of",
        f"{ROUNDS} rounds in which all four take turns, with an interval of 95 %; below 1 is faster. Images are",
        "prepared. *by vitlab*: as `vitlab predict --ckpt_path FILE` calls it. *int8*: `vitlab export --to onnx-int8`.",
        f"The last {len(OTHERS)} networks have random weights and images of 224 x 224 pixels.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|" + "---|" * len(HEADINGS),
        *rows,
        *(["", *told] if told else []),
    ]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
