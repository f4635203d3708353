"""Convert weights of ViTs with relative, rotary or factorized positions: timm's Eva, BEiT and NaFlexViT."""

import math
import re
from typing import Any

import torch
from torch import Tensor

from vitlab.class_paths import ClassSpec
from vitlab.layers.pos_embed import PosEmbedChoice

State = dict[str, Tensor]

_BIAS_TABLE = re.compile(r"(?:blocks\.(\d+)\.attn|rel_pos_bias)\.relative_position_bias_table")
RECOMPUTED = re.compile(
    r".*\.relative_position_index|rope\.(?:bands|t_x|t_y)|freqs_t_[xy]|blocks\.\d+\.attn\.rope(_reg)?\.freqs"
)


def rename_positions(state_dict: State, num_heads: int | None = None) -> State:
    """Rename rotations, biases and factorized tables, and other names in which these networks differ from timm's ViT.

    Axial rotations leave no trace in timm's state dicts: load such a file into a model with pos_embed="rope2d", or with
    pos_embed=["learned", "rope2d"] for timm's models with "ape" in their names, which also add a table.

    Args:
        state_dict: State dict of timm or of naver-ai/rope-vit.
        num_heads: Number of heads A; needed only for the files of naver-ai/rope-vit, which do not show it.

    Example:
        >>> list(rename_positions({"embeds.pos_embed_y": torch.zeros(1, 14, 8), "blocks.0.gamma_1": torch.ones(8)}))
        ['pos_embed.row', 'blocks.0.ls1.gamma']
    """
    state, tables = {}, {}
    for name, value in state_dict.items():
        if table := _BIAS_TABLE.fullmatch(name):
            tables[int(table[1] or 0)] = value
        elif name in ("rope.freqs", "freqs"):
            state["pos_embed.freqs"] = _head_freqs(value, num_heads)
        elif not RECOMPUTED.fullmatch(name):
            new_name, new_value = _rename_naflex(re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name), value)
            state[new_name] = new_value
    if tables:
        state["pos_embed.bias_table"] = torch.stack([tables[i] for i in sorted(tables)])
    return _fuse_projections(state)


def _head_freqs(freqs: Tensor, num_heads: int | None) -> Tensor:
    """Return ``(2, depth, A, d / 2)`` frequencies from the same, or from ``(2, depth, A * d / 2)``."""
    if freqs.ndim == 4:
        return freqs
    if num_heads is None:
        raise ValueError(
            "`num_heads` must be given for the weights of naver-ai/rope-vit: their `freqs` does not show it"
        )
    return freqs.unflatten(2, (num_heads, -1))


def _rename_naflex(name: str, value: Tensor) -> tuple[str, Tensor]:
    """Return the name and tensor of timm's ViT for a parameter under ``embeds.`` of NaFlexViT; others unchanged."""
    match name.removeprefix("embeds."):
        case "pos_embed_y" if name.startswith("embeds."):
            return "pos_embed.row", value
        case "pos_embed_x" if name.startswith("embeds."):
            return "pos_embed.col", value
        case "pos_embed" if name.startswith("embeds."):
            return "pos_embed.weight", value.flatten(1, 2)  # (1, h, w, D)
        case "proj.weight" if value.ndim == 2 and name.startswith("embeds."):
            in_chans = next(c for c in (3, 1, 4, 2) if math.isqrt(value.shape[1] // c) ** 2 * c == value.shape[1])
            side = math.isqrt(value.shape[1] // in_chans)
            return "patch_embed.proj.weight", value.unflatten(1, (side, side, in_chans)).permute(
                0, 3, 1, 2
            ).contiguous()
        case "proj.weight" | "proj.bias" as rest if name.startswith("embeds."):
            return f"patch_embed.{rest}", value
        case rest:
            return rest, value


def _fuse_projections(state: State) -> State:
    """Return the state with separate q, k, v projections, and the two halves of a gated MLP, fused into one layer each.

    A bias that is missing, such as that of the keys in BEiT and EVA, is zero.
    """
    fused = {}
    for name, value in state.items():
        if query := re.fullmatch(r"(.+\.attn\.)q_(?:proj\.(weight|bias)|(bias))", name):
            kind = query[2] or query[3]
            parts = [state.get(name.replace(".q_", f".{x}_"), torch.zeros_like(value)) for x in "qkv"]
            fused[f"{query[1]}qkv.{kind}"] = torch.cat(parts)
        elif ".mlp.fc1_g." in name:
            fused[name.replace("_g", "")] = torch.cat([value, state[name.replace("_g", "_x")]])
        elif not re.search(r"\.attn\.[kv]_(?:bias|proj\.)|\.mlp\.fc1_x\.", name):
            fused[name] = value
    return fused


def timm_positions(theirs: Any) -> PosEmbedChoice:
    """Return the arguments of our position embedding that is equivalent to that of timm's ``theirs``.

    Example:
        >>> from timm.models import VisionTransformer
        >>> timm_positions(VisionTransformer(img_size=32, patch_size=16, embed_dim=8, depth=1, num_heads=1))
        'learned'
    """
    tables = getattr(theirs, "embeds", theirs)
    parts: list[str | ClassSpec] = [] if tables.pos_embed is None else ["learned"]
    parts += [] if getattr(tables, "pos_embed_y", None) is None else ["factorized"]
    attn = theirs.blocks[0].attn
    shared = getattr(theirs, "rel_pos_bias", None) is not None
    if shared or getattr(attn, "relative_position_bias_table", None) is not None:
        join = {"join": "every_layer_shared"} if shared else {}
        parts.append({"class_path": "relpos", "init_args": join})
    if (rope := getattr(theirs, "rope", None)) is not None:
        parts.append(_timm_rotation(theirs, rope))
    if len(parts) > 1:
        return parts
    return parts[0] if parts else "none"


def _timm_rotation(theirs: Any, rope: Any) -> str | ClassSpec:
    kind, half = type(rope).__name__, getattr(theirs.blocks[0].attn, "rotate_half", False)
    axes = "yx" if getattr(rope, "grid_indexing", "xy") == "ij" else "xy"
    args = {"theta": float(rope.temperature), "axes": axes, "pairs": "half" if half else "interleaved"}
    match kind:
        case "RotaryEmbeddingMixed":
            return "rope_mixed"
        case "RotaryEmbeddingCat" if rope.ref_feat_shape in (None, rope.feat_shape) and not rope.grid_offset:
            return {"class_path": "rope2d", "init_args": {"coordinates": "index", **args}}
        case "RotaryEmbeddingDinoV3" if rope.normalize_coords == "separate" and not rope.grid_offset:
            moves = {"shift": rope.shift_coords, "jitter": rope.jitter_coords, "rescale": rope.rescale_coords}
            moves = {name: value for name, value in moves.items() if value is not None}
            return {"class_path": "rope2d", "init_args": {"coordinates": "normalized", **args, **moves}}
    raise ValueError(f"this network of timm has no counterpart here: it has {kind} of another grid")


def rename_blocks(state: State) -> State:
    """Rename the blocks of the dense and ghost backbones of the official T2T-ViT to ours.

    Example:
        >>> official = {"blocks.0.norm1.weight": torch.ones(8), "blocks.1.linear.bias": torch.ones(4)}
        >>> list(rename_blocks(official | {"blocks.2.norm1.weight": torch.ones(4)}))
        ['blocks.0.norm1.weight', 'blocks.1.transition.0.bias', 'blocks.1.norm1.weight']
    """
    numbers = sorted({int(name.split(".")[1]) for name in state if name.startswith("blocks.")})
    between = [i for i in numbers if f"blocks.{i}.linear.bias" in state]  # transitions, which halve the width
    renamed: State = {}
    for name, value in state.items():
        if not (match := re.fullmatch(r"blocks\.(\d+)\.(.+)", name)):
            renamed[name] = value
            continue
        i, rest = int(match[1]), match[2]
        block = f"blocks.{i - sum(j < i for j in between)}"
        if ghost := re.fullmatch(
            r"attn\.q\.(weight|bias)|(attn\.cheap_operation)_q.weight|mlp.cheap_operation2.weight", rest
        ):
            others = "qkv" if "attn" in rest else "23"
            stem = rest.replace(".q.", ".{}.").replace("_q.", "_{}.").replace("2.", "{}.")
            parts = [state[f"blocks.{i}.{stem.format(other)}"] for other in others]
            cheap = torch.stack([part.flatten() for part in parts]) if "cheap" in rest else torch.cat(parts)
            new = "mlp.cheap" if "mlp" in rest else "attn.qkv.cheap" if ghost[2] else f"attn.qkv.linear.{ghost[1]}"
            renamed[f"{block}.{new}"] = cheap
        elif not re.match(r"attn\.[kv]\.|(attn|mlp)\.cheap_operation", rest):
            renamed[f"{block}.{rest.replace('linear.', 'transition.0.') if rest.startswith('linear.') else rest}"] = (
                value
            )
    return renamed
