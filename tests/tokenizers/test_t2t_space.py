"""What the module of T2T-ViT can be beside what was published, each option against a slow version of itself."""

import itertools
import math
from contextlib import nullcontext
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.networks import randomized
from vitlab.tokenizers.conv import ConvStem
from vitlab.tokenizers.splits import soft_split, soft_splits, split_grids
from vitlab.tokenizers.t2t import T2TTokenizer
from vitlab.tokenizers.token_layers import T2TAttn, TokenAttention, TokenPerformer, build_token_layer, random_features

MODES = {"zero": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular", "none": None}


def slow_windows(x, kernel, stride, padding, dilation, mode):
    """Cut window by window out of the padded image."""
    if MODES[mode]:
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]), mode=MODES[mode])
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    rows, cols = (range(0, side - r + 1, s) for side, r, s in zip(x.shape[2:], reach, stride, strict=True))
    cut = [
        x[:, :, i : i + reach[0] : dilation[0], j : j + reach[1] : dilation[1]].flatten(1)
        for i, j in itertools.product(rows, cols)
    ]
    return torch.stack(cut, dim=1), (len(rows), len(cols))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
@pytest.mark.parametrize(("kernel", "stride"), [((3, 3), (2, 2)), ((4, 3), (1, 2)), ((2, 5), (2, 3))])
def test_windows_of_any_shape_and_border_are_cut_one_by_one(mode, dilation, kernel, stride):
    x = torch.randn(2, 3, 9, 11)
    split = soft_splits([kernel], [stride], mode)[0]
    padding = (0, 0) if mode == "none" else tuple(-(-k // 4) for k in kernel)
    expected, grid = slow_windows(x, kernel, stride, padding, dilation, mode)
    assert torch.equal(soft_split(x, *split, dilation, mode), expected)
    assert split_grids((9, 11), [split], [dilation], mode) == [grid]


@pytest.mark.parametrize("mode", MODES)
def test_a_grid_is_refused_where_torch_cannot_cut_it_and_nowhere_else(mode):
    for side, kernel in itertools.product(range(1, 5), range(1, 14)):  # borders of 1 to 4 cells
        for size in ((side, 9), (9, side)):
            (split,) = soft_splits([kernel], None, mode)
            try:
                count = soft_split(torch.zeros(1, 1, *size), *split, 1, mode).shape[1]
            except RuntimeError:
                with pytest.raises(ValueError, match=r"`img_size` must leave every split|cells around a grid of"):
                    split_grids(size, [split], None, mode)
            else:
                assert math.prod(*split_grids(size, [split], None, mode)) == count


@pytest.mark.parametrize("mode", MODES)
def test_convolutions_see_the_same_windows(mode):
    options = {"t2t_kernels": [[5, 3]], "t2t_strides": [[3, 2]], "t2t_dilations": [[1, 2]], "t2t_padding": mode}
    tokenizer, stem = T2TTokenizer((24, 16), 3, 8, **options), ConvStem((24, 16), 3, 8, **options)
    with torch.no_grad():
        stem.convs[0].weight.copy_(tokenizer.project.weight.view(8, 3, 5, 3))
        stem.convs[0].bias.copy_(tokenizer.project.bias)
    images = torch.randn(2, 3, 24, 16)
    assert stem.grid_size == tokenizer.grid_size and stem.patch_size == (3, 2)
    torch.testing.assert_close(stem(images), tokenizer(images), rtol=0, atol=1e-5)


def slow_attention(layer, x, heads, scale):
    """Head by head, query by query."""
    dim = layer.proj.in_features
    q, k, v = layer.qkv(x).split(dim, dim=-1)
    out = torch.zeros_like(v)
    for b, a, i in itertools.product(range(len(x)), range(heads), range(x.shape[1])):
        part = slice(a * dim // heads, (a + 1) * dim // heads)
        weights = (k[b, :, part] @ q[b, i, part] * scale).softmax(0)
        out[b, i, part] = weights @ v[b, :, part]
    return layer.proj(out), v


@pytest.mark.parametrize(("heads", "scale"), [(1, None), (4, None), (4, 0.25), (2, 0.0)])
@pytest.mark.parametrize("value_skip", [True, False])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_token_attention_has_heads_a_scale_a_bias_and_a_skip(heads, scale, value_skip, qkv_bias):
    options = {"num_heads": heads, "qk_scale": scale, "value_skip": value_skip, "qkv_bias": qkv_bias}
    layer, x = TokenAttention(27, 8, **options).double(), torch.randn(2, 5, 27, dtype=torch.float64)
    y, v = slow_attention(layer, x, heads, (27 // heads) ** -0.5 if scale is None else scale)
    torch.testing.assert_close(layer(x), v + y if value_skip else y, rtol=0, atol=1e-12)
    assert layer.weights(x).shape == (2, heads, 5, 5) and (layer.qkv.bias is not None) == qkv_bias


@pytest.mark.parametrize("t2t_attn", ["performer", "performer_relu", "transformer"])
def test_every_option_reaches_both_token_layers(t2t_attn):
    options = {"t2t_mlp_ratio": 1.5, "t2t_act_layer": "relu", "t2t_norm_layer": "rmsnorm", "t2t_dropout": 0.3}
    layer = build_token_layer(t2t_attn, 27, 8, 1e-5, t2t_qkv_bias=True, t2t_value_skip=False, **options)
    modules = list(layer.modules())
    assert [m.p for m in modules if isinstance(m, nn.Dropout)] == [0.3] * 2
    assert sum(isinstance(m, nn.ReLU) for m in modules) == 1 and sum(isinstance(m, nn.RMSNorm) for m in modules) == 2
    assert {m.out_features for m in modules if isinstance(m, nn.Linear)} == {24, 8, 12}
    assert all(m.bias is not None for m in modules if isinstance(m, nn.Linear))
    x = torch.randn(2, 5, 27)
    assert layer(x).shape == (2, 5, 8)


@pytest.mark.parametrize(
    ("t2t_attn", "options", "message"),
    [
        ("softmax", {}, "`t2t_attn` must be one of performer, performer_relu, transformer, none, got 'softmax'"),
        ("transformer", {"t2t_num_heads": 28, "t2t_dim": 28}, "`t2t_num_heads` must be at most 27, the values of"),
        ("transformer", {"t2t_num_heads": 3}, "`t2t_num_heads` must divide `t2t_dim`, got 3 and 8"),
        ("transformer", {"t2t_dropout": 1.0}, r"`t2t_dropout` must be in \[0, 1\), got 1.0"),
        ("performer", {"t2t_mlp_ratio": 0.1}, "`t2t_mlp_ratio` must give the MLP at least one channel, got 0.1"),
        ("performer", {"t2t_features": 0}, r"`t2t_features` must be in \[1, 65536\], got 0"),
    ],
)
def test_an_impossible_option_is_refused(t2t_attn, options, message):
    with pytest.raises(ValueError, match=message):
        build_token_layer(t2t_attn, **{"in_dim": 27, "t2t_dim": 8, "norm_eps": 1e-5} | options)


@pytest.mark.parametrize(
    ("name", "value", "having"),
    [
        ("t2t_num_heads", 4, {"transformer"}),
        ("t2t_qk_scale", 0.1, {"transformer"}),
        ("t2t_features", 8, {"performer", "performer_relu"}),
        ("t2t_value_skip", False, {"transformer", "performer", "performer_relu"}),
    ],
)
@pytest.mark.parametrize("t2t_attn", get_args(T2TAttn))
def test_an_option_is_refused_where_a_token_layer_does_not_have_it(t2t_attn, name, value, having):
    refused = pytest.raises(ValueError, match=f"`{name}` has no meaning for t2t_attn='{t2t_attn}', got {value}")
    with nullcontext() if t2t_attn in having else refused:
        build_token_layer(t2t_attn, 27, 8, 1e-5, **{name: value})


@pytest.mark.parametrize(
    ("t2t_attn", "name", "dropout", "bias"),
    [
        ("performer", "kqv", 0.1, True),
        ("performer_relu", "kqv", 0.1, True),
        ("transformer", "attn.qkv", 0.0, False),
        ("none", "value", 0.0, False),
    ],
)
def test_unless_asked_performers_alone_have_dropout_and_a_bias(t2t_attn, name, dropout, bias):
    layer = build_token_layer(t2t_attn, 27, 8, 1e-5)
    assert [m.p for m in layer.modules() if isinstance(m, nn.Dropout)] == [dropout] * 2
    assert (layer.get_submodule(name).bias is not None) == bias


@pytest.mark.parametrize("relu", [True, False])
def test_linear_attention_weighs_the_values_by_products_of_features(relu):
    layer = TokenPerformer(27, 8, relu=relu, features=5).double()
    q, k, v = torch.randn(3, 2, 6, 8, dtype=torch.float64)
    scores = layer.features(q) @ layer.features(k).transpose(-2, -1)
    assert (scores > 0).all() and layer.w.shape == (5, 8)
    expected = scores / (scores.sum(-1, keepdim=True) + 1e-8) @ v
    torch.testing.assert_close(layer.attend(q, k, v), expected, rtol=0, atol=1e-12)
    layer.w.fill_(0.25)
    found = layer.features(torch.tensor([[[0.0] * 8, [1.0] * 8, [-1.0] * 8]]).double())  # of products 0, 2 and -2
    values = [1e-3, 2 / 5**0.5 + 1e-3, 1e-3] if relu else [5**-0.5, math.exp(2 - 4) / 5**0.5, math.exp(-2 - 4) / 5**0.5]
    torch.testing.assert_close(found, torch.tensor(values).double()[:, None].expand(1, 3, 5))


def test_more_features_than_channels_are_orthogonal_in_blocks():
    w = random_features(20, 8)
    for block in w.split(8):
        torch.testing.assert_close(block @ block.T, 8 * torch.eye(len(block)), rtol=0, atol=1e-4)


def test_widths_may_differ_from_stage_to_stage():
    tokenizer = T2TTokenizer((32, 32), 3, 16, t2t_dim=[4, 6])
    shapes = [tuple(tokenizer.get_submodule(name).weight.shape) for name in ("attention1.proj", "attention2.proj")]
    assert shapes == [(4, 4), (6, 6)] and tokenizer.project.in_features == 6 * 9
    assert tokenizer(torch.randn(2, 3, 32, 32)).shape == (2, 4, 16)


ASIDE = [
    ({"t2t_kernels": [[7, 5], 3, 3]}, "t2t_kernels"),
    ({"t2t_strides": [4, [2, 1], 2]}, "t2t_kernels"),
    ({"t2t_dilations": [1, 2, 1]}, "t2t_dilations"),
    ({"t2t_padding": "reflect"}, "t2t_padding"),
    ({"t2t_attn": "transformer", "t2t_num_heads": 2}, "t2t_num_heads"),
    ({"t2t_value_skip": False}, "t2t_value_skip"),
    ({"t2t_norm_layer": "rmsnorm"}, "t2t_norm_layer"),
    ({"t2t_attn": "performer_relu"}, "t2t_attn"),
    ({"t2t_attn": "none"}, "t2t_attn"),
]
COVERED = [
    {"t2t_padding": "none"},
    {"t2t_mlp_ratio": 1.5, "t2t_act_layer": "silu", "t2t_qkv_bias": False, "t2t_features": 3},
    {"t2t_attn": "transformer", "t2t_qk_scale": 0.3, "t2t_qkv_bias": True, "t2t_mlp_ratio": 2.0},
    {"t2t_dim": [4, 6], "t2t_attn": "transformer"},
]


@pytest.mark.parametrize(("options", "named"), ASIDE)
def test_options_that_rule_out_the_fast_path_are_named(options, named):
    tokenizer = T2TTokenizer((64, 64), 3, 16, **{"t2t_dim": 8, **options})
    images = torch.randn(2, 3, 64, 64)
    assert tokenizer.unfused_options() == [named] and not tokenizer.is_fused(images)
    assert tokenizer(images).isfinite().all()


@pytest.mark.parametrize("options", COVERED)
def test_the_fast_path_is_exact_for_the_options_that_it_covers(options):
    tokenizer = randomized(T2TTokenizer((64, 64), 3, 16, **{"t2t_dim": 8, **options}), 0.2)
    images = torch.randn(2, 3, 64, 64)
    assert tokenizer.unfused_options() == [] and tokenizer.is_fused(images)
    fast = tokenizer(images)
    tokenizer.fused = False
    torch.testing.assert_close(fast, tokenizer(images), rtol=0, atol=2e-5)
