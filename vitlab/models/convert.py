"""Convert weights of timm and of the official T2T-ViT to ours, and ours to timm; outputs do not change."""

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.tokenizers.patch import pseudo_inverse_resize

State = dict[str, Tensor]
OF_TIMM = ("patch_embed.", "embeds.")  # how names begin in state dicts of timm alone

_BIAS_TABLE = re.compile(r"(?:blocks\.(\d+)\.attn|rel_pos_bias)\.relative_position_bias_table")
RECOMPUTED = re.compile(
    r".*\.relative_position_index|rope\.(?:bands|t_x|t_y)|freqs_t_[xy]|blocks\.\d+\.attn\.rope(_reg)?\.freqs"
)


def rename_positions(
    state_dict: State, num_heads: int | None = None, patch: tuple[int, int, int] | None = None
) -> State:
    """Rename rotations, biases and factorized tables, and other names in which these networks differ from timm's ViT.

    Axial rotations leave no trace in timm's state dicts: load such a file into a model with pos_embed="rope2d", or with
    pos_embed=["learned", "rope2d"] for timm's models with "ape" in their names, which also add a table.

    Args:
        state_dict: State dict of timm or of naver-ai/rope-vit.
        num_heads: Number of heads A; needed only for the files of naver-ai/rope-vit, which do not show it.
        patch: Channels, height and width of a patch, which the files of NaFlexViT do not show; None guesses them.

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
        elif name == "register_tokens":  # DINOv2
            state["reg_token"] = value
        elif name != "mask_token" and not RECOMPUTED.fullmatch(name):
            name = re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name)
            name = name.replace(".mlp.w12.", ".mlp.fc1.").replace(".mlp.w3.", ".mlp.fc2.")  # DINOv2's giant
            new_name, new_value = _rename_naflex(name, value, patch)
            state[new_name] = new_value
    if tables:
        state["pos_embed.bias_table"] = torch.stack([tables[i] for i in sorted(tables)])
    return fuse_projections(state)


def _head_freqs(freqs: Tensor, num_heads: int | None) -> Tensor:
    """Return ``(2, depth, A, d / 2)`` frequencies from the same, or from ``(2, depth, A * d / 2)``."""
    if freqs.ndim == 4:
        return freqs
    if num_heads is None:
        raise ValueError(
            "`num_heads` must be given for the weights of naver-ai/rope-vit: their `freqs` does not show it"
        )
    return freqs.unflatten(2, (num_heads, -1))


def _rename_naflex(name: str, value: Tensor, patch: tuple[int, int, int] | None) -> tuple[str, Tensor]:
    """Return the name and tensor of timm's ViT for a parameter under ``embeds.`` of NaFlexViT; others unchanged."""
    match name.removeprefix("embeds."):
        case "pos_embed_y" if name.startswith("embeds."):
            return "pos_embed.row", value
        case "pos_embed_x" if name.startswith("embeds."):
            return "pos_embed.col", value
        case "pos_embed" if name.startswith("embeds."):
            return "pos_embed.weight", value.flatten(1, 2)  # (1, h, w, D)
        case "proj.weight" if value.ndim == 2 and name.startswith("embeds."):
            in_chans, h, w = _patch_of(value.shape[1], patch)
            return "patch_embed.proj.weight", value.unflatten(1, (h, w, in_chans)).permute(0, 3, 1, 2).contiguous()
        case "proj.weight" | "proj.bias" as rest if name.startswith("embeds."):
            return f"patch_embed.{rest}", value
        case rest:
            return rest, value


def _patch_of(count: int, known: tuple[int, int, int] | None) -> tuple[int, int, int]:
    """Return channels, height and width of a patch of ``count`` numbers: as known, or a square of as many channels."""
    if known is not None and math.prod(known) == count:
        return known
    for in_chans in (3, 1, 4, 2) if known is None else known[:1]:
        if (side := math.isqrt(count // in_chans)) ** 2 * in_chans == count:
            return in_chans, side, side
    what = "squares of 1 to 4 channels: give `patch`"
    if known is not None:
        what = "{} x {} x {}: change `in_chans` or `patch_size`".format(*known)
    raise ValueError(f"the file's patches have {count} numbers, which are not {what}")


def fuse_projections(state: State) -> State:
    """Return the state with separate q, k, v projections, and the two halves of a gated MLP, fused into one layer each.

    A bias that is missing, such as that of the keys in BEiT, EVA and DINOv3, is zero; an MLP may have one half alone.

    >>> fuse_projections({"blocks.0.attn.q_bias": torch.ones(1), "blocks.0.attn.v_bias": torch.ones(1)})
    {'blocks.0.attn.qkv.bias': tensor([1., 0., 1.])}
    """
    fused: State = {}
    for name, value in state.items():
        if part := re.fullmatch(r"(.+\.attn\.)[qkv]_(proj\.weight|(?:proj\.)?bias)", name):
            parts = [state.get(f"{part[1]}{x}_{part[2]}", torch.zeros_like(value)) for x in "qkv"]
            fused[f"{part[1]}qkv.{part[2].removeprefix('proj.')}"] = torch.cat(parts)
        elif half := re.fullmatch(r"(.+\.mlp\.fc1)_[gx]\.(weight|bias)", name):
            names = [f"{half[1]}_{x}.{half[2]}" for x in "gx"]
            fused[f"{half[1]}.{half[2]}"] = torch.cat([state[each] for each in names if each in state])
        else:
            fused[name] = value
    return fused


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
            rest = re.sub(r"^linear\.", "transition.0.", rest)
            renamed[f"{block}.{rest}"] = value
    return renamed


def from_timm(
    state_dict: State,
    num_patches: int | None = None,
    num_heads: int | None = None,
    patch: tuple[int, int, int] | None = None,
) -> State:
    """Rename the state dict of a timm ViT, Eva (with rotations), BEiT or NaFlexViT to ours; outputs do not change.

    Positions that timm adds to class and register tokens are constants and become part of these tokens. DeiT, DINO,
    MAE and MoCo v3 have the same layout, and DINOv2, whose mask token is left out.

    Args:
        state_dict: State dict of timm.
        num_patches: Number of patch tokens N, from which follows how many rows of ``pos_embed`` belong to prefix
            tokens; None assumes a row for every prefix token, timm's default.
        num_heads: Number of heads A; needed only for the rotations in files of naver-ai/rope-vit.
        patch: Channels, height and width of a patch, which the files of NaFlexViT do not show; None guesses them.

    Example:
        >>> theirs = {"cls_token": torch.zeros(1, 1, 8), "pos_embed": torch.ones(1, 1 + 4, 8)}
        >>> {name: tuple(value.shape) for name, value in from_timm(theirs).items()}
        {'cls_token': (1, 1, 8), 'pos_embed.weight': (1, 4, 8)}
    """
    state = rename_positions(state_dict, num_heads, patch)
    if (weight := state.get("patch_embed.proj.weight")) is not None:  # CLIP has no bias here
        state.setdefault("patch_embed.proj.bias", weight.new_zeros(len(weight)))
    return fold_prefix_positions(_rename(state, "patch_embed.", "tokenizer."), num_patches)


def to_timm(state_dict: State, pos_embed: Tensor | None = None, no_embed_class: bool = False) -> State:
    """Rename our state dict to timm's; outputs do not change. Prefix tokens get zero positions.

    With ``pre_norm``, as in CLIP, timm has no bias of patches: one of zeros is left out, another one refused.

    Args:
        state_dict: State dict of a network with ``tokenizer="patch"`` and a linear head.
        pos_embed: The ``(N, D)`` table that the network adds, ``model.pos_embed.added()``; None takes the one in the
            state dict, which lacks those of a formula and a ``scale``.
        no_embed_class: timm's argument: whether its table has no rows for prefix tokens, as in DeiT III.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=1, num_heads=3)
        >>> list(to_timm(net.state_dict()))[-1]
        'pos_embed'
    """
    state = _rename(state_dict, "tokenizer.", "patch_embed.")
    saved = state.pop("pos_embed.weight", None)
    table = saved if pos_embed is None else pos_embed[None]
    foreign = [name for name in state if name.startswith(("pos_embed.", "head.0."))]
    foreign += [name for name in state if name.startswith("patch_embed.") and ".proj." not in name]
    if foreign or (saved is not None and len(saved) > 1):
        raise ValueError(f"timm's ViT has no counterpart of {', '.join(foreign) or 'a position table per block'}")
    if "norm_pre.weight" in state and (bias := state.pop("patch_embed.proj.bias")).any():
        if table is None:
            raise ValueError(
                "timm's ViT has no bias of patches where tokens are normalized before the blocks (CLIP), and this one "
                f"is up to {bias.abs().max():.1e}: set it to 0, add a table of positions, or use pre_norm=False"
            )
        table = table + bias  # both are added to each patch
    if table is not None:
        prefix = () if no_embed_class else ("cls_token", "reg_token")
        num_prefix_tokens = sum(state[name].shape[1] for name in prefix if name in state)
        state["pos_embed"] = torch.cat([table.new_zeros(1, num_prefix_tokens, table.shape[2]), table], dim=1)
    return state


def convert_layout(
    state_dict: State,
    num_patches: int,
    num_prefix_tokens: int,
    num_heads: int,
    patch: tuple[int, int, int] | None = None,
) -> tuple[State, list[str]]:
    """Convert a state dict of any supported layout to ours, keeping its position table; also say what it was.

    Args:
        state_dict: State dict of vitlab, timm or the official T2T-ViT.
        num_patches: Number of patch tokens N of the trained network if known, else of the model to load it.
        num_prefix_tokens: Number of prefix tokens P of the model.
        num_heads: Number of heads A of the model.
        patch: Channels, height and width of a patch of the model; None guesses those that a file does not show.

    Returns:
        The state dict, and a sentence if it was converted.

    Example:
        >>> convert_layout({"head.bias": torch.zeros(10)}, num_patches=196, num_prefix_tokens=1, num_heads=6)
        ({'head.bias': tensor([0., 0., 0., 0., 0., 0., 0., 0., 0., 0.])}, [])
    """
    rows = state_dict["pos_embed"].shape[1] if "pos_embed" in state_dict else 0
    if any(name.startswith("tokens_to_token.") for name in state_dict):
        state = rename_blocks(_rename(state_dict, "tokens_to_token.", "tokenizer."))
        state = fold_prefix_positions(state, rows - 1)
        return state, ["layout: converted from the official T2T-ViT"]
    if any(name.startswith(OF_TIMM) for name in state_dict):
        if rows and rows - num_patches not in (0, 1, num_prefix_tokens):
            raise unknown_grid(rows)
        left = ["weights: left out mask_token, which only pretraining needs"] if "mask_token" in state_dict else []
        state = from_timm(state_dict, num_patches, num_heads, patch)
        return state, ["layout: converted from timm", *left]
    return state_dict, []


def resize_patch_kernels(state: State, patch: tuple[int, int] | None) -> tuple[State, list[str]]:
    """Resize the patch kernels to another patch size as in FlexiViT, Beyer et al. 2023 (arXiv:2212.08013).

    Args:
        state: State dict in our layout.
        patch: Height and width of the new patches; None leaves the kernels unchanged.

    Example:
        >>> resize_patch_kernels({"tokenizer.proj.weight": torch.zeros(48, 3, 8, 8)}, (16, 16))[1]
        ['patches: kernels of 8 x 8 resized to 16 x 16']
    """
    kernel = state.get(name := "tokenizer.proj.weight")
    if patch is None or kernel is None or kernel.ndim != 4 or kernel.shape[2:] == patch:
        return state, []
    old = (kernel.shape[2], kernel.shape[3])
    resized = (kernel.double().flatten(2) @ pseudo_inverse_resize(old, patch).T).unflatten(2, patch)
    return state | {name: resized.to(kernel)}, ["patches: kernels of {} x {} resized to {} x {}".format(*old, *patch)]


def mlp_ratio_of(hidden_dim: int, dim: int) -> float:
    """Return the ratio of which ``int(dim * ratio)`` is ``hidden_dim``, which their quotient may miss by one.

    Example:
        >>> int(88 * (120 / 88)), int(88 * mlp_ratio_of(120, 88))
        (119, 120)
    """
    ratio = hidden_dim / dim
    while int(dim * ratio) < hidden_dim:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def unknown_grid(count: int | None = None) -> ValueError:
    """Return the error for a file whose positions fit no known grid; without their number where nobody can tell it.

    Example:
        >>> str(unknown_grid(16))[:60]
        'the file has 16 positions and does not say their grid, which'
    """
    return ValueError(
        f"the file has {'' if count is None else f'{count} '}positions and does not say their grid, which is not the "
        "network's: give rows and columns with --init_grid (grid=... in Python), or "
        '{"network": {"img_size": ..., "patch_size": ...}} in FILE.json beside it'
    )


def same_table(table: Tensor, formula: Tensor, tolerance: float) -> bool:
    """Return whether a table of positions equals a formula, up to ``tolerance``.

    Example:
        >>> same_table(torch.ones(4, 8), torch.ones(4, 8) + 1e-7, tolerance=1e-6)
        True
    """
    return table.shape == formula.shape and bool((table - formula.to(table)).abs().max() <= tolerance)


def full_precision(state: State) -> State:
    """Return tensors in half precision as float32, before anything is computed from them; others unchanged.

    Example:
        >>> full_precision({"cls_token": torch.zeros(1, 1, 8).bfloat16()})["cls_token"].dtype
        torch.float32
    """
    half = (torch.float16, torch.bfloat16)
    return {name: value.float() if value.dtype in half else value for name, value in state.items()}


def _rename(state_dict: State, old: str, new: str) -> State:
    return {new + name.removeprefix(old) if name.startswith(old) else name: value for name, value in state_dict.items()}


def fold_prefix_positions(state: State, num_patches: int | None) -> State:
    """Add the rows of ``pos_embed`` for prefix tokens to these tokens; the other rows become our table.

    Example:
        >>> state = {"cls_token": torch.zeros(1, 1, 8), "pos_embed": torch.ones(1, 1 + 4, 8)}
        >>> list(fold_prefix_positions(state, 4))
        ['cls_token', 'pos_embed.weight']
    """
    state = dict(state)
    if "pos_embed" not in state:
        return state
    table = state.pop("pos_embed")  # (1, rows, D)
    prefix: dict[str, int] = {name: state[name].shape[1] for name in ("cls_token", "reg_token") if name in state}
    layouts = [prefix, {name: 1 for name in prefix if name == "cls_token"}, {}]  # prefix tokens that may have rows
    candidates = [table.shape[1] - sum(layout.values()) for layout in layouts]
    num_patches = candidates[0] if num_patches is None else num_patches
    if num_patches not in candidates:
        raise ValueError(
            f"`pos_embed` must have a row for each patch, and can have rows for prefix tokens, got {table.shape[1]} "
            f"rows, {num_patches} patches and {sum(prefix.values())} prefix tokens"
        )
    row = 0
    for name, count in layouts[candidates.index(num_patches)].items():
        state |= full_precision({name: state[name]})
        state[name] = state[name] + table[:, row : row + count]
        row += count
    return state | {"pos_embed.weight": table[:, row:]}


def weights_for_timm(ours: nn.Module, theirs: nn.Module) -> State:
    """Return the state dict of ``theirs``, a ViT, Eva, Beit or NaFlexVit of timm, with the weights of ``ours``.

    It is the way back of :func:`vitlab.models.convert.from_timm`: a strict load gives equal outputs. Positions that
    timm added to prefix tokens are part of these tokens here, so they are zero there. A bias of keys that timm's class
    lacks is left out where nothing rotates or normalizes the keys: it adds the same to all logits of a query.

    Raises:
        ValueError: A weight of ours is not zero and has no place there, or has another shape, or ``theirs`` pools
            prefix tokens by attention, too.

    Example:
        >>> from timm.models import VisionTransformer as TimmViT
        >>> from vitlab.models import VisionTransformer
        >>> size = {"img_size": 32, "patch_size": 16, "embed_dim": 48, "depth": 1, "num_heads": 3}
        >>> theirs = TimmViT(**size)
        >>> theirs.load_state_dict(weights_for_timm(VisionTransformer(**size), theirs))
        <All keys matched successfully>
    """
    if pools_prefix_tokens(theirs):
        raise ValueError(
            f"timm's {type(theirs).__name__} does not have `global_pool: map` of patches alone: it pools class and "
            "register tokens, too"
        )
    target, left = theirs.state_dict(), dict(ours.state_dict())
    for name, part in ours.named_modules():
        if isinstance(part, AddedPosEmbed) and part.chosen_scale != 1:  # timm stores what is added
            left |= {key: part.chosen_scale * left[key] for x in part.stacks if (key := f"{name}.{x}") in left}
    used: set[str] = set()
    state = {name: _weight(name, target, left, used, theirs) for name in target}
    missing = [name for name, value in state.items() if value is None]
    dropped = [name for name in left if name not in used and bool(left[name].any())]
    if missing or dropped:
        what = ", ".join([*missing[:3], *dropped[:3]])
        raise ValueError(f"these weights do not fit timm's {type(theirs).__name__}: no counterpart of {what}")
    found = {name: value for name, value in state.items() if value is not None}
    if wrong := [name for name, value in found.items() if value.shape != target[name].shape]:
        shapes = [tuple(x.shape) for x in (found[wrong[0]], target[wrong[0]])]
        raise ValueError(f"`{wrong[0]}` of timm's {type(theirs).__name__} is {shapes[1]}, ours {shapes[0]}")
    return found


def pools_prefix_tokens(theirs: Any) -> bool:
    """Return whether a network of timm pools its class and register tokens by attention, as ``map`` here does not.

    Example:
        >>> from timm.models import Eva
        >>> size = {"img_size": 32, "patch_size": 16, "embed_dim": 48, "depth": 1, "num_heads": 3}
        >>> pools_prefix_tokens(Eva(**size, global_pool="map")), pools_prefix_tokens(Eva(**size))
        (True, False)
    """
    has_both = getattr(theirs, "attn_pool", None) is not None and theirs.num_prefix_tokens > 0
    return bool(has_both and getattr(theirs, "pool_include_prefix", True))  # Eva has no such choice


def _weight(name: str, target: State, ours: State, used: set[str], theirs: nn.Module) -> Tensor | None:
    """Return our value of timm's parameter ``name``; None if there is none. Names of ours that it holds go to used."""
    value = target[name]

    def take(own: str) -> Tensor | None:
        part = re.compile(own.replace("pos_embed.", r"pos_embed\.(\w+\.)?"))  # one of several position embeddings
        own = own if own in ours or "pos_embed." not in own else next(filter(part.fullmatch, ours), own)
        used.add(own)
        return ours.get(own)

    if RECOMPUTED.fullmatch(name):
        return value
    if name.endswith("relative_position_bias_table"):
        table, layer = take("pos_embed.bias_table"), re.match(r"blocks\.(\d+)\.", name)
        return None if table is None else table[int(layer[1]) if layer else 0]
    if part := re.fullmatch(r"(.+\.attn\.)([qkv])_(?:proj\.(weight|bias)|bias)", name):
        fused = take(f"{part[1]}qkv.{part[3] or 'bias'}")
        if fused is None:
            return None
        q, k, v = fused.chunk(3)
        has_k = f"{part[1]}k_proj.bias" in target or f"{part[1]}k_bias" in target
        changes = getattr(theirs, "rope", None) is not None or f"{part[1]}k_norm.weight" in target
        if (part[3] or "bias") == "bias" and not has_k and changes and bool(k.any()):  # else the same to all logits
            raise ValueError(f"timm's {type(theirs).__name__} has no bias of keys, and `{part[1]}qkv.bias` has one")
        return {"q": q, "k": k, "v": v}[part[2]]
    if half := re.fullmatch(r"(.+\.mlp\.fc1)_([gx])\.(weight|bias)", name):
        fused = take(f"{half[1]}.{half[3]}")
        return None if fused is None else fused.chunk(2)["gx".index(half[2])]
    return _renamed(re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name), value, take)


def _renamed(name: str, value: Tensor, take: Any) -> Tensor | None:
    """Return our value of a parameter of timm that has another name or shape here."""
    plain = name.removeprefix("embeds.")
    if name in ("rope.freqs", "freqs"):
        freqs = take("pos_embed.freqs")
        return None if freqs is None else freqs.reshape(value.shape)
    if plain in ("pos_embed_y", "pos_embed_x"):
        return take(f"pos_embed.{'row' if plain.endswith('y') else 'col'}")
    if plain == "pos_embed":
        table = take("pos_embed.weight")
        if table is None or value.ndim == 4:
            return None if table is None else table.reshape(value.shape)
        return torch.cat([table.new_zeros(1, value.shape[1] - table.shape[1], table.shape[2]), table], dim=1)
    if (plain != name and plain.startswith("proj.")) or name.startswith("patch_embed."):
        own: Tensor | None = take(f"tokenizer.{plain.removeprefix('patch_embed.')}")
        flat = own is not None and own.ndim == 4 and value.ndim == 2
        return own.permute(0, 2, 3, 1).flatten(1) if own is not None and flat else own
    return take(plain)
