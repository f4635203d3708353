"""Digits through the whole data module."""

import lightning as L
import pytest
import torch
from sklearn.datasets import load_digits

from tests.training import QUIET
from vitlab.data.known import Digits


def test_digits_knows_its_shape_before_reading_anything():
    data = Digits()
    assert (data.img_size, data.in_chans, data.num_classes) == ((8, 8), 1, 10)
    assert data.class_names[3] == "3" and data.splits == {}


def test_a_card_says_that_whole_images_are_whole():
    whole, cut = (Digits(**sizes).preparation() for sizes in ({}, {"img_size": 16}))
    assert (whole["native_size"], whole["crop_pct"]) == ([8, 8], 1.0)
    assert cut["crop_pct"] == (1.0 if cut["native_size"] else 0.875)


def test_fit_builds_training_and_validation_only():
    data = Digits()
    data.setup("fit")
    assert set(data.splits) == {"train", "val"}
    images, targets = next(data.iterate_batches(data.train_dataloader()))
    assert images.shape == (128, 1, 8, 8) and images.dtype == torch.float32 and targets.dtype == torch.int64


def test_training_images_have_mean_zero_and_variance_one():
    data = Digits(batch_size=1)
    data.setup("fit")
    images = torch.cat([x for x, _ in data.iterate_batches(data.train_dataloader())])
    assert abs(images.mean()) < 1e-5 and abs(images.std() - 1) < 1e-4


def test_images_are_resized_on_demand():
    data = Digits(img_size=[16, 12])
    data.setup("validate")
    images, _ = next(data.iterate_batches(data.val_dataloader()))
    assert images.shape[2:] == (16, 12)


class _Recorder(L.LightningModule):
    """Writes down what it is shown; saves a checkpoint after ``stop`` steps."""

    def __init__(self, stop=None, path=None):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.seen, self.stop, self.path = [], stop, path

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, batch[0].sum().item()))
        return self.layer(batch[0].flatten(1)).mean()

    def on_train_batch_end(self, *_):
        if len(self.seen) == self.stop and self.stop % 4:
            self.trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self):
        if len(self.seen) == self.stop:
            self.trainer.save_checkpoint(self.path)

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def _fit(module, path, **kwargs):
    trainer = L.Trainer(max_epochs=4, use_distributed_sampler=False, default_root_dir=path, **QUIET)
    trainer.fit(module, datamodule=Digits(batch_size=256, augment="crop-flip"), **kwargs)  # 4 steps an epoch


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*")
@pytest.mark.parametrize("stop", [1, 3, 4, 5, 8, 11])
def test_a_run_that_continues_sees_the_batches_it_had_not_seen(tmp_path, stop):
    whole, rest = _Recorder(stop, tmp_path / "x.ckpt"), _Recorder()
    _fit(whole, tmp_path)
    torch.manual_seed(1)  # the seed is part of the checkpoint
    _fit(rest, tmp_path, ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    assert len({value for *_, value in whole.seen}) == 16
    assert rest.seen == whole.seen[stop:]


def test_digits_are_those_that_scikit_learn_loads():
    images, labels = load_digits(return_X_y=True)
    found = Digits().read("all")
    assert found.images.flatten(1).div(255 / 16).round().int().tolist() == images.astype(int).tolist()
    assert found.labels.tolist() == labels.tolist()
