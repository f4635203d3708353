"""Features that are measured in training: FeatureQuality without a command."""

import contextlib

import lightning as L
import pytest
from lightning.pytorch.callbacks import EarlyStopping

from vitlab.callbacks.quality import FeatureQuality
from vitlab.data import Digits
from vitlab.tasks import Classifier

NETWORK = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


@pytest.mark.filterwarnings("ignore:the features have collapsed")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-true", "64-true"])
def test_features_are_measured_in_the_precision_of_the_weights(precision):
    limits = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1}
    trainer = L.Trainer(precision=precision, callbacks=[FeatureQuality(images=32)], **limits, **QUIET)
    trainer.fit(Classifier(num_classes=10, **NETWORK), Digits(batch_size=8))
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert 0 <= found["val/knn"] <= 1 and 0 <= found["val/probe"] <= 1 and 1 <= found["val/rankme"] <= 8


def test_two_callbacks_do_not_measure_the_same():
    both = [FeatureQuality(measures=["knn"], k=1), FeatureQuality(measures=["knn", "rankme"])]
    trainer = L.Trainer(max_epochs=1, callbacks=both, **QUIET)
    with pytest.raises(ValueError, match="two FeatureQuality callbacks measure knn: leave it to one of them"):
        trainer.fit(Classifier(num_classes=10, **NETWORK), Digits(batch_size=8))


@pytest.mark.parametrize(
    ("every", "validated", "monitor", "stale"),
    [
        (5, 1, "val/knn", True),
        (5, 2, "val/rankme", True),
        (5, None, "val/knn", True),
        (5, 10, "val/knn", False),
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
