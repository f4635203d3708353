from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from vitlab.tokenizers.conv import ConvStem
from vitlab.tokenizers.t2t import T2TTokenizer, soft_split, soft_splits, split_grids

MOUNTAINS = Path(__file__).parents[2] / "data" / "mountains" / "mountains.npy"


@pytest.mark.parametrize(
    ("img_size", "kernels", "strides", "grids"),
    [
        ((60, 100), [20], None, [(6, 10)]),
        ((400, 100), [7, 3, 3], None, [(100, 25), (50, 13), (25, 7)]),
        ((224, 224), [7, 3, 3], [4, 2, 2], [(56, 56), (28, 28), (14, 14)]),
        ((384, 384), [7, 3, 3], None, [(96, 96), (48, 48), (24, 24)]),
        ((1000, 300), [7, 3, 3], None, [(250, 75), (125, 38), (63, 19)]),
        ((1700, 500), [31, 3, 3], None, [(106, 31), (53, 16), (27, 8)]),
        ((32, 32), [3, 3, 3], [1, 2, 1], [(32, 32), (16, 16), (16, 16)]),
        ((32, 32), [3, 3, 3], [2, 2, 1], [(16, 16), (8, 8), (8, 8)]),
        ((32, 32), [7, 3, 3], None, [(8, 8), (4, 4), (2, 2)]),
        ((8, 8), [3, 3, 3], [1, 2, 1], [(8, 8), (4, 4), (4, 4)]),
        ((224, 160), [7, 3, 3], None, [(56, 40), (28, 20), (14, 10)]),
        ((40, 40), [7, 3, 3], None, [(10, 10), (5, 5), (3, 3)]),
    ],
)
def test_grids_are_those_of_the_articles_table(img_size, kernels, strides, grids):
    assert split_grids(img_size, soft_splits(kernels, strides)) == grids


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 2, 1), (5, 3, 2), (7, 4, 2), (9, 5, 3), (20, 10, 5), (31, 16, 8), (2, 1, 1)]
)
def test_default_stride_and_padding_round_half_and_quarter_windows_up(kernel, stride, padding):
    assert soft_splits([kernel]) == [(kernel, stride, padding)]


def test_given_strides_leave_the_padding_rule_alone():
    assert soft_splits([7, 3], [5, 1]) == [(7, 5, 2), (3, 1, 1)]


@pytest.mark.parametrize("split", [(3, 2, 1), (7, 4, 2), (4, 3, 1), (2, 5, 1)])
def test_grids_count_what_unfold_returns(split):
    for H in range(max(1, split[0] - 2 * split[2]), 12):  # from the first side that the window fits on
        ((h, w),) = split_grids((H, 9), [split])
        assert soft_split(torch.zeros(1, 1, H, 9), *split).shape[1] == h * w


def test_the_center_of_a_window_is_the_pixel_at_row_and_column():
    image = torch.arange(400 * 100.0).view(1, 1, 400, 100)  # row * 100 + column
    centers = soft_split(image, 7, 4, 2)[0, :, 3 * 7 + 3].view(100, 25)
    y, x = torch.meshgrid(torch.arange(100), torch.arange(25), indexing="ij")
    assert torch.equal(centers, ((4 * y + 1) * 100 + 4 * x + 1).float())


@pytest.mark.skipif(not MOUNTAINS.exists(), reason="the demo image is not part of the repository")
def test_the_mountains_have_the_articles_sums():
    image = torch.tensor(np.load(MOUNTAINS))[None, None]
    tokens = soft_split(image, 20, 10, 5)[0]
    assert tokens.shape == (60, 400)
    assert tokens[0].eq(0).sum() == 175
    assert tokens[0].sum().item() == pytest.approx(90.89552, abs=1e-5)
    assert tokens.sum().item() == pytest.approx(6798.14925, abs=1e-4)


def test_shapes_are_the_articles_walk():
    tokenizer = T2TTokenizer((400, 100), 1, 768, "transformer", fused=False)
    shapes = []
    for name in ("attention1", "attention2", "project"):
        part = tokenizer.get_submodule(name)
        part.register_forward_hook(lambda _, x, y: shapes.extend([tuple(x[0].shape), tuple(y.shape)]))
    tokenizer(torch.randn(1, 1, 400, 100))
    assert shapes[:4] == [(1, 2500, 49), (1, 2500, 64), (1, 650, 576), (1, 650, 64)]
    assert shapes[4:] == [(1, 175, 576), (1, 175, 768)]


@pytest.mark.parametrize("t2t_attn", ["performer", "transformer"])
@pytest.mark.parametrize(("in_chans", "img_size"), [(1, (40, 24)), (5, (19, 33)), (3, (7, 7))])
def test_any_channels_and_sides_give_the_grid_that_is_announced(t2t_attn, in_chans, img_size):
    tokenizer = T2TTokenizer(img_size, in_chans, 8, t2t_attn, t2t_dim=4)
    h, w = tokenizer.grid_size
    assert tokenizer(torch.randn(2, in_chans, *img_size)).shape == (2, h * w, 8)


def test_token_maps_keep_rows_and_columns_apart():
    tokenizer = T2TTokenizer((16, 32), 1, 4, "transformer", (3, 3), (2, 1), t2t_dim=4, fused=False)
    tokenizer.attention1 = nn.Flatten(2)  # tokens of 9 pixels go on as 9 channels
    tokenizer.project = nn.Identity()
    image = torch.randn(1, 1, 16, 32)
    maps = nn.functional.unfold(image, 3, stride=2, padding=1).view(1, 9, 8, 16)
    assert torch.equal(tokenizer(image), nn.functional.unfold(maps, 3, stride=1, padding=1).mT)


def test_one_split_is_a_linear_map_of_overlapping_patches():
    tokenizer = T2TTokenizer((60, 100), 1, 8, t2t_kernels=[20])
    assert list(tokenizer.state_dict()) == ["project.weight", "project.bias"]
    assert tokenizer(torch.randn(2, 1, 60, 100)).shape == (2, 60, 8)


@pytest.mark.parametrize(
    "changed",
    [
        {"t2t_attn": "transformer"},
        {"t2t_kernels": (5, 3, 3)},
        {"t2t_kernels": (7, 3)},
        {"t2t_strides": (2, 2, 1)},
        {"t2t_dim": 16},
        {"norm_eps": 0.5},
    ],
)
def test_every_argument_reaches_the_tokens(changed):
    tokens = []
    for arguments in ({}, changed):
        torch.manual_seed(0)
        tokenizer = T2TTokenizer((32, 32), 3, 8, **arguments).eval()
        tokens.append(tokenizer(torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))))
    assert tokens[0].shape != tokens[1].shape or (tokens[0] - tokens[1]).abs().max() > 1e-4


def test_convolutions_see_the_windows_of_the_soft_splits():
    t2t = T2TTokenizer((40, 24), 3, 8, t2t_dim=4)
    stem = ConvStem((40, 24), 3, 8, t2t_dim=4)
    assert stem.grid_size == t2t.grid_size == (3, 2)
    assert stem(torch.randn(2, 3, 40, 24)).shape == (2, 6, 8)
    assert [c.weight.shape for c in stem.convs] == [(4, 3, 7, 7), (4, 4, 3, 3), (8, 4, 3, 3)]


@pytest.mark.parametrize("tokenizer", [T2TTokenizer, ConvStem])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"img_size": (2, 32)}, r"a window of 7 does not fit on 2 x 32 cells, got img_size=\[2, 32\]"),
        ({"t2t_kernels": (7, 9, 9), "t2t_strides": (4, 4, 4)}, "`img_size` must leave every split at least one token"),
        ({"t2t_strides": (4, 2)}, r"`t2t_strides` as many, got t2t_kernels=\[7, 3, 3\] and t2t_strides=\[4, 2\]"),
        ({"t2t_strides": (4, 0, 2)}, r"`t2t_strides` must be at least 1, got \[4, 0, 2\]"),
        ({"t2t_kernels": ()}, "at least one entry"),
        ({"t2t_kernels": (7.5, 3, 3)}, r"`t2t_kernels` must be whole numbers or pairs .* got \[7.5, 3, 3\]"),
        ({"t2t_kernels": ([7, 3, 3], 3, 3)}, "`t2t_kernels` must be whole numbers or pairs"),
        ({"t2t_kernels": ([7], 3, 3)}, "`t2t_kernels` must be whole numbers or pairs"),
        ({"t2t_dilations": (2, 1)}, r"`t2t_dilations` needs an entry for each of 3 splits, got \(2, 1\)"),
        (
            {"t2t_padding": "zeros"},
            "`t2t_padding` must be one of zero, reflect, replicate, circular, none, got 'zeros'",
        ),
        ({"t2t_padding": "reflect"}, r"`t2t_padding=reflect` takes 1 cells around a grid of 1 x 1, too few"),
        ({"t2t_dim": (32, 64, 64)}, r"`t2t_dim` must be one width .* or 2, one a token layer, got \(32, 64, 64\)"),
    ],
)
def test_impossible_splits_are_refused(tokenizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        tokenizer(**{"img_size": (8, 8), "in_chans": 3, "embed_dim": 8} | arguments)
