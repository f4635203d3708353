"""Read ViTs of Hugging Face's transformers and of torchvision: their arguments and weights in our layout."""

import re
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.errors import did_you_mean, one_line
from vitlab.models.arguments import ModelArgs
from vitlab.models.convert import fold_prefix_positions, fuse_projections, mlp_ratio_of
from vitlab.models.weights_file import WeightsFile
from vitlab.tokenizers.splits import pair

State = dict[str, Tensor]
_CLASSES = {  # of transformers, by model type: the class to build where a configuration names none of these
    "vit": ("ViTModel", "ViTForImageClassification"),
    "deit": ("DeiTModel", "DeiTForImageClassification"),
    "dinov2": ("Dinov2Model",),
    "dinov2_with_registers": ("Dinov2WithRegistersModel",),
    "dinov3_vit": ("DINOv3ViTModel",),
    "siglip_vision_model": ("SiglipVisionModel", "SiglipForImageClassification"),
}
_HEADS = {  # of transformers, without a counterpart here
    "Dinov2ForImageClassification": "its head reads the class token and the mean of the patches",
    "Dinov2WithRegistersForImageClassification": "its head reads the class token and the mean of the patches",
    "DeiTForImageClassificationWithTeacher": "it has two heads",
}
_ACTS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu", "silu": "silu"}
_RENAMED = [  # of transformers to ours, in this order; the first of each kind is of version 5, others of files before
    (r"^(?:vit|deit|dinov2|dinov2_with_registers|vision_model)\.", ""),
    (r"^head\.probe$", "attn_pool.latent"),
    (r"^head\.attention\.out_proj\.", "attn_pool.proj."),
    (r"^head\.layernorm\.", "attn_pool.norm."),
    (r"^head\.(mlp|attention)\.", r"attn_pool.\1."),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.(?:register_tokens|distillation_token)$", "reg_token"),
    (r"^embeddings\.position_embeddings?(?:\.weight)?$", "pos_embed"),
    (r"^embeddings\.patch_embeddings?\.(?:projection\.)?", "tokenizer.proj."),
    (r"^(?:encoder\.|model\.)?layers?\.(\d+)\.", r"blocks.\1."),
    (r"\.(?:layernorm_before|layer_norm1)\.", ".norm1."),
    (r"\.(?:layernorm_after|layer_norm2)\.", ".norm2."),
    (r"\.(?:self_attn|attention)\.(?:attention\.)?([qkv])(?:_proj|uery|ey|alue)\.", r".attn.\1_proj."),
    (r"\.(?:self_attn|attention)\.(?:o_proj|out_proj|output\.dense)\.", ".attn.proj."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"\.(?:intermediate\.dense|mlp\.weights_in)\.", ".mlp.fc1."),
    (r"\.mlp\.gate_proj\.", ".mlp.fc1_g."),
    (r"\.mlp\.up_proj\.", ".mlp.fc1_x."),
    (r"^(blocks\.\d+)\.output\.dense\.|\.mlp\.(?:weights_out|down_proj)\.", r"\1.mlp.fc2."),
    (r"^(?:layernorm|post_layernorm)\.", "norm."),
    (r"^classifier\.", "head."),
]


def peer_model(name: str, pretrained: bool) -> nn.Module:
    """Return the network ``hf:NAME``, ``hf:FOLDER`` or ``torchvision:NAME``; ``pretrained`` loads published weights.

    It has timm's ``pretrained_cfg``. Of a folder nothing is downloaded. No code of a model's publisher runs, and
    weights are read from safetensors. A head that has no counterpart here is left out, with a warning.

    Example:
        >>> type(peer_model("torchvision:vit_b_16", pretrained=False)).__name__
        'VisionTransformer'
    """
    library, _, rest = name.partition(":")
    try:
        net = _torchvision_model(rest, pretrained) if library == "torchvision" else _hf_model(rest, pretrained)
        net.pretrained_cfg = peer_images(name)  # type: ignore[assignment]  # as networks of timm have it
    except ImportError as error:
        raise ValueError(f"{name} needs transformers: pip install transformers") from error
    except ValueError:
        raise
    except Exception as error:  # the hub raises many kinds
        reason = one_line(error)
        raise ValueError(f"{name} cannot be read: {reason}") from error
    return net


def _check_torchvision(name: str) -> None:
    from torchvision import models

    names = [known for known in models.list_models(module=models) if known.startswith("vit_")]
    if name not in names:
        raise ValueError(f"torchvision has the ViTs {', '.join(names)}, got {name!r}{did_you_mean(name, names)}")


def _torchvision_model(name: str, pretrained: bool) -> nn.Module:
    from torchvision import models

    _check_torchvision(name)
    net: nn.Module = models.get_model(name, weights="DEFAULT" if pretrained else None)
    return net.eval()


def _hf_model(name: str, pretrained: bool) -> nn.Module:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = one_line(error)
        raise ValueError(f"transformers has no configuration of hf:{name}: {reason}") from error
    named = getattr(config, "architectures", None) or []
    config = config.vision_config if config.model_type == "siglip" and named == ["SiglipModel"] else config
    kind = "siglip_vision_model" if config.model_type == "siglip" else config.model_type
    if kind not in _CLASSES:
        raise ValueError(f"hf:{name} is a {kind}, which has no counterpart here: {', '.join(_CLASSES)} have one")
    known = _CLASSES[kind]
    cls: Any = getattr(transformers, next((one for one in named if one in known), known[0]))
    if not pretrained:
        return cls(config).eval()
    if left := [_HEADS[one] for one in named if one in _HEADS]:
        warnings.warn(f"hf:{name} is read without its head, which has no counterpart here: {left[0]}", stacklevel=2)
    try:
        options = {"trust_remote_code": False, "use_safetensors": True, "dtype": torch.float32}  # else the file's
        return cls.from_pretrained(name, **options).eval()
    except OSError as error:
        raise ValueError(f"hf:{name} has no weights to give: {one_line(error)}") from error


def peer_images(name: str) -> dict[str, Any]:
    """Return how images were prepared for the published weights of a name, in timm's form; empty if unknown.

    Example:
        >>> peer_images("torchvision:vit_b_16")["crop_pct"]
        0.875
    """
    library, _, rest = name.partition(":")
    return _torchvision_images(rest) if library == "torchvision" else _hf_images(rest)


def _torchvision_images(name: str) -> dict[str, Any]:
    from torchvision import models

    _check_torchvision(name)
    how = models.get_model_weights(name)["DEFAULT"].transforms()
    (crop,), (resized,) = how.crop_size, how.resize_size
    return {
        "input_size": (3, crop, crop), "crop_pct": crop / resized, "crop_mode": "center",
        "interpolation": how.interpolation.value, "mean": tuple(how.mean), "std": tuple(how.std),
    }  # fmt: skip


def _hf_images(name: str) -> dict[str, Any]:
    """Return the preparation that transformers' image processor of a network states; empty if there is none.

    What its file leaves out is as in its class. Values that it does not bring to [0, 1] have other means and spreads.
    One that cuts nothing off, whose images have many shapes, gets the center of each image, with a warning. One that
    resizes nothing takes images of the network's size; others are squashed to it, with a warning.
    """
    from transformers import AutoConfig, AutoImageProcessor
    from transformers.utils import cached_file

    files = ("preprocessor_config.json", "processor_config.json")
    if not any(cached_file(name, file, _raise_exceptions_for_missing_entries=False) for file in files):
        return {}
    how: Any = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
    given: Any = how.size if how.do_resize else None
    if given is None:
        config: Any = AutoConfig.from_pretrained(name, trust_remote_code=False)
        height, width = pair("image_size", getattr(config, "vision_config", config).image_size)
        given = {"height": height, "width": width}
        whole = f"hf:{name} does not say how it resizes images: here they are squashed to the size of its network"
        warnings.warn(f"{whole}, {given['height']} x {given['width']} pixels", stacklevel=2)
    edge, longest = given.get("shortest_edge"), given.get("longest_edge")
    size = (edge, edge) if edge else (given.get("height"), given.get("width"))
    if longest or None in size:
        known = "height and width, or the shortest edge alone"
        raise ValueError(f"hf:{name} resizes images by {dict(how.size)}, which has no counterpart here: {known}, has")
    cut = how.crop_size if getattr(how, "do_center_crop", False) and how.do_resize else None
    crop = size if cut is None else (cut["height"], cut["width"])
    if edge and cut is None:
        whole = f"hf:{name} keeps the whole image, its shortest edge at {edge} pixels"
        warnings.warn(f"{whole}; here, where the grid is fixed, its center of {edge} x {edge} is cut out", stacklevel=2)
    names = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # as Pillow numbers them
    most = 255 * how.rescale_factor if how.do_rescale else 255  # of the values that are normalized
    mean, std = (how.image_mean, how.image_std) if how.do_normalize else (0.0, 1.0)
    return {
        "input_size": (3, *crop), "crop_pct": crop[0] / size[0], "crop_mode": "center" if edge else "squash",
        "interpolation": "bilinear" if how.resample is None else names[how.resample],
        **{key: tuple(one / most for one in (3 * [x] if isinstance(x, int | float) else x)) for key, x in
           (("mean", mean), ("std", std))},
    }  # fmt: skip


def peer_file(theirs: nn.Module, name: str) -> WeightsFile:
    """Return the weights of a ViT of transformers or torchvision with the arguments of our equivalent.

    Raises:
        ValueError: It has a part that does not exist here.

    Example:
        >>> from torchvision.models import VisionTransformer as TorchvisionViT
        >>> theirs = TorchvisionViT(32, 16, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=5)
        >>> peer_file(theirs, "torchvision:tiny").arguments["num_heads"]
        2
    """
    read = _read_hf if hasattr(theirs, "config") else _read_torchvision
    state, arguments = read(theirs, name)
    weight = state["tokenizer.proj.weight"]  # (D, C, p, p)
    sides = pair("img_size", arguments["img_size"])
    h, w = (side // patch for side, patch in zip(sides, weight.shape[2:], strict=True))
    arguments["img_size"] = (h * weight.shape[2], w * weight.shape[3])  # the rest is cut off there: 378 of 384
    arguments |= {"patch_size": tuple(weight.shape[2:]), "in_chans": weight.shape[1], "embed_dim": weight.shape[0]}
    arguments |= {"depth": 1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks."))}
    arguments |= {"mlp_ratio": mlp_ratio_of(state["blocks.0.mlp.fc2.weight"].shape[1], weight.shape[0])}
    arguments |= {"qkv_bias": "blocks.0.attn.qkv.bias" in state, "class_token": "cls_token" in state}
    arguments |= {"reg_tokens": state["reg_token"].shape[1] if "reg_token" in state else 0}
    arguments |= {"layer_scale": 1.0 if "blocks.0.ls1.gamma" in state else None}  # loaded later
    return WeightsFile(fold_prefix_positions(state, h * w), arguments, path=name, is_foreign=True)


@torch.no_grad()
def peer_outputs(theirs: Any, images: Tensor) -> Tensor:
    """Return what our network must equal: logits, else the pooled features or the normalized class token.

    Example:
        >>> peer_outputs(nn.Flatten(), torch.zeros(2, 1, 2, 2)).shape
        torch.Size([2, 4])
    """
    found = theirs(images)
    if isinstance(found, Tensor):
        return found
    if (logits := getattr(found, "logits", None)) is not None:
        return logits
    is_class_token = theirs.config.model_type != "siglip_vision_model"  # ViTModel's pooler adds a layer of its own
    return found.last_hidden_state[:, 0] if is_class_token else found.pooler_output


def _read_hf(theirs: Any, name: str) -> tuple[State, ModelArgs]:
    config, cls = theirs.config, type(theirs).__name__
    kind = "siglip_vision_model" if config.model_type == "siglip" else config.model_type
    if kind not in _CLASSES or cls not in _CLASSES[kind]:
        classes = ", ".join(known for each in _CLASSES.values() for known in each)
        raise ValueError(f"{name}: {cls} has no counterpart here: {_HEADS.get(cls, f'{classes} have one')}")
    config = getattr(config, "vision_config", config)
    if config.hidden_act not in _ACTS:
        raise ValueError(f"{name} has no counterpart here: it has hidden_act={config.hidden_act}")
    gated = getattr(config, "use_swiglu_ffn", False) or getattr(config, "use_gated_mlp", False)
    act = "silu" if getattr(config, "use_swiglu_ffn", False) else _ACTS[config.hidden_act]
    state = hf_state(theirs.state_dict())
    if cls == "SiglipForImageClassification":
        state = {key: value for key, value in state.items() if not key.startswith("attn_pool.")}
    siglip = {"SiglipVisionModel": "map", "SiglipForImageClassification": "avg"}
    if siglip.get(cls) == "map" and "attn_pool.latent" not in state:
        raise ValueError(f"{name} has no counterpart here: it has no head that pools (vision_use_head=False)")
    pos_embed: Any = "learned"
    if kind == "dinov3_vit":
        moves = {move: getattr(config, f"pos_embed_{move}") for move in ("shift", "jitter", "rescale")}
        options = {"coordinates": "normalized", "theta": float(config.rope_theta), "axes": "yx", "pairs": "half"}
        options |= {move: value for move, value in moves.items() if value is not None}
        pos_embed = {"class_path": "rope2d", "init_args": options}
    return state, {
        "img_size": pair("image_size", config.image_size),
        "num_classes": theirs.num_labels if "head.weight" in state else 0,
        "num_heads": config.num_attention_heads,
        "act_layer": act,
        "mlp_layer": "swiglu" if gated else "mlp",
        "norm_eps": config.layer_norm_eps,
        "pos_embed": pos_embed,
        "global_pool": siglip.get(cls, "token"),
    }


def hf_state(state_dict: State) -> State:
    """Return a state dict of transformers in our layout, positions not yet apart from prefix tokens.

    What only a pretraining needs, the mask token and the pooler of ViT and DeiT, is left out.

    Example:
        >>> list(hf_state({"vit.layernorm.bias": torch.zeros(8), "pooler.dense.bias": torch.zeros(8)}))
        ['norm.bias']
    """
    renamed: State = {}
    for key, value in state_dict.items():
        for old, new in _RENAMED:
            key = re.sub(old, new, key)
        renamed[key] = value
    if renamed.get("pos_embed", torch.empty(0, 0, 0)).ndim == 2:
        renamed["pos_embed"] = renamed["pos_embed"][None]
    if "reg_token" in renamed and not renamed["reg_token"].shape[1]:
        del renamed["reg_token"]
    state: State = {}
    for key, value in fuse_projections(renamed).items():
        if match := re.fullmatch(r"attn_pool\.attention\.in_proj_(weight|bias)", key):
            third = len(value) // 3
            state |= {f"attn_pool.q.{match[1]}": value[:third], f"attn_pool.kv.{match[1]}": value[third:]}
        elif not re.search(r"^pooler\.|mask_token$", key):
            state[key] = value
    for key, value in list(state.items()):  # DINOv3 can do without some biases
        if re.fullmatch(r"blocks\.\d+\.(attn\.proj|mlp\.fc[12])\.weight", key):
            state.setdefault(key.replace(".weight", ".bias"), value.new_zeros(len(value)))
    return state


def _read_torchvision(theirs: Any, name: str) -> tuple[State, ModelArgs]:
    from torchvision.models import VisionTransformer as TorchvisionViT

    if type(theirs) is not TorchvisionViT:
        raise ValueError(
            f"{name}: {type(theirs).__name__} has no counterpart here: torchvision's VisionTransformer has"
        )
    if not isinstance(theirs.conv_proj, nn.Conv2d):
        raise ValueError(f"{name} has no counterpart here: it has conv_stem_configs")
    names = [("conv_proj.", "tokenizer.proj."), ("class_token", "cls_token"), ("encoder.pos_embedding", "pos_embed")]
    names += [("encoder.ln.", "norm."), ("heads.pre_logits.", "head.0."), ("encoder.layers.encoder_layer_", "blocks.")]
    hidden = theirs.representation_size or 0
    names += [("heads.head.", "head.2." if hidden else "head."), (".ln_1.", ".norm1."), (".ln_2.", ".norm2.")]
    names += [(".self_attention.in_proj_", ".attn.qkv."), (".self_attention.out_proj.", ".attn.proj.")]
    names += [(".mlp.0.", ".mlp.fc1."), (".mlp.3.", ".mlp.fc2.")]
    state: State = {}
    for key, value in theirs.state_dict().items():
        for old, new in names:
            key = key.replace(old, new)
        state[key] = value
    block = theirs.encoder.layers[0]
    return state, {
        "img_size": pair("image_size", theirs.image_size),
        "num_classes": theirs.num_classes,
        "num_heads": block.num_heads,
        "norm_eps": block.ln_1.eps,
        "pos_embed": "learned",
        "global_pool": "token",
        "head_hidden": hidden,
    }
