"""Networks of timm: build one, and say which arguments make ours equal to it."""

from typing import Any, get_args

import torch
from torch import nn

from vitlab.class_paths import ClassSpec
from vitlab.errors import did_you_mean, one_line
from vitlab.layers.pool import PoolName
from vitlab.layers.pos_embed import PosEmbedChoice
from vitlab.models.arguments import ModelArgs
from vitlab.models.convert import mlp_ratio_of, pools_prefix_tokens
from vitlab.models.weights_file import WeightsFile

_NORMED: ClassSpec = {"class_path": "softmax", "init_args": {"qk_norm": True}}


class NoCounterpart(ValueError):
    """A network of another library that has no equivalent in vitlab.

    Args:
        message: What is missing here.
        theirs: The network.

    Example:
        >>> NoCounterpart("it has no blocks", nn.Identity()).theirs
        Identity()
    """

    def __init__(self, message: str, theirs: nn.Module) -> None:
        super().__init__(message)
        self.theirs = theirs


def timm_model(name: str, pretrained: bool) -> nn.Module:
    """Return the timm model ``timm:NAME``; ``pretrained`` loads its published weights, downloaded if needed.

    Example:
        >>> timm_model("timm:vit_tiny_patch16_224", pretrained=False).embed_dim
        192
    """
    import timm

    try:
        return timm.create_model(name.removeprefix("timm:"), pretrained=pretrained).eval()
    except Exception as error:  # timm and the hub raise many kinds
        reason = one_line(error)
        called, known = name.removeprefix("timm:"), timm.list_models()
        close = "" if called.split(".")[0] in known else did_you_mean(called, known)  # else what failed is no name
        raise ValueError(
            f"timm has no {'weights to give' if pretrained else 'model'} for {name}: {reason}{close}"
        ) from error


def timm_file(theirs: nn.Module, name: str) -> WeightsFile:
    """Return the weights of a timm network with the arguments of our equivalent; refuse one without equivalent.

    Example:
        >>> timm_file(timm_model("timm:test_vit", pretrained=False), "timm:test_vit").arguments["depth"]
        6
    """
    return WeightsFile(theirs.state_dict(), timm_arguments(theirs), path=name)


def timm_arguments(theirs: Any) -> ModelArgs:
    """Return the arguments of our network that is equivalent to timm's ``theirs``, or raise what is missing here.

    Example:
        >>> arguments = timm_arguments(timm_model("timm:vit_tiny_patch16_224", pretrained=False))
        >>> arguments["embed_dim"], arguments["depth"], arguments["num_heads"]
        (192, 12, 3)
    """
    from timm.models import Beit, Eva, NaFlexVit
    from timm.models import VisionTransformer as TimmViT

    if type(theirs) not in (TimmViT, Eva, Beit, NaFlexVit):
        reason = "its VisionTransformer, Eva, Beit and NaFlexVit have one"
        reason = "it has a distillation token and a head of its own" if hasattr(theirs, "dist_token") else reason
        raise NoCounterpart(f"timm's {type(theirs).__name__} has no counterpart here: {reason}", theirs)
    block: Any = theirs.blocks[0]
    norm, act = _known_layers(theirs)
    scales = [getattr(block, name, None) for name in ("ls1", "gamma_1")]
    patches = getattr(theirs, "patch_embed", None) or theirs.embeds
    patch, tokens = tuple(patches.patch_size), theirs if hasattr(theirs, "patch_embed") else patches
    fixed = getattr(patches, "grid_size", None)  # NaFlexViT has no fixed image size
    grid = fixed or patches.pos_embed_grid_size
    registers = getattr(tokens, "reg_token", None)
    qkv, none = block.attn.qkv or block.attn.q_proj, nn.Identity()
    return {
        "img_size": (grid[0] * patch[0], grid[1] * patch[1]),  # the rest is cut off there: 378 of 384
        "in_chans": theirs.in_chans if fixed is None else patches.proj.in_channels,
        "num_classes": theirs.num_classes,
        "patch_size": patch,
        "embed_dim": theirs.embed_dim,
        "depth": len(theirs.blocks),
        "num_heads": block.attn.num_heads,
        "mlp_ratio": mlp_ratio_of(block.mlp.fc2.in_features, theirs.embed_dim),
        "qkv_bias": qkv.bias is not None or getattr(block.attn, "q_bias", None) is not None,
        "attn": "softmax" if isinstance(getattr(block.attn, "q_norm", none), nn.Identity) else _NORMED,
        "act_layer": act,
        "mlp_layer": "mlp" if type(block.mlp).__name__ == "Mlp" else "swiglu",
        "norm_layer": norm,
        "norm_eps": torch.finfo(torch.float32).eps if block.norm1.eps is None else block.norm1.eps,  # as torch does
        "pos_embed": timm_positions(theirs),
        "class_token": tokens.cls_token is not None,
        "reg_tokens": 0 if registers is None else registers.shape[1],
        "global_pool": theirs.global_pool,
        "pre_norm": not isinstance(getattr(theirs, "norm_pre", nn.Identity()), nn.Identity),
        "fc_norm": not isinstance(theirs.fc_norm, nn.Identity),
        "layer_scale": 1.0 if any(not isinstance(s, nn.Identity | None) for s in scales) else None,  # loaded later
    }


def _known_layers(theirs: Any) -> tuple[str, str]:
    """Return our names of timm's normalization and activation; refuse layers that do not exist here."""
    block, embed = theirs.blocks[0], getattr(theirs, "patch_embed", None) or theirs.embeds
    if type(block).__name__ not in ("Block", "EvaBlock"):
        reason = f"it has block_fn={type(block).__name__}"
        raise NoCounterpart(f"this network of timm has no counterpart here: {reason}", theirs)
    norms = {"LayerNorm": "layernorm", "RmsNorm": "rmsnorm", "RMSNorm": "rmsnorm"}  # the last of torch
    acts = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "ReLU": "relu", "SiLU": "silu"}
    norm, act = type(block.norm1).__name__, type(getattr(block.mlp, "act", None)).__name__
    mlp = type(block.mlp).__name__
    none = nn.Identity()
    missing = {
        "pool_include_prefix": getattr(theirs, "pool_include_prefix", False),
        "global_pool='map' of all tokens": pools_prefix_tokens(theirs),
        f"embed_layer={type(embed).__name__}": type(embed).__name__ not in ("PatchEmbed", "NaFlexEmbeds"),
        "pos_embed_ar_preserving": getattr(embed, "pos_embed_ar_preserving", False),
        f"global_pool={theirs.global_pool!r}": theirs.global_pool not in get_args(PoolName),
        f"norm_layer={norm}": norm not in norms,
        f"act_layer={act}": act not in acts,
        "scale_mlp": not isinstance(getattr(block.mlp, "norm", none), nn.Identity),
        "scale_attn_inner": not isinstance(getattr(block.attn, "norm", none), nn.Identity),
        "gated attention": getattr(block.attn, "gate", None) is not None,
        "norms of both kinds": not isinstance(theirs.norm, nn.Identity) and not isinstance(theirs.fc_norm, nn.Identity),
        f"mlp_layer={mlp}": mlp not in ("Mlp", "GluMlp", "SwiGLU") or getattr(block.mlp, "gate_last", False),
    }
    if any(missing.values()):
        names = ", ".join(name for name, is_missing in missing.items() if is_missing)
        raise NoCounterpart(f"this network of timm has no counterpart here: it has {names}", theirs)
    return norms[norm], acts[act]


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
