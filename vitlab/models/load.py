"""Load weights from a file into a network, or build the network that the file describes."""

import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from vitlab.errors import one_line, preview
from vitlab.interface import own_network
from vitlab.layers.pos_embed import resample_pos_embed
from vitlab.layers.pos_embed.added import AddedPosEmbed, Factorized, SinCos1d, SinCosPosEmbed
from vitlab.layers.pos_embed.resizable import SIZED, Resizable
from vitlab.layers.pos_embed.rotary import RoPE2d
from vitlab.layers.resample import Grid, ResizePolicy
from vitlab.models.arguments import ModelArgs
from vitlab.models.convert import (
    OF_TIMM,
    convert_layout,
    full_precision,
    resize_patch_kernels,
    same_table,
    unknown_grid,
)
from vitlab.models.differences import other_scale, other_settings
from vitlab.models.old_names import OLD, upgrade
from vitlab.models.vit import VisionTransformer
from vitlab.models.weights_file import WeightsFile, network_prefix, read_weights, unwrapped
from vitlab.tokenizers.patch import PatchEmbed
from vitlab.tokenizers.splits import pair

State = dict[str, Tensor]
NEW_HEAD = "head: not loaded"  # how the sentence about a head that stays new begins
_NEW = "and one starts new only where it is trained with a new head"
_POOLS_OTHERWISE = {  # what to do about parts between the last block and the head that one side alone has
    ("unexpected", "fc_norm."): "the file's fc_norm normalizes after pooling: set `model.fc_norm=True`",
    ("missing", "fc_norm."): f"the file has no norm after pooling, {_NEW}: set `model.fc_norm=False`",
    ("unexpected", "attn_pool."): "the file pools by attention: set `model.global_pool=map`",
    ("missing", "attn_pool."): f"the file has no attention pool, {_NEW}: set `model.global_pool` to token, avg or max",
}


def load_network(path: str | Path) -> VisionTransformer:
    """Build the network of a checkpoint or of an exported safetensors file, with its weights, ready to evaluate.

    Args:
        path: A local file that holds the arguments of its network, as those of vitlab do.

    Raises:
        ValueError: The file lacks these arguments, is damaged, holds more than weights, or is of a network of a class
            of the user's that computes something else.

    Example:
        >>> import tempfile
        >>> arguments = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 1, "num_heads": 3}
        >>> content = {"hyper_parameters": arguments, "state_dict": VisionTransformer(**arguments).state_dict()}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(content, f"{folder}/last.ckpt")
        ...     load_network(f"{folder}/last.ckpt").grid_size
        (4, 4)
    """
    file = unwrapped(read_weights(path))
    arguments = network_args(file.arguments)
    if not arguments:
        way_out = _way_out(file.state_dict) or "give its arguments: create_model(..., weights=...)"
        raise ValueError(f"{path} does not say how its network was built; {way_out}")
    if any(name.startswith(OF_TIMM) for name in file.state_dict):
        raise ValueError(
            f"{path} is in timm's format: give its run, or what `vitlab export --to safetensors` writes of it; "
            "create_model(weights=...) converts it"
        )
    if own := file.own.get("network"):
        raise ValueError(
            f"{path} has the weights of {own}, which does not compute what vitlab's VisionTransformer does: load its "
            "run, vitlab.load(RUN)"
        )
    net = VisionTransformer(**arguments | {"num_classes": outputs_of(file.state_dict)})
    _fill(net, file.extra | file.state_dict, path)
    return net.eval()


def load_weights(
    model: VisionTransformer,
    path: str | Path | WeightsFile,
    resize: ResizePolicy | Literal["usual"] | None = None,
    antialias: bool = True,
    grid: Sequence[int] | None = None,
) -> list[str]:
    """Load the weights of a file into ``model`` and return a sentence for each conversion that they needed.

    The file is safetensors or a torch file, from vitlab, timm or the official T2T-ViT. A head with other outputs is not
    loaded, and below a new head a norm after pooling and an attention pool may be new, too; positions of another grid
    and kernels of other patches are resized. Any other mismatch raises a ValueError.

    Args:
        model: The network to load into.
        path: A local file, or one that was read already.
        resize: How to resample positions for another grid; required if grids or patches differ. ``usual`` is the
            ``resize`` of the model's position embedding, or its default; in a list, each takes its own.
        antialias: Whether bicubic interpolation smooths when it shrinks the grid.
        grid: Rows and columns of tokens that the positions were trained on; None if the file or a FILE.json beside it
            states them, or the model has the same grid.

    Example:
        >>> import tempfile
        >>> net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=1, num_heads=3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(net.state_dict(), f"{folder}/weights.pt")
        ...     load_weights(net, f"{folder}/weights.pt", grid=(4, 4))
        []
    """
    file = unwrapped(path if isinstance(path, WeightsFile) else read_weights(path))
    says = "img_size" in file.arguments and grid is None
    trained = _built_without_weights(network_args(file.arguments)) if says else None
    known, doubts = _given_grid(trained, model, grid)
    shape = {"num_patches": math.prod(known or model.grid_size), "num_prefix_tokens": model.num_prefix_tokens}
    patch = (model.in_chans, *pair("patch_size", model.patch_size))
    state, sentences = convert_layout(file.state_dict, num_heads=model.num_heads, patch=patch, **shape)
    if any("timm" in sentence for sentence in sentences):
        _check_pool(model, file)
        if "pos_embed.freqs" not in state:
            _check_rotation(model, file)
    is_official = any("T2T" in sentence for sentence in sentences)
    old_grid, grid_sentences = (known, doubts) if known else _trained_grid(state, model, is_official)
    state = _rename_to_parts(state, model)
    state, table_sentences = _drop_formula(state, model, old_grid)
    state = full_precision(state)
    new_patch = model.tokenizer.patch_size if resize and isinstance(model.tokenizer, PatchEmbed) else None
    state, patch_sentences = resize_patch_kernels(state, new_patch)
    is_ours = not sentences and not file.is_foreign
    state = state if is_ours else _unscaled(state, model)
    scale_sentences = other_scale(trained, model) if trained and is_ours and not doubts else []
    state, resize_sentences = resample_pos_embed(state, model, old_grid, resize, antialias)
    state, pool_sentences = _without_pool(state, model)
    state, head_sentences = _keep_new_head(state, model)
    _fill(model, file.extra | state, file.path)
    positions = (*scale_sentences, *grid_sentences, *patch_sentences, *table_sentences, *resize_sentences)
    theirs = file.own.get("network", "")
    is_other = theirs and theirs != own_network(model)
    own = [f"weights: of {theirs}, which computes something else than this network"] if is_other else []
    others = other_settings(trained, model, bool(head_sentences), bool(doubts)) if trained and not theirs else []
    return [*file.sentences, *own, *sentences, *others, *positions, *pool_sentences, *head_sentences]


def outputs_of(state: State) -> int:
    """Return the number of outputs K of the head in a state dict; 0 without a head.

    Example:
        >>> outputs_of({"head.weight": torch.zeros(10, 48)})
        10
    """
    rows = [len(value) for name, value in state.items() if name.startswith("head.")]
    return rows[-1] if rows else 0


def network_args(arguments: Mapping[str, Any]) -> ModelArgs:
    """Return the arguments of a task that belong to its network.

    Example:
        >>> network_args({"depth": 3, "lr": 1e-3})
        {'depth': 3}
    """
    names = {*inspect.signature(VisionTransformer).parameters, *OLD}
    return cast(ModelArgs, upgrade({name: value for name, value in arguments.items() if name in names}))


def _given_grid(
    trained: VisionTransformer | None, model: VisionTransformer, grid: Sequence[int] | None
) -> tuple[Grid | None, list[str]]:
    """Return the grid of the positions, as given or of the network in training, and a warning if methods differ."""
    if grid is not None:
        return pair("grid", grid, "tokens"), []
    if trained is None:
        return None, []
    theirs, ours = _methods(trained), _methods(model)
    doubt = f"positions: trained with {' and '.join(theirs)}, the model has {' and '.join(ours)}"
    return (trained.grid_size[0], trained.grid_size[1]), [doubt] if sorted(theirs) != sorted(ours) else []


def _methods(model: VisionTransformer) -> list[str]:
    """Return the classes of the position embeddings of a network."""
    return [type(each).__name__ for each in model.pos_embed.single_methods().values()]


def _built_without_weights(arguments: ModelArgs) -> VisionTransformer:
    """Return a network on the meta device, or on the CPU where a part of the user's own needs values to be built."""
    try:
        with torch.device("meta"):
            return VisionTransformer(**arguments)
    except Exception:  # foreign code can raise anything
        return VisionTransformer(**arguments)


def _trained_grid(state: State, model: VisionTransformer, is_official: bool) -> tuple[Grid, list[str]]:
    """Infer the grid from the number of positions: the model's own, or a square for the official T2T-ViT."""
    if isinstance(model.pos_embed, Factorized) and "pos_embed.row" in state:
        return (state["pos_embed.row"].shape[1], state["pos_embed.col"].shape[1]), []
    h, w = model.grid_size
    table, biases = state.get("pos_embed.weight"), state.get("pos_embed.bias_table")
    assumed = [f"positions: the file does not say its grid, taken to be {h} x {w}"] if model.pos_embed.policies else []
    if table is not None and is_official and (side := math.isqrt(table.shape[1])) ** 2 == table.shape[1]:
        return (side, side), []  # its code supports no other grid
    if not type(model.pos_embed).__module__.startswith("vitlab."):  # it may call anything `weight` or `bias_table`
        own = _within(model.state_dict(), "pos_embed.") if model.pos_embed.policies else {}
        if any(name in state and state[name].shape != value.shape for name, value in own.items()):
            raise unknown_grid()
        return (h, w), assumed
    if table is not None and table.shape[1] != h * w:
        raise unknown_grid(table.shape[1])
    if biases is not None and (2 * h - 1) * (2 * w - 1) not in (biases.shape[1], biases.shape[1] - 3):
        raise unknown_grid(biases.shape[1])
    return (h, w), assumed


def _may_be_eva(file: WeightsFile) -> bool:
    names = " ".join(file.state_dict)
    eva = any(name in names for name in (".gamma_1", ".attn.q_bias", ".attn.q_proj."))
    return eva or ("norm_pre." in names and "attn_pool." in names)


def _check_pool(model: VisionTransformer, file: WeightsFile) -> None:
    """Refuse weights of timm's Eva that pool prefix tokens by attention, unless the file describes this network."""
    pools = model.global_pool == "map" and model.num_prefix_tokens and "attn_pool.latent" in file.state_dict
    if pools and _may_be_eva(file) and "pos_embed" not in file.arguments:
        raise ValueError(
            f"{file.path} seems to be of timm's Eva, whose `global_pool: map` pools class and register tokens, too; "
            "vitlab's pools patches alone. If it is of timm's VisionTransformer, put "
            '{"network": {"pos_embed": "learned"}} into FILE.json beside it'
        )


def _check_rotation(model: VisionTransformer, file: WeightsFile) -> None:
    """Refuse a timm file that may rotate unless the model or a FILE.json states how: such files do not store it."""
    is_beit = any("relative_position_bias_table" in name for name in file.state_dict)
    may_rotate = _may_be_eva(file) and not is_beit and "pos_embed" not in file.arguments
    rotations = [part for part in model.pos_embed.modules() if isinstance(part, RoPE2d)]
    if all(part.is_explicit for part in rotations) and (rotations or not may_rotate):
        return
    if "pos_embed" in file.arguments and _ways(_built_without_weights(network_args(file.arguments))) == _ways(model):
        return
    ours = "" if rotations else ", a pos_embed of [learned, rope2d] or rope2d"
    nothing = '; if nothing rotates, put {"network": {"pos_embed": "learned"}} into FILE.json beside it'
    raise ValueError(
        f"timm's files do not say how they rotate; give it in the init_args of rope2d{ours}: coordinates, pairs and "
        "axes (index, interleaved, xy for rope-vit; index, interleaved, yx for EVA-02; normalized, half, yx for DINOv3)"
        f" or build the network as timm:NAME{'' if rotations else nothing}"
    )


def _ways(model: VisionTransformer) -> list[tuple[Any, ...]]:
    """Return how each axial rotation of a network turns."""
    parts = [part for part in model.pos_embed.modules() if isinstance(part, RoPE2d)]
    return [(part.theta, part.coordinates, part.pairs, part.axes, part.register_theta) for part in parts]


def _rename_to_parts(state: State, model: VisionTransformer) -> State:
    """Rename position tensors of a foreign file to those of the methods that a position embedding combines."""
    methods = {name: each for name, each in model.pos_embed.single_methods().items() if name}
    moved = {
        f"pos_embed.{key}": f"pos_embed.{name}.{key}" for name, each in methods.items() for key in each.state_dict()
    }
    return {moved.get(name, name): value for name, value in state.items()}


def _drop_formula(state: State, model: VisionTransformer, grid: Grid) -> tuple[State, list[str]]:
    """Drop a position table that the model computes itself; refuse one that differs from it."""
    pos_embed, table = model.pos_embed, state.get("pos_embed.weight")
    if table is None or not isinstance(pos_embed, SinCosPosEmbed) or pos_embed.trainable:
        return state, []
    if table.shape[-1] != model.embed_dim:  # of another network, of which this is the least
        return state, []
    tolerance = 1e-6 if isinstance(pos_embed, SinCos1d) else 1e-5  # published 2-D tables were computed in float32
    if not same_table(table[0], pos_embed.chosen_scale * pos_embed.formula(grid), tolerance):
        raise ValueError(
            "the file's position table is not that of the formula: it was trained, resized or made by another formula; "
            "build the model with pos_embed {class_path: learned, init_args: {trainable: false}} to keep it"
        )
    state = {name: value for name, value in state.items() if name != "pos_embed.weight"}
    return state, ["positions: the file's table is that of the formula, which the model computes itself"]


def _unscaled(state: State, model: VisionTransformer) -> State:
    """Divide the position tables of a foreign file, which holds what is added, by the ``scale`` of the model."""
    tables = {
        f"{name}.{key}": part.chosen_scale
        for name, part in model.named_modules()
        if isinstance(part, AddedPosEmbed) and part.chosen_scale != 1
        for key in part.stacks
    }
    return {name: value / tables[name] if name in tables else value for name, value in state.items()}


def _keep_new_head(state: State, model: VisionTransformer) -> tuple[State, list[str]]:
    """Replace the head by the model's own if the file's has other outputs or none, and what pools for it likewise."""
    old, new = _within(state, "head."), _within(model.state_dict(), "head.")
    if {name: value.shape for name, value in old.items()} == {name: value.shape for name, value in new.items()}:
        return state, []
    (outputs, hidden), (own_outputs, own_hidden) = _head_widths(old), _head_widths(new)
    theirs, ours = f"{outputs} outputs{hidden}", f"{own_outputs}{own_hidden}"
    others = {name: value for name, value in state.items() if name not in old}
    others, pool_sentences = _keep_new_pool(others, model) if new else (others, [])
    return others | new, [f"{NEW_HEAD}, the file's has {theirs} and the model's new one {ours}", *pool_sentences]


def _without_pool(state: State, model: VisionTransformer) -> tuple[State, list[str]]:
    """Leave out what pools for a model whose task does not; its last norm starts new if the file's is after pooling."""
    parts = {part: _within(state, f"{part}.") for part in ("fc_norm", "attn_pool")}
    left_out = [part for part, values in parts.items() if values]
    if not left_out or not getattr(model, "pools_nothing", False):
        return state, []
    norm = {} if _within(state, "norm.") else _within(model.state_dict(), "norm.")
    state = {name: value for name, value in state.items() if not name.startswith(("fc_norm.", "attn_pool."))} | norm
    new = "; its norm of the tokens starts new" if norm else ""
    return state, [f"pooling: left out the file's {' and '.join(left_out)}, the model pools nothing{new}"]


def _keep_new_pool(state: State, model: VisionTransformer) -> tuple[State, list[str]]:
    """Let what pools for a new head start new if the file lacks it; leave out what only the file has for its own."""
    own, sentences = model.state_dict(), []
    norm, old_norm, last = _within(own, "fc_norm."), _within(state, "fc_norm."), _within(state, "norm.")
    if norm and not old_norm:
        state = {name: value for name, value in state.items() if name not in last} | norm
        left_out = "; left out the file's final norm, before pooling" if last else ""
        sentences += [f"pooling: the norm after it starts new, the file has none{left_out}"]
    pool, old_pool = _within(own, "attn_pool."), _within(state, "attn_pool.")
    if pool and not old_pool and all(p.requires_grad for p in cast(nn.Module, model.attn_pool).parameters()):
        state = state | pool
        sentences += ["pooling: the attention pool starts new, the file has none"]
    elif old_pool and not pool:
        state = {name: value for name, value in state.items() if name not in old_pool}
        sentences += ["pooling: left out the file's attention pool, the model has none"]
    return state, sentences


def _within(state: State, prefix: str) -> State:
    """Return the entries of a part."""
    return {name: value for name, value in state.items() if name.startswith(prefix)}


def _head_widths(head: State) -> tuple[int, str]:
    """Return the outputs of a head, 0 without one, and what comes before them in words."""
    *hidden, outputs = [len(value) for value in head.values() if value.ndim > 1] or [0]
    return outputs, "".join(f" after a hidden layer of {width}" for width in hidden)


def _fill(model: VisionTransformer, state: State, path: str | Path) -> None:
    """Load ``state`` into ``model``, or raise a ValueError that lists what does not fit."""
    whole = model.state_dict()
    own = {name: value for name, value in whole.items() if not name.endswith("_extra_state")}
    kept = {name: value for name, value in whole.items() if name not in own}  # safetensors may have no extra state
    shapes = [
        f"{name} {tuple(state[name].shape)}, not {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    differences = {
        "missing": [name for name in own if name not in state and not name.endswith(SIZED)],
        "unexpected": [name for name in state if name not in whole and not name.endswith(SIZED)],
        "of another shape": shapes,
    }
    reasons = [f"{len(names)} {kind} ({preview(names)})" for kind, names in differences.items() if names]
    if reasons:
        names = differences["missing"] + differences["unexpected"]
        hint = "".join(
            f"; {way_out}"
            for (kind, part), way_out in _POOLS_OTHERWISE.items()
            if any(name.startswith(part) for name in differences[kind])
        )
        if way_out := _way_out(state):
            hint = f"; {way_out}"
        elif {*names, *(text.partition(" ")[0] for text in shapes)} <= {"cls_token", "reg_token"}:
            hint = f"; build the model with {_prefix_tokens(state)}"
        elif any("pos_embed" in name for name in names) and all("pos_embed" in name for name in differences["missing"]):
            hint += "; build the model with the `model.pos_embed` of the file"
        elif not names and (channels := _channels(state, own, model.in_chans)):
            hint = f"; its images have {channels} channels, and {model.in_chans} here: set `data.in_chans={channels}`"
        raise ValueError(f"{path} does not fit the model: {'; '.join(reasons)}{hint}")
    _forget_grids(model, state)
    try:
        model.load_state_dict(kept | state)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model: {one_line(error, 2000)}") from error


def _channels(state: State, own: State, in_chans: int) -> int | None:
    """Return the channels of the images of weights, if these are all by which they differ from a model; else None."""
    pairs = {name: (state[name].numel(), value.numel()) for name, value in own.items() if name in state}
    shares = {theirs * in_chans / ours for theirs, ours in pairs.values() if theirs != ours and ours}
    others = [name for name, (theirs, ours) in pairs.items() if theirs != ours and not name.startswith("tokenizer.")]
    return None if others or len(shares) != 1 or not (share := shares.pop()).is_integer() else int(share)


def _way_out(state: State) -> str | None:
    """Return what to do with weights whose names are those of no network that is read here; None for others."""
    if any("embeddings.patch_embedding" in name for name in state):
        return "transformers has written it: give the folder in which it lies with its config.json, as hf:FOLDER"
    if prefix := network_prefix(state):
        return f"it has its network under `{prefix}`: save these weights alone, without this prefix"
    if any(name.startswith("decoder_") for name in state):
        return "it has the decoder of a pretraining: save its weights without those of decoder_ and mask_token"
    return None


def _prefix_tokens(state: State) -> str:
    """Return the arguments that give a network the tokens before the patches that a file has."""
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    if "cls_token" in state:
        return f"`model.class_token=true` and `model.reg_tokens={registers}`"
    return f"`model.class_token=false`, `model.reg_tokens={registers}` and `model.global_pool=avg`"


def _forget_grids(model: VisionTransformer, state: State) -> None:
    """Remove what the positions keep of the grid of other weights, where ``state`` has none."""
    for name, module in model.named_modules():
        kept = [key for key in SIZED if module._buffers.get(key) is not None and f"{name}.{key}" not in state]
        if isinstance(module, Resizable) and kept:
            module._buffers.update(dict.fromkeys(kept))
            module.fill_tables()
