"""The data of the picture viewer: maps of every layer and head, small enough for one page."""

import base64
import io
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitlab.analysis.attribution.maps import METHODS, caught_maps
from vitlab.analysis.subject import Subject
from vitlab.analysis.views.pca import pca_colors
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import block_tokens, outputs

BUDGET = 4_000_000  # bytes of the maps between patches in a page, before they become text
POOLS = ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4), (8, 8))  # cells of queries and keys: so many patches a side


def pictures_of(
    subject: Subject, budget: int = BUDGET, count: int = 12, has_gradients: bool = True
) -> list[dict[str, Any]]:
    """Return for each image its pixels, prediction and maps as text.

    Args:
        subject: The network with its pictures.
        budget: Bytes that all maps between patches may have; where they have more, patches share a cell.
        count: Pictures at most.
        has_gradients: Whether maps that need gradients, dozens of passes, are among them.
    """
    images, net = subject.shown(count), subject.net
    query, key = pools(net, len(images), budget)
    scores = outputs(net, images)
    classes, has_head = scores.argmax(dim=1), net.num_classes > 1
    names_of_maps = [n for n in METHODS if n != "occlusion"] if has_gradients else ["attention", "rollout"]
    maps = {name: METHODS[name](net, images, classes) for name in names_of_maps if has_head}
    tokens = block_tokens(net, images)
    layers = sorted({0, len(net.blocks) // 2, len(net.blocks)})
    colors = {str(i): pca_colors(tokens[i][:, net.num_prefix_tokens :])[0] for i in layers}
    names = subject.class_names
    found = []
    for i, pixels in enumerate(subject.pixels(images)):
        with torch.no_grad(), caught_maps(net) as caught:
            net(images[i : i + 1])
        attention = torch.stack([each[0] for each in caught])  # (depth, A, L, L)
        k, share = int(classes[i]), float(scores[i].softmax(dim=0).max())
        said = (names[k] if k < len(names) else f"class {k}") if has_head else ""
        entry: dict[str, Any] = {"src": data_url(pixels), "said": f"{said}, {share:.0%}" if has_head else ""}
        entry |= {
            "cells": _text(pooled(attention[..., net.num_prefix_tokens :, net.num_prefix_tokens :], net, query, key))
        }
        if net.num_prefix_tokens:
            entry["token"] = _text(attention[:, :, 0, net.num_prefix_tokens :])
        entry["maps"] = {name: _text(each[i]) for name, each in maps.items()}
        entry["colors"] = {name: _text(each[i] * 255, scale=False) for name, each in colors.items()}
        found.append(entry)
    return found


def shape_of(subject: Subject, count: int, budget: int = BUDGET) -> dict[str, Any]:
    """Return the sizes that the viewer needs to decode the maps."""
    net = subject.net
    query, key = pools(net, count, budget)
    (h, w), heads = net.grid_size, net.num_heads
    sizes = {"depth": len(net.blocks), "heads": heads, "grid": [h, w]}
    return sizes | {
        "query": [-(-h // query), -(-w // query)],
        "key": [-(-h // key), -(-w // key)],
        "name": subject.name,
    }


def pools(net: VisionTransformer, count: int, budget: int) -> tuple[int, int]:
    """Return the pooling factors for queries and keys that keep the maps within the budget.

    Example:
        >>> net = VisionTransformer(img_size=224, patch_size=16, embed_dim=48, depth=12, num_heads=6)
        >>> pools(net, count=1, budget=4_000_000), pools(net, count=12, budget=4_000_000)
        ((1, 1), (2, 2))
    """
    (h, w), heads = net.grid_size, net.num_heads
    for query, key in POOLS:
        cells = -(-h // query) * -(-w // query) * -(-h // key) * -(-w // key)
        if len(net.blocks) * heads * cells * count <= budget:
            break
    return query, key


def pooled(maps: Tensor, net: VisionTransformer, query: int, key: int) -> Tensor:
    """Pool ``(depth, A, N, N)`` attention over queries and keys to ``(depth, A, n, m)``."""
    (h, w), lead = net.grid_size, maps.shape[:2]
    rows = F.avg_pool2d(maps.flatten(0, 2).unflatten(1, (1, h, w)), key, ceil_mode=True).flatten(1)  # (depth A N, m)
    columns = rows.view(-1, h, w, rows.shape[1]).permute(0, 3, 1, 2)  # (depth A, m, h, w)
    cells = F.avg_pool2d(columns, query, ceil_mode=True).flatten(2).transpose(1, 2)
    return cells.unflatten(0, lead)


def data_url(pixels: Tensor, side: int = 224) -> str:
    """Return ``(H, W, C)`` values in [0, 1] as a data URL: JPEG if large, else an enlarged PNG."""
    array = (pixels * 255).round().to(torch.uint8).numpy()
    image = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
    small = max(image.size) < 100
    if not small and max(image.size) > 2 * side:
        image.thumbnail((2 * side, 2 * side))
    file = io.BytesIO()
    image.save(file, "PNG" if small else "JPEG", **({} if small else {"quality": 82}))
    return f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(file.getvalue()).decode()}"


def _text(values: Tensor, scale: bool = True) -> str:
    """Return values as bytes in base64; with ``scale`` each last axis spans its own range."""
    values = values.detach().float().cpu()
    if scale:
        low, high = values.amin(dim=-1, keepdim=True), values.amax(dim=-1, keepdim=True)
        values = (values - low) / (high - low).clamp(min=1e-12) * 255
    return base64.b64encode(values.round().to(torch.uint8).numpy().tobytes()).decode()
