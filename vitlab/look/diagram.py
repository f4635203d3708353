"""Draw the architecture of a network, with the shapes of its tensors."""

from html import escape
from itertools import groupby
from typing import NamedTuple

import torch

from vitlab.analysis.views.token_layers import split_features
from vitlab.layers.block import Block
from vitlab.models.foreign import AnyNetwork
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import Asked
from vitlab.tokenizers.t2t import T2TTokenizer

WIDE, HIGH, GAP, LEFT, SIDE = 300, 46, 26, 30, 140  # pixels: a box, the way between two, the borders
MOST_STEPS = 24  # of a foreign network; the last ones
STYLE = """<style>
.vl{color:#1c2024}@media (prefers-color-scheme:dark){.vl{color:#e6e7ea}}
.vl text{font:13px system-ui,sans-serif;fill:currentColor}.vl .s{font-size:11px;opacity:.75}
.vl rect{stroke:currentColor;stroke-width:1;rx:6}.vl path{stroke:currentColor;fill:none}
.vl .a{fill:#56B4E933}.vl .b{fill:#E69F0033}.vl .c{fill:#009E7333}.vl .d{fill:#CC79A733}.vl .e{fill:none}
</style>"""


class Box(NamedTuple):
    """A step: its name, description, color and output shape."""

    name: str
    words: str
    kind: str
    shape: str


def steps_of(net: VisionTransformer) -> list[Box]:
    """Return the steps from image to outputs, with the shapes of one image.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=4, embed_dim=48, depth=2, num_heads=3, num_classes=10)
        >>> [step.shape for step in steps_of(net)]
        ['3 x 32 x 32', '64 x 48', '64 x 48', '65 x 48', '65 x 48', '48', '10']
    """
    (H, W), (h, w), D, P = net.img_size, net.grid_size, net.embed_dim, net.num_prefix_tokens
    N, block = h * w, net.blocks[0]
    steps = [
        Box("image", f"{net.in_chans} channel{'s' * (net.in_chans > 1)}", "e", f"{net.in_chans} x {H} x {W}"),
        *_tokens(net),
    ]
    join = str(getattr(net.pos_embed, "join", None) or "none").replace("_", " ")
    where = {"stem": "added to the tokens", "none": "not added to the tokens"}.get(join, f"in {join}")
    steps.append(Box("positions", f"{type(net.pos_embed).__name__}, {where}", "c", f"{N} x {D}"))
    if P:
        prefix = ["class token"] if net.cls_token is not None else []
        prefix += [f"{net.reg_token.shape[1]} registers"] if net.reg_token is not None else []
        steps.append(Box(" and ".join(prefix), "in front of the patches", "c", f"{N + P} x {D}"))
    words = type(block).__name__  # of one's own
    if isinstance(block, Block):
        hidden = getattr(getattr(block.mlp, "fc2", None), "in_features", None)
        words = f"attention of {net.num_heads} heads, " + (
            f"MLP {D} to {hidden}" if hidden else type(block.mlp).__name__
        )
    steps.append(Box(f"{len(net.blocks)} blocks", words, "b", f"{N + P} x {D}"))
    read = {"token": "the class token", "avg": "mean of the patches", "max": "maximum of the patches"}
    steps.append(Box("norm, pool", read.get(str(net.global_pool), "attention over the patches"), "d", f"{D}"))
    if net.num_classes:
        words = f"tanh layer of {net.head_hidden}" if net.head_hidden else "linear"
        steps.append(Box("head", words, "d", f"{net.num_classes}"))
    return steps


def _tokens(net: VisionTransformer) -> list[Box]:
    """Return the steps of the tokenizer."""
    tokenizer, (h, w), D = net.tokenizer, net.grid_size, net.embed_dim
    if not isinstance(tokenizer, T2TTokenizer):
        words = f"{type(tokenizer).__name__}, one token per {net.patch_size} pixels, grid {h} x {w}"
        return [Box("tokens", words, "a", f"{h * w} x {D}")]
    found = []
    image = torch.zeros(1, net.in_chans, *net.img_size, device=next(net.parameters()).device)
    names = [type(layer).__name__ for layer in tokenizer.layers()]
    for i, (windows, features) in enumerate(split_features(tokenizer, image)):
        (y, x), (kernel, stride, _) = tokenizer.grids[i], tokenizer.splits[i]
        words = f"windows of {_side(kernel)}, stride {_side(stride)}: grid {y} x {x}"
        found.append(Box(f"soft split {i + 1}", words, "a", f"{y * x} x {windows.shape[2]}"))
        name = names[i] if i < len(names) else "linear"
        kinds = {"TokenPerformer": "linear attention of all tokens", "linear": "to the width of the blocks"}
        what = kinds.get(name, "attention of all tokens")
        found.append(Box(name, what, "b" if i < len(names) else "a", f"{y * x} x {features.shape[1]}"))
    return found


def _side(value: object) -> str:
    return " x ".join(map(str, value)) if isinstance(value, tuple | list) else f"{value} x {value}"


def _steps_of_any(net: AnyNetwork) -> list[Box]:
    """Return the steps of another network: its layers, those of one class and shape together."""
    (H, W), colors = net.img_size, "abcd"
    steps = [Box("image", f"{net.in_chans} channel{'s' * (net.in_chans > 1)}", "e", f"{net.in_chans} x {H} x {W}")]
    rows = [(key, [*group]) for key, group in groupby(net.layers, key=lambda layer: (layer.kind, layer.shape))]
    if len(rows) > MOST_STEPS:
        steps.append(Box("...", f"{len(rows) - MOST_STEPS} more steps", "e", ""))
    for i, ((kind, shape), layers) in enumerate(rows[-MOST_STEPS:]):
        where = layers[0].name + (f" to {layers[-1].name}" if len(layers) > 1 else "")
        title = f"{len(layers)} {kind}" if len(layers) > 1 else kind
        words = where if len(where) <= 44 else f"{where[:41]}..."
        steps.append(Box(title, words, colors[i % len(colors)], " x ".join(map(str, shape))))
    return [*steps, Box("head", "linear" if net.head_name else "not linear", "d", f"{net.num_classes}")]


def architecture(net: Asked, name: str = "") -> str:
    """Return an SVG drawing of a network from image to outputs.

    Args:
        net: The network; its tokenizer runs once on a black image.
        name: What stands above it.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=4, embed_dim=48, depth=2, num_heads=3, num_classes=10)
        >>> "65 x 48" in architecture(net)
        True
    """
    steps = _steps_of_any(net) if isinstance(net, AnyNetwork) else steps_of(net)
    height = 40 + len(steps) * (HIGH + GAP)
    count = sum(p.numel() for p in net.parameters())
    title = escape(f"{name or type(net.net if isinstance(net, AnyNetwork) else net).__name__}: {count:,} parameters")
    parts = [
        f'<svg class="vl" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDE + SIDE} {height}" '
        f'width="{LEFT + WIDE + SIDE}" role="img" aria-label="{title}">{STYLE}',
        f'<text x="{LEFT}" y="20">{title}</text>',
        '<defs><marker id="vl-tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L6 3L0 6" /></marker></defs>',
    ]
    for i, step in enumerate(steps):
        top = 36 + i * (HIGH + GAP)
        parts.append(f'<rect class="{step.kind}" x="{LEFT}" y="{top}" width="{WIDE}" height="{HIGH}"/>')
        parts.append(f'<text x="{LEFT + 12}" y="{top + 19}">{escape(step.name)}</text>')
        parts.append(f'<text class="s" x="{LEFT + 12}" y="{top + 36}">{escape(step.words)}</text>')
        middle, end = LEFT + WIDE / 2, top + HIGH
        tip = ' marker-end="url(#vl-tip)"' if i + 1 < len(steps) else ""
        parts.append(f'<path d="M{middle} {end}v{GAP - 2 if tip else 10}"{tip}/>' if tip else "")
        parts.append(f'<text x="{LEFT + WIDE + 14}" y="{top + 27}">{escape(step.shape)}</text>')
    return "".join(parts) + "</svg>"
