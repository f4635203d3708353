"""What a network knows of position: the table's similarities, and logits by displacement."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.analysis.figures import grid_of_axes, heat
from vitlab.analysis.subject import Finding, Subject
from vitlab.errors import UsageError
from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.layers.pos_embed.rotary import RotaryPosEmbed
from vitlab.layers.resample import Grid
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import attention_inputs, attention_logits


def similarity(table: Tensor) -> Tensor:
    """Map ``(N, D)`` positions to their cosine similarities ``(N, N)``, as in figure 7 of ViT (arXiv:2010.11929).

    Example:
        >>> similarity(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        tensor([[1., 0.],
                [0., 1.]])
    """
    table = F.normalize(table, dim=-1)
    return table @ table.T


def mosaic(tiles: np.ndarray) -> np.ndarray:
    """Map ``(h, w, h', w')`` tiles to one picture in which tile (y, x) stands in row y, column x, NaN between them.

    Example:
        >>> mosaic(np.zeros((2, 3, 2, 3))).shape  # 2 x 3 tiles of 2 x 3 with a line between them
        (5, 11)
    """
    h, w = tiles.shape[:2]
    framed = np.pad(tiles, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=np.nan)
    return framed.swapaxes(1, 2).reshape(h * framed.shape[2], w * framed.shape[3])[:-1, :-1]


def displacement_profile(logits: Tensor, grid_size: Grid) -> Tensor:
    """Map ``(A, N, N)`` logits to their mean over pairs at each displacement, ``(A, 2h - 1, 2w - 1)``.

    Entry (h - 1 + dy, w - 1 + dx) is for keys dy rows below and dx columns right of their query. Each head's mean over
    all pairs is taken away, since the softmax does not see it.

    Example:
        >>> displacement_profile(torch.randn(2, 15, 15), (3, 5)).shape
        torch.Size([2, 5, 9])
    """
    h, w = grid_size
    y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    y, x = y.flatten().to(logits.device), x.flatten().to(logits.device)
    index = (y - y[:, None] + h - 1) * (2 * w - 1) + x - x[:, None] + w - 1  # (N, N): key minus query
    count = torch.bincount(index.flatten(), minlength=(2 * h - 1) * (2 * w - 1))
    centred = logits - logits.mean(dim=(1, 2), keepdim=True)
    sums = logits.new_zeros(len(logits), len(count)).index_add_(1, index.flatten(), centred.flatten(1))
    return (sums / count).unflatten(1, (2 * h - 1, 2 * w - 1))


def mean_logits(net: VisionTransformer, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], int]:
    """Return each block's ``(A, N, N)`` patch to patch logits, their mean over all images, and the number of these."""
    sums: list[Tensor] = []
    n = 0
    for images, _ in batches:
        n += len(images)
        for layer, logits in enumerate(attention_logits(net, images)):
            total = logits[:, :, net.num_prefix_tokens :, net.num_prefix_tokens :].double().sum(dim=0)
            sums[layer : layer + 1] = [total + sums[layer] if layer < len(sums) else total]
    return [total / n for total in sums], n


@torch.no_grad()
def rotary_profiles(net: VisionTransformer, batches: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return what each block's rotation makes of the mean query and the mean key alone, ``(A, 2h - 1, 2w - 1)`` each.

    That is E[q]^T R(dy, dx) E[k], scaled: the means are over patches and images, before they are turned. It is the
    part of :func:`displacement_profile` that does not come from what patches at some places have in common.
    """
    sums: list[Tensor] = [torch.zeros(())] * len(net.blocks)
    n = 0
    for images, _ in batches:
        n += len(images) * net.grid_size[0] * net.grid_size[1]
        for layer, x in enumerate(attention_inputs(net, images)):
            attn: Any = net.blocks[layer].attn
            q, k, _ = attn.qkv(x[:, net.num_prefix_tokens :]).unflatten(2, (3, attn.num_heads, -1)).unbind(2)
            total = torch.stack([attn.q_norm(q), attn.k_norm(k)]).double().sum(dim=(1, 2))  # (2, A, d)
            sums[layer] = sums[layer].to(total) + total
    profiles = []
    for layer, total in enumerate(sums):
        everywhere = (total / n)[:, :, None].expand(-1, -1, net.num_prefix_tokens + math.prod(net.grid_size), -1)
        q, k = net.pos_embed.rotate(everywhere, layer)[:, :, net.num_prefix_tokens :]  # (A, N, d) each
        scale = net.blocks[layer].attn.qk_scale  # type: ignore[union-attr]
        profiles.append(displacement_profile(q @ k.transpose(-2, -1) * scale, net.grid_size))
    return profiles


def analyze_position(subject: Subject) -> Finding:
    """Compare the table's vectors of all cells with each other.

    Example:
        >>> finding = analyze_position(subject)
        >>> list(finding.table.columns)
        ['row', 'column', 'other_row', 'other_column', 'cosine', 'norm_ratio']
    """
    net, pos_embed = subject.net, subject.net.pos_embed
    if not isinstance(pos_embed, AddedPosEmbed):
        raise UsageError(
            f"position compares the rows of a table, and pos_embed={subject.pos_embed} has none; use displacement, "
            "which works for every method"
        )
    layer = subject.layer or 0
    with torch.no_grad():
        table = pos_embed.table(layer).detach().float()
        ratio = float(table.norm(dim=-1).mean() / net.tokenizer(subject.shown(32)).norm(dim=-1).mean())
    h, w = net.grid_size
    cosines = similarity(table).cpu().view(h, w, h, w)
    figure, axes = grid_of_axes(1, 1, size=5, bar=True)
    shown = heat(axes[0, 0], mosaic(cosines.numpy()))
    axes[0, 0].set_axis_off()
    figure.colorbar(shown, ax=axes, shrink=0.8, label="cosine similarity")
    rows = [
        {"row": n // w, "column": n % w, "other_row": m // w, "other_column": m % w, "cosine": float(value)}
        for n, values in enumerate(cosines.view(h * w, h * w))
        for m, value in enumerate(values)
    ]
    where = f"table of layer {layer}" if pos_embed.join == "every_layer" else "the table"
    note = f"{where} of pos_embed={subject.pos_embed}, whose vectors are {ratio:.2f} times as long as the patch tokens"
    return Finding(pd.DataFrame(rows).assign(norm_ratio=ratio), figure, note)


def analyze_displacement(subject: Subject) -> Finding:
    """Show how the logits of each head depend on where the key lies, seen from the query.

    Example:
        >>> finding = analyze_displacement(subject)
        >>> list(finding.table.columns)
        ['layer', 'head', 'dy', 'dx', 'logit']
    """
    net, (h, w) = subject.net, subject.net.grid_size
    logits, n = mean_logits(net, subject.batches())
    kinds = {"logit": [displacement_profile(layer, (h, w)).cpu() for layer in logits]}
    if isinstance(net.pos_embed, RotaryPosEmbed):
        kinds["rotation"] = [profile.cpu() for profile in rotary_profiles(net, subject.batches())]
    heads = len(kinds["logit"][0])
    figure, axes = grid_of_axes(len(logits), len(kinds) * heads, size=1.3, bar=True)
    most = max(float(profile.abs().max()) for profiles in kinds.values() for profile in profiles)
    for layer in range(len(logits)):
        panels = [(kind, head) for kind in kinds for head in range(heads)]
        for ax, (kind, head) in zip(axes[layer], panels, strict=True):
            title = f"head {head}" + ("" if kind == "logit" else ",\nmean q and k") if layer == 0 else ""
            shown = heat(ax, kinds[kind][layer][head].numpy(), title, diverging=True, vmin=-most, vmax=most)
            ax.plot(w - 1, h - 1, "+", color="black", markersize=5)
        axes[layer, 0].set_ylabel(f"layer {layer}", fontsize=8)
    figure.colorbar(shown, ax=axes, shrink=0.8, label="mean logit")
    cells = [
        {"layer": layer, "head": head, "dy": dy - h + 1, "dx": dx - w + 1}
        | {kind: float(profiles[layer][head, dy, dx]) for kind, profiles in kinds.items()}
        for layer, head, dy, dx in np.ndindex(len(logits), heads, 2 * h - 1, 2 * w - 1)
    ]
    note = f"{n} validation images, patch to patch, mean of each head taken away; the cross is the query; corners are "
    note += "means of few pairs" + ("; right: what the rotation alone makes of mean q and k" if len(kinds) > 1 else "")
    return Finding(pd.DataFrame(cells), figure, note)
