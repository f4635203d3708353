"""What each part of the T2T tokenizer can tell a token about its place: overlap, border, and attention between splits.

The windows are those of `experiments/t2t_positions/factorial_fashion_mnist.yaml`: tokens 4 pixels apart that reach over
10 x 10 pixels, either all of them, which neighbors share, or 4 x 4 of them, 3 pixels apart, which no other token has.
"""

import pytest
import torch

from vitlab.analysis.views.token_layers import token_layer_maps
from vitlab.tokenizers.splits import soft_splits, split_grids
from vitlab.tokenizers.t2t import T2TTokenizer
from vitlab.tokenizers.token_layers import TokenMlp, build_token_layer

SHARED = {"t2t_kernels": [4, 4], "t2t_strides": [2, 2], "t2t_dim": [6]}
APART = {"t2t_kernels": [2, 2], "t2t_strides": [2, 2], "t2t_dilations": [3, 3], "t2t_dim": [6]}
WINDOWS = {"shared": SHARED, "apart": APART}
NO_PADDING = {"t2t_kernels": [4], "t2t_strides": [4], "t2t_padding": "none"}
BORDERS = ["zero", "reflect", "circular"]


def tokenizer(**args):
    torch.manual_seed(0)
    return T2TTokenizer((28, 28), 1, 8, **{"t2t_dropout": 0.0, **args}).double().eval()


def pixels_of(split, token):
    """Return the (28, 28) pixels that a token depends on, by its gradient."""
    images = torch.randn(1, 1, 28, 28, dtype=torch.float64, requires_grad=True)
    split(images)[0, token].sum().backward()
    return images.grad[0, 0] != 0


def extent(mask):
    rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
    return [int(side.max() - side.min()) + 1 for side in (rows, columns)]


def test_overlapping_and_dilated_windows_reach_equally_far_and_only_one_shares_pixels():
    middle, right = 3 * 7 + 3, 3 * 7 + 4
    seen = {
        name: [pixels_of(tokenizer(t2t_attn="none", **w), t) for t in (middle, right)] for name, w in WINDOWS.items()
    }
    assert [extent(one) for pair in seen.values() for one in pair] == [[10, 10]] * 4
    assert {name: int(a.sum()) for name, (a, _) in seen.items()} == {"shared": 100, "apart": 16}
    assert {name: int((a & b).sum()) for name, (a, b) in seen.items()} == {"shared": 60, "apart": 0}


def test_windows_apart_without_a_border_cut_the_image_into_parts():
    split = tokenizer(t2t_attn="none", t2t_padding="circular", **APART)
    assert (sum(pixels_of(split, token).int() for token in range(49)) == 1).all()
    zeros = tokenizer(t2t_attn="none", **APART)  # a border takes the place of the outermost lines
    seen = sum(pixels_of(zeros, token).int() for token in range(49))
    assert seen.max() == 1 and (seen.sum(1) == 0).nonzero().flatten().tolist() == [0, 2, 25, 27]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("t2t_attn", ["performer", "none"])
def test_in_a_uniform_image_only_zero_padding_makes_tokens_differ_at_the_border(windows, t2t_attn):
    even = torch.full((1, 1, 28, 28), 0.7, dtype=torch.float64)
    for border in BORDERS:
        split = tokenizer(t2t_attn=t2t_attn, t2t_padding=border, **WINDOWS[windows])
        tokens = split(even).unflatten(1, (7, 7))[0]
        off = (tokens - tokens[3, 3]).abs().amax(-1)
        assert off[1:-1, 1:-1].max() < 1e-12
        ring = torch.cat([off[0], off[-1], off[:, 0], off[:, -1]])
        assert ring.min() > 1e-3 if border == "zero" else ring.max() < 1e-12
    assert tokenizer(**NO_PADDING)(even).std(dim=1).max() < 1e-12


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("t2t_attn", ["performer", "none"])
def test_without_a_border_a_shift_by_a_step_shifts_the_tokens_and_with_one_it_does_not(windows, t2t_attn):
    images = torch.randn(1, 1, 28, 28, dtype=torch.float64)
    moved = images.roll((4, 8), dims=(2, 3))
    worst = {}
    for border in BORDERS:
        split = tokenizer(t2t_attn=t2t_attn, t2t_padding=border, **WINDOWS[windows])
        tokens, after = (split(x).unflatten(1, (7, 7)) for x in (images, moved))
        worst[border] = (tokens.roll((1, 2), dims=(1, 2)) - after).abs().max().item()
    assert worst["circular"] < 1e-12 and min(worst["zero"], worst["reflect"]) > 1e-2


@pytest.mark.parametrize("windows", WINDOWS)
def test_only_attention_lets_a_token_see_windows_that_its_own_does_not_touch(windows):
    seen = {
        a: pixels_of(tokenizer(t2t_attn=a, t2t_padding="circular", **WINDOWS[windows]), 24)
        for a in ("performer", "none")
    }
    assert extent(seen["none"]) == [10, 10]
    assert seen["performer"].all()


def test_all_borders_have_the_grid_of_zeros():
    for border in BORDERS:
        splits = {name: soft_splits(w["t2t_kernels"], w["t2t_strides"], border) for name, w in WINDOWS.items()}
        grids = {
            name: split_grids((28, 28), splits[name], WINDOWS[name].get("t2t_dilations"), border) for name in splits
        }
        assert grids == {"shared": [(14, 14), (7, 7)], "apart": [(14, 14), (7, 7)]}


def test_a_token_layer_without_attention_is_the_formula_token_by_token():
    layer = TokenMlp(12, 6, mlp_ratio=1.5, qkv_bias=True).double()
    torch.nn.init.normal_(layer.norm1.weight)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    v = (normed * layer.norm1.weight) @ layer.value.weight.T + layer.value.bias
    inner = (v - v.mean(-1, keepdim=True)) / (v.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    hidden = torch.nn.functional.gelu(inner @ layer.mlp.fc1.weight.T + layer.mlp.fc1.bias)
    assert hidden.shape == (2, 5, 9)
    torch.testing.assert_close(layer(x), v + hidden @ layer.mlp.fc2.weight.T + layer.mlp.fc2.bias, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(x[:, [3, 1]]), layer(x)[:, [3, 1]])


def test_the_other_options_reach_a_token_layer_without_attention():
    options = {"t2t_mlp_ratio": 1.5, "t2t_act_layer": "relu", "t2t_norm_layer": "rmsnorm", "t2t_dropout": 0.3}
    modules = list(build_token_layer("none", 27, 8, 1e-5, t2t_qkv_bias=True, **options).modules())
    assert [m.p for m in modules if isinstance(m, torch.nn.Dropout)] == [0.3] * 2
    assert [m.out_features for m in modules if isinstance(m, torch.nn.Linear)] == [8, 12, 8]
    assert all(m.bias is not None for m in modules if isinstance(m, torch.nn.Linear))
    assert sum(isinstance(m, torch.nn.RMSNorm) for m in modules) == 2
    assert sum(isinstance(m, torch.nn.ReLU) for m in modules) == 1


def test_the_map_of_a_token_layer_without_attention_is_that_each_token_reads_itself():
    (maps,) = token_layer_maps(tokenizer(t2t_attn="none", **SHARED), torch.randn(2, 1, 28, 28, dtype=torch.float64))
    assert torch.equal(maps, torch.eye(196, dtype=torch.float64).expand(2, -1, -1))
