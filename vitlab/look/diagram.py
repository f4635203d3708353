"""Draw the architecture of a network, level by level, with the shapes of its tensors.

The first level goes from image to outputs. Three others open what it shows as one box: the tokenizer of T2T-ViT, a
block, and the head. Every shape is that of a tensor that passed through this network.
"""

from collections.abc import Callable
from itertools import groupby
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.attention import Attention
from vitlab.layers.block import Block, LayerScale
from vitlab.layers.dense_block import DenseBlock
from vitlab.layers.mlp import Mlp
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.together import acts_on_logits
from vitlab.look.sketch import SUM, THROUGH, Box, Row, Skip, svg_of
from vitlab.models.cost import count_all_parameters
from vitlab.models.foreign import AnyNetwork
from vitlab.models.hooks import after_each_call, modes_kept
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import Asked
from vitlab.tables import counted, shape_text
from vitlab.tokenizers.t2t import T2TTokenizer
from vitlab.tokenizers.token_layers import TokenPerformer, TokenTransformer

Level = Literal["network", "tokens", "block", "head"]
LEVELS: tuple[Level, ...] = get_args(Level)
TITLES: dict[Level, str] = {
    "network": "from image to outputs",
    "tokens": "inside the tokenizer",
    "block": "inside a block",
    "head": "inside the head",
}
MOST_STEPS = 24  # of a foreign network; the last ones
Rows = list[Row]


def architecture(net: Asked, name: str = "", level: Level = "network", key: str = "") -> str:
    """Return an SVG drawing of a network: from image to outputs, or of what is inside one of these steps.

    Args:
        net: The network; it runs once on a black image.
        name: What stands above it.
        level: What is drawn; see :func:`levels_of` for those that a network has.
        key: Id of the drawing, ``KEY-LEVEL`` of what is inside; boxes become links to these.

    Raises:
        UsageError: The network has no such level.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=4, embed_dim=48, depth=2, num_heads=3, num_classes=10)
        >>> "65 x 48" in architecture(net), "3 x 65 x 65" in architecture(net, level="block")
        (True, True)
    """
    if level not in (found := levels_of(net)):
        raise UsageError(f"level must be one of {', '.join(found)} for this network, got {level!r}")
    count = count_all_parameters(net)
    title = name or type(net.net if isinstance(net, AnyNetwork) else net).__name__
    if level == "network":
        steps = _steps_of_any(net) if isinstance(net, AnyNetwork) else steps_of(net, key and f"#{key}-")
        return svg_of(f"{title}: {count:,} parameters", [[step] for step in steps], key=key)
    assert isinstance(net, VisionTransformer)
    words = f"{title}, {'block 1 of ' + str(len(net.blocks)) if level == 'block' else TITLES[level]}"
    rows, skips = {"tokens": _inside_tokens, "block": _inside_block, "head": _inside_head}[level](net)
    turns = [i for i, row in enumerate(rows) if row[0].name == "unfold" and 1 < i < len(rows) - 2]
    return svg_of(words, rows, skips, key and f"{key}-{level}", turns)


def explorer(net: Asked, name: str, key: str) -> str:
    """Return HTML with the drawing of a network and, to unfold below it, what is inside its steps.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=4, embed_dim=48, depth=2, num_heads=3, num_classes=10)
        >>> explorer(net, "a network", "n0").count("<details")
        2
    """
    parts = [architecture(net, name, key=key)]
    for level in levels_of(net)[1:]:
        drawing = architecture(net, name, level, key)
        parts.append(f"<details><summary>{TITLES[level]}</summary>{drawing}</details>")
    return "".join(parts)


def levels_of(net: Asked) -> list[Level]:
    """Return the levels at which a network can be drawn.

    Example:
        >>> levels_of(VisionTransformer(img_size=32, patch_size=4, embed_dim=48, depth=2, num_heads=3))
        ['network', 'block', 'head']
    """
    if isinstance(net, AnyNetwork):
        return ["network"]
    return [level for level in LEVELS if level != "tokens" or isinstance(net.tokenizer, T2TTokenizer)]


def shapes_in(module: nn.Module, call: Callable[[], object]) -> dict[str, tuple[int, ...]]:
    """Return the output shape of each submodule of ``module``, without the batch, while ``call`` runs.

    Example:
        >>> layer = nn.Sequential(nn.Linear(4, 8), nn.GELU())
        >>> shapes_in(layer, lambda: layer(torch.zeros(1, 3, 4)))
        {'0': (3, 8), '1': (3, 8)}
    """
    found: dict[str, tuple[int, ...]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: object, output: object) -> None:
            if isinstance(output, Tensor):
                found.setdefault(name, tuple(output.shape[1:]))

        return hook

    keeping = {name: keep(name) for name, _ in module.named_modules() if name}
    with modes_kept(module), after_each_call(keeping, module), torch.no_grad():
        module.eval()
        call()
    return found


def steps_of(net: VisionTransformer, link: str = "") -> list[Box]:
    """Return the steps from image to outputs, with the shapes of one image.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=4, embed_dim=48, depth=2, num_heads=3, num_classes=10)
        >>> [step.shape for step in steps_of(net)]
        ['3 x 32 x 32', '64 x 48', '64 x 48', '65 x 48', '65 x 48', '48', '10']
    """
    (H, W), (h, w), D, P = net.img_size, net.grid_size, net.embed_dim, net.num_prefix_tokens
    N, block = h * w, net.blocks[0]
    inside = dict.fromkeys(LEVELS, "") | ({level: link + level for level in levels_of(net)} if link else {})
    channels = f"{net.in_chans} channel{'s' * (net.in_chans > 1)}"
    steps = [Box("image", channels, "e", f"{net.in_chans} x {H} x {W}"), *_tokens(net, inside["tokens"])]
    join = str(getattr(net.pos_embed, "join", None) or "none").replace("_", " ")
    where = {"stem": "added to the tokens", "none": "not added to the tokens"}.get(join, f"in {join}")
    steps.append(Box("positions", f"{type(net.pos_embed).__name__}, {where}", "c", f"{N} x {D}"))
    if P:
        prefix = ["class token"] if net.cls_token is not None else []
        prefix += [counted(net.reg_token.shape[1], "register")] if net.reg_token is not None else []
        steps.append(Box(" and ".join(prefix), "in front of the patches", "c", f"{N + P} x {D}"))
    words = type(block).__name__  # of one's own
    if isinstance(block, Block):
        hidden = getattr(getattr(block.mlp, "fc2", None), "in_features", None)
        mlp = f"MLP {D} to {hidden}" if hidden else type(block.mlp).__name__
        words = f"attention of {counted(net.num_heads, 'head')}, {mlp}"
    steps.append(Box(counted(len(net.blocks), "block"), words, "b", f"{N + P} x {D}", inside["block"]))
    steps.append(Box("norm, pool", _pooled(net), "d", f"{D}", inside["head"]))
    if net.num_classes:
        head = f"tanh layer of {net.head_hidden}" if net.head_hidden else "linear"
        steps.append(Box("head", head, "d", f"{net.num_classes}", inside["head"]))
    return steps


def _pooled(net: VisionTransformer) -> str:
    read = {"token": "the class token", "avg": "mean of the patches", "max": "maximum of the patches"}
    return read.get(str(net.global_pool), "attention over the patches")


def _tokens(net: VisionTransformer, link: str) -> list[Box]:
    """Return the steps of the tokenizer."""
    tokenizer, (h, w), D = net.tokenizer, net.grid_size, net.embed_dim
    if not isinstance(tokenizer, T2TTokenizer):
        words = f"{type(tokenizer).__name__}, one token per {net.patch_size} pixels, grid {h} x {w}"
        return [Box("tokens", words, "a", f"{h * w} x {D}")]
    found, shapes = [], _tokenizer_shapes(net)
    for i, ((y, x), (kernel, stride, _)) in enumerate(zip(tokenizer.grids, tokenizer.splits, strict=True)):
        words = f"windows of {_side(kernel)}, stride {_side(stride)}: grid {y} x {x}"
        found.append(Box(f"soft split {i + 1}", words, "a", shape_text((y * x, _window(tokenizer, i))), link))
        last = i + 1 == len(tokenizer.grids)
        layer = tokenizer.project if last else tokenizer.layers()[i]
        kinds = {"TokenPerformer": "linear attention of all tokens", "Linear": "to the width of the blocks"}
        kinds["TokenMlp"] = "each token by itself"
        name = "linear" if last else type(layer).__name__
        what = kinds.get(type(layer).__name__, "attention of all tokens")
        shape = shapes["project" if last else f"attention{i + 1}"]
        found.append(Box(name, what, "a" if last else "b", shape_text(shape), link))
    return found


def _window(tokenizer: T2TTokenizer, i: int) -> int:
    layer = (*tokenizer.layers(), tokenizer.project)[i]
    first = layer if isinstance(layer, nn.Linear) else next(m for m in layer.modules() if isinstance(m, nn.Linear))
    return first.in_features


def _tokenizer_shapes(net: VisionTransformer) -> dict[str, tuple[int, ...]]:
    return shapes_in(net.tokenizer, lambda: net.tokenizer(_black(net)))


def _black(net: VisionTransformer) -> Tensor:
    return torch.zeros(1, net.in_chans, *net.img_size, device=next(net.parameters()).device)


def _side(value: object) -> str:
    return shape_text(value if isinstance(value, tuple | list) else (value, value))


def _inside_tokens(net: VisionTransformer) -> tuple[Rows, list[Skip]]:
    """Return the T2T module: soft split, token layer, reshape, and so on."""
    tokenizer = net.tokenizer
    assert isinstance(tokenizer, T2TTokenizer)
    shapes, (H, W) = _tokenizer_shapes(net), net.img_size
    rows: Rows = [[Box("image", "", "e", f"{net.in_chans} x {H} x {W}")]]
    skips: list[Skip] = []
    for i, ((y, x), (kernel, stride, padding)) in enumerate(zip(tokenizer.grids, tokenizer.splits, strict=True)):
        words = f"windows of {_side(kernel)}, stride {_side(stride)}, padding {padding}, as rows"
        rows.append([Box("unfold", words, "a", shape_text((y * x, _window(tokenizer, i))))])
        if i + 1 == len(tokenizer.grids):
            rows.append([Box("linear", "to the width of the blocks", "a", shape_text(shapes["project"]))])
            break
        layer, name = tokenizer.layers()[i], f"attention{i + 1}"
        inside, skip = _inside_token_layer(layer, name, y * x, shapes)
        skips += [Skip(s.start + len(rows), s.end + len(rows), s.side) for s in skip]
        width = shapes[name][1]
        rows += [*inside, [Box("reshape", "tokens become an image again", "c", f"{width} x {y} x {x}")]]
    return rows, skips


def _inside_token_layer(
    layer: nn.Module, name: str, N: int, shapes: dict[str, tuple[int, ...]]
) -> tuple[Rows, list[Skip]]:
    """Return the steps of a token transformer or performer on N tokens; of another class, one box."""
    if isinstance(layer, TokenPerformer):
        d, m, kind = layer.w.shape[1], layer.w.shape[0], "ReLU" if layer.relu else "exponential"
        three, qkv = layer.kqv, [Box(one, "", "b", f"{N} x {d}") for one in ("queries", "keys", "values")]
        attention: Rows = [
            [Box("features", "", "b", f"{N} x {m}"), Box("features", "", "b", f"{N} x {m}"), THROUGH],
            [THROUGH, Box("keys times values", "no map of all pairs", "b", f"{m} x {d}", span=2)],
            [Box("queries times that", f"{kind} features, divided by their sums", "b", f"{N} x {d}")],
        ]
        wide, act_layer = layer.mlp[0], layer.mlp[1]
        assert isinstance(wide, nn.Linear)
        skips_values, hidden, act = layer.value_skip, wide.out_features, type(act_layer).__name__
    elif isinstance(layer, TokenTransformer):
        attn = layer.attn
        A, d = attn.num_heads, attn.proj.in_features // attn.num_heads
        pairs = f"{A} x {N} x {N}"
        three, qkv = attn.qkv, [Box(one, "", "b", f"{A} x {N} x {d}") for one in ("queries", "keys", "values")]
        attention = [
            [Box("scores", f"queries times keys, times {attn.scale:.3g}", "b", pairs, span=2), THROUGH],
            [Box("softmax", "each row sums to 1", "b", pairs, span=2), THROUGH],
            [Box("weights times values", "heads side by side", "b", f"{N} x {A * d}")],
        ]
        skips_values, hidden, act = attn.value_skip, layer.mlp.fc1.out_features, type(layer.mlp.act).__name__
    else:
        return [[Box(type(layer).__name__, "", "b", shape_text(shapes[name]))]], []
    D = shapes[name][1]
    rows: Rows = [
        [Box("norm", type(layer.norm1).__name__, "d", shape_text(shapes[f"{name}.norm1"]))],
        [Box("qkv", "linear, three in one", "b", f"{N} x {three.out_features}")],
        qkv,
        *attention,
        [Box("projection", "linear", "b", f"{N} x {D}")],
    ]
    skips = []
    if skips_values:  # not from the input, which has another width
        rows.append(SUM)
        skips.append(Skip(2, len(rows) - 1, "right"))
    start = len(rows) - 1
    rows += _mlp_rows(type(layer.norm2).__name__, f"{N} x {D}", f"{N} x {hidden}", act)
    return rows, [*skips, Skip(start, len(rows) - 1)]


def _mlp_rows(norm: str, shape: str, hidden: str, act: str, scale: bool = False) -> Rows:
    rows: Rows = [
        [Box("norm", norm, "d", shape)],
        [Box("MLP, first layer", f"linear, then {act}", "a", hidden)],
        [Box("MLP, second layer", "linear", "a", shape)],
    ]
    return [*rows, *([[Box("layer scale", "a factor per channel", "d", shape)]] if scale else []), SUM]


def _inside_block(net: VisionTransformer) -> tuple[Rows, list[Skip]]:
    """Return the steps of the first block; those of a class of one's own are its parts, in the order of their calls."""
    block, image = net.blocks[0], _black(net)
    with modes_kept(net), torch.no_grad():
        x = net.eval().embed(image)
        shapes = shapes_in(block, lambda: block(x, net.positions(image), 0))
    L, D = x.shape[1:]
    rows: Rows = [[Box("tokens", "that enter the block", "e", f"{L} x {D}")]]
    known = isinstance(block, Block) and type(block) in (Block, DenseBlock)
    if not known or not isinstance(block.attn, Attention) or not isinstance(block.mlp, Mlp):
        kinds = {name: type(part).__name__ for name, part in block.named_modules()}
        own = [Box(name, kinds[name], "b", shape_text(shape)) for name, shape in shapes.items() if "." not in name]
        return [*rows, *([one] for one in own)], []
    attn = block.attn
    rows.append([Box("norm", type(block.norm1).__name__, "d", shape_text(shapes["norm1"]))])
    rows.append([Box("qkv", "linear, three in one", "b", shape_text(shapes.get("attn.qkv", (L, 3 * D))))])
    rows += _attention_rows(attn, net.pos_embed, L, shape_text(shapes.get("attn", (L, D))))
    if isinstance(block.ls1, LayerScale):
        rows.append([Box("layer scale", "a factor per channel", "d", f"{L} x {D}")])
    rows.append(SUM)
    middle = len(rows) - 1
    act = type(block.mlp.act).__name__ + (", gated" if block.mlp.gated else "")
    hidden, scale = f"{L} x {block.mlp.fc2.in_features}", isinstance(block.ls2, LayerScale)
    rows += _mlp_rows(type(block.norm2).__name__, f"{L} x {D}", hidden, act, scale)
    skips = [Skip(0, middle), Skip(middle, len(rows) - 1)]
    if isinstance(block, DenseBlock):
        out = D + block.dense_linear.out_features
        rows.append([Box("concatenate", "a linear map of the tokens is appended", "c", f"{L} x {out}")])
        D = out
    return [*rows, [Box("tokens", "that leave the block", "e", f"{L} x {D}")]], skips


def _attention_rows(attn: Attention, pos_embed: PosEmbed, L: int, end: str) -> Rows:
    """Return multi-head attention of L tokens: a column each for queries, keys and values."""
    A, d = attn.num_heads, attn.proj.in_features // attn.num_heads
    shape, pairs = f"{A} x {L} x {d}", f"{A} x {L} x {L}"
    rows: Rows = [[Box(word, "", "b", shape) for word in ("queries", "keys", "values")]]
    positions = type(pos_embed).__name__
    if not isinstance(attn.q_norm, nn.Identity):
        rows.append([Box("norm of each head", "queries and keys", "d", shape, span=2), THROUGH])
    if type(pos_embed).rotate is not PosEmbed.rotate:
        rows.append([Box("positions", f"{positions} rotates queries and keys", "c", shape, span=2), THROUGH])
    rows.append([Box("scores", f"queries times keys, times {attn.qk_scale:.3g}", "b", pairs, span=2), THROUGH])
    if acts_on_logits(pos_embed):
        rows.append([Box("positions", f"{positions} adds to the scores", "c", pairs, span=2), THROUGH])
    weigh = "each row sums to 1" if attn.is_softmax else f"weights of {type(attn).__name__}"
    rows.append([Box("softmax" if attn.is_softmax else "weights", weigh, "b", pairs, span=2), THROUGH])
    rows.append([Box("weights times values", "of each head", "b", shape)])
    gate = ", gated by the tokens" if attn.gate is not None else ""
    rows.append([Box("heads side by side", f"then a linear projection{gate}", "b", end)])
    return rows


def _inside_head(net: VisionTransformer) -> tuple[Rows, list[Skip]]:
    """Return what turns the tokens into outputs."""
    L = net.grid_size[0] * net.grid_size[1] + net.num_prefix_tokens
    D, rows = net.num_features, [[Box("tokens", "that leave the last block", "e", f"{L} x {net.num_features}")]]
    before = not isinstance(net.norm, nn.Identity)
    norm = Box("norm", type(net.norm if before else net.fc_norm).__name__, "d", f"{L} x {D}" if before else f"{D}")
    pool = Box("pool", _pooled(net), "c", f"{D}")
    rows += [[one] for one in ((norm, pool) if before else (pool, norm))]
    if net.head_hidden:
        rows.append([Box("linear, tanh", "as in the pre-training of ViT", "a", f"{net.head_hidden}")])
    if net.num_classes:
        rows.append([Box("linear", "one number for each output", "a", f"{net.num_classes}")])
    return [*rows], []


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
        steps.append(Box(title, words, colors[i % len(colors)], shape_text(shape)))
    return [*steps, Box("head", "linear" if net.head_name else "not linear", "d", f"{net.num_classes}")]
