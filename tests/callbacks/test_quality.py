"""Features that are measured in training: FeatureQuality without a command."""

import contextlib
import math
import re
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.callbacks.loops import is_due, is_last
from vitlab.callbacks.quality import FeatureQuality, collapse, probe, rankme
from vitlab.data import Digits
from vitlab.interface import mode_of
from vitlab.runs import guard
from vitlab.runs.records import metrics_and_n, split_metrics
from vitlab.tables import metrics_text
from vitlab.tasks import Classifier

NETWORK = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-true", "64-true"])
def test_features_are_measured_in_the_precision_of_the_weights(precision):
    limits = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1}
    trainer = L.Trainer(precision=precision, callbacks=[FeatureQuality(images=32)], **limits, **QUIET)
    trainer.fit(Classifier(num_classes=10, **NETWORK), Digits(batch_size=8))
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert 0 <= found["val/knn"] <= 1 and 0 <= found["val/probe"] <= 1 and 1 <= found["val/rankme"] <= 8


@pytest.mark.slow
def test_the_line_of_the_best_epoch_counts_the_images_that_each_metric_was_measured_on():
    trainer = L.Trainer(max_epochs=1, limit_train_batches=1, callbacks=[FeatureQuality(images=50)], **QUIET)
    trainer.fit(Classifier(num_classes=10, **NETWORK), Digits(batch_size=8))
    found = {name.removeprefix("val/"): float(value) for name, value in trainer.callback_metrics.items()}
    shown = {name: value for name, value in found.items() if "train" not in name}
    names = re.sub(r" \d+\.\d{4}", "", metrics_text(shown))
    assert names == "loss, acc1, acc5 on 288 images; knn, probe, rankme on 50 images"
    assert "knn_images" not in split_metrics(shown) and metrics_and_n(shown)["knn_images"] == 50


@pytest.mark.parametrize(
    ("every", "between", "due"),
    [(5, 1, [5, 10]), (5, 2, [6, 10]), (3, 2, [4, 6, 10]), (1, 3, [3, 6, 9]), (4, 10, [10]), (12, 1, [])],
)
def test_the_first_validation_at_or_after_each_multiple_of_a_period_measures(every, between, due):
    trainer = SimpleNamespace(check_val_every_n_epoch=between, num_training_batches=3, val_check_batch=3)
    trainer.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_idx=2))
    validated = range(between, 11, between)
    assert [done for done in validated if is_due(epoch_of(trainer, done), every)] == due
    trainer.num_training_batches = trainer.val_check_batch = math.inf  # of a loader without length
    assert [done for done in validated if is_due(epoch_of(trainer, done), every)] == due


@pytest.mark.parametrize(
    ("every", "apart", "interval", "due"),
    [
        (2, 1, 2, [(2, 8), (4, 8), (6, 8)]),  # of 8 batches, the last of an epoch ends it
        (1, 1, 3, [(2, 3), (3, 3), (4, 3), (5, 3), (6, 3)]),  # the last comes before the end
        (2, 2, 4, [(2, 8), (4, 8), (6, 8)]),
        (3, 2, 3, [(4, 3)]),
    ],
)
def test_of_several_validations_in_an_epoch_one_is_the_first_at_or_after_a_multiple(every, apart, interval, due):
    loop, found, last = SimpleNamespace(), [], []
    trainer = SimpleNamespace(check_val_every_n_epoch=apart, num_training_batches=8, val_check_batch=interval)
    trainer.fit_loop, trainer.max_epochs, trainer.max_steps = SimpleNamespace(epoch_loop=loop), 6, -1
    for epoch in range(apart, 7, apart):
        for batch in range(interval, 9, interval):
            loop.batch_idx = batch - 1
            found += [(epoch, batch)] if is_due(epoch_of(trainer, epoch), every) else []
            last += [(epoch, batch)] if is_last(trainer) else []
    assert found == due
    assert last == [(6, 8 // interval * interval)]


def epoch_of(trainer, done):
    trainer.current_epoch = done - 1
    return trainer


@pytest.mark.parametrize(
    ("every", "interval", "due"),
    [(2, 5, [10, 15, 20, 25, 30]), (2, 3, [6, 12, 18, 24, 30]), (1, 7, [7, 14, 21, 28]), (2, 2, [6, 12, 18])],
)
def test_validations_that_count_batches_across_epochs_measure_after_each_multiple_of_a_period(every, interval, due):
    trainer = SimpleNamespace(check_val_every_n_epoch=None, num_training_batches=3, val_check_batch=interval)
    trainer.fit_loop, found = SimpleNamespace(epoch_loop=SimpleNamespace()), []
    for batches in range(interval, 31 if interval > 2 else 19, interval):
        trainer.fit_loop.epoch_loop.total_batch_idx = batches - 1
        found += [batches] if is_due(epoch_of(trainer, (batches - 1) // 3 + 1), every) else []
    assert found == due


def test_it_is_known_that_larger_values_of_features_and_smaller_losses_are_better():
    task, quiet = Classifier(num_classes=10, **NETWORK), {**QUIET, "enable_checkpointing": True}
    cases = [("val/knn", "knn", "max"), ("val/rankme", "rankme", "max"), ("val/knn", "rankme", None)]
    for monitor, measure, mode in cases:
        keeper = Checkpoint(monitor=monitor)
        trainer = L.Trainer(callbacks=[keeper, FeatureQuality(measures=[measure])], **quiet)
        keeper.setup(trainer, task, "fit")
        assert keeper.mode == mode
    task.val_meter.loss_name = "cross_entropy"  # as of DINO
    assert mode_of(task, "val/cross_entropy") == "min" and mode_of(task, "val/entropy") is None


def test_measuring_many_images_is_not_taken_for_a_loader_that_hangs(monkeypatch):
    quality, told = FeatureQuality(images=40), []
    task, data = Classifier(num_classes=10, **NETWORK), Digits(batch_size=8)
    trainer = L.Trainer(callbacks=[quality], **QUIET)
    trainer._data_connector.attach_datamodule(task, data)
    data.setup("fit")
    monkeypatch.setattr(guard, "goes_on", lambda: told.append(1))
    quality.features(trainer, task.eval(), "val", 40)
    assert len(told) == 5


def test_images_that_are_measured_lie_evenly_from_the_first_to_the_last():
    quality, task, data = FeatureQuality(), Classifier(num_classes=10, **NETWORK), Digits(batch_size=64)
    trainer = L.Trainer(callbacks=[quality], **QUIET)
    trainer._data_connector.attach_datamodule(task, data)
    data.setup("fit")
    (whole, labels), (few, their_labels) = (quality.features(trainer, task.eval(), "val", most) for most in (999, 8))
    assert len(whole) == 288 and torch.equal(labels, torch.as_tensor(data.splits["val"].labels))
    torch.testing.assert_close(few, whole[::41])  # 287 is 7 * 41
    assert torch.equal(their_labels, labels[::41])


def test_the_rank_is_that_of_singular_values_and_not_of_their_squares():
    assert rankme(torch.diag(torch.tensor([3.0, 1.0]))) == pytest.approx(4 / 3**0.75, abs=1e-4)  # shares 3/4 and 1/4


def test_the_probe_standardizes_what_it_classifies_as_what_it_was_fitted_on():
    features, labels = torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1])
    assert probe(features, labels, torch.full((3, 1), 2.0)).tolist() == [1, 1, 1]
    assert probe(features, labels, torch.full((3, 1), 0.4)).tolist() == [0, 0, 0]
    one_of_twenty = (torch.arange(20) == 7).long()  # a penalty that is felt would leave 0.7 to the many
    assert probe(one_of_twenty[:, None].float(), one_of_twenty, torch.tensor([[0.4], [0.7]])).tolist() == [0, 1]


@pytest.mark.parametrize(("k", "right"), [(1, 0.0), (2, 0.0), (3, 1.0)])
def test_as_many_training_images_vote_as_are_asked_for(k, right):
    angles = {"train": [0.1, 0.15, 0.15, 3.0], "val": [0.0, 0.0]}  # the nearest says 0, the next two outvote it
    labels = {"train": torch.tensor([0, 1, 1, 2]), "val": torch.tensor([1, 1])}
    quality = FeatureQuality(measures=["knn"], k=k)
    quality.features = lambda trainer, task, split, most: (
        torch.tensor([[math.cos(a), math.sin(a)] for a in angles[split]]), labels[split]
    )  # fmt: skip
    data = SimpleNamespace(splits={"val": range(2)})
    trainer = SimpleNamespace(callbacks=[], limit_val_batches=1.0, datamodule=data, sanity_checking=False)
    assert quality.measure(trainer, None, 4) == {"knn": right}


def test_features_with_a_large_mean_have_not_collapsed_and_those_on_a_line_or_a_point_have():
    draw = torch.Generator().manual_seed(0)
    noise, offset = (torch.randn(*size, generator=draw) for size in ((200, 16), (1, 16)))
    line, point = noise[:, :1] * noise[:1], torch.zeros(200, 1)
    for mean in (0, 1, 100):
        assert collapse(mean * offset + noise) == ""
        assert collapse(mean * offset + line + 1e-3 * noise) == "all lie close to one line"
        assert collapse(mean * offset + point) == "all are alike"
    assert collapse(offset + 1e-7 * noise) == "all are alike"  # but for rounding
    assert collapse(noise[:2]) == ""
    assert rankme(100 * offset + noise) < 1.5 < 12 < rankme(noise)  # the published number, of features with their mean


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("split", ["train", "val"])
def test_measures_of_features_that_are_not_finite_are_nan(split, value):
    draw = torch.Generator().manual_seed(0)
    sets = {name: (torch.randn(12, 4, generator=draw), torch.arange(12) % 3) for name in ("train", "val")}
    sets[split][0][5, 1] = value
    quality = FeatureQuality(k=3)
    quality.features = lambda trainer, task, split, most: sets[split]
    data = SimpleNamespace(splits={"val": range(12)})
    trainer = SimpleNamespace(callbacks=[], limit_val_batches=1.0, datamodule=data, sanity_checking=False)
    found = quality.measure(trainer, None, 12)
    assert math.isnan(found["knn"]) and math.isnan(found["probe"])
    assert math.isnan(found["rankme"]) == (split == "val")
    assert collapse(sets[split][0]) == ""


def test_two_callbacks_do_not_measure_the_same():
    both = [FeatureQuality(measures=["knn"], k=1), FeatureQuality(measures=["knn", "rankme"])]
    trainer = L.Trainer(max_epochs=1, callbacks=both, **QUIET)
    with pytest.raises(ValueError, match="two FeatureQuality callbacks measure knn: leave it to one of them"):
        trainer.fit(Classifier(num_classes=10, **NETWORK), Digits(batch_size=8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "validated", "monitor", "stale"),
    [
        (5, 1, "val/knn", True),
        (5, 2, "val/rankme", True),
        (5, None, "val/knn", True),
        (5, 10, "val/knn", False),
        (5, 7, "val/knn", False),
        (1, 1, "val/knn", False),
        (5, 1, "val/loss", False),
    ],
)
def test_stopping_by_a_measure_that_not_every_validation_takes_is_refused(every, validated, monitor, stale):
    interval = {"check_val_every_n_epoch": validated} | ({} if validated else {"val_check_interval": 3})
    quality, data = FeatureQuality(every_n_epochs=every), Digits(batch_size=8)
    trainer = L.Trainer(callbacks=[quality, EarlyStopping(monitor)], **interval, **QUIET)
    trainer._data_connector.attach_datamodule(Classifier(num_classes=10, **NETWORK), data)
    data.setup("fit")
    wrong = pytest.raises(ValueError, match=f"reads `{monitor}` at every validation, .* every 5 epochs")
    with wrong if stale else contextlib.nullcontext():
        quality.setup(trainer, Classifier(num_classes=10, **NETWORK), "fit")
