from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from figure_faults import faults
from small_nets import POSITIONS, SMALL

from vitlab.analysis.positions import (
    _panels,
    analyze_displacement,
    analyze_position,
    as_today,
    displacement_profile,
    is_without_itself,
    mosaic,
    profiles,
    similarity,
    spread_above,
    spread_of_layers,
)
from vitlab.analysis.subject import Subject
from vitlab.analysis.typeset import INCHES, printed
from vitlab.errors import UsageError
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.biases import RelPos
from vitlab.models.vit import VisionTransformer


def test_similarity_is_the_cosine_of_each_pair():
    table = torch.randn(6, 5)
    for i in range(6):
        for j in range(6):
            expected = torch.dot(table[i], table[j]) / (table[i].norm() * table[j].norm())
            assert similarity(table)[i, j].item() == pytest.approx(expected.item(), abs=1e-6)


def test_the_profile_is_the_mean_of_a_loop_over_pairs():
    h, w = 2, 3
    logits = torch.randn(2, 6, 6)
    sums, counts = torch.zeros(2, 3, 5), torch.zeros(3, 5)
    for query in range(6):
        for key in range(6):
            dy, dx = key // w - query // w, key % w - query % w
            sums[:, dy + h - 1, dx + w - 1] += logits[:, query, key]
            counts[dy + h - 1, dx + w - 1] += 1
    expected = sums / counts - logits.mean(dim=(1, 2))[:, None, None]
    torch.testing.assert_close(displacement_profile(logits, (h, w)), expected)


def test_pairs_that_a_mask_forbids_do_not_count():
    """As in LookHere (arXiv:2405.13985): the first of two heads sees its own column and those to the right."""
    x = torch.arange(6) % 3
    logits = torch.randn(2, 6, 6)
    logits[0, x < x[:, None]] = -torch.inf
    profile = displacement_profile(logits, (2, 3))
    torch.testing.assert_close(profile[1], displacement_profile(logits[1:], (2, 3))[0])
    assert profile[0, :, :2].isnan().all()
    pairs = torch.tensor([[1, 2, 3, 2, 1], [2, 4, 6, 4, 2], [1, 2, 3, 2, 1]])
    assert float((pairs * profile[0])[:, 2:].sum()) == pytest.approx(0, abs=1e-5)  # the mean is that of what is seen
    found, floor = spread_above(profile[0], torch.zeros(3, 5), pairs)
    seen, weights = profile[0, :, 2:], pairs[:, 2:] / pairs[:, 2:].sum()
    assert (found, floor) == (pytest.approx(float((weights * seen.square()).sum().sqrt())), 0)


class Rightward(PosEmbed):
    """LookHere's mask: no head sees what lies to the left of its query."""

    def bias(self, layer):
        x = torch.arange(16) % 4
        masked = torch.zeros(2, 16, 16).masked_fill(x < x[:, None], -torch.inf)
        return torch.nn.functional.pad(masked, (1, 0, 1, 0))


def test_displacement_of_masked_attention_leaves_out_what_is_masked(small_subject):
    table = analyze_displacement(small_subject(pos_embed=Rightward)).table
    left = table["dx"] < 0
    assert (table["pairs"] == 0).equals(left)
    assert table.loc[left, "position"].isna().all() and np.isfinite(table.loc[~left, "position"]).all()
    assert np.isfinite(spread_of_layers(table)["spread"]).all()
    assert not is_without_itself([table])


def test_a_relative_bias_is_its_own_profile():
    bias = RelPos((3, 4), num_heads=2)
    torch.nn.init.normal_(bias.bias_table)
    profile = displacement_profile(bias.bias(0), (3, 4))
    expected = bias.bias_table[0].T.reshape(2, 5, 7).flip(1, 2)  # the table has query minus key
    difference = profile - expected
    torch.testing.assert_close(difference, difference[:, :1, :1].expand_as(difference), atol=1e-5, rtol=0)


def test_the_mean_profile_and_its_standard_error_are_over_images_whatever_the_batches(monkeypatch):
    """Of profiles that are 1, 2 and 6 times another, with a mean of 3 and a variance of 7."""
    logits = torch.tensor([[9.0, 9.0, 9.0], [9.0, 0.0, 1.0], [9.0, 0.0, 0.0]])  # of a class token and two patches
    monkeypatch.setattr(
        "vitlab.analysis.positions.attention_logits",
        lambda net, images, two_passes: [images[:, None] * logits, -images[:, None] * logits],
    )
    net = SimpleNamespace(num_prefix_tokens=1, grid_size=(1, 2))
    batches = [(torch.tensor(times).view(-1, 1, 1), None) for times in ([1.0], [2.0, 6.0])]
    mean, error, n = profiles(net, batches)
    expected = torch.tensor([-0.25, -0.25, 0.75]).double()  # one key to the left, itself, one to the right
    torch.testing.assert_close(mean, torch.stack([3 * expected, -3 * expected]).view(2, 1, 1, 3))
    torch.testing.assert_close(error, (7 / 3) ** 0.5 * expected.abs().expand(2, 1, 1, 3))
    assert n == 3


@pytest.mark.slow
@pytest.mark.parametrize("pos_embed", POSITIONS)
def test_every_method_has_a_profile_and_some_have_a_table(small_subject, pos_embed):
    subject = small_subject(pos_embed=pos_embed)
    table = analyze_displacement(subject).table
    assert len(table) == 2 * 2 * 7 * 7 and table.notna().all(axis=None)
    if pos_embed in ("learned", "factorized", "sincos1d", "sincos2d", "fourier"):
        assert len(analyze_position(subject).table) == 16 * 16
    else:
        with pytest.raises(UsageError, match=f"pos_embed={pos_embed} has none; use displacement"):
            analyze_position(subject)


@pytest.mark.slow
def test_lengths_are_those_of_the_vectors_that_are_added(small_subject):
    ratios = [
        analyze_position(small_subject(pos_embed={"class_path": "sincos2d", "init_args": {"scale": scale}})).table
        for scale in (1.0, 0.25)
    ]
    whole, quarter = (float(table["norm_ratio"].iloc[0]) for table in ratios)
    assert quarter == pytest.approx(whole / 4)


def test_the_length_of_a_table_is_the_mean_over_its_cells(small_subject):
    subject = small_subject(num_images=2)
    with torch.no_grad():
        subject.net.tokenizer.proj.weight.zero_()
        subject.net.tokenizer.proj.bias.zero_()[3] = -5.0
        subject.net.pos_embed.weight.zero_()
        subject.net.pos_embed.weight[..., :12, 0] = 1.0
        subject.net.pos_embed.weight[..., 12:, 1] = 3.0
    finding = analyze_position(subject)
    assert finding.table["norm_ratio"][0] == pytest.approx((12 * 1 + 4 * 3) / 16 / 5)
    assert "whose vectors are 0.30 [0.30, 0.30] times as long" in finding.note
    subject.num_images = 1  # no interval
    assert "whose vectors are 0.30 times as long" in analyze_position(subject).note


def test_a_table_beside_a_rotation_is_shown(small_subject):
    subject = small_subject(pos_embed=["learned", "rope2d"])
    expected = similarity(subject.net.pos_embed.parts["learned"].table(0)).detach().flatten()
    assert analyze_position(subject).table["cosine"].to_numpy() == pytest.approx(expected.numpy(), abs=1e-6)


def test_of_one_image_no_spread_is_told(small_subject):
    finding = analyze_displacement(small_subject(num_images=1))
    assert {ax.get_title() for ax in finding.figure.axes[:2]} == {"head 0, position", "head 1, position"}
    assert spread_of_layers(finding.table)["spread"].isna().all()


def test_the_spread_beyond_noise_is_over_pairs_and_below_0_where_noise_is_larger():
    rows = [  # layer, head, pairs, position, error
        (0, 0, 1, 2.0, 0.0), (0, 0, 3, 0.0, 0.0), (0, 1, 1, 0.0, 2.0), (0, 1, 3, 0.0, 2.0),
        (1, 0, 3, 1.0, 0.0), (1, 0, 1, 3.0, 1.0),
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["layer", "head", "pairs", "position", "error"])
    assert spread_of_layers(table)["spread"].tolist() == pytest.approx([(1 - 2) / 2, (11 / 4) ** 0.5])
    found = spread_above(torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 0.5]]), torch.tensor([[1, 3]]))
    assert found == pytest.approx(((3 / 4 - 7 / 16) ** 0.5, (7 / 16) ** 0.5))  # 1.5 and -0.5 from the mean of pairs


def test_older_tables_lose_the_offset_of_a_token_and_itself_with_its_part_of_mean_and_errors():
    old = pd.DataFrame({"layer": 0, "head": 0, "dy": 0, "dx": [-1, 0, 1]})
    old = old.assign(position=[1.0, -2.0, 3.0], error=[0.5, 0.3, 0.4])  # 1 - 2 * 2 + 3 is 0
    table = as_today(old)
    assert table["position"].tolist() == pytest.approx([-1, np.nan, 1], nan_ok=True)
    assert table["pairs"].tolist() == [1, 0, 1]
    assert table["error"].tolist() == pytest.approx([0.4, np.nan, 0.07**0.5], nan_ok=True)


def test_intervals_of_three_images_are_4_3_errors_to_each_side(small_subject, monkeypatch):
    monkeypatch.setattr("vitlab.analysis.positions._panels", lambda *_: None)
    subject = small_subject(num_images=3)
    table = analyze_displacement(subject).table
    _, error, n = profiles(subject.net, subject.batches())
    errors = {"position": table["error"].to_numpy(), "logit": error.flatten().numpy()}
    assert n == 3 and not np.allclose(*errors.values())
    for name, own in errors.items():
        for end, sign in (("low", -1), ("high", 1)):
            np.testing.assert_allclose(
                table[f"{name}_{end}"] - table[name], sign * 4.302653 * own, rtol=1e-4, atol=1e-6
            )


def test_lengths_are_those_of_as_many_images_as_are_asked_for(small_subject):
    few, all_of_them = (analyze_position(small_subject(num_images=n)).table["norm_ratio"][0] for n in (1, 24))
    assert few != all_of_them


def test_each_layer_shows_its_own_table(small_subject):
    tables = [analyze_position(small_subject(pos_embed_join="every_layer", layer=i)).table for i in (0, 1)]
    assert not tables[0].equals(tables[1])


def test_a_mosaic_puts_each_tile_in_its_place():
    tiles = np.random.default_rng(0).random((2, 3, 4, 5))
    picture = mosaic(tiles)
    assert picture.shape == (2 * 5 - 1, 3 * 6 - 1)
    for y in range(2):
        for x in range(3):
            np.testing.assert_array_equal(picture[5 * y : 5 * y + 4, 6 * x : 6 * x + 5], tiles[y, x])
    assert np.isnan(picture).sum() == picture.size - tiles.size


@pytest.mark.rare
@pytest.mark.parametrize(("depth", "heads"), [(3, 3), (2, 4)])
def test_panels_of_several_heads_have_room_for_their_titles_in_a_column(depth, heads):
    values = torch.randn(depth, heads, 7, 7)
    done = printed(_panels(values, 1e-5 * values, 1e-6 * values.abs(), torch.ones(7, 7)), INCHES["column"], "of a run")
    assert not faults(done) and {ax.title.get_rotation() for ax in done.axes} == {0}


@pytest.mark.slow
def test_hundreds_of_heads_are_tiles_of_two_pictures(digits):
    net = VisionTransformer(**{**SMALL, "depth": 4, "num_heads": 8}).eval()
    finding = analyze_displacement(Subject(net, digits, num_images=16))
    position = finding.figure.axes[0]
    side = 2 * net.grid_size[0]  # of a tile, its line included
    assert position.images[0].get_array().shape == (4 * side - 1, 8 * side - 1)
    one = finding.table.query("layer == 3 and head == 5").pivot(index="dy", columns="dx", values="position")
    tile = position.images[0].get_array()[3 * side :, 5 * side : 6 * side - 1]
    assert np.asarray(tile) == pytest.approx(one.to_numpy()) and "center of each tile" in finding.note
    done = printed(finding.figure, INCHES["column"], "displacement of a run")
    assert len(done.axes) == 3 and not faults(done)
