"""Labels in doubt: planted wrong labels are found, and what cannot be judged is told."""

import argparse
import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch
from figure_faults import fits_a_column
from PIL import Image

from vitlab.analysis.outcomes.labels import (
    analyze_labels,
    confident_classes,
    estimated_errors,
    held_out_predictions,
)
from vitlab.analysis.subject import Subject
from vitlab.cli.analyze import _take_fold
from vitlab.cli.main import main as command
from vitlab.data import ImageFolder
from vitlab.errors import UsageError
from vitlab.look.analysis_page import write_leaves
from vitlab.models.vit import VisionTransformer

N, CLASSES, WRONG = 400, 4, 0.05


def _planted(seed=0):
    """Return probabilities of a network that is right in most images, labels of which a share is wrong, and which."""
    rng = np.random.default_rng(seed)
    true = rng.integers(0, CLASSES, N)
    logits = rng.normal(0, 1, (N, CLASSES))
    logits[np.arange(N), true] += 3.0
    wrong = rng.random(N) < WRONG
    given = np.where(wrong, (true + rng.integers(1, CLASSES, N)) % CLASSES, true)
    shares = np.exp(logits)
    return shares / shares.sum(axis=1, keepdims=True), given, wrong


@pytest.fixture(scope="module")
def folds(tmp_path_factory):
    """A cross-validation of two folds as `vitlab cv` writes it, and the images."""
    home = tmp_path_factory.mktemp("labels")
    shares, given, wrong = _planted()
    names = [f"{given[i]}/{i}.png" for i in range(N)]
    for i, name in enumerate(names):
        (home / "photos" / str(given[i])).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), i % 251, np.uint8)).save(home / "photos" / name)
    (home / "cv.yaml").write_text("axes: {fold: {fold1of2: {}, fold2of2: {}}}")
    for fold in (0, 1):
        run = home / f"fold{fold + 1}of2" / "s0"
        (run / "predictions").mkdir(parents=True)
        (run / "data.json").write_text(_facts([str(k) for k in range(CLASSES)]))
        rows = np.arange(fold, N, 2)
        columns = {"index": np.arange(len(rows)), "path": [names[i] for i in rows], "target": given[rows],
                   "prediction": shares[rows].argmax(axis=1), "probability": shares[rows].max(axis=1),
                   "probabilities": list(shares[rows])}  # fmt: skip
        pd.DataFrame(columns).to_parquet(run / "predictions" / "val.parquet")
    return home, {names[i] for i in np.flatnonzero(wrong)}


@pytest.fixture(scope="module")
def subject(folds):
    net = VisionTransformer(
        img_size=4, in_chans=1, num_classes=CLASSES, patch_size=2, embed_dim=8, depth=1, num_heads=2
    )
    data = ImageFolder(str(folds[0] / "photos"), in_chans=1, num_workers=0, split_file=str(_everything(folds[0])))
    return Subject(net, data, name="net", folds=folds[0])


def _facts(names):
    """Return the text of a data.json."""
    return json.dumps({"class_names": names, "mean": [0.5], "std": [0.2]})


def _everything(home):
    """Write a division of the images without a test split, as that of a cross-validation."""
    names = sorted(str(path.relative_to(home / "photos")) for path in (home / "photos").rglob("*.png"))
    file = home / "splits.json"
    file.write_text(json.dumps({"train": names[::2], "val": names[1::2], "test": []}))
    return file


@pytest.mark.slow
def test_planted_wrong_labels_come_first(folds, subject):
    finding = analyze_labels(subject)
    table, wrong = finding.table, folds[1]
    assert len(table) == N and 10 < len(wrong) < 30
    first = table.head(len(wrong))["image"].isin(wrong).mean()
    assert first > 0.8 > 10 * len(wrong) / N  # at least sixteen times chance
    doubted = table[table["doubted"]]
    assert (table["doubted"].to_numpy()[: len(doubted)]).all()
    assert doubted["image"].isin(wrong).mean() > 0.9 and len(doubted) > len(wrong) / 2
    right = doubted[doubted["image"].isin(wrong)]
    assert (right["suggested"] != right["label"]).all() and (right["margin"] < 0).all()
    estimate = float(finding.note.split("about ")[1].split("%")[0]) / 100
    assert abs(estimate - len(wrong) / N) < 0.03
    agreed = float(finding.note.split("agree with ")[1].split("%")[0]) / 100  # the more, the better the estimate
    assert agreed == pytest.approx(1 - (table["margin"] < 0).mean(), abs=6e-4)


@pytest.mark.slow
def test_the_page_shows_doubted_images_and_no_file_name_breaks_its_script(subject, tmp_path):
    finding = analyze_labels(subject)
    fits_a_column(finding.figure)
    assert len(finding.gallery) == max(24, int(finding.table["doubted"].sum()))
    assert [words["name"] for _, words in finding.gallery] == finding.table["image"].tolist()[: len(finding.gallery)]
    png, words = finding.gallery[0]
    assert png.startswith(b"\x89PNG") and words["label"].startswith(finding.table["label"][0])
    evil = [(png, {**words, "name": "</script><b>&"})]
    page = write_leaves(tmp_path, "a<b", "labels", finding.note, evil).read_text()
    assert page.count("</script>") == 1 and "a&lt;b" in page and "\\u003c/script\\u003e" in page


def test_confident_classes_are_those_of_the_definition():
    shares, given, _ = _planted(1)
    thresholds = [shares[given == k, k].mean() for k in range(CLASSES)]
    for found, row in zip(confident_classes(shares, given), shares, strict=True):
        above = [k for k in range(CLASSES) if row[k] >= thresholds[k]]
        assert found == (max(above, key=lambda k: row[k]) if above else -1)
    assert estimated_errors(given, given, CLASSES) == 0


def test_the_confident_joint_is_that_of_cleanlab():
    count = pytest.importorskip("cleanlab.count")
    shares, given, _ = _planted(2)
    joint = np.zeros((CLASSES, CLASSES), int)
    confident = confident_classes(shares, given)
    np.add.at(joint, (given[confident >= 0], confident[confident >= 0]), 1)
    assert (joint == count.compute_confident_joint(given, shares, calibrate=False)).all()
    calibrated = count.compute_confident_joint(given, shares, calibrate=True)
    share = 1 - np.trace(calibrated) / calibrated.sum()
    assert abs(share - estimated_errors(confident, given, CLASSES)) < 0.01  # it rounds to whole images


def test_a_class_without_images_is_never_suggested():
    shares = torch.tensor([[0.6, 0.1, 0.3], [0.2, 0.7, 0.1]]).numpy()
    assert confident_classes(shares, np.array([0, 1])).tolist() == [0, 1]


def test_labels_names_the_fold_or_file_that_is_missing(folds, subject, tmp_path):
    with pytest.raises(UsageError, match="labels needs a cross-validation: `vitlab cv`, then"):
        analyze_labels(dataclasses.replace(subject, folds=None))
    (tmp_path / "cv.yaml").write_text("axes: {fold: {fold1of2: {}}}")
    with pytest.raises(UsageError, match="fold1of2 has no predictions: let `vitlab cv` finish first"):
        held_out_predictions(tmp_path)
    (tmp_path / "cv.yaml").write_text("axes: 3")
    with pytest.raises(UsageError, match="does not list folds"):
        held_out_predictions(tmp_path)
    run = tmp_path / "fold1of2" / "s0"
    (run / "predictions").mkdir(parents=True)
    (run / "data.json").write_text(_facts([]))
    (tmp_path / "cv.yaml").write_text("axes: {fold: {fold1of2: {}}}")
    pd.DataFrame({"path": ["a"], "target_0": [1.0]}).to_parquet(run / "predictions" / "val.parquet")
    with pytest.raises(UsageError, match="is about other targets than classes"):
        held_out_predictions(tmp_path)


def test_the_command_takes_the_folder_of_a_cross_validation_and_refuses_an_unfinished_one(tmp_path, capsys):
    (tmp_path / "cv.yaml").write_text("axes: {fold: {fold1of2: {}}}")
    assert command(["analyze", "labels", str(tmp_path)]) == 2
    assert "has no fold that was trained: let `vitlab cv` finish first" in capsys.readouterr().err
    (run := tmp_path / "fold1of2" / "s0" / "checkpoints").mkdir(parents=True)
    (run / "last.ckpt").touch()
    (run.parent / "config.yaml").touch()
    options = argparse.Namespace(run=str(tmp_path), output=None)
    _take_fold(options)
    assert (options.run, options.output) == (str(run.parent), str(tmp_path / "analysis"))
    assert options.named == str(tmp_path)  # in the title of the page
