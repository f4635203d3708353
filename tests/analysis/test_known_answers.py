"""Analyses of networks whose answer is known: without positions, with a head that looks left, of constant features."""

import functools

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from scipy.stats import t as student
from small_nets import (
    SMALL,
    brightness_net,
    left_looking_net,
    net_looking_at,
    net_looking_at_what_is_alike,
    small_net,
    trained_net,
)

from vitlab.analysis.cka import analyze_cka
from vitlab.analysis.features import analyze_fewshot, analyze_knn
from vitlab.analysis.head_attention import (
    analyze_attention,
    analyze_distance,
    analyze_entropy,
    analyze_heads,
    analyze_rollout,
)
from vitlab.analysis.positions import analyze_displacement, pairs_at, profiles, spread_above
from vitlab.analysis.probes import analyze_probe
from vitlab.analysis.resolution import analyze_resolution
from vitlab.analysis.scramble import analyze_scramble, shuffled_tokens
from vitlab.analysis.subject import Subject
from vitlab.cli.pack import main as pack
from vitlab.data.packed import Packed
from vitlab.errors import UsageError


def displacements(subject):
    return analyze_displacement(subject).table.set_index(["layer", "head", "dy", "dx"])


def holds_zero(table):
    return (table["position_low"] <= 0) & (table["position_high"] >= 0)


@pytest.fixture(scope="module")
def trained(digits):
    """Trains a network on the digits until it classifies, once for each set of arguments."""
    everything = Subject(small_net(), digits, SMALL, num_images=2000)
    images, labels = (torch.cat(parts) for parts in zip(*everything.batches("train"), strict=True))

    @functools.cache
    def build(**changes):
        net = trained_net(images, labels, **changes)
        subject = Subject(net, digits, {**SMALL, **changes}, num_images=256)
        unseen, classes = subject.labeled()
        assert (net(unseen).argmax(dim=1) == classes).float().mean() > 0.5
        return subject

    return build


OVERLAPPING = {"tokenizer": "t2t", "t2t_kernels": (3, 3), "t2t_strides": (2, 1), "t2t_dim": 8}
WITHOUT_POSITIONS = [{}, {"class_token": False, "global_pool": "avg"}]
WITHOUT_POSITIONS += [pytest.param(OVERLAPPING, marks=pytest.mark.rare)]


@pytest.mark.slow
@pytest.mark.parametrize("changes", WITHOUT_POSITIONS, ids=["class_token", "mean", "t2t"])
def test_a_trained_network_without_positions_has_no_displacement_although_content_shows_a_pattern(trained, changes):
    table = displacements(trained(pos_embed="none", **changes))
    assert holds_zero(table).mean() > 0.85  # 95 % intervals, which neighbors share; .898 with the weights of torch 2.10
    itself = table.xs((0, 0), level=("dy", "dx"))
    assert (itself["position"].abs() < 4 * itself["error"]).all()
    assert (itself["logit"].abs() > 10 * itself["error"]).any()  # a token and itself: content
    for _, head in table.groupby(["layer", "head"]):
        found, floor = spread_above(*(torch.tensor(head[name].to_numpy()) for name in ("position", "error", "pairs")))
        assert found < 1.5 * floor  # beyond the noise there is no more than the noise of one draw


@pytest.mark.slow
def test_intervals_of_displacement_and_of_its_spread_hold_the_truth(trained):
    subject = trained(pos_embed="none")
    subject.num_images = 64
    batches, weights = list(subject.batches()), pairs_at((4, 4)) / 16**2
    hold, spreads = [], []
    for draw in range(200):
        with shuffled_tokens(subject.net, seed=draw):
            position, error, n = profiles(subject.net, batches, two_passes=True)
        hold.append(position.abs() <= student.ppf(0.975, n - 1) * error)
        beyond = (weights * (position.square() - error.square())).sum(dim=(-1, -2))
        spreads.append(beyond.sign() * beyond.abs().sqrt())
    hold = torch.stack(hold).double().mean(dim=0)
    assert 0.93 < hold.mean() < 0.97 and 0.9 < hold[..., 3, 3].mean() < 0.98  # all, and of a token with itself
    seeds = torch.stack(spreads).mean(dim=2).view(40, 5, 2)  # 40 arms of five seeds, two layers
    reach = student.ppf(0.975, 4) * seeds.std(dim=1) / 5**0.5
    assert 0.88 < (seeds.mean(dim=1).abs() <= reach).double().mean() < 0.99


@pytest.mark.slow
def test_each_network_has_shuffles_of_its_own(trained):
    one, other = trained(pos_embed="none"), trained(pos_embed="none", class_token=False, global_pool="avg")
    tables = [displacements(subject) for subject in (one, one, other)]
    assert tables[0].equals(tables[1])
    noise = [(table["position"] / table["error"]).to_numpy() for table in tables]
    assert abs(np.corrcoef(noise[0], noise[2])[0, 1]) < 0.3


def test_a_head_that_attends_to_similar_tokens_shows_no_position(digits):
    table = displacements(Subject(net_looking_at_what_is_alike(), digits, SMALL, num_images=256)).loc[0, 0]
    assert holds_zero(table).mean() > 0.9 and holds_zero(table)[0, 0]
    assert table["logit"][0, 0] > 10 * table["error"][0, 0]


@pytest.mark.parametrize("offset", [(0, 0), (0, -1), (1, 1)])
def test_a_head_that_attends_to_a_place_is_recognized(digits, offset):
    table = displacements(Subject(net_looking_at(*offset), digits, num_images=16)).loc[0, 0]["position"]
    assert table.idxmax() == offset and table[offset] > 40
    assert table.drop(index=[offset]).std() < 1e-3


def test_distance_and_entropy_on_an_oblong_grid_are_those_counted_by_hand():
    """Of 2 x 4 patches: one to the left, but in the first column, where all are as far as they are."""
    subject = Subject(left_looking_net(img_size=(4, 8)), lambda image: image, pictures=torch.randn(3, 1, 4, 8))
    first = (0 + 1 + 2 + 3 + 1 + 2**0.5 + 5**0.5 + 10**0.5) / 8
    pairs = (4 * 0 + 6 * 1 + 4 * 2 + 2 * 3) / 32 + (4 * 1 + 6 * 2**0.5 + 4 * 5**0.5 + 2 * 10**0.5) / 32
    row = analyze_distance(subject).table.iloc[0]
    assert (row["distance"], row["uniform"]) == (pytest.approx((3 + first) / 4, abs=1e-4), pytest.approx(pairs))
    assert row["above_null_low"] <= 0 <= row["above_null_high"]
    row = analyze_entropy(subject).table.iloc[0]
    assert (row["entropy"], row["uniform"]) == (pytest.approx(np.log(8) / 4, abs=1e-4), pytest.approx(np.log(8)))


def test_pictures_of_a_head_that_looks_left_show_the_left_neighbor_of_the_query(digits):
    subject = Subject(left_looking_net(), digits, query=(1, 2), num_images=4)
    for finding in (analyze_attention(subject), analyze_heads(subject)):
        weights = finding.table.groupby(["row", "column"])["weight"].min()  # of all images and maps
        assert weights.idxmax() == (1, 1) and weights[1, 1] > 0.99
    table = analyze_rollout(subject).table.groupby(["row", "column"])["weight"].mean()
    assert table[1, 1] == pytest.approx(0.5, abs=1e-3) and table[1, 2] == pytest.approx(0.5, abs=1e-3)


def test_the_null_reveals_a_head_that_attends_by_content_alone(digits):
    net = small_net(pos_embed="none")
    table = analyze_distance(Subject(net, digits, SMALL, num_images=256)).table
    assert (table["null"] - table["uniform"]).abs().max() < 0.03
    assert ((table["above_null_low"] > 0) | (table["above_null_high"] < 0)).any()
    entropies = analyze_entropy(Subject(net, digits, SMALL, num_images=16))  # the same tokens in another order
    assert (entropies.table["above_null"] == 0).all() and f" 0 of {len(table)} heads differ" in entropies.note


@pytest.mark.slow
@pytest.mark.parametrize("analyze", [analyze_distance, analyze_entropy])
def test_the_axis_of_distance_and_entropy_is_that_of_their_numbers(trained, analyze):
    finding = analyze(trained(pos_embed="none"))
    low, high = finding.figure.axes[0].get_ylim()
    names = [name for name in finding.table if name in ("null", "uniform") or name.startswith(("dist", "entr"))]
    numbers = finding.table[names].to_numpy()
    assert low < numbers.min() and numbers.max() < high and np.ptp(numbers) > 0.8 * (high - low)


def test_the_interval_of_outputs_that_never_change_is_that_of_a_share(digits):
    subject = Subject(small_net(pos_embed="none"), digits, SMALL, num_images=32)
    table = analyze_scramble(subject).table
    assert (table["flipped"] == 0).all() and (table["flipped_low"] == 0).all()
    assert table["flipped_high"].iloc[0] == pytest.approx(1.96**2 / (32 + 1.96**2), abs=1e-4)  # Wilson's at none of 32


@pytest.mark.slow
def test_features_that_vary_by_the_rounding_of_two_threads_are_constant(digits):
    torch.set_num_threads(2)
    net = small_net(pos_embed="none")
    with torch.no_grad():
        net.tokenizer.proj.weight.zero_()
    subject = Subject(net, digits, SMALL, num_images=100)
    probe = analyze_probe(subject).table
    assert probe["accuracy"].max() <= 1 / 16 + 1e-9 and (probe["excess"] == 0).all()
    for table in (analyze_fewshot(subject).table, analyze_knn(subject).table):
        assert (table["acc1_low"] < 0.2).all() and (table["acc1"] < 0.25).all()
        assert table["classes"].str.contains("nothing of few labels").all()
    alike = analyze_cka(subject)
    assert alike.table["cka"].isna().all()  # what does not vary is alike to nothing, and to everything
    assert alike.note.endswith("after 0, 1, 2 blocks all images have the same features, alike to nothing")


def test_a_baseline_with_another_tokenizer_is_refused(digits):
    subject = Subject(small_net(), digits, SMALL, num_images=16)
    for changes in ({"tokenizer": "t2t", "t2t_kernels": [3, 3], "t2t_dim": 8}, {"patch_size": 4}):
        arguments = {**SMALL, "pos_embed": "none", **changes}
        subject.other = Subject(small_net(**arguments), digits, arguments, name="other")
        with pytest.raises(UsageError, match="needs a run of the same tokenizer and grid"):
            analyze_probe(subject)


def test_cka_of_equal_layers_is_exactly_one_and_otherwise_has_an_interval(small_subject):
    table = analyze_cka(small_subject()).table
    same = table[table["layer"] == table["other_layer"]]
    assert (same["cka_high"] - same["cka_low"] < 1e-6).all()
    other = table[table["layer"] != table["other_layer"]]
    assert (other["cka_low"] < other["cka"] - 1e-4).all()


def test_a_class_visible_in_the_center_keeps_its_accuracy_when_packed_images_are_resized(tmp_path):
    for name, center in (("dark", 40), ("light", 215)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(20):
            pixels = np.random.default_rng(i).integers(118, 138, size=(40, 40, 3), dtype=np.uint8)
            pixels[10:30, 10:30] = center
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
    assert pack([str(tmp_path / "photos"), str(tmp_path / "packed"), "--size", "40", "--num_workers", "0"]) == 0
    data = Packed(str(tmp_path / "packed"), img_size=32, crop_pct=1.0, num_workers=0)
    table = analyze_resolution(Subject(brightness_net(32, 8, 3), data, num_images=8)).table
    resized = table[table["protocol"] == "resize"].set_index("size")["acc1"]
    assert len(resized) == 6 and (resized == 1.0).all()
    assert isinstance(table, pd.DataFrame) and (table["acc1_low"] < 1).all()
