"""Errors, confusion and calibration, against answers that are known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import binom
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score, precision_recall_fscore_support
from torch import nn
from torchmetrics.functional.classification import multiclass_calibration_error

import vitlab
from vitlab.analysis import (
    ANALYSES,
    analyze_calibration,
    analyze_confusion,
    analyze_errors,
    analyze_fewshot,
    analyze_probe,
    analyze_scramble,
)
from vitlab.analysis.outcomes.calibration import calibration_error, expected_calibration_error, reliability
from vitlab.analysis.outcomes.confusion import _smoothed
from vitlab.analysis.outcomes.outcome import Outcome, outcome_of
from vitlab.analysis.subject import Subject
from vitlab.class_metrics import by_class, confusion, over_classes
from vitlab.data import Table
from vitlab.errors import UsageError


def test_a_matrix_and_its_means_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    targets, predictions = rng.integers(0, 4, 200), rng.integers(0, 5, 200)  # nothing is of class 4
    matrix = confusion(targets, predictions, 5)
    assert (matrix == confusion_matrix(targets, predictions, labels=range(5))).all()
    precision, recall, f1, _ = precision_recall_fscore_support(targets, predictions, labels=range(4))
    found = by_class(matrix)
    assert np.allclose(found["recall"][:4], recall) and np.isnan(found["recall"][4])
    assert np.allclose(found["precision"][:4], precision) and np.allclose(found["f1"][:4], f1)
    means = over_classes(matrix)
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        assert means["acc1_macro"] == pytest.approx(balanced_accuracy_score(targets, predictions))
    assert means["f1_macro"] == pytest.approx(f1_score(targets, predictions, labels=range(4), average="macro"))


def test_the_calibration_error_is_that_of_torchmetrics_and_nothing_for_true_probabilities():
    rng = np.random.default_rng(0)
    shares = torch.from_numpy(rng.dirichlet(np.ones(5), 4000)).float()
    targets = torch.from_numpy(rng.integers(0, 5, 4000))
    confidence, first = shares.max(1)
    table = reliability(confidence.double().numpy(), (first == targets).numpy())
    expected = multiclass_calibration_error(shares, targets, 5, n_bins=15, norm="l1").item()
    assert expected_calibration_error(table) == pytest.approx(expected, abs=1e-5) and table["n"].sum() == 4000
    drawn = np.array([rng.choice(5, p=p / p.sum()) for p in shares.double().numpy()])
    true = reliability(confidence.double().numpy(), first.numpy() == drawn)
    assert expected_calibration_error(true) < 0.03 < 0.2 < expected_calibration_error(table)


@pytest.mark.slow
def test_analyses_of_digits_agree_with_each_other_and_with_the_network(small_subject):
    subject = small_subject()
    images = [batch for batch, _ in subject.batches(limit=10**6)]
    labels = subject.data.splits["val"].labels
    with torch.no_grad():
        shares = torch.cat([subject.net(batch) for batch in images]).softmax(1)
    right = shares.argmax(1) == labels
    errors = analyze_errors(subject)
    assert len(errors.table) == (~right).sum() and f"{len(labels):,} images of val" in errors.note
    assert errors.table["probability_of_target"].is_monotonic_increasing
    worst = int(torch.where(right, 2, shares[torch.arange(len(labels)), labels]).argmin())
    assert errors.table.iloc[0][["image", "target"]].tolist() == [f"image {worst}", str(labels[worst].item())]
    shown = [ax for ax in errors.figure.axes if ax.images]
    pixels = subject.data.splits["val"].images[worst, 0].numpy() / 255
    assert len(shown) == 24 and np.allclose(np.asarray(shown[0].images[0].get_array()), pixels, atol=1e-5)
    table = analyze_confusion(subject).table
    matrix = table[[f"as {k}" for k in range(10)]].to_numpy()
    assert matrix.trace() == right.sum() and (matrix.sum(1) == np.bincount(labels, minlength=10)).all()
    calibration = analyze_calibration(subject).table
    assert (calibration["n"] * calibration["accuracy"]).sum() == pytest.approx(right.sum().item())
    subject.split = "test"
    assert len(outcome_of(subject)) == len(subject.data.splits["test"])


@pytest.mark.parametrize(
    "analysis",
    [analyze_errors, analyze_confusion, analyze_calibration, analyze_scramble, analyze_fewshot, analyze_probe],
)
def test_outputs_that_are_not_finite_are_no_class(small_subject, analysis):
    subject = small_subject(num_images=16)
    with torch.no_grad():
        subject.net.norm.bias[0] = torch.nan
        subject.net.tokenizer.proj.bias[0] = torch.nan
    with pytest.raises(UsageError, match="images are not finite, as of a network that has diverged"):
        analysis(subject)


@pytest.mark.parametrize("analysis", [analyze_errors, analyze_confusion, analyze_calibration])
def test_a_network_without_a_head_has_no_accuracy(small_subject, analysis):
    """Such as that of a masked autoencoder: its features are no scores of classes."""
    with pytest.raises(UsageError, match="has no outputs for classes, so accuracy cannot be measured"):
        analysis(small_subject(num_classes=0))


def test_a_probability_of_0_is_in_the_interval_of_its_bin(monkeypatch):
    outputs = torch.tensor([[0.0, 0.04], [0.0, 0.99], [0.5, 1.0]])
    found = Outcome("multilabel", torch.tensor([[0, 0], [0, 1], [0, 1]]), outputs, ["cat", "dog"], ["a", "b", "c"])
    monkeypatch.setattr("vitlab.analysis.outcomes.calibration.outcome_of", lambda subject: found)
    table = analyze_calibration(SimpleNamespace(split="val", name="toy")).table
    first = table.iloc[0]
    assert (first["n"], first["confidence"]) == (3, pytest.approx(0.04 / 3))
    assert first["confidence_low"] < first["confidence"] < first["confidence_high"]
    assert table["confidence_high"].tolist()[2] == 1.0  # t's interval of 0.99 and 1 ends at 1.06
    outputs.clamp_(max=0.0)  # alone in its bin
    assert analyze_calibration(SimpleNamespace(split="val", name="toy")).table["confidence_high"].tolist() == [0.0]


@pytest.mark.parametrize("labels", [1, 2])
def test_of_100_images_at_one_half_calibrated_probabilities_show_40_to_60_right_in_95_percent_of_draws(
    monkeypatch, labels
):
    """Two labels that always go together are worth one: of 100 images each, the intervals would be narrower."""
    classes = torch.arange(100) % 2
    found = Outcome("class", classes, torch.full((100, 2), 0.5), ["cat", "dog"], ["a"] * 100)
    if labels == 2:
        twice = classes[:, None].expand(-1, 2)
        found = Outcome("multilabel", twice, torch.full((100, 2), 0.5), ["cat", "dog"], ["a"] * 100)
    monkeypatch.setattr("vitlab.analysis.outcomes.calibration.outcome_of", lambda subject: found)
    finding = analyze_calibration(SimpleNamespace(split="val", name="toy"))
    (row,) = finding.table.itertuples()
    assert (row.n, row.accuracy, row.consistent_low, row.consistent_high) == (100 * labels, 0.5, 0.4, 0.6)
    chance = (binom.pmf(k := np.arange(101), 100, 0.5) * abs(k / 100 - 0.5)).sum()  # 0.0398
    error = calibration_error(np.full(100 * labels, 0.5), np.repeat(classes.numpy() > 0, labels),
                              np.repeat(k[:100], labels), draws=1000)  # fmt: skip
    assert error.plain == 0 == error.rms and error.by_chance == pytest.approx(chance, rel=0.08)
    (bars,) = [lines for lines in finding.figure.axes[0].collections if len(lines.get_segments())]
    assert bars.get_segments()[0][:, 1] == pytest.approx([row.accuracy_low, row.accuracy_high])


def test_a_report_reads_labels_as_classes(monkeypatch):
    there, said = torch.tensor([[0, 1], [1, 1]]), torch.tensor([[0.9, 0.9], [0.9, 0.1]])
    found = Outcome("multilabel", there, said, ["cat", "dog"], ["a", "b"])
    monkeypatch.setattr("vitlab.analysis.outcomes.confusion.outcome_of", lambda subject: found)
    table, curve = analyze_confusion(SimpleNamespace(split="val", name="toy")).table, ANALYSES["confusion"].curve
    rows = curve.summary(table)[[*curve.lines, *curve.measures]]
    assert rows.iloc[:, :3].to_numpy().tolist() == [["cat", 1.0, 0.5], ["dog", 0.5, 1.0]]


def test_probabilities_that_are_never_wrong_are_off_by_what_they_lack():
    """0.9 said and always right: the error is 0.1, and cannot be larger in the direction that was found."""
    for n in (40, 100, 1000):  # of fewer, all may be right where 0.78 is true
        found = calibration_error(np.full(n, 0.9), np.ones(n, bool))
        assert found.low <= found.rms <= found.high == pytest.approx(0.1, abs=1e-9)


@pytest.mark.parametrize(
    ("n", "said", "true"),
    [
        (20, 0.95, 0.87),
        (20, 0.95, 0.95),
        (20, 0.9, 0.97),
        (100, 0.98, 0.95),
        *(pytest.param(1000, 0.95, share, marks=pytest.mark.rare) for share in (0.93, 0.95, 0.965)),
    ],
)
def test_the_interval_of_few_confident_images_holds_the_truth_in_both_directions(n, said, true):
    """Over- and underconfident: the interval for each number of right images, weighted by its probability."""
    shares, held, width = binom.pmf(np.arange(n + 1), n, true), 0.0, 0.0
    likely = np.flatnonzero(shares > 0.004)
    for right in likely:
        found = calibration_error(np.full(n, said), np.arange(n) < right, draws=200)
        held += shares[right] * (found.low - 1e-9 <= abs(said - true) <= found.high + 1e-9)
        width += shares[right] * (found.high - found.low)
    assert held / shares[likely].sum() >= 0.93
    assert width < 6.5 * (true * (1 - true) / n) ** 0.5  # of an interval of a mean: 3.9


@pytest.mark.slow
def test_mistakes_are_in_the_order_of_the_tiniest_probabilities(small_subject):
    subject = small_subject()
    with torch.no_grad():
        subject.net.head.weight.mul_(300)
    table = analyze_errors(subject).table
    logits = torch.cat([subject.net(images) for images, _ in subject.batches("val", limit=2**62)]).double()
    labels = torch.from_numpy(np.asarray(subject.data.splits["val"].labels))
    true = logits.softmax(dim=1).gather(1, labels[:, None])[:, 0][logits.argmax(dim=1) != labels]
    assert (true < 1e-9).sum() > 3
    assert np.allclose(np.log(table["probability_of_target"]), np.log(np.sort(true.detach().numpy())), atol=0.02)


def test_errors_of_labels_and_numbers_are_cross_entropy_and_absolute_error():
    targets, outputs = torch.tensor([[1, 0], [1, 1]]), torch.tensor([[0.9, 0.2], [0.3, 0.6]])
    labels = Outcome("multilabel", targets, outputs, ["cat", "dog"], ["a", "b"])
    expected = torch.nn.functional.binary_cross_entropy(outputs, targets.float(), reduction="none").mean(1)
    assert torch.allclose(labels.image_errors(), expected) and labels.wrong().tolist() == [False, True]
    numbers = Outcome("number", torch.tensor([[0.0], [10.0], [20.0]]), torch.tensor([[1.0], [10.0], [5.0]]), ["x"], [])
    assert torch.allclose(numbers.image_errors(), torch.tensor([0.1, 0.0, 1.5]))


def test_shares_of_few_images_are_drawn_as_with_four_more_half_of_them_right():
    """3.84 more in each class, the wrong ones as 2 to 1 to 1: as classes were given wrongly, once more each."""
    found = _smoothed(np.array([[2, 0, 0], [1, 3, 0], [0, 0, 1]]))
    assert found[0] == pytest.approx([3.92 / 5.84, 0.96 / 5.84, 0.96 / 5.84], abs=1e-3)
    assert found[1] == pytest.approx([2.28 / 7.84, 4.92 / 7.84, 0.64 / 7.84], abs=1e-3)
    assert found[2] == pytest.approx([1.28 / 4.84, 0.64 / 4.84, 2.92 / 4.84], abs=1e-3)


@pytest.mark.rare
def test_every_rate_of_an_analysis_has_an_interval_that_holds_it(small_subject):
    """Columns that are means over images; what remains names a row, counts, or is of the weights alone."""
    subject = small_subject(pos_embed="learned", num_images=24)
    not_means = {
        "noise",
        "image",
        "layer",
        "head",
        "dy",
        "dx",
        "row",
        "column",
        "uniform",
        "error",
        "n",
        "images",
        "low",
    }
    not_means |= {
        "high",
        "level",
        "side",
        "blocks",
        "repeat",
        "pixels",
        "size",
        "shots",
        "draws",
        "spread",
        "pairs",
        "k",
        "n_train",
        "share",
    }
    not_means |= {"other_row", "other_column", "cosine", "other_layer"}
    names = "probe scramble scramble_image shift resolution distance entropy displacement position fewshot knn cka "
    for name in (names + "faithfulness sanity confusion calibration").split():
        table = getattr(vitlab.analysis, f"analyze_{name}")(subject).table.select_dtypes("number")
        for column in table.columns:
            if column in not_means or column.endswith(("_low", "_high")) or column.startswith("as "):
                continue
            low, value, high = (table[c].to_numpy(dtype=float) for c in (f"{column}_low", column, f"{column}_high"))
            known = np.isfinite(low)
            assert known.any() and (low[known] <= value[known] + 1e-9).all(), (name, column)
            assert (value[known] <= high[known] + 1e-9).all(), (name, column)


def test_errors_of_numbers_are_in_standard_deviations_of_the_training_targets():
    one = torch.tensor([[3.0]]), torch.tensor([[3.5]]), ["y"], ["a"]
    assert Outcome("number", *one, torch.tensor([2.0])).image_errors().tolist() == [0.25]
    assert Outcome("number", *one).image_errors().tolist() == [0.5]  # unknown: in their unit
    alike = torch.tensor([[3.0], [3.0]]), torch.tensor([[3.5], [2.0]]), ["y"], ["a", "b"]
    assert Outcome("number", *alike).image_errors().tolist() == [0.5, 1.0]
    nan = torch.nan
    lacking = torch.tensor([[2.0, nan], [nan, nan], [4.0, 6.0]]), torch.tensor([[4.0, 9.0], [1.0, 1.0], [4.0, 12.0]])
    for spread, expected in ((torch.tensor([1.0, 2.0]), [2.0, nan, 1.5]), (None, [2**0.5, nan, 3.0])):
        found = Outcome("number", *lacking, ["y", "z"], ["a", "b", "c"], spread).image_errors().tolist()
        assert found == pytest.approx(expected, nan_ok=True)


def test_images_that_lack_a_target_stand_among_the_others_and_those_without_any_last(small_subject, monkeypatch):
    targets = torch.tensor([[torch.nan, torch.nan], [1.0, torch.nan], [1.0, 1.0], [3.0, 3.0]])
    found = Outcome("number", targets, torch.zeros(4, 2), ["y", "z"], list("abcd"), torch.ones(2))
    monkeypatch.setattr("vitlab.analysis.outcomes.errors.outcome_of", lambda subject: found)
    subject = small_subject()
    subject.images("val")
    table = analyze_errors(subject).table
    assert table["image"].tolist() == ["d", "b", "c", "a"]
    assert table["error"].tolist() == pytest.approx([3.0, 1.0, 1.0, torch.nan], nan_ok=True)


def test_a_matrix_is_drawn_as_shares_of_each_class_and_a_class_without_images_is_in_no_mean(monkeypatch):
    targets, outputs = torch.tensor([0, 0, 0, 1, 1]), torch.eye(3)[[0, 0, 1, 1, 2]]
    found = Outcome("class", targets, outputs, ["cat", "dog", "elk"], list("abcde"))
    monkeypatch.setattr("vitlab.analysis.outcomes.confusion.outcome_of", lambda subject: found)
    finding = analyze_confusion(SimpleNamespace(split="val", name="toy"))
    left, right = finding.figure.axes
    shares = [[2 / 3, 1 / 3, 0], [0, 1 / 2, 1 / 2], [0, 0, 0]]
    assert np.allclose(left.images[0].get_array(), shares) and left.images[0].get_clim() == (0, 1)
    assert [text.get_text() for text in left.texts] == list("210011000")
    f1 = (4 / 5 + 1 / 2) / 2
    assert f"recall {(2 / 3 + 1 / 2) / 2:.4f} [" in finding.note and f"F1 {f1:.4f} [" in finding.note
    assert "nan" not in finding.note
    bars = [[bar.get_width() for bar in bars] for bars in right.containers]
    assert np.allclose(bars, [[2 / 3, 1 / 2, np.nan], [1, 1 / 2, 0]], equal_nan=True)
    ends = right.collections[0].get_segments()  # of recall
    assert np.allclose([end[:, 0] for end in ends[:2]], finding.table[["recall_low", "recall_high"]][:2])


def test_mistakes_of_labels_name_what_is_missed_and_what_is_found_wrongly(small_subject, monkeypatch):
    """The worst first; a probability of a half is a no."""
    targets = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 0]])
    outputs = torch.tensor([[0.4, 0.9, 0.2], [0.6, 0.7, 0.5], [0.1, 0.5, 0.3]])
    found = Outcome("multilabel", targets, outputs, ["cat", "dog", "elk"], list("abc"))
    monkeypatch.setattr("vitlab.analysis.outcomes.errors.outcome_of", lambda subject: found)
    subject = small_subject()
    subject.images("val")
    finding = analyze_errors(subject)
    table, wilson = finding.table, "20.8% to 93.9%"
    assert finding.note == f"3 images of val, 2 of them wrong (66.7%, 95 % interval {wilson})"
    rows = table[["image", "missed", "wrongly_found"]].to_numpy().tolist()
    assert rows == [["a", "cat; elk", "dog"], ["c", "dog", ""]]
    expected = nn.functional.binary_cross_entropy(outputs, targets.float(), reduction="none").mean(dim=1)
    assert table["cross_entropy"].tolist() == pytest.approx(expected[[0, 2]].tolist(), rel=1e-5)


def test_a_file_that_became_unreadable_shifts_neither_names_nor_pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    for i in range(10):
        Image.fromarray(np.full((8, 8), 25 * i, np.uint8)).save(tmp_path / f"{i}.png")
    (tmp_path / "t.csv").write_text("path,shade\n" + "".join(f"{i}.png,{25 * i}.5\n" for i in range(10)))
    fixed = {"img_size": 8, "in_chans": 1, "batch_size": 2, "mean": [0.0], "std": [1.0]}
    data = Table(str(tmp_path / "t.csv"), targets=["shade"], val_share=0.5, max_unreadable=1, **fixed)
    data.build("val")
    lost, *left = data.splits["val"].names
    (tmp_path / lost).write_bytes(b"gone")
    shown, drawn = [], "vitlab.analysis.figures.picture"
    monkeypatch.setattr(drawn, lambda ax, pixels, title: shown.append(255 * pixels.mean()))
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    table = analyze_errors(Subject(net, data, classifies=False)).table
    assert sorted(table["image"]) == sorted(left)
    shades = [25 * int(name[:-4]) for name in table["image"]]
    assert table["target/shade"].tolist() == [shade + 0.5 for shade in shades]
    assert shown == pytest.approx(shades, abs=0.1)
