import copy

import numpy as np
import pandas as pd
import pytest
import torch
from small_nets import small_net

from vitlab.analysis import ANALYSES
from vitlab.analysis.resolution import analyze_resolution, by_protocol, canvas, measure, sizes
from vitlab.analysis.scramble import changes_of, means_of
from vitlab.analysis.shift import analyze_shift, first_filling, shift_sizes, shifted
from vitlab.analysis.subject import Subject
from vitlab.data.known import Digits

IMAGES = torch.arange(1.0, 25).view(1, 1, 4, 6)


@pytest.mark.parametrize(("dy", "dx"), [(1, 0), (-2, 0), (0, 2), (0, -1), (1, -2)])
def test_a_shift_moves_every_pixel_and_fills_the_border(dy, dx):
    for fill in ("black", "reflect", "circular"):
        moved = shifted(IMAGES, dy, dx, fill, black=-7.0)
        for y in range(4):
            for x in range(6):
                source_y, source_x = y - dy, x - dx
                if fill == "circular":
                    expected = IMAGES[0, 0, source_y % 4, source_x % 6]
                elif fill == "reflect":
                    source_y, source_x = abs(source_y), abs(source_x)
                    expected = IMAGES[0, 0, min(source_y, 6 - source_y), min(source_x, 10 - source_x)]
                else:
                    inside = 0 <= source_y < 4 and 0 <= source_x < 6
                    expected = IMAGES[0, 0, source_y, source_x] if inside else torch.tensor(-7.0)
                assert moved[0, 0, y, x] == expected


def test_wrapping_by_whole_patches_changes_nothing_without_positions():
    images = torch.randn(3, 1, 8, 8)
    for pos_embed, limit in (("none", 1e-5), ("learned", None)):
        net = small_net(pos_embed=pos_embed)
        with torch.no_grad():
            change = (net(shifted(images, 2, -4, "circular")) - net(images)).abs().max().item()
        assert change <= limit if limit else change > 1e-3


def test_shifts_go_from_pixels_to_two_patches():
    assert shift_sizes(2, 8) == [1, 2, 4]
    assert shift_sizes(16, 224) == [1, 2, 4, 8, 16, 32]
    assert shift_sizes(4, 8) == [1, 2, 3, 4]


def test_the_shift_table_holds_every_fill_and_direction(small_subject):
    table = analyze_shift(small_subject()).table
    assert len(table) == 3 * 4 * 5  # fillings, distances, directions and their mean
    mean = table["direction"] == "mean"
    expected = table[~mean].groupby(["fill", "pixels"], sort=False)[["acc1", "agreement", "change_most"]].mean()
    np.testing.assert_allclose(table[mean][[*expected]], expected.to_numpy(), atol=1e-6)
    assert (table[table["pixels"] == 0]["agreement"] == 1).all()


def test_metrics_of_a_shift_are_those_with_a_black_border():
    rows = [
        {"fill": fill, "pixels": pixels, "acc1": acc1 + pixels / 100, "agreement": acc1 + pixels / 10}
        for fill, *both in (("black", 0.1, 0.3), ("reflect", 0.4, 0.6), ("circular", 0.7, 0.9))
        for pixels in (0, 2)
        for acc1 in both  # two directions
    ]
    found = ANALYSES["shift"].metrics(pd.DataFrame(rows))
    assert found == pytest.approx({"acc1@0": 0.2, "agreement@0": 0.2, "acc1@2": 0.22, "agreement@2": 0.4})


def test_flips_accuracies_and_their_intervals_are_those_counted_by_hand():
    before, after = torch.eye(4), torch.eye(4)[[0, 1, 3, 2]]
    found = means_of(changes_of(before, after, torch.tensor([0, 0, 2, 2])))
    ends = {
        f"{name}_{end}": pytest.approx(v, abs=0.01)
        for name in ("acc1", "flipped")
        for end, v in (("low", 0.15), ("high", 0.85))
    }
    own = {
        "mean": (0.25, 0, 0.25 + 0.4594),
        "most": (0.5, 0, 0.5 + 0.9187),
    }  # 0 0 1/2 1/2, 0 0 1 1; a change is not below 0
    ends |= {
        f"change_{name}{end}": pytest.approx(v, abs=1e-3)
        for name, values in own.items()
        for end, v in zip(("", "_low", "_high"), values, strict=True)
    }
    assert found == {"acc1": 0.5, "flipped": 0.5, **ends}


def test_sizes_reach_from_half_to_twice_in_whole_patches():
    assert sizes((8, 8), (4, 4), (2, 2)) == [(4, 4), (6, 6), (8, 8), (10, 10), (12, 12), (16, 16)]
    assert sizes((224, 224), (14, 14), (16, 16))[0] == (112, 112)


def test_a_canvas_keeps_pixels_and_whole_patches():
    large = canvas(IMAGES, (8, 12), torch.tensor([[[-1.0]]]), steps=(2, 2))
    assert torch.equal(large[:, :, 2:6, 2:8], IMAGES)
    assert (large.sum() - IMAGES.sum()).item() == -(8 * 12 - 24)
    assert torch.equal(canvas(large, (4, 6), torch.tensor([[[-1.0]]]), steps=(2, 2)), IMAGES)


TRAINED = {"class_path": "sincos2d", "init_args": {"trainable": True}}
RESCALED = {"class_path": "rope2d", "init_args": {"resize": "rescale"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pos_embed", "usual", "expected"),
    [
        ("none", "nothing to resize", 1),
        ("learned", "interpolate", 1),
        ("sincos2d", "rescale", 3),
        ("relpos", "interpolate", 1),
        ("rope2d", "extrapolate", 2),
        (RESCALED, "rescale", 2),
        ("conv", "nothing to resize", 1),
        (["sincos2d", "rope2d"], "usual", 4),  # the table is rescaled, the rotation extrapolated
        ([TRAINED, "rope2d"], "interpolate", 3),
    ],
)
def test_every_policy_of_a_method_is_measured_and_all_agree_at_the_trained_size(
    small_subject, pos_embed, usual, expected
):
    table = analyze_resolution(small_subject(pos_embed=pos_embed, num_images=16)).table
    trained = table[table["size"] == 8]
    assert trained["acc1"].nunique() == 1
    assert table["policy"].nunique() == expected and len(table) == 6 * 2 * expected
    metrics = set(table["metric"])
    assert set(table["policy"][table["metric"] == "resolution/acc1@12"]) == {usual}
    if pos_embed == "rope2d":
        assert "resolution/acc1@12/rescale" in metrics


def test_a_report_has_a_panel_for_each_way_of_larger_images_that_was_measured_and_for_the_first_filling():
    lines = {"a": ("resize, interpolate", "resize, extrapolate"), "b": ("resize, extrapolate", "resize, rescale")}
    rows = [{"arm": arm, "line": line, "measure": "acc1"} for arm, mine in lines.items() for line in mine]
    ((title, shown),) = by_protocol(ANALYSES["resolution"].curve, rows)  # nothing on a canvas
    assert (title, shown) == ("the whole image, resized", [rows[0], rows[2]])  # each arm's usual policy
    curve = ANALYSES["shift"].curve
    rows = [{"line": fill, "measure": measure} for fill in ("black", "circular") for measure in curve.measures]
    assert first_filling(curve, rows) == [("fill: black", [row]) for row in rows[: len(curve.measures)]]


def test_each_policy_is_measured_by_a_network_that_follows_it(small_subject, monkeypatch):
    subject, seen = small_subject(pos_embed="sincos2d", num_images=2), []
    monkeypatch.setattr("vitlab.analysis.resolution.sizes_taken", lambda subject: [(8, 8), (12, 12)])
    subject.net.register_forward_pre_hook(lambda net, args: seen.append(net.pos_embed_resize))
    measured = [row["policy"] for row in measure(subject)]
    assert seen == measured and {*seen} == {"rescale", "extrapolate", "interpolate"}
    assert subject.net.pos_embed_resize is None


def test_another_run_is_drawn_for_comparison(small_subject):
    subject = small_subject(num_images=16)
    subject.other = copy.copy(small_subject(pos_embed="none", num_images=16))
    subject.other.name = "none"
    assert set(analyze_resolution(subject).table["run"]) == {"model", "none"}


def test_another_run_of_the_same_name_has_a_curve_of_its_own(small_subject):
    subject = small_subject(num_images=16)
    subject.other = small_subject(pos_embed="none", num_images=16)
    finding = analyze_resolution(subject)
    assert set(finding.table["run"]) == {"model", "model (other)"} and subject.other.name == "model"
    assert len(finding.figure.axes[0].get_legend().get_texts()) == 2


def test_oblong_patches_have_both_sides_in_the_shifts():
    net = small_net(img_size=(16, 16), patch_size=(2, 8), class_token=False, global_pool="avg", pos_embed="none")
    finding = analyze_shift(Subject(net, Digits(img_size=16), num_images=16))
    change = finding.table[finding.table["fill"] == "circular"].pivot(
        index="pixels", columns="direction", values="change_most"
    )
    assert list(change.index) == [0, 1, 2, 4, 8]
    assert change["down"][2] < 1e-4 < change["right"][2] and change["right"][8] < 1e-4  # whole patches
    assert finding.note.endswith("patches of 2 x 8 pixels")
