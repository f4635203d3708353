"""The short ways through the network: exact, and the ones that training takes."""

import shutil
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml

from tests.networks import randomized
from vitlab.layers.block import Block
from vitlab.layers.pos_embed import PosEmbed, PosEmbedName
from vitlab.models import SIZES, VisionTransformer
from vitlab.models.load import network_args
from vitlab.tasks import Classifier
from vitlab.tokenizers import splits
from vitlab.tokenizers.t2t import T2TTokenizer

CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
RECIPES = [path for path in CONFIGS if "cluster" not in path.parts]
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


def net_of(**arguments):
    return randomized(VisionTransformer(**TINY | arguments).double())


def gradients(model, logits):
    return torch.autograd.grad(logits.square().sum(), list(model.parameters()), allow_unused=True)


def lengths_of_blocks(monkeypatch):
    """Return a list that each block appends the number of its tokens to: a hook would end the short way."""
    seen, forward = [], Block.forward

    def noted(*args, **kwargs):
        y = forward(*args, **kwargs)
        seen.append(y.shape[1])
        return y

    monkeypatch.setattr(Block, "forward", noted)
    return seen


@pytest.mark.parametrize("pos_embed", get_args(PosEmbedName))
@pytest.mark.parametrize("grad_checkpoint", [False, True])
def test_a_last_block_for_the_class_token_alone_changes_nothing(pos_embed, grad_checkpoint, monkeypatch):
    options = {"reg_tokens": 1, "layer_scale": 0.5, "qk_norm": True, "grad_checkpoint": grad_checkpoint}
    model = net_of(pos_embed=pos_embed, **options)
    images = torch.randn(2, 1, 16, 24, dtype=torch.float64)
    assert model.reads_class_token_only()
    seen = lengths_of_blocks(monkeypatch)
    long = model(images)
    model.skips_unread_tokens = True
    short = model(images)
    assert seen == [26, 26, 26, 1]
    torch.testing.assert_close(short, long, rtol=0, atol=1e-12)
    for one, other in zip(gradients(model, short), gradients(model, long), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("global_pool", ["avg", "max", "map"])
def test_heads_that_read_patches_get_all_of_them(global_pool):
    assert not net_of(global_pool=global_pool).reads_class_token_only()


@pytest.mark.parametrize(
    "changed",
    [
        {"dense_blocks": [1, 1], "dense_growth": 8, "pos_embed": "sincos1d"},
        {"dense_blocks": [2], "dense_growth": 8, "pos_embed": "relpos"},
        {"ghost": True, "mlp_layer": "ghost", "mlp_ratio": 3.0, "pos_embed": "rope2d"},
    ],
)
def test_dense_and_cheap_blocks_serve_the_class_token_alone(changed):
    model = net_of(**changed, reg_tokens=1)
    images = torch.randn(2, 1, 16, 24, dtype=torch.float64)
    expected = model(images)
    model.skips_unread_tokens = True
    torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-12)
    assert None not in gradients(model, expected)
    model.reset_head(3)
    assert model(images).shape == (2, 3)


DENSE = {"class_path": "vitlab.layers.dense_block.DenseBlock", "init_args": {"dense_blocks": [2]}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dense_blocks": [1]}, r"numbers of blocks that sum to `depth`, .*, got \[1\], 2 and 64"),
        ({"dense_blocks": [2, 0]}, r"numbers of blocks that sum to `depth`, .*, got \[2, 0\], 2 and 64"),
        ({"dense_blocks": [2], "dense_growth": 0}, r"and `dense_growth` at least 1, got \[2\], 2 and 0"),
        ({"dense_blocks": [2], "pos_embed": "rope2d"}, "which RoPE2d of `pos_embed` does not support"),
        ({"block": DENSE, "pos_embed": "rope2d"}, "which RoPE2d of `pos_embed` does not support"),
        ({"dense_blocks": [2], "pos_embed": "relpos1d"}, "which RelPos1d of `pos_embed` does not support"),
        ({"dense_blocks": [2], "pos_embed": "conv"}, "which ConvPosEmbed of `pos_embed` does not support"),
        ({"dense_blocks": [2], "pos_embed_join": "every_layer"}, "which Learned of `pos_embed` does not support"),
        ({"ghost": True, "embed_dim": 15, "num_heads": 3}, "`embed_dim` must be even for `ghost`, got 15"),
        ({"mlp_layer": "ghost", "mlp_ratio": 1.5}, "whole number of at least 2 for mlp_layer='ghost', got 1.5"),
        ({"mlp_layer": "ghost", "mlp_ratio": 1.0}, "whole number of at least 2 for mlp_layer='ghost', got 1"),
    ],
)
def test_impossible_backbones_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        VisionTransformer(**TINY | changed)


def test_a_gate_by_the_mean_of_all_tokens_needs_them_all():
    model = net_of(se_reduction=4)
    assert not model.reads_class_token_only()
    images = torch.randn(2, 1, 16, 24, dtype=torch.float64)
    expected = model(images)
    model.skips_unread_tokens = True
    assert torch.equal(model(images), expected) and None not in gradients(model, expected)


@pytest.mark.parametrize("changed", [{"pos_embed_join": "every_layer"}, {"depth": 1}])
def test_a_convolution_after_the_last_block_keeps_its_gradient(changed):
    model = net_of(pos_embed="conv", **changed)
    assert not model.reads_class_token_only()
    assert None not in gradients(model, model(torch.randn(2, 1, 16, 24, dtype=torch.float64)))


def test_a_custom_position_embedding_that_acts_after_a_block_is_called():
    class Doubles(PosEmbed):
        def leave(self, x, layer):
            return 2 * x

    model = net_of(pos_embed="none")
    model.pos_embed, model.skips_unread_tokens = Doubles(), True
    images = torch.randn(2, 1, 16, 24, dtype=torch.float64)
    torch.testing.assert_close(model(images), model.forward_head(model.forward_features(images)))


@pytest.mark.parametrize("t2t_attn", ["performer", "transformer"])
def test_training_takes_the_fast_path_for_both_token_layers(t2t_attn, monkeypatch):
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


@cache
def network_of(path):
    arguments = (yaml.load(path.read_text(), yaml.CSafeLoader).get("model") or {}).get("init_args", {})
    size = 224 if {"imagenet", "finetune"} & set(path.parts) else 28 if "fashion_mnist" in path.stem else 32
    with torch.device("meta"):
        return VisionTransformer(**network_args(arguments) | {"img_size": size})


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_config_keeps_the_fast_paths(path):
    model = network_of(path)
    if isinstance(model.tokenizer, T2TTokenizer):
        assert model.tokenizer.is_fused(torch.empty(1, 3, *model.img_size))
    assert model.reads_class_token_only() == (model.global_pool == "token")


@pytest.mark.slow
def test_the_configs_have_both_token_layers_and_a_head_for_each_way():
    models = [network_of(path) for path in RECIPES]
    tokenizers = [model.tokenizer for model in models if isinstance(model.tokenizer, T2TTokenizer)]
    assert {type(tokenizer.attention1).__name__ for tokenizer in tokenizers} == {"TokenPerformer", "TokenTransformer"}
    assert {model.reads_class_token_only() for model in models} == {True, False}


@pytest.mark.parametrize("name", [name for name in SIZES if name.startswith("t2t")])
def test_every_published_network_keeps_the_fast_path(name):
    with torch.device("meta"):
        model = VisionTransformer(**SIZES[name])
    assert model.tokenizer.is_fused(torch.empty(1, 3, 224, 224))
    assert model.reads_class_token_only() == (name != "t2t_vit_14_se")


def test_tasks_skip_what_no_one_reads_in_training_and_evaluation(monkeypatch):
    task, seen = Classifier(**TINY), lengths_of_blocks(monkeypatch)
    images, labels = torch.randn(2, 1, 16, 24), torch.zeros(2, dtype=torch.long)
    task.training_step((images, labels), 0)
    task.eval().predict_step(images, 0)
    assert seen == [25, 1, 25, 1]


def one_graph(model):
    torch.compiler.reset()
    return torch.compile(model, fullgraph=True, backend="eager")


@pytest.mark.rare
@pytest.mark.parametrize(
    ("pos_embed", "tokenizer"),
    [("learned", "patch"), ("rope_mixed", "t2t"), ("relpos", "patch"), ("conv", "t2t"), ("sincos1d", "patch")],
)
def test_the_network_is_one_graph(pos_embed, tokenizer):
    model = VisionTransformer(**TINY | {"pos_embed": pos_embed, "tokenizer": tokenizer}).train()
    if tokenizer == "t2t":
        for module in model.tokenizer.modules():
            module.p = 0.0  # dropout draws other numbers in a graph
    images = torch.randn(2, 1, 16, 24)
    torch.testing.assert_close(one_graph(model)(images), model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.rare
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="torch compiles with a C++ compiler")
@pytest.mark.parametrize("path", [p for p in RECIPES if "compile: true" in p.read_text()], ids=lambda p: p.stem)
def test_the_compiled_training_step_of_a_recipe_is_one_graph_with_the_same_loss(path):
    given = yaml.safe_load(path.read_text())["model"]["init_args"]
    arguments = network_args(given) | {"depth": 2, "dropout": 0.0, "drop_path_rate": 0.0}
    model, images = VisionTransformer(**arguments, img_size=32, num_classes=5), torch.randn(4, 3, 32, 32)
    loss = model(images).square().mean()
    expected = torch.autograd.grad(loss, list(model.parameters()))
    model.compile(fullgraph=True)  # by inductor
    compiled = model(images).square().mean()
    torch.testing.assert_close(compiled, loss, rtol=1e-4, atol=1e-6)
    for one, other in zip(torch.autograd.grad(compiled, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
