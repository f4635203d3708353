import math

import pytest
import torch
from timm.layers import build_sincos2d_pos_embed

from vitlab.layers.pos_embed.added import Factorized, Fourier, Learned, SinCos1d, SinCos2d
from vitlab.layers.pos_embed.build import build_pos_embed

GRIDS = [(14, 14), (3, 5)]


@pytest.mark.parametrize("embed_dim", [8, 7])
def test_sincos1d_is_the_formula_with_the_first_patch_at_position_1(embed_dim):
    table = SinCos1d((2, 3), embed_dim).table()
    for n in range(6):
        for j in range(embed_dim):
            angle = (n + 1) / 10_000 ** (2 * (j // 2) / embed_dim)
            expected = torch.tensor(math.cos(angle) if j % 2 else math.sin(angle), dtype=torch.float64).float()
            assert table[n, j] == expected


def test_sincos1d_has_the_values_of_t2t_vit_at_its_positions_5_and_196():
    table = SinCos1d((14, 14), 384).table()
    torch.testing.assert_close(table[4, :4], torch.tensor([-0.9589243, 0.2836622, -0.9985736, 0.0533950]))
    torch.testing.assert_close(table[195, 382:], torch.tensor([0.0205617, 0.9997886]))


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("mae", [0.1411200, 0.6173582, -0.9899925, 0.8414710, 0.5403023]),
        ("moco", [0.8414710, 0.7348220, 0.5403023, 0.1411200, -0.9899925]),
        ("big_vision", [0.1411200, 0.6252633, -0.9899925, 0.8414710, 0.5403023]),
        ("timm", [0.8414710, 0.7348220, 0.1411200, 0.5403023, -0.9899925]),
    ],
)
def test_sincos2d_has_the_published_values_at_row_1_column_3(style, expected):
    table = SinCos2d((14, 14), 192, style=style).table()
    torch.testing.assert_close(table[17, [0, 1, 48, 96, 144]], torch.tensor(expected))


def test_sincos2d_puts_the_column_first_on_a_grid_that_is_not_square():
    expected = [0.9092974, 0.0199987, -0.4161468, 0.9998000, 0.8414710, 0.0099998, 0.5403023, 0.9999500]
    torch.testing.assert_close(SinCos2d((2, 3), 8).table()[5], torch.tensor(expected))


@pytest.mark.parametrize("grid_size", GRIDS)
def test_sincos2d_styles_are_those_of_timm(grid_size):
    interleaved = build_sincos2d_pos_embed(list(grid_size), 32, interleave_sin_cos=True)
    y_half, x_half = interleaved.chunk(2, dim=1)
    references = {
        "timm": build_sincos2d_pos_embed(list(grid_size), 32),
        "moco": interleaved,
        "mae": torch.cat([x_half, y_half], dim=1),
    }
    for style, reference in references.items():
        torch.testing.assert_close(SinCos2d(grid_size, 32, style=style).table(), reference, rtol=0, atol=1e-6)


def test_sincos2d_layouts_have_one_gram_matrix_and_big_vision_another():
    grams = {}
    for style in ("mae", "moco", "timm", "big_vision"):
        table = SinCos2d((14, 14), 192, style=style).table()
        grams[style] = table @ table.T
    torch.testing.assert_close(grams["moco"], grams["mae"], rtol=0, atol=1e-4)
    torch.testing.assert_close(grams["timm"], grams["mae"], rtol=0, atol=1e-4)
    assert (grams["big_vision"] - grams["mae"]).abs().max() > 0.5


@pytest.mark.parametrize("cls", [SinCos1d, SinCos2d])
def test_every_sine_position_has_a_squared_norm_of_half_the_width(cls):
    squared = cls((14, 14), 192).formula((14, 14)).square().sum(dim=1)
    torch.testing.assert_close(squared, torch.full((196,), 96.0, dtype=torch.float64))


def test_factorized_table_is_the_row_plus_the_column():
    module = Factorized((2, 3), 4, depth=2, join="every_layer")
    for layer in range(2):
        for y in range(2):
            for x in range(3):
                expected = module.row[layer, y] + module.col[layer, x]
                torch.testing.assert_close(module.table(layer)[y * 3 + x], expected, rtol=0, atol=0)


def test_stem_adds_once_before_prefix_tokens_and_nowhere_else():
    module = Learned((2, 3), 4)
    x, tokens = torch.randn(2, 6, 4), torch.randn(2, 7, 4)
    torch.testing.assert_close(module(x), x + module.weight, rtol=0, atol=0)
    assert module.enter(tokens, 0) is tokens


def test_every_layer_adds_the_layers_own_table_to_patches_alone():
    module = Learned((2, 3), 4, depth=2, join="every_layer")
    x, tokens = torch.randn(2, 6, 4), torch.randn(2, 8, 4)
    assert module(x) is x
    for layer in range(2):
        moved = module.enter(tokens, layer)
        torch.testing.assert_close(moved[:, :2], tokens[:, :2], rtol=0, atol=0)
        torch.testing.assert_close(moved[:, 2:], tokens[:, 2:] + module.weight[layer], rtol=0, atol=0)
    assert not torch.equal(module.weight[0], module.weight[1])


def test_every_layer_shared_adds_one_table_before_each_block():
    module = Learned((2, 3), 4, depth=2, join="every_layer_shared")
    tokens = torch.randn(1, 7, 4)
    torch.testing.assert_close(module.enter(tokens, 0), module.enter(tokens, 1), rtol=0, atol=0)


def test_trainable_sine_tables_start_at_the_formula_one_a_layer():
    fixed = SinCos2d((2, 3), 8)
    trained = SinCos2d((2, 3), 8, depth=2, join="every_layer", trainable=True)
    assert trained.weight.shape == (2, 6, 8)
    assert trained.weight.requires_grad
    torch.testing.assert_close(trained.weight[1], fixed.table(), rtol=0, atol=0)


def test_adding_positions_does_not_change_the_input():
    for join in ("stem", "every_layer"):
        module = Learned((2, 3), 4, depth=1, join=join)
        x = torch.randn(1, 6, 4)
        before = x.clone()
        module.enter(module(x), 0)
        assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["learned", "factorized", "sincos1d", "sincos2d"])
def test_what_is_added_can_be_scaled_and_a_scale_of_one_is_none(name):
    plain, one, half = (
        own(name if scale is None else {"class_path": name, "init_args": {"scale": scale}})
        for scale in (None, 1.0, 0.5)
    )
    x = torch.randn(2, 6, 8)
    assert plain.state_dict().keys() == half.state_dict().keys()
    assert torch.equal(one(x), plain(x))
    assert torch.allclose(half(x) - x, 0.5 * (plain(x) - x), atol=1e-6)


def own(choice):
    torch.manual_seed(0)
    return build_pos_embed(choice, (2, 3), embed_dim=8, num_heads=2, depth=1, num_prefix_tokens=1)


@pytest.mark.parametrize("choice", [("rope2d", 2.0), ("learned", 0), ("learned", "big")])
def test_a_scale_is_a_factor_on_what_is_added(choice):
    with pytest.raises(ValueError, match="`scale` belongs to a method that adds a vector"):
        own({"class_path": choice[0], "init_args": {"scale": choice[1]}})


def test_fourier_features_follow_the_papers_formula():
    position = Fourier((3, 4), embed_dim=6, gamma=2.0)
    for n, (y, x) in enumerate((y, x) for y in range(3) for x in range(4)):
        angles = position.freqs @ torch.tensor([float(y), float(x)])
        features = torch.cat([angles.cos(), angles.sin()]) / 6**0.5
        torch.testing.assert_close(position.table()[n], position.mlp(features))
