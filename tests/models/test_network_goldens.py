"""Networks of each option, as they were before options moved to the parts that understand them.

`python tests/models/test_network_goldens.py` writes the file again: only where a change of numbers is meant.
"""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from vitlab.models import SIZES, VisionTransformer, create_model

FILE = Path(__file__).parents[1] / "goldens" / "networks.json"
BASE = {"img_size": 16, "in_chans": 2, "num_classes": 5, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2}
T2T = {"tokenizer": "t2t", "t2t_kernels": [3, 3], "t2t_strides": [2, 2], "t2t_dim": 8}
OLD = {  # by the names of that time, which stay readable
    "plain": {},
    "qk": {"qk_norm": True, "qk_scale": 0.5, "qkv_bias": False, "norm_layer": "rmsnorm"},
    "value_skip": {"value_skip": True, "reg_tokens": 2},
    "gate": {"attn_gate": True, "attn_dropout": 0.0},
    "se": {"se_reduction": 4, "global_pool": "avg"},
    "ghost": {"ghost": True, "mlp_layer": "ghost"},
    "swiglu": {"mlp_layer": "swiglu", "act_layer": "silu", "layer_scale": 0.1},
    "dense": {"dense_blocks": [1, 2], "dense_growth": 8, "pos_embed": "sincos1d"},
    "dense-se": {"dense_blocks": [2, 1], "se_reduction": 4, "pos_embed": "relpos"},
    "map": {"global_pool": "map", "class_token": False},
    "max": {"global_pool": "max", "fc_norm": True, "head_hidden": 8, "pre_norm": True},
    "flexi": {"flexi_patch": [2, 4]},
    "t2t": T2T,
    "t2t-transformer": T2T
    | {"t2t_attn": "transformer", "t2t_num_heads": 2, "t2t_mlp_ratio": 2.0, "t2t_qkv_bias": True},
    "t2t-relu": T2T | {"t2t_attn": "performer_relu", "t2t_features": 6, "t2t_dropout": 0.0, "t2t_value_skip": False},
    "t2t-space": T2T | {"t2t_padding": "reflect", "t2t_dilations": [1, 2], "t2t_act_layer": "relu"},
    "t2t-norm": T2T | {"t2t_norm_layer": "rmsnorm", "t2t_qk_scale": None},
    "conv": T2T | {"tokenizer": "conv", "t2t_padding": "none"},
    "patch-ignores-t2t": {"t2t_dim": 8},
    "frozen": {"pos_embed": "learned", "pos_embed_trainable": False},
    "trained": {"pos_embed": "sincos2d", "pos_embed_trainable": True, "pos_embed_join": "every_layer"},
    "shared": {"pos_embed_join": "every_layer_shared", "pos_embed_resize": "interpolate"},
    "rope": {"pos_embed": "rope2d", "rope_theta": 50.0, "pos_embed_resize": "rescale"},
    "mixed": {"pos_embed": "rope_mixed", "rope_theta": 20.0, "pos_embed_join": "every_layer_shared"},
    "list": {"pos_embed": ["learned", "rope2d"], "pos_embed_resize": "rescale"},
    "spec": {"pos_embed": {"class_path": "rope2d", "init_args": {"coordinates": "normalized", "pairs": "half"}}},
}


def numbers(arguments: dict) -> dict:
    """Return names, initial weights, outputs and gradients of a network: sums that any change shows in."""
    torch.manual_seed(3)
    net = VisionTransformer(**BASE | arguments).double().eval()
    state = net.state_dict()
    weight = torch.arange(1, 65, dtype=torch.float64)
    start = {
        name: float((value.double().flatten()[:64] * weight[: value.numel()]).sum()) for name, value in state.items()
    }
    images = torch.linspace(-1, 1, 3 * 2 * 256, dtype=torch.float64).sin().view(3, 2, 16, 16)
    logits = net(images)
    params = {name: p for name, p in net.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(logits.square().sum(), [*params.values()], allow_unused=True)
    found = {name: None if g is None else float(g.norm()) for name, g in zip(params, grads, strict=True)}
    shapes = {name: list(value.shape) for name, value in state.items()}
    return {
        "shapes": shapes,
        "trains": sorted(params),
        "start": start,
        "logits": logits.flatten().tolist(),
        "grads": found,
    }


def published(name: str) -> VisionTransformer:
    with torch.device("meta"):
        return create_model(name)


def hash_of(net: VisionTransformer) -> str:
    """Return a hash of names and shapes."""
    shapes = [(name, *value.shape) for name, value in net.state_dict().items()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]


def trained_only(found: dict) -> dict:
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.skipif(Version(torch.__version__) < Version("2.12"), reason="torch 2.11 and older draw other weights")
@pytest.mark.parametrize("name", OLD)
def test_a_network_starts_and_computes_as_it_did(name):
    expected, found = json.loads(FILE.read_text())["networks"][name], numbers(OLD[name])
    assert found["shapes"] == expected["shapes"] and list(found["shapes"]) == list(expected["shapes"])
    assert found["trains"] == expected["trains"]
    for part in ("start", "grads"):
        one, other = (trained_only(numbers[part]) for numbers in (found, expected))
        assert one == pytest.approx(other, rel=1e-5, abs=1e-8)
    assert found["logits"] == pytest.approx(expected["logits"], rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", SIZES)
def test_a_published_network_has_its_tensors_and_is_built_without_memory(name):
    net = published(name)
    assert hash_of(net) == json.loads(FILE.read_text())["sizes"][name]
    assert {p.device.type for p in net.parameters()} == {"meta"}
    assert (net.embed_dim, net.patch_size) == (SIZES[name]["embed_dim"], SIZES[name].get("patch_size", 16))


if __name__ == "__main__":
    torch.set_num_threads(1)
    content = {"networks": {n: numbers(OLD[n]) for n in OLD}, "sizes": {n: hash_of(published(n)) for n in SIZES}}
    FILE.write_text(json.dumps(content) + "\n")
    sys.stdout.write(f"{FILE.stat().st_size} bytes\n")
