"""The linear probe of masks: masks that are a function of the token, of the place, of nothing."""

import dataclasses

import numpy as np
import pytest
import torch
from figure_faults import fits_a_column
from PIL import Image

from vitlab.analysis.segmentation import Counts, analyze_segmentation, count, softmax_regression
from vitlab.analysis.subject import Subject
from vitlab.data import Unlabeled
from vitlab.errors import UsageError
from vitlab.models.vit import VisionTransformer

N, SIDE, PATCH = 60, 8, 2


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Pictures of patches in three gray levels; masks by level, by place, and at random; a network that sees them."""
    folder = tmp_path_factory.mktemp("segmentation")
    rng = np.random.default_rng(0)
    for name in ("photos", "level", "place", "random"):
        (folder / name).mkdir()
    place = np.kron(np.arange(16).reshape(4, 4) % 3, np.ones((PATCH, PATCH), int))
    for i in range(N):
        levels = rng.integers(0, 3, (4, 4))
        pixels = np.kron(levels, np.ones((PATCH, PATCH), int))
        Image.fromarray((40 + 80 * pixels).astype(np.uint8)).save(folder / "photos" / f"{i}.png")
        mask = pixels.astype(np.uint8)
        mask[0, :3] = 255  # counts nowhere
        Image.fromarray(mask).save(folder / "level" / f"{i}.png")
        np.save(folder / "place" / f"{i}.npy", place)
        Image.fromarray(rng.integers(0, 2, (SIDE, SIDE)).astype(np.uint8)).save(folder / "random" / f"{i}.png")
    torch.manual_seed(0)
    net = VisionTransformer(img_size=SIDE, in_chans=1, patch_size=PATCH, embed_dim=16, depth=1, num_heads=2)
    data = Unlabeled(str(folder / "photos"), img_size=SIDE, in_chans=1, num_workers=0)
    return Subject(net, data, classifies=False), folder


def measured(subject, masks):
    finding = analyze_segmentation(dataclasses.replace(subject, masks=masks))
    return finding, finding.table[finding.table["class"] == "mean"].set_index("of")["iou"]


@pytest.mark.slow
def test_masks_that_depend_on_tokens_or_on_places_are_predicted_from_these(tokens):
    subject, folder = tokens
    finding, miou = measured(subject, folder / "level")
    assert miou["tokens"] == 1 and miou["without positions"] == 1 and miou["majority of patches"] == 1
    assert miou["place alone"] < 0.4 and "3 classes" in finding.note
    fits_a_column(finding.figure)
    each = finding.table[finding.table["of"] == "tokens"].set_index("class")
    assert each.loc[["0", "1", "2"], "pixels"].sum() == each.loc["mean", "pixels"]
    assert each.loc["mean", "pixels"] % (SIDE * SIDE - 3) == 0  # three pixels of each image count nowhere
    _, miou = measured(subject, folder / "place")
    assert miou["place alone"] == 1 and miou["tokens"] > miou["without positions"] + 0.2


def test_the_class_of_a_place_is_that_of_training_masks_alone(tokens, tmp_path, monkeypatch):
    """The corner is of class 0 in those, and of class 1 where it is scored, as another place is in both."""
    subject, _ = tokens
    for split, corner in (("train", 0), ("val", 1)):
        for name in subject.images(split).names:
            mask = np.zeros((SIDE, SIDE), np.uint8)
            mask[:2, :3], mask[5, 6] = corner, 1
            np.save((tmp_path / name).with_suffix(".npy"), mask)
    module = "vitlab.analysis.segmentation."
    monkeypatch.setattr(f"{module}_predict", lambda *_: np.zeros((len(subject.images("val")), SIDE, SIDE), int))
    monkeypatch.setattr(f"{module}_figure", lambda *_: None)
    table = analyze_segmentation(dataclasses.replace(subject, masks=tmp_path)).table.set_index(["of", "class"])["iou"]
    assert table["place alone", "1"] == pytest.approx(1 / 7) and table["place alone", "0"] == pytest.approx(57 / 63)


@pytest.mark.slow
def test_random_masks_are_not_found_and_the_intervals_hold_the_value(tokens):
    subject, folder = tokens
    finding, miou = measured(subject, folder / "random")
    assert miou["tokens"] < 0.45 < miou["majority of patches"] < 1
    assert (finding.table["iou_low"] <= finding.table["iou"]).all()
    assert (finding.table["iou"] <= finding.table["iou_high"]).all()
    (legend,) = finding.figure.legends
    colors = [patch.get_facecolor()[:3] for patch in legend.get_patches()]
    mask = finding.figure.axes[len(finding.figure.axes) // 3].images[0].get_array()
    assert legend.get_title().get_text() == "class" and [text.get_text() for text in legend.texts] == ["0", "1"]
    assert {tuple(color) for color in np.asarray(mask).reshape(-1, 3)} == set(colors)


def test_the_intersection_over_union_is_that_of_the_definition():
    masks = torch.randint(3, (4, 5, 5)).numpy().astype(np.uint8)
    masks[0, 0] = 255
    said = torch.randint(3, (4, 5, 5)).numpy()
    there = masks != 255
    slow = [
        ((said == k) & (masks == k)).sum() / (((said == k) & there) | (masks == k)).sum() for k in range(3)
    ]  # fmt: skip
    counts = count(masks, said, 4)
    assert np.allclose(counts.ious()[:3], slow) and np.isnan(counts.ious()[3])


def test_a_class_of_one_image_has_no_interval_and_with_one_image_there_is_none():
    true = np.array([[8, 4, 0], [8, 0, 4], [8, 0, 3]])
    counts = Counts(both=true - [[2, 1, 0], [3, 0, 2], [4, 0, 1]], true=true, said=true)
    low, high = counts.intervals().T
    assert np.isnan(low).tolist() == np.isnan(high).tolist() == [False, True, False, False]
    assert (low[[0, 2, 3]] < np.append(counts.ious(), counts.ious().mean())[[0, 2, 3]]).all() and (high < 1.1)[0]
    assert np.isnan(Counts(*(part[:1, :2] for part in counts)).intervals()).all()
    assert np.isnan(Counts(true, true, true).intervals()[[0, 1, 2]]).all()  # all right: nothing varies


def test_softmax_regression_is_at_the_minimum_of_its_loss():
    x, shares, weights = torch.randn(40, 3), torch.rand(40, 3).softmax(dim=1), torch.rand(40)
    w, b = (part.requires_grad_() for part in softmax_regression(x, shares, weights))
    loss = (-(shares * (x @ w + b).log_softmax(dim=1)).sum(dim=1) * weights).sum() + w.square().sum() / 2
    gradients = torch.autograd.grad(loss, [w, b])
    assert all(gradient.abs().max() < 1e-2 for gradient in gradients)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.zeros((SIDE, SIDE + 1), np.uint8), r"0.png has 8 x 9 pixels, and its image 0.png 8 x 8$"),
        (np.zeros((SIDE, SIDE, 3), np.uint8), r"0.png must hold class numbers, gray or palette, and is RGB"),
        (np.full((SIDE, SIDE), 300, np.uint16), r"0.png has the class 300: 0 to 254 are classes"),
        (b"no picture", r"0.png cannot be read"),
        (
            255 * np.eye(SIDE, dtype=np.uint8),
            r"must have two classes or more, beside 255, which is ignored: number them",
        ),
        (None, r"has no mask of a train image, such as .*png"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_in_one_line(tokens, tmp_path, mask, message):
    for i in range(N) if mask is not None else []:
        if isinstance(mask, bytes):
            (tmp_path / f"{i}.png").write_bytes(mask)
        else:
            Image.fromarray(mask).save(tmp_path / f"{i}.png")
    with pytest.raises(UsageError, match=message.replace("0.png", r"\d+.png")) as told:
        measured(tokens[0], tmp_path)
    assert "\n" not in str(told.value)


def test_missing_masks_and_folders_are_reported(tokens):
    subject, folder = tokens
    for masks, message in ((None, "needs masks: --masks DIR"), (folder / "nothing", "must be a folder, got")):
        with pytest.raises(UsageError, match=message):
            measured(subject, masks)
