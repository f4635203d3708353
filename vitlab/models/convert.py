"""Weights of other libraries and of other models: read, renamed, resized, loaded."""

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitlab.layers.attention import Attention
from vitlab.layers.pos_embed import resample_pos_embed
from vitlab.layers.pos_embed.sincos import SinCos1d, SinCosPosEmbed
from vitlab.layers.resample import Grid, ResizePolicy
from vitlab.models.convert_pos import rename_positions
from vitlab.models.vit import VisionTransformer
from vitlab.models.weights_file import read_weights, some

State = dict[str, Tensor]


def from_timm(state_dict: State, num_patches: int | None = None, num_heads: int | None = None) -> State:
    """Rename the state dict of a timm ViT, Eva (with rotations), BEiT or NaFlexViT to ours; outputs do not change.

    Where timm adds a position to class token and registers, it is a constant and becomes part of them here. The
    layout is that of DeiT, DINO, MAE and MoCo v3 too.

    Args:
        state_dict: timm's names and tensors.
        num_patches: Number of patch tokens N, which tells how many rows of ``pos_embed`` are prefix tokens'; None looks
            for a square number and otherwise takes every prefix token to have a row, as timm has it.
        num_heads: Number of heads A; needed for the rotations of naver-ai/rope-vit's own files alone.
    """
    if any(name.startswith("fc_norm.") for name in state_dict):
        raise ValueError(
            "timm weights with `fc_norm` are another network: they normalise after pooling, and ours normalises every "
            "token before; only a timm model built with `fc_norm=False` has a counterpart"
        )
    state = rename_positions(state_dict, num_heads)
    return _fold_prefix_positions(_rename(state, "patch_embed.", "tokenizer."), num_patches)


def to_timm(state_dict: State, pos_embed: Tensor | None = None) -> State:
    """Rename our state dict to timm's; outputs do not change. Prefix tokens get positions of zero.

    Args:
        state_dict: Our names and tensors, of a network with ``tokenizer="patch"`` and a linear head.
        pos_embed: The ``(N, D)`` table of a method that does not save it, such as ``model.pos_embed.table(0)``.
    """
    state = _rename(state_dict, "tokenizer.", "patch_embed.")
    table = state.pop("pos_embed.weight", None if pos_embed is None else pos_embed[None])
    foreign = [name for name in state if name.startswith(("pos_embed.", "head.0."))]
    foreign += [name for name in state if name.startswith("patch_embed.") and ".proj." not in name]
    if foreign or (table is not None and len(table) > 1):
        raise ValueError(f"timm's ViT has no counterpart of {', '.join(foreign) or 'a position table per block'}")
    if table is not None:
        num_prefix_tokens = sum(state[name].shape[1] for name in ("cls_token", "reg_token") if name in state)
        state["pos_embed"] = torch.cat([table.new_zeros(1, num_prefix_tokens, table.shape[2]), table], dim=1)
    return state


def from_t2t(state_dict: State) -> State:
    """Rename the state dict of an official T2T-ViT (yitu-opensource/T2T-ViT) to ours; outputs do not change.

    The class token's position becomes part of it. The sines of the other positions are no weights for us and go; a
    table that differs from the formula stays, for a model with a learned table.
    """
    state = _rename(state_dict, "tokens_to_token.", "tokenizer.")
    state = _fold_prefix_positions(state, state["pos_embed"].shape[1] - 1)
    table = state["pos_embed.weight"][0]
    formula = SinCos1d((1, len(table)), table.shape[1]).table()
    if _same_table(table, formula, 1e-6):
        del state["pos_embed.weight"]
    return state


def load_weights(
    model: VisionTransformer,
    path: str | Path,
    resize: ResizePolicy | Literal["usual"] | None = None,
    antialias: bool = True,
) -> list[str]:
    """Load the weights of a file into ``model`` and return a sentence for each change that they needed.

    The file is safetensors or torch's own, from vitlab, timm or the official T2T-ViT. A head for other classes is left
    as the model has it, positions of another grid are resized; whatever else does not fit is refused.

    Args:
        model: The network to fill.
        path: A local file.
        resize: How to carry positions to another grid; must be given where the grids differ. ``usual`` is the usual
            way of the model's position embedding.
        antialias: Whether bicubic interpolation smooths when the grid shrinks.
    """
    file = read_weights(path)
    state, sentences = _as_ours(file.state_dict, model)
    old_grid, grid_sentences = _trained_grid(state, file.arguments, model)
    state, table_sentences = _drop_formula(state, model, old_grid)
    policy = _usual_policy(state, model, old_grid) if resize == "usual" else resize
    state, resize_sentences = resample_pos_embed(state, model, old_grid, policy, antialias)
    state, head_sentences = _keep_new_head(state, model)
    _check_fit(state, model, path)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model: {' '.join(str(error).split())}") from error
    parts = (file.sentences, sentences, grid_sentences, table_sentences, resize_sentences, head_sentences)
    return [sentence for part in parts for sentence in part]


def of_network(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a task's arguments that its network takes."""
    names = inspect.signature(VisionTransformer).parameters
    return {name: value for name, value in arguments.items() if name in names}


def _usual_policy(state: State, model: VisionTransformer, old_grid: Grid) -> ResizePolicy | None:
    prefix = "pos_embed."
    positions = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    policies = model.pos_embed.policies_for(positions)
    return policies[0] if policies and tuple(old_grid) != tuple(model.grid_size) else None


def _rename(state_dict: State, old: str, new: str) -> State:
    return {new + name.removeprefix(old) if name.startswith(old) else name: value for name, value in state_dict.items()}


def _fold_prefix_positions(state: State, num_patches: int | None) -> State:
    """Return ``state`` with the rows of ``pos_embed`` for prefix tokens added to these, the others as our table."""
    state = dict(state)
    if "pos_embed" not in state:
        return state
    table = state.pop("pos_embed")  # (1, rows, D)
    everyone: dict[str, int] = {name: state[name].shape[1] for name in ("cls_token", "reg_token") if name in state}
    layouts = [everyone, {name: 1 for name in everyone if name == "cls_token"}, {}]  # whose rows may come first
    patches = [table.shape[1] - sum(layout.values()) for layout in layouts]
    if num_patches is None:
        num_patches = next((n for n in patches if n > 0 and math.isqrt(n) ** 2 == n), patches[0])
    if num_patches not in patches:
        raise ValueError(
            f"`pos_embed` must have a row for each patch, and may for prefix tokens, got {table.shape[1]} rows, "
            f"{num_patches} patches and {sum(everyone.values())} prefix tokens"
        )
    row = 0
    for name, count in layouts[patches.index(num_patches)].items():
        state[name] = state[name] + table[:, row : row + count]
        row += count
    return state | {"pos_embed.weight": table[:, row:]}


def _as_ours(state_dict: State, model: VisionTransformer) -> tuple[State, list[str]]:
    """Return the state dict in our layout, its position table kept, and what it was converted from."""
    rows = state_dict["pos_embed"].shape[1] if "pos_embed" in state_dict else 0
    if any(name.startswith("tokens_to_token.") for name in state_dict):
        state = _fold_prefix_positions(_rename(state_dict, "tokens_to_token.", "tokenizer."), rows - 1)
        return state, ["layout: converted from the official T2T-ViT"]
    if any(name.startswith(("patch_embed.", "embeds.")) for name in state_dict):
        num_heads = next(m.num_heads for m in model.blocks.modules() if isinstance(m, Attention))
        num_patches = math.prod(model.grid_size)
        same_grid = rows - num_patches in (0, 1, model.num_prefix_tokens)
        return from_timm(state_dict, num_patches if same_grid else None, num_heads), ["layout: converted from timm"]
    return state_dict, []


def _trained_grid(state: State, arguments: dict[str, Any], model: VisionTransformer) -> tuple[Grid, list[str]]:
    """Return the grid that a file's positions belong to, and what is doubtful about them."""
    if "img_size" in arguments:
        with torch.device("meta"):
            trained = VisionTransformer(**of_network(arguments))
        kinds = [type(m.pos_embed).__name__ for m in (trained, model)]
        doubt = [f"positions: trained with {kinds[0]}, the model has {kinds[1]}"] if len(set(kinds)) > 1 else []
        return trained.grid_size, doubt
    if "pos_embed.row" in state:
        return (state["pos_embed.row"].shape[1], state["pos_embed.col"].shape[1]), []
    h, w = model.grid_size
    table, biases = state.get("pos_embed.weight"), state.get("pos_embed.bias_table")
    if biases is not None:
        return _bias_grid(biases.shape[1], (h, w)), []
    if table is None:
        doubt = (
            [f"positions: the file does not say its grid, taken to be {h} x {w}"] if model.pos_embed.policies else []
        )
        return (h, w), doubt
    if table.shape[1] == h * w:
        return (h, w), []
    side = math.isqrt(table.shape[1])
    if side * side != table.shape[1]:
        raise ValueError(f"the file has {table.shape[1]} positions, no square, and does not say their grid")
    return (side, side), []


def _bias_grid(rows: int, grid: Grid) -> Grid:
    """Return the grid of a bias table with ``rows`` displacements, three entries of prefix tokens perhaps included."""
    side = (math.isqrt(rows) + 1) // 2
    for h, w in (grid, (side, side)):
        if (2 * h - 1) * (2 * w - 1) in (rows, rows - 3):
            return h, w
    raise ValueError(f"the file has {rows} relative positions, of no square grid, and does not say their grid")


def _drop_formula(state: State, model: VisionTransformer, grid: Grid) -> tuple[State, list[str]]:
    """Return the state dict without a table that the model computes by itself."""
    pos_embed, table = model.pos_embed, state.get("pos_embed.weight")
    if table is None or not isinstance(pos_embed, SinCosPosEmbed) or pos_embed.trainable:
        return state, []
    tolerance = 1e-6 if isinstance(pos_embed, SinCos1d) else 1e-5  # published tables in 2-D are computed in float32
    if not _same_table(table[0], pos_embed.formula(grid), tolerance):
        raise ValueError(
            "the file's position table is not the formula's: it was trained, resized or made by another formula; "
            "build the model with pos_embed='learned' and pos_embed_trainable=False to keep it"
        )
    state = {name: value for name, value in state.items() if name != "pos_embed.weight"}
    return state, ["positions: the file's table is the formula's, which the model computes by itself"]


def _same_table(table: Tensor, formula: Tensor, tolerance: float) -> bool:
    return table.shape == formula.shape and bool((table - formula.to(table)).abs().max() <= tolerance)


def _keep_new_head(state: State, model: VisionTransformer) -> tuple[State, list[str]]:
    """Return the state dict with the model's own head where the file's has other outputs or none."""
    old = {name: value for name, value in state.items() if name.startswith("head.")}
    new = {name: value for name, value in model.state_dict().items() if name.startswith("head.")}
    if {name: value.shape for name, value in old.items()} == {name: value.shape for name, value in new.items()}:
        return state, []
    counts = [len(list(head.values())[-1]) if head else 0 for head in (old, new)]
    others = {name: value for name, value in state.items() if name not in old}
    return others | new, [f"head: not loaded, the file's has {counts[0]} outputs and the model's new one {counts[1]}"]


def _check_fit(state: State, model: VisionTransformer, path: str | Path) -> None:
    own = model.state_dict()
    resized = {"pos_embed.interpolated", "pos_embed.trained_grid"}  # a module takes these up when it loads them
    shapes = [
        f"{name} {tuple(state[name].shape)}, not {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    differences = {
        "missing": [name for name in own if name not in state],
        "unexpected": [name for name in state if name not in own and name not in resized],
        "of another shape": shapes,
    }
    found = [f"{len(names)} {kind} ({some(names)})" for kind, names in differences.items() if names]
    if found:
        raise ValueError(f"{path} does not fit the model: {'; '.join(found)}")
