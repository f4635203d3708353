"""Put the weights of a network of ours into the network of timm that it was read from, or one built like it."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.models.convert_pos import RECOMPUTED

State = dict[str, Tensor]


def weights_for_timm(ours: nn.Module, theirs: nn.Module) -> State:
    """Return the state dict of ``theirs``, a ViT, Eva, Beit or NaFlexVit of timm, with the weights of ``ours``.

    It is the way back of :func:`vitlab.models.convert.from_timm`: a strict load gives equal outputs. Positions that
    timm added to prefix tokens are part of these tokens here, so they are zero there. A bias of keys that timm's class
    lacks is left out where nothing rotates the keys: it adds the same to all logits of a query.

    Raises:
        ValueError: A weight of ours is not zero and has no place there, or has another shape.

    Example:
        >>> from timm.models import VisionTransformer as TimmViT
        >>> from vitlab.models import VisionTransformer
        >>> size = {"img_size": 32, "patch_size": 16, "embed_dim": 48, "depth": 1, "num_heads": 3}
        >>> theirs = TimmViT(**size)
        >>> theirs.load_state_dict(weights_for_timm(VisionTransformer(**size), theirs))
        <All keys matched successfully>
    """
    target, left = theirs.state_dict(), dict(ours.state_dict())
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
        rotates = getattr(theirs, "rope", None) is not None  # else it adds the same to all logits of a query
        if (part[3] or "bias") == "bias" and not has_k and rotates and bool(k.any()):
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
