"""The data of the picture viewer: maps of every layer and head, small enough for one page."""

import base64
import io
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitlab.analysis.attribution.maps import SIGNED, methods_of, occlusion
from vitlab.analysis.parts import reads_token
from vitlab.analysis.pictures import as_image
from vitlab.analysis.subject import Subject
from vitlab.analysis.views.pca import pca_colors, placed_by_blocks
from vitlab.analysis.views.token_layers import token_layer_maps
from vitlab.layers.resample import Grid
from vitlab.look.analysis_page import data_url
from vitlab.models.cost import count_all_parameters
from vitlab.models.walk import (
    CELLS_LOST,
    Asked,
    all_attention_maps,
    heads_of,
    keeps_tokens,
    outputs,
    probabilities,
)
from vitlab.tokenizers.t2t import T2TTokenizer

BUDGET = 4_500_000  # bytes of the maps between patches in a page, two each, before they become text
TOGETHER = 1_000_000  # weights of attention of a head, of all pictures with the classes that are computed at once
PASSES = 2_400  # of occlusion for all pictures; where it takes more, neighboring patches are covered together
SPLITS = 600_000  # bytes of the maps of each token layer of T2T
MOST_CLASSES, FEW_CLASSES = 9, 2  # beside the predicted one, whose maps there are: of small networks, and of large ones
SMALL = 100_000_000  # products of a small network's forward pass, about: its parameters times its patches
POOLS = ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4), (8, 8))  # cells of queries and keys: so many patches a side


def pictures_of(
    subject: Subject, budget: int = BUDGET, count: int = 12, has_gradients: bool = True
) -> list[dict[str, Any]]:
    """Return for each image its pixels, prediction and maps as text.

    Args:
        subject: The network with its pictures.
        budget: Bytes that all maps between patches may have, two each; where they have more, patches share a cell.
        count: Pictures at most.
        has_gradients: Whether maps that need gradients, dozens of passes, are among them.
    """
    images, net = subject.shown(count), subject.net
    heads = seen_heads(net)
    query, key = pools(net.grid_size, sum(heads) * len(images), budget)
    scores = outputs(net, images)
    shares = probabilities(net, scores)
    classes, has_head = scores.argmax(dim=1), subject.scores_classes
    maps = _maps_of_no_class(net, images, classes) if has_head else {}
    maps |= _maps_of_classes(net, images, classes) if has_head and has_gradients else {}
    truth, names = subject.shown_classes(count) if has_head else [], subject.class_names
    others = _of_other_classes(net, images, scores, truth) if has_head and has_gradients else []
    colors, t2t = _colors(net, images), _t2t_of(net)
    found = []
    for i, pixels in enumerate(subject.pixels(images).numpy()):
        k, share = int(classes[i]), float(shares[i].max())
        said = f"{subject.called(k)}, {share:.0%}" if has_head else ""
        entry: dict[str, Any] = {"src": picture_url(pixels), "said": said}
        if has_head:
            entry["class"] = k
            entry["target"] = names[truth[i]] if i < len(truth) and truth[i] in range(len(names)) else ""
        if heads:
            attention = _attention(net, images[i : i + 1])
            cells = attention[..., net.num_prefix_tokens :, net.num_prefix_tokens :]
            entry["cells"] = packed(pooled(cells, net.grid_size, query, key))
            if net.cls_token is not None:  # else the first token is a patch or a register
                entry["token"] = packed(attention[:, :, 0, net.num_prefix_tokens :])
        entry["maps"] = _packed_maps(maps, i)
        entry["targets"] = {
            which[i]: {"name": subject.called(which[i]), "maps": _packed_maps(of_these, i)}
            for which, of_these in others
        }
        layers = zip(t2t.grids, token_layer_maps(t2t, images[i : i + 1]), strict=False) if t2t else ()
        entry["splits"] = [packed(pooled(x[None], grid, *pools(grid, len(images), SPLITS))) for grid, x in layers]
        entry["colors"] = {name: _base64((each[i] * 255).round().to(torch.uint8)) for name, each in colors.items()}
        found.append(entry)
    return found


def _packed_maps(maps: dict[str, Tensor], i: int) -> dict[str, dict[str, Any]]:
    return {name: packed(each[i], name.startswith(SIGNED)) for name, each in maps.items()}


def _of_other_classes(
    net: Asked, images: Tensor, scores: Tensor, truth: list[int]
) -> list[tuple[list[int], dict[str, Tensor]]]:
    """Return further classes of the images, ``(B,)`` each, with the maps of these: the true one, then the likely ones.

    Of rollout and attention there is one map for all classes.
    """
    is_small = count_all_parameters(net) * net.grid_size[0] * net.grid_size[1] <= SMALL
    most = min(MOST_CLASSES if is_small else FEW_CLASSES, scores.shape[1] - 1)
    if not most:
        return []
    order = scores.argsort(dim=1, descending=True).tolist()
    rows = []
    for i, ranked in enumerate(order):
        first = [truth[i]] if i < len(truth) and truth[i] in ranked[1:] else []
        rows.append([*first, *(k for k in ranked[1:] if k not in first)][:most])
    together = TOGETHER // (len(images) * net.grid_size[0] ** 2 * net.grid_size[1] ** 2) if is_small else 1
    found = []
    for some in torch.tensor(rows, device=images.device).split(max(together, 1), dim=1):
        count = some.shape[1]  # of the (B, K) classes
        maps = _maps_of_classes(net, images.repeat_interleave(count, dim=0), some.flatten(), count)
        apart = {name: each.unflatten(0, (-1, count)) for name, each in maps.items()}
        found += [(some[:, k].tolist(), {name: each[:, k] for name, each in apart.items()}) for k in range(count)]
    return found


def _t2t_of(net: Asked) -> T2TTokenizer | None:
    tokenizer = getattr(net, "tokenizer", None)
    return tokenizer if isinstance(tokenizer, T2TTokenizer) else None


def _attention(net: Asked, image: Tensor) -> Tensor:
    """Return the attention of all layers for one image, ``(depth, A, L, L)``; see :func:`seen_heads`."""
    with torch.no_grad():
        return torch.stack([maps[0] for maps in all_attention_maps(net, image)])


def seen_heads(net: Asked) -> list[int]:
    """Return the number of heads of each layer; empty where layers differ or have none, which :func:`unseen` says.

    Example:
        >>> from vitlab.models.vit import VisionTransformer
        >>> seen_heads(VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3))
        [3, 3]
    """
    found = set(heads_of(net))
    return heads_of(net) if len(found) == 1 and found != {0} and keeps_tokens(net) else []


def unseen(net: Asked) -> str:
    """Return why a page has no attention of layers and heads; empty if it has.

    Example:
        >>> from vitlab.models.vit import VisionTransformer
        >>> unseen(VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3))
        ''
    """
    if seen_heads(net):
        return ""
    if not any(heads := heads_of(net)):
        return "no attention with a weight for each pair of patches"
    if not keeps_tokens(net):
        return f"the blocks change the number of tokens: {CELLS_LOST}"
    return f"the layers have {', '.join(map(str, heads))} heads, not as many each: vitlab analyze heads draws them"


def _colors(net: Asked, images: Tensor) -> dict[str, Tensor]:
    """Return the colors of the features before, half way through and after the blocks, ``(B, N, 3)`` on the grid."""
    tokens = placed_by_blocks(net, images)
    there, colors = list(tokens), {}
    for passed in sorted({there[0], there[len(there) // 2], there[-1]}) if there else []:
        features, grid = tokens[passed]
        found = pca_colors(features)[0].unflatten(1, grid).permute(0, 3, 1, 2)
        colors[str(passed)] = F.interpolate(found, net.grid_size, mode="nearest").flatten(2).transpose(1, 2)
    return colors


def _maps_of_no_class(net: Asked, images: Tensor, classes: Tensor) -> dict[str, Tensor]:
    """Return the ``(B, N)`` maps that are the same for all classes; of single heads the page has all."""
    methods = methods_of(net)
    shown = {"rollout": "rollout"}
    if not reads_token(net):  # else it is the class token's row
        shown = {"attention": "attention that the head reads", **shown}
    return {title: methods[name](net, images, classes) for name, title in shown.items() if name in methods}


def _maps_of_classes(net: Asked, images: Tensor, classes: Tensor, repeats: int = 1) -> dict[str, Tensor]:
    """Return the ``(B, N)`` maps of one class for each picture, which need gradients or dozens of passes.

    Each picture may stand there several times in a row, with another class each.
    """
    others = ("attention", "rollout", "occlusion")
    found = {name: method(net, images, classes) for name, method in methods_of(net).items() if name not in others}
    (h, w), count = net.grid_size, len(images) // repeats
    side = next(n for n in range(1, max(h, w) + 1) if -(-h // n) * -(-w // n) * count <= PASSES or n == max(h, w))
    name = "occlusion" if side == 1 else f"occlusion, {side} x {side} patches together"
    return found | {name: occlusion(net, images, classes, side)}


def shape_of(subject: Subject, count: int, budget: int = BUDGET) -> dict[str, Any]:
    """Return the sizes that the viewer needs to decode the maps.

    ``query`` and ``key`` are pooling factors on ``grid``; of a token layer of T2T, they stand behind its own grid.
    """
    net = subject.net
    (H, W), heads = net.img_size, seen_heads(net)
    query, key = pools(net.grid_size, sum(heads) * count, budget)
    grids = t2t.grids[:-1] if (t2t := _t2t_of(net)) else []  # no token layer follows the last split
    splits = [(grid, *pools(grid, count, SPLITS)) for grid in grids]
    return {
        "depth": len(heads),
        "heads": max(heads, default=0),
        "grid": list(net.grid_size),
        "query": query,
        "key": key,
        "ratio": round(W / H, 4),
        "name": subject.name,
        "unseen": unseen(net),
        "splits": [{"query": [*grid, of_queries], "key": [*grid, of_keys]} for grid, of_queries, of_keys in splits],
    }


def pools(grid: Grid, maps: int, budget: int) -> tuple[int, int]:
    """Return the pooling factors for queries and keys that keep so many maps between patches within the budget.

    Example:
        >>> pools((14, 14), maps=72, budget=BUDGET), pools((14, 14), maps=12 * 72, budget=BUDGET)
        ((2, 1), (2, 2))
    """
    h, w = grid
    for query, key in POOLS:
        if -(-h // query) * -(-w // query) * -(-h // key) * -(-w // key) * maps * 2 <= budget:
            break
    return query, key


def pooled(maps: Tensor, grid: Grid, query: int, key: int) -> Tensor:
    """Pool ``(depth, A, N, N)`` attention on a grid of N patches over queries and keys to ``(depth, A, n, m)``.

    The patch in row y lies in row ``y // query`` of the n cells, and so in columns; the last may have fewer patches.
    """
    (h, w), lead = grid, maps.shape[:2]
    rows = F.avg_pool2d(maps.flatten(0, 2).unflatten(1, (1, h, w)), key, ceil_mode=True).flatten(1)  # (depth A N, m)
    columns = rows.view(-1, h, w, rows.shape[1]).permute(0, 3, 1, 2)  # (depth A, m, h, w)
    cells = F.avg_pool2d(columns, query, ceil_mode=True).flatten(2).transpose(1, 2)
    return cells.unflatten(0, lead)


def picture_url(pixels: NDArray[np.floating], side: int = 224) -> str:
    """Return ``(H, W, C)`` values in [0, 1] as a data URL: JPEG if 100 pixels or more are side by side, else PNG."""
    image = as_image(pixels)
    small = max(image.size) < 100
    if not small and max(image.size) > 2 * side:
        image.thumbnail((2 * side, 2 * side))
    file = io.BytesIO()
    image.save(file, "PNG" if small else "JPEG", **({} if small else {"quality": 82}))
    return data_url(file.getvalue(), "png" if small else "jpeg")


def packed(values: Tensor, signed: bool = False) -> dict[str, Any]:
    """Return values as 16 bits each and one scale for all: number ``low + code * (high - low) / 65535``.

    Args:
        values: Numbers of any shape; from 0 on if none is negative. What is not finite becomes 0.
        signed: Whether they have a sign that is to be drawn.

    Example:
        >>> packed(torch.tensor([0.0, 0.5, 2.0]))
        {'text': 'AAAAQP//', 'low': 0.0, 'high': 2.0, 'signed': False}
    """
    values = values.detach().double().cpu()
    values = torch.where(values.isfinite(), values, 0.0)
    low, high = min(0.0, float(values.min())), float(values.max())
    codes = ((values - low) / max(high - low, 1e-300) * 65535).round().numpy().astype("<u2")
    return {"text": base64.b64encode(codes.tobytes()).decode(), "low": low, "high": high, "signed": signed}


def _base64(values: Tensor) -> str:
    return base64.b64encode(values.cpu().numpy().tobytes()).decode()
