"""The networks to compare: ours, a plain implementation, and other libraries' with the same weights."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.official import official
from vitlab.class_paths import name_and_args
from vitlab.layers.attention import Attention
from vitlab.layers.kernels import products
from vitlab.layers.linear import Linear
from vitlab.models.convert import to_timm
from vitlab.models.sizes import SIZES
from vitlab.models.vit import VisionTransformer

CIFAR = {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 9, "num_heads": 3, "mlp_ratio": 2.0}
SHARED = ("img_size", "num_classes", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio")  # known to all peers
NETWORKS: dict[str, dict[str, Any]] = {
    **{name: dict(size) for name, size in SIZES.items()},
    "cifar_vit": {**CIFAR, "num_classes": 10},
}


class Plain(nn.Module):
    """Our network implemented plainly, like the official code: every window and attention map is written to memory,
    linear layers are torch's own, and all tokens go through the last block.

    Args:
        net: A network of its own, not shared with another contender.
    """

    def __init__(self, net: VisionTransformer) -> None:
        super().__init__()
        self.net = net
        if hasattr(net.tokenizer, "fused"):
            net.tokenizer.fused = False
        for module in net.modules():
            if isinstance(module, Attention):
                module.kernel = products
            elif isinstance(module, Linear):
                module.__class__ = nn.Linear  # type: ignore[assignment]

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(B, C, H, W)`` to ``(B, K)``."""
        return self.net.forward_head(self.net.forward_features(images))


def ours(model: str) -> VisionTransformer:
    """Build our network; the same weights each time, none of them zero."""
    torch.manual_seed(0)
    net = VisionTransformer(**NETWORKS[model])
    net.skips_unread_tokens = True  # as every task does
    for name, p in net.named_parameters():
        if p.ndim == 1:
            nn.init.normal_(p, mean=1.0 if "norm" in name and name.endswith("weight") else 0.0, std=0.02)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return net


def build(model: str, contender: str, t2t_repo: str | None = None) -> nn.Module:
    """Build a contender with the weights of :func:`ours`; ``official`` is built by the code in ``t2t_repo``."""
    match contender:
        case "vitlab":
            return ours(model)
        case "plain":
            return Plain(ours(model))
        case "official" if t2t_repo:
            return official(ours(model), model, t2t_repo)
    return _PEERS[contender](ours(model), NETWORKS[model])


def contenders(model: str, peers: list[str], t2t_repo: str | None = None) -> tuple[list[str], list[str]]:
    """Return the contenders, the reference first, and the peers that are not installed; they have a usual ViT alone."""
    if name_and_args("tokenizer", NETWORKS[model].get("tokenizer", "patch"))[0] == "t2t":
        return ["plain", *(["official"] if t2t_repo else []), "vitlab"], []
    if not NETWORKS[model].keys() <= {*SHARED}:
        return ["plain", "vitlab"], []
    missing = [peer for peer in peers if importlib.util.find_spec(peer) is None]
    return [*(peer for peer in peers if peer not in missing), "vitlab"], missing


def difference(net: nn.Module, base: nn.Module, images: Tensor) -> float:
    """Return the largest difference of two networks' logits in evaluation."""
    with torch.no_grad():
        return (net.eval()(images) - base.eval()(images)).abs().max().item()


def _timm(net: VisionTransformer, arguments: dict[str, Any]) -> nn.Module:
    import timm

    model = timm.models.VisionTransformer(**{name: arguments[name] for name in SHARED if name in arguments})
    model.load_state_dict(to_timm(net.state_dict()))
    return model


def _torchvision(net: VisionTransformer, arguments: dict[str, Any]) -> nn.Module:
    import torchvision

    D, ratio = arguments["embed_dim"], arguments.get("mlp_ratio", 4.0)
    model = torchvision.models.VisionTransformer(
        image_size=net.img_size[0],
        patch_size=arguments["patch_size"],
        num_layers=arguments["depth"],
        num_heads=arguments["num_heads"],
        hidden_dim=D,
        mlp_dim=int(D * ratio),
        num_classes=arguments.get("num_classes", 1000),
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
    )
    parts = {"norm1": "ln_1", "norm2": "ln_2", "attn.proj": "self_attention.out_proj", "mlp.fc1": "mlp.0"}
    parts |= {"mlp.fc2": "mlp.3", "attn.qkv.": "self_attention.in_proj_"}
    whole = {"tokenizer.proj": "conv_proj", "norm.": "encoder.ln.", "head.": "heads.head.", "cls_token": "class_token"}
    state = {}
    for name, value in net.state_dict().items():
        if name == "pos_embed.weight":
            state["encoder.pos_embedding"] = torch.cat([value.new_zeros(1, 1, D), value], dim=1)
            continue
        for old, new in (parts if name.startswith("blocks.") else whole).items():
            name = name.replace(old, new)
        state[name.replace("blocks.", "encoder.layers.encoder_layer_")] = value
    model.load_state_dict(state)
    return model


def _vit_pytorch(net: VisionTransformer, arguments: dict[str, Any]) -> nn.Module:
    import vit_pytorch

    return vit_pytorch.ViT(  # two more normalizations around the patches: weights of its own
        image_size=net.img_size[0],
        patch_size=arguments["patch_size"],
        num_classes=arguments.get("num_classes", 1000),
        dim=arguments["embed_dim"],
        depth=arguments["depth"],
        heads=arguments["num_heads"],
        dim_head=arguments["embed_dim"] // arguments["num_heads"],
        mlp_dim=int(arguments["embed_dim"] * arguments.get("mlp_ratio", 4.0)),
    )


def _transformers(net: VisionTransformer, arguments: dict[str, Any]) -> nn.Module:
    import transformers

    own: Any = transformers.ViTConfig  # its signature lacks what every config takes, such as num_labels
    config = own(
        image_size=net.img_size[0],
        patch_size=arguments["patch_size"],
        hidden_size=arguments["embed_dim"],
        num_hidden_layers=arguments["depth"],
        num_attention_heads=arguments["num_heads"],
        intermediate_size=int(arguments["embed_dim"] * arguments.get("mlp_ratio", 4.0)),
        num_labels=arguments.get("num_classes", 1000),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _Logits(transformers.ViTForImageClassification(config))


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).logits


_PEERS: dict[str, Callable[[VisionTransformer, dict[str, Any]], nn.Module]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "vit_pytorch": _vit_pytorch,
    "transformers": _transformers,
}
PEERS = list(_PEERS)
OWN_WEIGHTS = ("vit_pytorch", "transformers")  # timed on the same shapes, not compared value by value
