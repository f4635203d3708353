"""Which ViTs of transformers and torchvision vitlab reads with equal outputs: writes the end of docs/timm.md.

See ``COMMAND``. Nothing is fetched: networks have the sizes of published ones, two blocks and random parameters.
"""

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision
import transformers
from torch import nn

from vitlab.models.convert_peers import peer_file, peer_outputs
from vitlab.models.load import load_weights
from vitlab.models.vit import VisionTransformer

COMMAND = "python benchmarks/peers_table.py docs/timm.md"
MARK = "<!-- peers -->"
DEPTH = 2
CLASSES = 10
TOLERANCE = 1e-5  # of the largest output
INTRODUCTION = f"""{MARK}

## Networks of transformers and torchvision

`vitlab.create_model("hf:NAME")` reads a ViT of Hugging Face's transformers, and `"hf:FOLDER"` one that
`save_pretrained` wrote, where nothing is downloaded. `"torchvision:vit_b_16"` reads one of torchvision.
`--init_from`, `analyze`, `look` and `vitlab.load` take these names, too, and prepare images as the libraries do.
Each call compares the outputs of both, and refuses a network that differs: the logits; without a head the
normalized class token; of SigLIP the pooled features. A folder whose head is refused below is read without it,
with a warning. A network is built for the size in its configuration, and its images are prepared to that; where its
processor has another, as 224 of DINOv2's 518 pixels, a warning says so, and `img_size=224` takes that one. Pixels
that fill no patch, such as the last 6 of 384 in patches of 14, are not read: images are resized to the other 378.
`vitlab.load` refuses a folder without an image processor. transformers {{transformers}}, torchvision {{torchvision}};
`{COMMAND}` wrote this part.

Networks have the width, heads, patches and resolution of published ones, **{DEPTH} blocks in place of all** and random
parameters. The largest difference is that of two random images, relative to the largest output, or to 1.

| class | sizes | equal, worst | refused |
|---|---|---|---|
"""


class Size(NamedTuple):
    """The size of a published network.

    Args:
        name: What it is called.
        width: Of tokens.
        heads: Attention heads.
        hidden: Width of the MLP.
        patch: Side of a patch.
        side: Of the images.
        more: Other arguments of its configuration.
    """

    name: str
    width: int
    heads: int
    hidden: int
    patch: int = 16
    side: int = 224
    more: tuple[tuple[str, Any], ...] = ()


def sizes(patch: int, side: int, names: str, *more: tuple[str, Any]) -> list[Size]:
    """Return the usual sizes of the names tiny, small, base and large.

    >>> sizes(16, 224, "tiny")[0].heads
    3
    """
    heads = {"tiny": 3, "small": 6, "base": 12, "large": 16}
    return [Size(n, 64 * heads[n], heads[n], 256 * heads[n], patch, side, more) for n in names.split()]


VIT = [*sizes(16, 224, "tiny small base large"), *sizes(32, 384, "base")]
DEIT = [*sizes(16, 224, "tiny small base"), *sizes(16, 384, "base")]
DINOV2 = [*sizes(14, 518, "small base large"), Size("giant", 1536, 24, 6144, 14, 518, (("use_swiglu_ffn", True),))]
PLUS = (("use_gated_mlp", True), ("hidden_act", "silu"), ("num_register_tokens", 4))
DINOV3 = [*sizes(16, 224, "small base large", ("num_register_tokens", 4)), Size("small plus", 384, 6, 1536, more=PLUS)]
DINOV3.append(Size("huge plus", 1280, 20, 5120, more=PLUS))
SIGLIP = [*sizes(16, 224, "base large"), Size("so400m", 1152, 16, 4304, 14, 384)]
NETWORKS: dict[str, tuple[str, list[Size]]] = {
    "ViTModel": ("ViTConfig", VIT),
    "ViTForImageClassification": ("ViTConfig", VIT),
    "DeiTModel": ("DeiTConfig", DEIT),
    "DeiTForImageClassification": ("DeiTConfig", DEIT),
    "DeiTForImageClassificationWithTeacher": ("DeiTConfig", DEIT[:1]),
    "Dinov2Model": ("Dinov2Config", DINOV2),
    "Dinov2ForImageClassification": ("Dinov2Config", DINOV2[:1]),
    "Dinov2WithRegistersModel": ("Dinov2WithRegistersConfig", DINOV2),
    "DINOv3ViTModel": ("DINOv3ViTConfig", DINOV3),
    "SiglipVisionModel": ("SiglipVisionConfig", SIGLIP),
    "SiglipForImageClassification": ("SiglipConfig", SIGLIP[:1]),
}
TORCHVISION = {"vit_b_16": 768, "vit_b_32": 768, "vit_l_16": 1024, "vit_l_32": 1024, "vit_h_14": 1280}  # widths


def build(name: str, config: str, size: Size) -> nn.Module:
    """Return the network of transformers with random parameters, two blocks deep."""
    options = {"hidden_size": size.width, "num_attention_heads": size.heads, "num_hidden_layers": DEPTH}
    options |= {"intermediate_size": size.hidden, "patch_size": size.patch, "image_size": size.side, **dict(size.more)}
    if config == "SiglipConfig":
        options = {"vision_config": options, "text_config": {"hidden_size": 64, "num_hidden_layers": 1}}
    kind = getattr(transformers, config)(**options, num_labels=CLASSES)
    net: nn.Module = getattr(transformers, name)(kind)
    return net


def compare(theirs: nn.Module, name: str) -> float | str:
    """Return the largest relative difference of outputs, or why the network is refused."""
    with torch.no_grad():
        for p in theirs.eval().parameters():
            p.add_(0.02 * torch.randn_like(p))
    try:
        file = peer_file(theirs, name)
    except ValueError as error:
        return str(error).split(" here: ")[-1]
    ours = VisionTransformer(**file.arguments).eval()
    load_weights(ours, file)
    images = torch.randn(2, ours.in_chans, *ours.img_size)
    expected = peer_outputs(theirs, images)
    with torch.no_grad():
        return float((ours(images) - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def row(name: str, found: dict[str, float | str]) -> str:
    """Return the row of a class."""
    equal = [value for value in found.values() if isinstance(value, float) and value <= TOLERANCE]
    wrong = [f"{size} DIFFERS by {v:.0e}" for size, v in found.items() if isinstance(v, float) and not v <= TOLERANCE]
    refused = {value for value in found.values() if isinstance(value, str)}
    cell = f"{len(equal)}, {max(equal):.1e}" if equal else ""
    print(name, cell, *refused, *wrong, file=sys.stderr, flush=True)
    return f"| `{name}` | {', '.join(found)} | {cell} | {'; '.join([*sorted(refused), *wrong])} |"


def main() -> None:
    """Compare all, and write the end of the page."""
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rows = []
    for name, (config, of_class) in NETWORKS.items():
        labels = [f"{size.name}/{size.patch} at {size.side}" for size in of_class]
        found = {label: compare(build(name, config, s), "hf") for label, s in zip(labels, of_class, strict=True)}
        rows.append(row(name, found))
    found = {}
    for name, width in TORCHVISION.items():
        patch, hidden = int(name[-2:]), 5120 if width == 1280 else 4 * width
        args = (224, patch, DEPTH, width // (80 if width == 1280 else 64), width, hidden)
        found[name] = compare(torchvision.models.VisionTransformer(*args, num_classes=CLASSES), f"torchvision:{name}")
    rows.append(row("torchvision VisionTransformer", found))
    page = Path(sys.argv[1])
    before = page.read_text().partition(MARK)[0].rstrip()
    text = INTRODUCTION.format(transformers=transformers.__version__, torchvision=torchvision.__version__)
    page.write_text("\n\n".join([before, text + "\n".join(rows)]) + "\n")


if __name__ == "__main__":
    main()
