import inspect
import math
import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn

from tests.networks import randomized
from vitlab.layers.pos_embed import PosEmbedName
from vitlab.models import VisionTransformer
from vitlab.models.old_names import OLD
from vitlab.tokenizers.build import TokenizerName
from vitlab.tokenizers.t2t import T2TTokenizer
from vitlab.tokenizers.token_layers import build_token_layer

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
    "mlp_ratio": 2.0,
}


def tiny(**arguments):
    return VisionTransformer(**TINY | arguments)


@pytest.fixture
def images():
    return torch.randn(2, 1, 16, 24)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"tokenizer": "patch", "pos_embed": "learned", "drop_path_rate": 0.5, "global_pool": "map", "head_hidden": 3},
        {"tokenizer": "conv", "pos_embed": "relpos", "drop_path_rate": 0.5, "dropout": 0.1, "reg_tokens": 1},
        {"tokenizer": "t2t", "pos_embed": "rope2d", "drop_path_rate": 0.5, "drop_path_subset": True},
        {"grad_checkpoint": True, "qk_norm": True, "layer_scale": 0.1, "norm_layer": "rmsnorm"},
        *(pytest.param({"pos_embed": name}, marks=pytest.mark.rare) for name in get_args(PosEmbedName)),
    ],
)
def test_a_training_step_is_one_graph_for_the_compiler(arguments, images):
    torch.compiler.reset()
    model = tiny(**arguments)
    torch.compile(model, fullgraph=True, backend="eager")(images).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    "part",
    [*({"tokenizer": name} for name in get_args(TokenizerName)), *({"pos_embed": n} for n in get_args(PosEmbedName))],
    ids=lambda part: next(iter(part.values())),
)
@pytest.mark.parametrize("global_pool", ["token", "avg", "map"])
def test_every_parameter_gets_a_gradient(part, global_pool, images):
    options = {"reg_tokens": 1, "layer_scale": 0.5, "qk_norm": True, "head_hidden": 3} | part
    options |= {"global_pool": global_pool, "class_token": global_pool != "avg"}
    model = randomized(tiny(**options)).eval()
    outputs = model(images)
    assert model.grid_size == (4, 6) and outputs.shape == (2, 5)
    outputs.square().sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    if global_pool == "map":
        without.remove("attn_pool.kv.bias") if "attn_pool.kv.bias" in without else None
    assert [name for name in without if name != "pos_embed.threshold"] == []  # FIRE's, drawn too small to count


def test_the_articles_and_jls_shapes():
    model = VisionTransformer(embed_dim=768, depth=1, num_heads=12, num_classes=10, global_pool="avg")
    assert model(torch.randn(4, 3, 224, 224)).shape == (4, 10)
    regressor = VisionTransformer((400, 100), 1, 1, patch_size=50, embed_dim=24, depth=1, num_heads=4, mlp_ratio=1.5)
    features = regressor.forward_features(torch.randn(1, 1, 400, 100))
    assert features.shape == (1, 17, 24)
    assert regressor.forward_head(features).shape == (1, 1)


@pytest.mark.parametrize(
    ("img_size", "patch_size", "grid_size"), [([60, 100], 20, (3, 5)), (32, 8, (4, 4)), ([400, 100], 50, (8, 2))]
)
def test_the_patch_size_given_is_the_patch_size_used(img_size, patch_size, grid_size):
    assert tiny(img_size=img_size, patch_size=patch_size).grid_size == grid_size


# What goes into the logits


def test_the_walk_is_tokens_positions_prefix_blocks_norm_head(images):
    model = randomized(tiny(reg_tokens=2)).eval()
    x = model.tokenizer(images) + model.pos_embed.weight
    x = torch.cat([model.cls_token.expand(2, -1, -1), model.reg_token.expand(2, -1, -1), x], dim=1)
    for i, block in enumerate(model.blocks):
        x = block(x, model.pos_embed, i)
    torch.testing.assert_close(model(images), model.head(model.norm(x)[:, 0]))


def test_token_pooling_reads_the_class_token_and_the_others_the_patches_only():
    tokens = torch.randn(2, 3 + 24, 16)
    changed = tokens.clone()
    changed[:, :3] += 1
    pools = {name: randomized(tiny(reg_tokens=2, global_pool=name)) for name in ("token", "avg", "max", "map")}
    assert torch.equal(pools["token"].pool(tokens), tokens[:, 0])
    torch.testing.assert_close(pools["avg"].pool(tokens), tokens[:, 3:].mean(1))
    assert torch.equal(pools["max"].pool(tokens), tokens[:, 3:].amax(1))
    assert torch.equal(pools["map"].pool(tokens), pools["map"].attn_pool(tokens[:, 3:]))
    for name in ("avg", "max", "map"):
        assert torch.equal(pools[name].pool(changed), pools[name].pool(tokens))


@pytest.mark.parametrize("tokenizer", get_args(TokenizerName))
@pytest.mark.parametrize("global_pool", ["token", "avg", "max", "map"])
def test_without_positions_the_order_of_tokens_does_not_matter(tokenizer, global_pool, images):
    model = randomized(tiny(tokenizer=tokenizer, global_pool=global_pool, pos_embed="none")).double().eval()
    images = images.double()
    order = torch.randperm(24)
    logits = model(images)
    model.tokenizer.register_forward_hook(lambda _, x, tokens: tokens[:, order])
    torch.testing.assert_close(model(images), logits, rtol=0, atol=1e-10)


def test_num_heads_is_the_backbones_alone():
    one, two = tiny(tokenizer="t2t", num_heads=1), tiny(tokenizer="t2t", num_heads=4)
    assert repr(one.tokenizer) == repr(two.tokenizer)
    assert tiny(tokenizer="t2t", qk_scale=0.0).tokenizer.attention1.kqv.bias is not None


def test_batches_of_one_and_changed_neighbors_give_the_same_logits(images):
    model = randomized(tiny()).eval()
    torch.testing.assert_close(model(images[:1]), model(images)[:1])


def test_images_are_not_changed(images):
    before = images.clone()
    tiny()(images)
    assert torch.equal(images, before)


# Training


def test_evaluation_is_deterministic_and_training_is_not(images):
    model = tiny(dropout=0.2, drop_path_rate=0.2)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


def test_drop_path_grows_linearly_to_its_rate():
    rates = [block.drop_path.rate for block in tiny(depth=5, drop_path_rate=0.2).blocks]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert [block.drop_path.rate for block in tiny(depth=1, drop_path_rate=0.2).blocks] == [0]


def test_dropout_follows_positions_and_every_linear_layer_but_qkv(images):
    model = tiny(dropout=0.5)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.5] * 5  # 2 a block, and the positions'
    shapes = []
    model.dropout.register_forward_hook(lambda _, x, y: shapes.append(tuple(y.shape)))
    model(images)
    assert shapes == [(2, 25, 16)]


def test_checkpointing_recomputes_blocks_and_changes_no_gradient(images):
    calls, gradients = [], []
    for grad_checkpoint in (False, True):
        torch.manual_seed(0)
        model = tiny(grad_checkpoint=grad_checkpoint, dropout=0.2, drop_path_rate=0.2)
        count = []
        model.blocks[0].attn.register_forward_hook(lambda *_, count=count: count.append(1))
        torch.manual_seed(1)
        model(images).square().sum().backward()
        calls.append(len(count))
        gradients.append([p.grad for p in model.parameters()])
    assert calls == [1, 2]
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("t2t_attn", ["performer", "transformer"])
def test_t2t_is_finite_under_autocast(t2t_attn, dtype, images):
    model = tiny(tokenizer="t2t", t2t_attn=t2t_attn, norm_eps=1e-5).eval()
    if t2t_attn == "performer":
        with torch.no_grad():
            model.tokenizer.attention1.kqv.weight *= 100
    with torch.no_grad(), torch.autocast("cpu", dtype):
        assert model(images).isfinite().all()


@pytest.mark.parametrize("tokenizer", get_args(TokenizerName))
def test_a_network_in_float64_gives_the_logits_of_float32(tokenizer, images):
    model = tiny(tokenizer=tokenizer).eval()
    logits = model(images)
    torch.testing.assert_close(model.double()(images.double()).float(), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_exported_graph_takes_any_batch_size(images):
    model = tiny(tokenizer="t2t", global_pool="map", pos_embed="rope2d").eval()  # others: tests/cli/test_export.py
    batch = {"images": {0: torch.export.Dim("batch", min=1)}}
    exported = torch.export.export(model, (images,), dynamic_shapes=batch).module()
    for many in (images[:1], images.repeat(3, 1, 1, 1)):
        torch.testing.assert_close(exported(many), model(many))


# Initial values


@pytest.mark.parametrize("tokenizer", ["patch", "t2t", "conv"])
def test_initial_weights_have_std_002_and_biases_are_zero(tokenizer):
    model = VisionTransformer(img_size=32, patch_size=8, tokenizer=tokenizer, depth=1, reg_tokens=4, global_pool="map")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.1), name
            assert module.bias is None or not module.bias.any(), name
        if isinstance(module, nn.LayerNorm):
            assert torch.equal(module.weight, torch.ones_like(module.weight))
            assert not module.bias.any()
    assert model.cls_token.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.reg_token.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.attn_pool.latent.std().item() == pytest.approx(384**-0.5, rel=0.1)


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        ({"tokenizer": "conv"}, "tokenizer."),
        ({"tokenizer": "t2t"}, "tokenizer."),
        ({"global_pool": "map"}, "attn_pool."),
        ({"reg_tokens": 3}, "reg_token"),
        ({"layer_scale": 1.0}, "nothing"),
        ({"depth": 4}, "nothing"),
        ({"num_classes": 3}, "head."),
    ],
)
def test_models_of_one_seed_share_every_part_that_both_have(changed, differs):
    weights = []
    for options in ({"pos_embed": "learned"}, {"pos_embed": "learned", **changed}):
        torch.manual_seed(7)
        weights.append(tiny(**options).state_dict())
    shared = [name for name in weights[0] if name in weights[1] and not name.startswith(differs)]
    assert {"cls_token", "pos_embed.weight", "blocks.1.mlp.fc2.weight"} <= set(shared)
    for name in shared:
        assert torch.equal(weights[0][name], weights[1][name]), name


def test_a_seed_gives_one_network_and_leaves_the_stream_of_others_alone():
    torch.manual_seed(7)
    one, after = tiny(depth=1).state_dict(), torch.rand(1)
    torch.manual_seed(7)
    two, later = tiny(depth=3).state_dict(), torch.rand(1)
    assert torch.equal(after, later) and not torch.equal(tiny().head.weight, one["head.weight"])
    assert torch.equal(one["head.weight"], two["head.weight"])
    assert not torch.equal(two["blocks.0.attn.qkv.weight"], two["blocks.1.attn.qkv.weight"])


# Names and parts


def test_state_dict_keys_are_the_contract():
    names = list(tiny(layer_scale=0.1, qk_norm=True, reg_tokens=1, depth=1, global_pool="map").state_dict())
    block = [f"{part}.{kind}" for part in ("norm1", "attn.qkv") for kind in ("weight", "bias")]
    block += [f"attn.{part}.{kind}" for part in ("q_norm", "k_norm", "proj") for kind in ("weight", "bias")]
    block += ["ls1.gamma"]
    block += [f"{part}.{kind}" for part in ("norm2", "mlp.fc1", "mlp.fc2") for kind in ("weight", "bias")]
    block += ["ls2.gamma"]
    pool = ["latent"] + [
        f"{p}.{k}" for p in ("q", "kv", "proj", "norm", "mlp.fc1", "mlp.fc2") for k in ("weight", "bias")
    ]
    assert sorted(names) == sorted(
        [f"blocks.0.{name}" for name in block]
        + [f"attn_pool.{name}" for name in pool]
        + ["norm.weight", "norm.bias", "head.weight", "head.bias", "tokenizer.proj.weight", "tokenizer.proj.bias"]
        + ["cls_token", "reg_token", "pos_embed.weight"]
    )


def test_without_class_and_register_tokens_there_are_none():
    model = tiny(class_token=False, global_pool="avg")
    assert model.cls_token is None
    assert model.reg_token is None
    assert model.num_prefix_tokens == 0


def test_a_head_is_linear_or_has_a_tanh_layer_or_is_missing():
    assert isinstance(tiny().head, nn.Linear)
    head = tiny(head_hidden=7).head
    x = torch.randn(2, 16)
    torch.testing.assert_close(head(x), head[2](torch.tanh(head[0](x))))
    features = tiny(num_classes=0)
    assert features(torch.randn(2, 1, 16, 24)).shape == (2, 16)


@pytest.mark.parametrize("global_pool", ["token", "map"])
def test_stages_hold_every_parameter_once_from_input_to_output(global_pool):
    model = tiny(reg_tokens=1, global_pool=global_pool, head_hidden=3, tokenizer="t2t", pos_embed="rope_mixed")
    stages = model.stages()
    assert len(stages) == 2 + 2
    assert sorted(id(p) for stage in stages for p in stage) == sorted(id(p) for p in model.parameters())
    assert any(p is model.cls_token for p in stages[0])
    assert any(p is model.pos_embed.freqs for p in stages[0])
    assert any(p is model.head[0].weight for p in stages[-1])
    assert any(p is model.norm.weight for p in stages[-1])


@pytest.mark.parametrize(
    "changed",
    [
        {"qkv_bias": False},
        {"qk_scale": 0.0},
        {"qk_norm": True},
        {"act_layer": "relu"},
        {"norm_layer": "rmsnorm"},
        {"norm_eps": 1.0},
        {"mlp_ratio": 1.5},
        {"pos_embed": "sincos2d"},
        {"pos_embed_join": "every_layer"},
        {"class_token": False, "global_pool": "avg"},
        {"reg_tokens": 1},
        {"layer_scale": 0.1},
        {"num_heads": 4},
        {"depth": 3},
        {"patch_size": 2},
        {"tokenizer": "conv"},
        {"head_hidden": 3},
    ],
)
def test_every_argument_reaches_the_logits(changed, images):
    logits = []
    for arguments in ({}, changed):
        torch.manual_seed(0)
        logits.append(tiny(**arguments).eval()(images))
    assert (logits[0] - logits[1]).abs().max() > 1e-5


def test_every_argument_is_described_in_one_line():
    for taker in (VisionTransformer, T2TTokenizer, build_token_layer):
        lines = inspect.getdoc(taker).split("Args:\n")[1].split("\n\n")[0].splitlines()
        assert all(len(line) < 120 for line in lines)
        described = {line.split(":")[0].strip(" *") for line in lines} - {"old"}
        assert described == set(inspect.signature(taker).parameters)


def test_every_option_of_the_t2t_module_is_earned_by_a_config_or_an_experiment():
    root = Path(__file__).parents[2]
    files = [*(root / "configs").rglob("*.yaml"), *(root / "experiments").rglob("*.yaml")]
    text = "\n".join(path.read_text() for path in files)
    names = [name for name in OLD if name.startswith(("t2t_", "value_", "se_"))]
    assert len(names) == 17 and not [name for name in names if not re.search(rf"\b([a-z.]+)?{name}: ", text)]


# Mistakes

DENSE = {"block": {"class_path": "dense", "init_args": {"dense_blocks": [1, 1], "dense_growth": 5}}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"img_size": 30}, r"`patch_size` must divide .* got patch_size=4 and img_size=\[30, 30\]"),
        (
            {"img_size": (1, 16, 24)},
            r"`img_size` must be one side or \[height, width\], in whole pixels, got \(1, 16, 24\)",
        ),
        ({"img_size": 16.0}, "`img_size` must be one side .* in whole pixels, got 16.0"),
        ({"img_size": 0}, "`img_size` must be one side"),
        ({"num_heads": 3}, "`num_heads` must divide `embed_dim`, got num_heads=3 and embed_dim=16"),
        (
            {"num_heads": 4, **DENSE},
            "num_heads=4 and embed_dim=10, the width of block 1: choose another `dense_growth` than 5",
        ),
        (
            {"attn": {"class_path": "gated", "init_args": {"dim": 8}}},
            "`attn.dim` follows from the network: leave it out",
        ),
        ({"block": {"class_path": "plain", "init_args": {"place": 3}}}, "`block.place` follows from the network"),
        ({"num_heads": 0}, r"`num_heads` must be in \[1, 65536\], got 0"),
        ({"num_heads": 2, "global_pool": "map", **DENSE}, "`num_heads` must divide .* num_heads=2 and a width of 15"),
        ({"mlp_ratio": math.inf}, r"^`mlp_ratio` must be in \(0, 1000\], got inf"),
        ({"init_std": math.nan}, r"`init_std` must be in \(0, 10\], got nan"),
        ({"norm_eps": -1.0}, r"`norm_eps` must be in \[0, 1\], got -1.0"),
        ({"tokenizer": "t2t", "t2t_mlp_ratio": math.inf}, "`t2t_mlp_ratio` must give the MLP at least .* got inf"),
        ({"in_chans": 0}, r"`in_chans` must be in \[1, 65536\], got 0"),
        ({"depth": 0}, r"`depth` must be in \[1, 1000\], got 0"),
        ({"embed_dim": 0}, r"`embed_dim` must be in \[1, 65536\], got 0"),
        ({"reg_tokens": np.int64(-1)}, r"`reg_tokens` must be in \[0, 65536\], got -1"),
        ({"num_classes": -1}, r"`num_classes` must be in \[0, 1e6\], got -1"),
        ({"dropout": 1.5}, r"`dropout` must be in \[0, 1\), got 1.5"),
        ({"drop_path_rate": 1.0}, r"`drop_path_rate` must be in \[0, 1\), got 1.0"),
        ({"mlp_ratio": 0.01}, "`mlp_ratio` must give the MLP at least one channel, got 0 of 16"),
        ({"class_token": False}, "needs `class_token=True`; without one use 'avg', 'max' or 'map'"),
        (
            {"global_pool": "mean"},
            "`global_pool` must be one of token, avg, max, map, or a class path such as mypkg.Mine, got 'mean'",
        ),
        ({"tokenizer": "t2"}, "`tokenizer` must be one of patch, t2t, conv, .* got 't2'"),
        (
            {"tokenizer": "t2t", "t2t_attn": "linear"},
            "`tokenizer.t2t_attn` must be one of performer, performer_relu, transformer, none, got 'linear'",
        ),
        ({"tokenizer": "t2t", "t2t_strides": (9, 9)}, "must leave every split at least one token"),
        (
            {"pos_embed": "rope"},
            "`pos_embed` must be one of none, learned, .* conv, or a class path such as mypkg.Mine, got 'rope'",
        ),
        ({"act_layer": "swish"}, "`act_layer` must be one of gelu, gelu_tanh, quick_gelu, relu, silu, .* got 'swish'"),
        ({"norm_layer": "batchnorm"}, "`norm_layer` must be one of layernorm, rmsnorm, .* got 'batchnorm'; did you"),
        ({"mlp_layer": "glu"}, "`mlp_layer` must be one of mlp, swiglu, ghost, or a class path such as .*, got 'glu'"),
        ({"rope_theta": 10.0}, "Learned takes no argument `theta`"),
        ({"rope_theta": 10.0, "pos_embed": ["learned", "rope2d"]}, "`rope_theta` cannot be given for a list"),
    ],
)
def test_a_wrong_value_is_named_with_the_way_out(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny(**{"t2t_kernels": (9, 20)} | arguments if "t2t_strides" in arguments else arguments)


@pytest.mark.parametrize("shape", [(2, 3, 16, 24), (1, 16, 24)])
def test_images_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"images must be \(B, 1, height, width\), got \("):
        tiny()(torch.randn(shape))


def test_init_std_is_the_standard_deviation_of_linear_weights_alone():
    net = VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=1, num_heads=2, init_std=0.1)
    assert net.blocks[0].attn.qkv.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert net.cls_token.std().item() == pytest.approx(0.02, rel=0.3)
    with pytest.raises(ValueError, match=r"`init_std` must be in \(0, 10\], got 0"):
        VisionTransformer(img_size=32, patch_size=8, init_std=0)
