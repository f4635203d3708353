import math

import pytest
import torch
from timm.layers import RelPosBias
from timm.models.swin_transformer_v2 import WindowAttention
from torch import nn

from vitlab.layers.attention import Attention
from vitlab.layers.pos_embed.biases import (
    Alibi2d,
    ContinuousBias,
    Fire,
    RelPos,
    RelPos1d,
    alibi_slopes,
    displacement_index,
)


def test_relpos_bias_depends_on_the_displacement_alone():
    bias = RelPos((4, 5), num_heads=1).bias(0)[0].view(4, 5, 4, 5)
    seen = {}
    for y in range(4):
        for x in range(5):
            for key_y in range(4):
                for key_x in range(5):
                    value = seen.setdefault((y - key_y, x - key_x), bias[y, x, key_y, key_x].item())
                    assert bias[y, x, key_y, key_x].item() == value
    assert len(set(seen.values())) == 63


def test_relpos_index_is_the_published_one():
    assert displacement_index((2, 2), 0).tolist() == [[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]
    assert displacement_index((2, 3), 0)[0].tolist() == [7, 6, 5, 2, 1, 0]


def test_relpos_index_has_three_entries_for_prefix_tokens():
    index = displacement_index((2, 2), 1)
    assert index[0].tolist() == [11, 9, 9, 9, 9]
    assert index[1:, 0].tolist() == [10, 10, 10, 10]
    assert torch.equal(index[1:, 1:], displacement_index((2, 2), 0))
    assert displacement_index((2, 2), 2)[:3, :3].tolist() == [[11, 11, 9], [11, 11, 9], [10, 10, 4]]


@pytest.mark.parametrize("num_prefix_tokens", [0, 1])
@pytest.mark.parametrize("grid_size", [(3, 3), (3, 5)])
def test_relpos_is_timms_given_the_same_tables(grid_size, num_prefix_tokens):
    ours = RelPos(grid_size, num_heads=2, depth=2, num_prefix_tokens=num_prefix_tokens)
    for layer in range(2):
        theirs = RelPosBias(grid_size, 2, num_prefix_tokens)
        theirs.relative_position_bias_table.data.copy_(ours.bias_table[layer])
        torch.testing.assert_close(ours.bias(layer), theirs.get_bias()[0], rtol=0, atol=0)


def test_relpos_shared_has_one_table():
    shared = RelPos((2, 3), num_heads=2, depth=4, num_prefix_tokens=1, join="every_layer_shared")
    assert shared.bias_table.shape == (1, 3 * 5 + 3, 2)
    assert torch.equal(shared.bias(0), shared.bias(3))


def test_alibi_slopes_are_the_published_ones():
    assert alibi_slopes(1) == [0.00390625]
    assert alibi_slopes(3) == [0.0625, 0.00390625, 0.25]
    assert alibi_slopes(4) == [0.25, 0.0625, 0.015625, 0.00390625]
    assert alibi_slopes(6) == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]


def test_alibi2d_is_minus_slope_times_distance():
    bias = Alibi2d((2, 3), num_heads=3).bias(0)
    for a, slope in enumerate([0.0625, 0.00390625, 0.25]):
        for i in range(6):
            for j in range(6):
                distance = ((i // 3 - j // 3) ** 2 + (i % 3 - j % 3) ** 2) ** 0.5
                assert bias[a, i, j].item() == pytest.approx(-slope * distance, abs=1e-7)


def test_alibi2d_does_not_touch_prefix_tokens():
    bias = Alibi2d((2, 3), num_heads=2, num_prefix_tokens=2).bias(0)
    assert bias.shape == (2, 8, 8)
    assert bias[:, :2].abs().max() == 0
    assert bias[:, :, :2].abs().max() == 0


def test_alibi2d_notices_a_shuffle_but_no_symmetry_of_a_square():
    bias = Alibi2d((4, 4), num_heads=3).double().bias(0)
    cells = torch.arange(16).view(4, 4)
    symmetries = [turn for k in range(4) for turn in (cells.rot90(k), cells.rot90(k).flip(0))]
    for cell in symmetries:
        order = cell.flatten()
        torch.testing.assert_close(bias[:, order][:, :, order], bias, rtol=0, atol=1e-12)
    order = torch.randperm(16)
    assert (bias[:, order][:, :, order] - bias).abs().max() > 0.1


@pytest.mark.parametrize("module", [RelPos((14, 14), 2, 2, 1), Alibi2d((14, 14), 2, 1)])
def test_biases_are_float32_in_bfloat16_models(module):
    before = module.bias(0).detach().clone()
    module.to(torch.bfloat16)
    assert module.bias(0).dtype == torch.float32
    torch.testing.assert_close(module.bias(0), before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("trained", [None, (2, 3)])
def test_log_spaced_biases_are_swin_v2s(trained):
    theirs = WindowAttention(8, (4, 5), 2, pretrained_window_size=trained or (0, 0))
    ours = ContinuousBias((4, 5), num_heads=2)
    if trained:
        ours.load_state_dict(ours.resized_state(ours.state_dict(), trained, "extrapolate"))
    ours.mlps[0].load_state_dict(theirs.cpb_mlp.state_dict())
    table = theirs.cpb_mlp(theirs.relative_coords_table).view(-1, 2)
    expected = 16 * table[theirs.relative_position_index.view(-1)].sigmoid().view(20, 20, 2).permute(2, 0, 1)
    torch.testing.assert_close(ours.bias(0) + 8, expected)


def test_fire_is_the_papers_function_of_a_distance_where_keys_lie_before_the_query():
    fire = Fire((1, 9), num_heads=2, threshold=5.0).double()
    f, c, T = fire.mlp, fire.c.item(), 5.0
    bias = fire.biases(0)
    for i in range(4, 9):  # no key behind these is farther than the first
        for j in range(i + 1):
            x = math.log(c * (i - j) + 1) / math.log(c * max(T, i) + 1)
            torch.testing.assert_close(bias[:, i, j], f(torch.tensor([0.0, x], dtype=torch.float64)))


@pytest.mark.slow
def test_fire_knows_rows_from_columns_and_a_grid_beyond_the_trained_one_stays_bounded():
    fire = Fire((3, 4), num_heads=1, num_prefix_tokens=1)
    seen = []
    fire.mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    large = fire.at((30, 40)).bias(0)
    assert large.shape == (1, 1201, 1201) and seen[-1].abs().max().item() == pytest.approx(1.0)
    bias = fire.bias(0)
    assert bias[0, 0].abs().max() == bias[0, :, 0].abs().max() == 0
    assert not torch.allclose(bias[0, 1, 2], bias[0, 1, 5]) and not torch.allclose(bias[0, 1, 2], bias[0, 2, 1])


def test_vits_relative_logits_are_products_of_queries_and_vectors_of_offsets():
    relative, attn = RelPos1d((2, 2), head_dim=4, num_prefix_tokens=1), Attention(8, num_heads=2)
    nn.init.normal_(relative.keys)
    x = torch.randn(1, 5, 8)
    q, k, _ = attn.qkv(x).unflatten(2, (3, 2, 4)).unbind(2)
    logits = attn.logits(x, relative, layer=0)
    for head in range(2):
        for i in range(5):
            for j in range(5):
                key = k[0, j, head]
                if i and j:
                    key = key + relative.keys[0, (i - 1) - (j - 1) + 3]
                expected = (q[0, i, head] @ key) / math.sqrt(4)
                torch.testing.assert_close(logits[0, head, i, j], expected)


@pytest.mark.parametrize("option", [{"c": 1}, {"threshold": 8}])
def test_fire_takes_whole_numbers(option):
    fire = Fire((2, 3), num_heads=2, **option)
    fire.bias(0).sum().backward()
    assert fire.c.dtype == fire.threshold.dtype == torch.float32


@pytest.mark.parametrize("option", [{"c": 0.0}, {"threshold": -1.0}, {"hidden": 0}])
def test_fire_refuses_impossible_options(option):
    with pytest.raises(ValueError, match="must be above 0 for fire"):
        Fire((2, 2), num_heads=1, **option)
