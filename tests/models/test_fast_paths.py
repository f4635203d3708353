"""The short ways through the network: exact, and the ones that training takes."""

from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from torch import nn

from vitlab.layers.pos_embed import PosEmbed, PosEmbedName
from vitlab.models.vit import SIZES, VisionTransformer
from vitlab.tokenizers import splits
from vitlab.tokenizers.t2t import T2TTokenizer

CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
TINY = {
    "img_size": (16, 24),
    "in_chans": 1,
    "num_classes": 5,
    "patch_size": 4,
    "t2t_kernels": (3, 3),
    "t2t_strides": (2, 2),
    "t2t_dim": 4,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
}


def randomised(**arguments):
    model = VisionTransformer(**TINY | arguments).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.eval()


def gradients(model, logits):
    return torch.autograd.grad(logits.square().sum(), list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("pos_embed", get_args(PosEmbedName))
@pytest.mark.parametrize("grad_checkpoint", [False, True])
def test_a_last_block_for_the_class_token_alone_changes_nothing(pos_embed, grad_checkpoint):
    options = {"reg_tokens": 1, "layer_scale": 0.5, "qk_norm": True, "grad_checkpoint": grad_checkpoint}
    model = randomised(pos_embed=pos_embed, **options)
    images = torch.randn(2, 1, 16, 24, dtype=torch.float64)
    assert model.reads_class_token_only()
    seen = []
    model.norm.register_forward_hook(lambda _, x, y: seen.append(tuple(y.shape)))
    short, long = model(images), model.forward_head(model.forward_features(images))
    assert seen == [(2, 1, 16), (2, 26, 16)]
    torch.testing.assert_close(short, long, rtol=0, atol=1e-12)
    for one, other in zip(gradients(model, short), gradients(model, long), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("global_pool", ["avg", "max", "map"])
def test_heads_that_read_patches_get_all_of_them(global_pool):
    assert not randomised(global_pool=global_pool).reads_class_token_only()


@pytest.mark.parametrize("changed", [{"pos_embed_join": "every_layer"}, {"depth": 1}])
def test_a_convolution_after_the_last_block_keeps_its_gradient(changed):
    model = randomised(pos_embed="conv", **changed)
    assert not model.reads_class_token_only()
    assert None not in gradients(model, model(torch.randn(2, 1, 16, 24, dtype=torch.float64)))


def test_a_foreign_position_embedding_that_acts_after_a_block_is_asked():
    class Doubles(PosEmbed):
        def leave(self, x, layer):
            return 2 * x

    model = randomised(pos_embed="none")
    model.pos_embed = Doubles()
    images = torch.randn(2, 1, 16, 24, dtype=torch.float64)
    torch.testing.assert_close(model(images), model.forward_head(model.forward_features(images)))


@pytest.mark.parametrize("t2t_attn", ["performer", "transformer"])
def test_training_takes_the_fast_way_for_both_token_layers(t2t_attn, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("windows were written to memory")

    monkeypatch.setattr(splits.F, "unfold", fail)
    model = VisionTransformer(**TINY | {"tokenizer": "t2t", "t2t_attn": t2t_attn, "t2t_kernels": (3, 3)})
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
            model.train()(torch.randn(2, 1, 16, 24)).sum().backward()
    model.tokenizer.fused = False
    with pytest.raises(AssertionError, match="windows were written"):
        model(torch.randn(2, 1, 16, 24))


@pytest.mark.parametrize("path", [p for p in CONFIGS if "t2t" in p.name], ids=lambda p: p.stem)
def test_no_config_leaves_the_fast_way(path):
    arguments = yaml.safe_load(path.read_text())["model"]["init_args"]
    size = 224 if "imagenet" in path.parts else 28
    given = {name: arguments[name] for name in ("t2t_attn", "t2t_kernels", "t2t_strides") if name in arguments}
    tokenizer = T2TTokenizer((size, size), 3, 8, **given)
    assert tokenizer.is_fused(torch.empty(1, 3, size, size))
    assert arguments.get("global_pool", "token") != "token" or VisionTransformer(**TINY).reads_class_token_only()


@pytest.mark.parametrize("name", [name for name in SIZES if name.startswith("t2t")])
def test_no_published_network_leaves_the_fast_way(name):
    with torch.device("meta"):
        model = VisionTransformer(**SIZES[name])
    assert model.tokenizer.is_fused(torch.empty(1, 3, 224, 224))
    assert model.reads_class_token_only()


@pytest.mark.parametrize("pos_embed", ["learned", "rope_mixed", "relpos", "conv", "sincos1d"])
@pytest.mark.parametrize("tokenizer", ["patch", "t2t"])
def test_the_network_is_one_graph(pos_embed, tokenizer):
    model = VisionTransformer(**TINY | {"pos_embed": pos_embed, "tokenizer": tokenizer, "drop_path_rate": 0.1}).train()
    if tokenizer == "t2t":
        for module in model.tokenizer.modules():
            module.p = 0.0  # dropout draws other numbers in a graph
    model.blocks[1].drop_path.rate = 0.0
    images = torch.randn(2, 1, 16, 24)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
    model.blocks[1].drop_path.rate = 0.1
    torch.compiler.reset()
    assert torch.compile(model, fullgraph=True, backend="eager")(images).isfinite().all()
