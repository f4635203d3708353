import pandas as pd
import pytest
import torch
from small_nets import POSITIONS, small_net

from vitlab.analysis import ANALYSES
from vitlab.analysis.scramble import (
    analyze_scramble,
    analyze_scramble_image,
    block_sides,
    permuted_blocks,
    scramble_image,
    scramble_tokens,
)
from vitlab.errors import UsageError

IMAGES = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
T2T = {"tokenizer": "t2t", "t2t_kernels": (3, 3), "t2t_strides": (1, 2), "t2t_dim": 8}


def order_of(side=1, seed=0):
    return permuted_blocks((4, 4), side, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tokenizer", ["patch", "t2t"])
@pytest.mark.parametrize("pos_embed", POSITIONS)
def test_scrambling_tokens_changes_nothing_without_positions_and_something_with_them(pos_embed, tokenizer):
    net = small_net(pos_embed=pos_embed, init_std=0.5, **(T2T if tokenizer == "t2t" else {}))
    with torch.no_grad():
        change = (scramble_tokens(net, IMAGES, order_of()) - net(IMAGES)).abs().max().item()
    if pos_embed == "none":
        assert change <= 1e-5
    else:
        assert change > 1e-4


def test_scrambling_patches_equals_scrambling_tokens_only_for_the_patch_tokenizer():
    order = order_of()
    for arguments, same in (({}, True), (T2T, False)):
        net = small_net(pos_embed="learned", **arguments)
        with torch.no_grad():
            change = net(scramble_image(IMAGES, order, (4, 4))) - scramble_tokens(net, IMAGES, order)
        assert (change.abs().max().item() < 1e-5) is same


def test_scrambling_an_image_moves_its_patches():
    image = torch.arange(24.0).view(1, 1, 4, 6)
    order = torch.tensor([1, 0, 2, 5, 4, 3])
    scrambled = scramble_image(image, order, (2, 3))
    for slot, cell in enumerate(order.tolist()):
        y, x, old_y, old_x = slot // 3 * 2, slot % 3 * 2, cell // 3 * 2, cell % 3 * 2
        assert torch.equal(scrambled[..., y : y + 2, x : x + 2], image[..., old_y : old_y + 2, old_x : old_x + 2])


@pytest.mark.parametrize(("shape", "count"), [((9, 8), 16), ((8, 9), 16), ((8, 8), 9)])
def test_patches_that_do_not_fit_are_refused_in_words(shape, count):
    with pytest.raises(ValueError, match=f"4 x 4 patches must divide .* {shape[0]} x {shape[1]} pixels .* of {count}$"):
        scramble_image(torch.zeros(1, 1, *shape), torch.randperm(count), (4, 4))


@pytest.mark.parametrize("side", [1, 2])
def test_scrambling_in_blocks_keeps_the_inside_of_each_block(side):
    order = permuted_blocks((4, 6), side, torch.Generator().manual_seed(1))
    assert sorted(order.tolist()) == list(range(24)) and order.tolist() != list(range(24))
    blocks = order.view(4 // side, side, 6 // side, side).transpose(1, 2).reshape(-1, side * side)
    first = blocks[:, :1]
    assert ((first // 6 % side == 0) & (first % 6 % side == 0)).all()
    inside = torch.tensor([6 * dy + dx for dy in range(side) for dx in range(side)])
    assert torch.equal(blocks, first + inside)


def test_block_sides_fill_the_grid():
    assert block_sides((8, 8)) == [4, 2, 1]
    assert block_sides((4, 6)) == [2, 1]
    assert block_sides((14, 14)) == [7, 2, 1]
    assert block_sides((4, 8)) == [4, 2, 1]


def test_the_first_row_is_the_unscrambled_image(small_subject):
    for analyze, level in ((analyze_scramble, "tokens"), (analyze_scramble_image, "image")):
        table = analyze(small_subject()).table
        assert list(table["blocks"]) == [1, 4, 4, 4, 16, 16, 16] and set(table["level"]) == {level}
        assert table["flipped"][0] == 0 and table["change_most"][0] == 0
        assert (table["change_most"][1:] > 0).all()


def test_metrics_of_scrambling_are_those_of_the_smallest_blocks():
    rows = [
        {"blocks": blocks, "acc1": acc1, "flipped": 1 - acc1}
        for blocks, *repeats in ((1, 0.9), (4, 0.5, 0.7), (16, 0.2, 0.3))
        for acc1 in repeats
    ]
    for name in ("scramble", "scramble_image"):
        assert ANALYSES[name].metrics(pd.DataFrame(rows)) == pytest.approx({"acc1": 0.25, "flipped": 0.75})


def test_a_network_that_predicts_numbers_is_refused(small_subject):
    with pytest.raises(UsageError, match="predicts numbers; use probe or cka"):
        analyze_scramble(small_subject(classifies=False))
