"""The linear probe of masks: masks that are a function of the token, of the place, of nothing."""

import dataclasses

import numpy as np
import pytest
import torch
from figure_faults import fits_a_column
from PIL import Image

from vitlab.analysis import segmentation
from vitlab.analysis.segmentation import Counts, analyze_segmentation, count, read_mask, softmax_regression
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


@pytest.fixture(scope="module")
def oblong(tmp_path_factory):
    """Photos of 16 x 32 pixels for a network of 8 x 12, all but every third with a mask of blocks of 2 x 2 pixels."""
    folder = tmp_path_factory.mktemp("oblong")
    rng, levels = np.random.default_rng(0), {}
    for name in ("photos", "masks"):
        (folder / name).mkdir()
    for i in range(90):
        Image.fromarray(np.full((16, 32), 2 * i, np.uint8)).save(folder / "photos" / f"{i}.png")
        if i % 3:
            levels[i] = rng.integers(0, 200, (8, 16))
            np.save(folder / "masks" / f"{i}.npy", np.kron(levels[i], np.ones((2, 2), int)))
    torch.manual_seed(0)
    net = VisionTransformer(img_size=(8, 12), in_chans=1, patch_size=2, embed_dim=16, depth=3, num_heads=2)
    data = Unlabeled(str(folder / "photos"), img_size=[8, 12], in_chans=1, crop_pct=1.0, num_workers=0)
    return Subject(net, data, classifies=False, num_images=4), folder / "masks", levels


def test_a_mask_of_a_small_image_is_enlarged_with_it(tmp_path):
    rng = np.random.default_rng(0)
    levels = {f"{i}.png": rng.integers(0, 200, (8, 12)).astype(np.uint8) for i in range(20)}
    for folder in ("photos", "masks"):
        (tmp_path / folder).mkdir()
        for name, values in levels.items():
            Image.fromarray(values).save(tmp_path / folder / name)
    net = VisionTransformer(img_size=(16, 36), in_chans=1, patch_size=4, embed_dim=16, depth=1, num_heads=2)
    data = Unlabeled(str(tmp_path / "photos"), img_size=[16, 36], in_chans=1, num_workers=0)
    images, masks = segmentation._masked(Subject(net, data, classifies=False), "val", tmp_path / "masks")
    for name, mask in zip(images.names, masks, strict=True):
        assert np.array_equal(mask, np.kron(levels[name], np.ones((2, 3))))


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_mask_is_resized_and_cut_as_its_image_without_mixing_classes(oblong, split):
    subject, masks, levels = oblong
    images, cut = segmentation._masked(subject, split, masks)
    names = [int(name.removesuffix(".png")) for name in images.names]
    assert len(names) == len(cut) == 4 and all(i % 3 for i in names) and names != sorted(levels)[:4]
    for i, mask in zip(names, cut, strict=True):
        assert mask.tolist() == levels[i][:, 2:14].tolist()
    every, _ = segmentation._masked(dataclasses.replace(subject, num_images=99), split, masks)
    masked = [name for name in subject.images(split).names if int(name.removesuffix(".png")) % 3]
    assert list(every.names) == masked and set(images.names) < set(masked)


def test_the_tokens_that_are_probed_leave_the_block_that_was_asked_for(oblong):
    subject, *_ = oblong
    blocks = {layer: segmentation._layer(dataclasses.replace(subject, layer=layer)) for layer in (None, 0, 1, 2)}
    assert blocks == {None: (2, (4, 6)), 0: (0, (4, 6)), 1: (1, (4, 6)), 2: (2, (4, 6))}
    left, images = [], subject.images("val").take(np.arange(3))
    hook = subject.net.blocks[1].register_forward_hook(lambda block, args, out: left.append(out.detach()))
    (tokens,) = segmentation._tokens(subject.net, subject, images, 1)
    hook.remove()
    assert tokens.shape == (3, 24, 16)
    assert torch.allclose(tokens, left[0][:, subject.net.num_prefix_tokens :], atol=1e-6)


def test_each_patch_counts_by_the_share_of_its_pixels_that_has_a_class(monkeypatch):
    found = []
    monkeypatch.setattr(segmentation, "softmax_regression", lambda *given: found.extend(given) or softmax(*given))
    softmax = softmax_regression
    masks = np.array([[[0, 1, 255, 255], [255, 255, 255, 255]], [[1, 1, 0, 0], [1, 1, 0, 255]]], np.uint8)
    tokens = torch.tensor([[[1.0, 5.0], [9.0, 5.0]], [[2.0, 5.0], [-3.0, 5.0]]])  # the second feature is constant
    said = segmentation._predict([tokens], masks, [tokens[1:], tokens[:1]], segmentation._cells((1, 2), (2, 4)), 2)
    x, shares, weights = found
    assert shares.tolist() == [[0.5, 0.5], [0.0, 1.0], [1.0, 0.0]] and weights.tolist() == [0.5, 1.0, 0.75]
    assert x[:, 1].tolist() == [0, 0, 0] and x[:, 0].tolist() == pytest.approx([0.37796, 0.75593, -1.13389], abs=1e-4)
    assert said.tolist() == [[[1, 1, 0, 0]] * 2, [[1, 1, 1, 1]] * 2]  # images of which the masks are not asked


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


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (np.zeros((2, 3)), r"must hold height x width class numbers, got \(2, 3\) float64$"),
        (np.zeros((2, 3, 1), int), r"must hold height x width class numbers, got \(2, 3, 1\) int64$"),
        (np.zeros((0, 3), np.uint8), r"must hold height x width class numbers, got \(0, 3\) uint8$"),
        (np.array([[0, -1]]), r"has the class -1: 0 to 254 are classes, and 255 is ignored$"),
        (np.array([[255, 256]]), r"has the class 256: 0 to 254 are classes, and 255 is ignored$"),
    ],
)
def test_an_array_that_is_no_mask_is_refused(tmp_path, values, told):
    np.save(tmp_path / "mask.npy", values)
    with pytest.raises(UsageError, match=told):
        read_mask(tmp_path / "mask.npy")
    for mask in ([[0, 255, 254]], [[True, False, True]]):
        np.save(tmp_path / "mask.npy", np.array(mask))
        assert np.asarray(read_mask(tmp_path / "mask.npy")).tolist() == [[int(k) for k in mask[0]]]


def test_images_without_masks_of_their_own_are_refused(tokens):
    subject, folder = tokens
    masks, alone = folder / "level", [Image.new("L", (9, 9))]
    pictures = Subject(subject.net, lambda image: torch.zeros(1, SIDE, SIDE), pictures=alone, masks=masks)
    kept = Unlabeled(str(folder / "photos"), img_size=SIDE, in_chans=1, num_workers=0, native_patch=PATCH)
    for one in (pictures, dataclasses.replace(subject, data=kept, masks=masks)):
        with pytest.raises(UsageError, match="segmentation needs images of a data set, all of one size, and model has"):
            analyze_segmentation(one)


def test_missing_masks_and_folders_are_reported(tokens):
    subject, folder = tokens
    for masks, message in ((None, "needs masks: --masks DIR"), (folder / "nothing", "must be a folder, got")):
        with pytest.raises(UsageError, match=message):
            measured(subject, masks)
