import re

import pytest
import torch
from timm.layers import resample_abs_pos_embed
from torch import nn

from vitlab.layers.pos_embed import build_pos_embed, resample_pos_embed
from vitlab.layers.resample import resize_axis, resize_bias_table, resize_table
from vitlab.resized import resize_images


def network(name, grid_size, num_prefix_tokens=1):
    model = nn.Module()
    model.pos_embed = build_pos_embed(name, grid_size, 16, 2, 3, num_prefix_tokens)
    return model


def carried(name, old_grid, grid, policy, num_prefix_tokens=1):
    """Return the position embedding at ``grid`` of a model that was trained at ``old_grid``."""
    old, new = network(name, old_grid, num_prefix_tokens), network(name, grid, num_prefix_tokens)
    state, _ = resample_pos_embed(old.state_dict(), new, old_grid, policy)
    new.load_state_dict(state)
    return new.pos_embed


@pytest.mark.parametrize(("old_grid", "grid"), [((14, 14), (28, 28)), ((14, 14), (7, 7)), ((3, 5), (6, 4))])
@pytest.mark.parametrize("antialias", [True, False])
def test_tables_are_resized_as_timm_does(old_grid, grid, antialias):
    table = torch.randn(1, old_grid[0] * old_grid[1], 8)
    theirs = resample_abs_pos_embed(table, list(grid), list(old_grid), num_prefix_tokens=0, antialias=antialias)
    torch.testing.assert_close(resize_table(table, old_grid, grid, antialias), theirs, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("new", [(5, 1), (1, 5), (1, 1), (16, 1), (3, 2)])
@pytest.mark.parametrize("old", [(8, 8), (8, 1), (5, 7)])
def test_rows_and_columns_are_resized_apart(old, new, mode):
    images = torch.randn(2, 3, *old)
    down, across = (
        resize_images(torch.eye(n).expand(1, 1, n, n), (m, n), mode)[0, 0] if n > 1 else torch.ones(m, 1)
        for n, m in zip(old, new, strict=True)
    )
    torch.testing.assert_close(resize_images(images, new, mode), down @ images @ across.T)


def test_resizing_to_the_same_size_returns_the_same_tensor():
    table, axis, bias = torch.randn(2, 15, 4), torch.randn(2, 5, 4), torch.randn(2, 5 * 9 + 3, 4)
    assert resize_table(table, (3, 5), (3, 5)) is table
    assert resize_axis(axis, 5) is axis
    assert resize_bias_table(bias, (3, 5), (3, 5)) is bias


@pytest.mark.parametrize("grid", [(6, 4), (2, 3), (3, 9), (1, 1)])
def test_resizing_keeps_constant_tables_constant(grid):
    h, w = grid
    torch.testing.assert_close(
        resize_table(torch.ones(1, 15, 4), (3, 5), grid), torch.ones(1, h * w, 4), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(resize_axis(torch.ones(2, 5, 4), w), torch.ones(2, w, 4), rtol=0, atol=1e-6)
    bias, expected = torch.ones(1, 5 * 9, 4), torch.ones(1, (2 * h - 1) * (2 * w - 1), 4)
    torch.testing.assert_close(resize_bias_table(bias, (3, 5), grid), expected, rtol=0, atol=1e-6)


def test_resizing_keeps_the_dtype():
    assert resize_table(torch.randn(1, 15, 4).bfloat16(), (3, 5), (6, 6)).dtype == torch.bfloat16


def test_an_axis_is_interpolated_between_the_centers_of_its_cells():
    resized = resize_axis(torch.arange(4.0)[None, :, None], 8)[0, :, 0]
    assert resized.tolist() == [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]


def test_a_table_is_not_transposed_on_a_grid_that_is_not_square():
    y = torch.arange(4.0)[:, None].expand(4, 8).reshape(1, 32, 1)
    resized = resize_table(y, (4, 8), (8, 4)).view(8, 4)
    assert (resized - resized[:, :1]).abs().max() <= 1e-6
    assert (resized[1:, 0] > resized[:-1, 0]).all()


def offsets(grid, axis):
    """Return the bias table whose every entry is its own offset along ``axis``, with three prefix entries 7, 8, 9."""
    sides = [torch.arange(-side + 1.0, side) for side in grid]
    field = torch.meshgrid(*sides, indexing="ij")[axis]
    return torch.cat([field.flatten(), torch.tensor([7.0, 8.0, 9.0])])[None, :, None]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("old_grid", "grid"), [((14, 14), (20, 20)), ((3, 5), (6, 7)), ((6, 7), (3, 5)), ((4, 4), (14, 9))]
)
def test_bias_tables_keep_the_entries_next_to_the_diagonal_and_of_prefix_tokens(axis, old_grid, grid):
    resized = resize_bias_table(offsets(old_grid, axis), old_grid, grid)[0, :, 0]
    assert resized[-3:].tolist() == [7, 8, 9]
    field = resized[:-3].view(2 * grid[0] - 1, 2 * grid[1] - 1).movedim(axis, 0)
    torch.testing.assert_close(field, field[:, :1].expand_as(field), rtol=0, atol=1e-5)
    line, center = field[:, grid[1 - axis] - 1], grid[axis] - 1
    assert line[center - 1 : center + 2].tolist() == [-1, 0, 1]
    assert (line[1:] > line[:-1]).all()
    torch.testing.assert_close(line[-1], torch.tensor(old_grid[axis] - 1.0), rtol=0, atol=1e-4)


def test_bias_tables_are_spaced_geometrically_as_in_beit():
    line = resize_bias_table(offsets((14, 14), 0), (14, 14), (20, 20))[0, :-3, 0].view(39, 39)[16:23, 0]
    expected = torch.tensor([-2.83, -1.94, -1, 0, 1, 1.94, 2.83])
    torch.testing.assert_close(line, expected, rtol=0, atol=0.006)


@pytest.mark.filterwarnings("ignore")  # timm indexes with a list
@pytest.mark.parametrize(("old_grid", "grid"), [((14, 14), (20, 20)), ((6, 8), (9, 11))])
def test_bias_tables_are_resized_as_timm_does(old_grid, grid):
    from timm.layers.pos_embed_rel import resize_rel_pos_bias_table

    table = torch.randn((2 * old_grid[0] - 1) * (2 * old_grid[1] - 1) + 3, 2)
    shape = ((2 * grid[0] - 1) * (2 * grid[1] - 1) + 3, 2)
    theirs = resize_rel_pos_bias_table(table, grid, shape, old_grid)
    torch.testing.assert_close(resize_bias_table(table[None], old_grid, grid)[0], theirs, rtol=0, atol=1e-3)


def test_a_sine_table_rescaled_is_close_to_one_interpolated_and_not_to_one_extrapolated():
    tables = {}
    for policy in ("rescale", "interpolate", "extrapolate"):
        old, new = (
            build_pos_embed("sincos2d", (14, 14), 192, 3, 1, 1),
            build_pos_embed("sincos2d", (28, 28), 192, 3, 1, 1),
        )
        new.load_state_dict(new.resized_state(old.state_dict(), (14, 14), policy))
        tables[policy] = new.table()
    assert (tables["rescale"] - tables["interpolate"]).abs().mean() <= 0.005
    assert (tables["extrapolate"] - tables["interpolate"]).abs().mean() > 0.1


def test_a_sine_table_rescaled_to_twice_the_grid_puts_old_cells_between_new_ones():
    pos_embed = carried("sincos2d", (3, 5), (6, 10), "rescale")
    x = torch.tensor([-0.25, 0.25, 0.75, 1.25])
    torch.testing.assert_close(pos_embed.table()[:4, 0], x.sin())
    torch.testing.assert_close(pos_embed.table().view(6, 10, 16)[:4, 0, 8], x.sin())


def test_fourier_features_rescaled_are_those_of_places_between_old_cells():
    cells = carried("fourier", (2, 3), (4, 6), "rescale").cells.view(4, 6, 2)
    assert cells[:, 0, 0].tolist() == [-0.25, 0.25, 0.75, 1.25]
    assert cells[0, :, 1].tolist() == [-0.25, 0.25, 0.75, 1.25, 1.75, 2.25]


def test_rotations_rescaled_meet_at_old_cells_without_an_offset():
    for name in ("rope2d", "rope_mixed"):
        old, new = network(name, (3, 5)), network(name, (6, 10))
        state, _ = resample_pos_embed(old.state_dict(), new, (3, 5), "rescale")
        new.load_state_dict(state)
        cos_sin = torch.stack([x.expand(2, -1, -1) for x in new.pos_embed.cos_sin(1)])[:, :, 1:].unflatten(2, (6, 10))
        expected = torch.stack([x.expand(2, -1, -1) for x in old.pos_embed.cos_sin(1)])[:, :, 1:].unflatten(2, (3, 5))
        torch.testing.assert_close(cos_sin[:, :, ::2, ::2], expected)


def test_distances_rescaled_are_those_between_old_cells():
    bias = carried("alibi2d", (3, 5), (6, 5), "rescale", num_prefix_tokens=0).bias(0).view(2, 6, 5, 6, 5)
    expected = build_pos_embed("alibi2d", (3, 5), 16, 2, 3, 0).bias(0).view(2, 3, 5, 3, 5)
    torch.testing.assert_close(bias[:, ::2, :, ::2], expected)


@pytest.mark.parametrize("name", ["sincos1d", "sincos2d", "alibi2d", "rope2d", "rope_mixed"])
def test_extrapolated_positions_are_those_of_a_model_at_the_new_grid(name):
    pos_embed, fresh = carried(name, (3, 5), (6, 4), "extrapolate"), network(name, (6, 4)).pos_embed
    for key, buffer in pos_embed.named_buffers():
        assert torch.equal(buffer, fresh.get_buffer(key)), key


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("learned", "interpolate; usual is interpolate"),
        ("factorized", "interpolate; usual is interpolate"),
        ("relpos", "interpolate; usual is interpolate"),
        ("sincos1d", "interpolate, extrapolate; usual is interpolate"),
        ("sincos2d", "rescale, interpolate, extrapolate; usual is rescale"),
        ("alibi2d", "extrapolate, rescale; usual is extrapolate"),
        ("rope2d", "extrapolate, rescale; usual is extrapolate"),
        ("rope_mixed", "extrapolate, rescale; usual is extrapolate"),
    ],
)
@pytest.mark.parametrize("policy", [None, "stretch"])
def test_another_grid_demands_a_policy_that_the_method_has(name, allowed, policy):
    old, new = network(name, (3, 5)), network(name, (5, 3))  # as many cells, so that no shape differs
    with pytest.raises(ValueError, match=f"3 x 5 grid and the model has 5 x 3: .* one of {allowed}; got {policy}"):
        resample_pos_embed(old.state_dict(), new, (3, 5), policy)


@pytest.mark.parametrize("name", ["none", "conv"])
def test_methods_that_do_not_depend_on_a_grid_need_no_policy_and_take_none(name):
    old, new = network(name, (3, 5)), network(name, (6, 4))
    state = old.state_dict()
    assert resample_pos_embed(state, new, (3, 5), None) == (state, [])
    with pytest.raises(ValueError, match="null: there is nothing to resize; got interpolate"):
        resample_pos_embed(state, new, (3, 5), "interpolate")


@pytest.mark.parametrize(
    ("name", "policy", "rule"),
    [
        ("learned", "rescale", "must be one of interpolate; usual is interpolate; got rescale"),
        ("none", "interpolate", "null: there is nothing to resize; got interpolate"),
        (["learned", "relpos"], "rescale", "one of interpolate.*; got rescale"),
    ],
)
def test_a_policy_that_the_method_never_has_is_refused_at_its_own_grid_too(name, policy, rule):
    model = network(name, (3, 5))
    state = model.state_dict()
    for usual in ("usual", None, *model.pos_embed.policies):
        assert resample_pos_embed(state, model, (3, 5), usual) == (state, [])
    with pytest.raises(ValueError, match=rule):
        resample_pos_embed(state, model, (3, 5), policy)
    with pytest.raises(ValueError, match=rule):
        model.pos_embed.at((4, 4), policy)


def test_a_trained_sine_table_can_only_be_interpolated():
    trained = {"class_path": "sincos2d", "init_args": {"trainable": True}}
    old, new = network(trained, (3, 5)), network(trained, (6, 4))
    with pytest.raises(ValueError, match="one of interpolate; usual is interpolate; got rescale"):
        resample_pos_embed(old.state_dict(), new, (3, 5), "rescale")
    state, _ = resample_pos_embed(old.state_dict(), new, (3, 5), "interpolate")
    expected = resize_table(old.pos_embed.weight, (3, 5), (6, 4))
    assert torch.equal(state["pos_embed.weight"], expected)


@pytest.mark.parametrize(
    ("name", "policy", "key"),
    [
        ("sincos1d", "interpolate", "pos_embed.interpolated"),
        ("sincos2d", "interpolate", "pos_embed.interpolated"),
        ("sincos2d", "rescale", "pos_embed.trained_grid"),
        ("rope2d", "rescale", "pos_embed.trained_grid"),
        ("rope_mixed", "rescale", "pos_embed.trained_grid"),
        ("alibi2d", "rescale", "pos_embed.trained_grid"),
    ],
)
def test_what_a_policy_did_to_a_fixed_method_is_saved_and_loads_without_it(name, policy, key):
    pos_embed = carried(name, (3, 5), (6, 4), policy)
    model, again, fresh = nn.Module(), network(name, (6, 4)), network(name, (6, 4))
    model.pos_embed = pos_embed
    assert key in model.state_dict()
    again.load_state_dict(model.state_dict())
    probe = torch.randn(1, 2, 25, 8)
    for other, same in [(again, True), (fresh, False)]:
        if name == "rope_mixed":
            other.pos_embed.freqs = pos_embed.freqs
        got = [other.pos_embed(torch.zeros(1, 24, 16)), other.pos_embed.rotate(probe, 0), other.pos_embed.bias(0)]
        expected = [pos_embed(torch.zeros(1, 24, 16)), pos_embed.rotate(probe, 0), pos_embed.bias(0)]
        equal = all(x is y is None or torch.equal(x, y) for x, y in zip(got, expected, strict=True))
        assert equal == same


def test_a_grid_can_change_twice_when_the_first_change_was_rescaled():
    once = carried("rope2d", (4, 4), (8, 8), "rescale")
    state = {"trained_grid": once.trained_grid}
    twice = build_pos_embed("rope2d", (16, 16), 16, 2, 3, 1)
    twice.load_state_dict(twice.resized_state(state, (8, 8), "rescale"))
    assert torch.equal(twice.sin, carried("rope2d", (4, 4), (16, 16), "rescale").sin)
    with pytest.raises(ValueError, match="one of rescale; usual is rescale; got extrapolate"):
        twice.resized_state(state, (8, 8), "extrapolate")


def test_the_norm_of_a_random_table_is_reported_to_shrink():
    old, new = network("learned", (14, 14)), network("learned", (28, 28))
    state, sentences = resample_pos_embed({"head.bias": torch.ones(2)} | old.state_dict(), new, (14, 14), "interpolate")
    (sentence,) = sentences  # versions of torch draw another table
    assert re.fullmatch("positions: interpolate from 14 x 14 to 28 x 28, norm of a position x 0.8[1-3]", sentence)
    assert state["pos_embed.weight"].shape == (1, 784, 16)
    assert torch.equal(state["head.bias"], torch.ones(2))
