import pytest
import torch
from timm.layers import RelPosBias

from vitlab.layers.pos_embed.biases import Alibi2d, RelPos, alibi_slopes, displacement_index


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


def test_alibi2d_does_not_notice_the_symmetries_of_a_square_but_a_shuffle():
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
