"""Tasks and data of vitlab with Lightning's own Trainer: what the commands know, they know too."""

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.rank_zero import WarningCache
from PIL import Image

import vitlab
from tests.training import QUIET
from vitlab.api import _weights_of
from vitlab.jobs.terminal import lightning_quieted

pytestmark = pytest.mark.slow

SMALL = {"patch_size": 2, "embed_dim": 16, "depth": 1, "num_heads": 2}


def trained(folder, task, data, **more):
    how = QUIET | {"enable_checkpointing": True} | more
    trainer = L.Trainer(max_steps=2, default_root_dir=folder, limit_val_batches=1, **how)
    trainer.fit(task, data)
    return trainer


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # which has the state of a ModelCheckpoint
def test_a_classifier_learns_its_sizes_from_the_data_and_its_checkpoint_is_loaded(tmp_path):
    task, data = vitlab.Classifier(**SMALL), vitlab.Digits(subset=0.1, batch_size=16)
    trained(tmp_path, task, data)
    assert task.net.img_size == (8, 8)
    assert (task.net.in_chans, task.net.num_classes, task.hparams["num_classes"]) == (1, 10, 10)
    file = next(Path(tmp_path).rglob("*.ckpt"))
    net, transform = vitlab.load(file)
    image = Image.radial_gradient("L").resize((8, 8))
    torch.testing.assert_close(transform(image), data.eval_transform(image))
    task.eval()
    torch.testing.assert_close(net(transform(image)[None]), task(transform(image)[None]))
    again = vitlab.Classifier.load_from_checkpoint(file)
    assert again.net.img_size == (8, 8)
    tester = L.Trainer(**QUIET)
    assert "acc1" in str(tester.test(vitlab.Classifier(**SMALL), data, ckpt_path=file, verbose=False))


def test_a_classifier_needs_no_arguments(tmp_path):
    data = vitlab.Digits(subset=0.05, batch_size=8)
    plain, task = vitlab.Classifier(), vitlab.Classifier(embed_dim=16, depth=1, num_heads=2)
    plain.take_sizes(data)
    trained(tmp_path, task, data)  # a smaller one that is told as little of the images
    for net in (plain.net, task.net):
        assert (net.img_size, net.patch_size, net.grid_size, net.num_classes) == ((8, 8), 2, (4, 4), 10)
    net, transform = vitlab.load(next(Path(tmp_path).rglob("*.ckpt")))
    assert net(transform(Image.new("L", (8, 8)))[None]).shape == (1, 10)
    with pytest.raises(ValueError, match="`patch_size` must divide"):  # what was given stays
        vitlab.Classifier(**SMALL | {"patch_size": 16}).take_sizes(vitlab.Digits())


class Noting(vitlab.Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("val/own", batch[1].float().mean())
        return super().validation_step(batch, batch_idx)


def test_lightning_advises_to_average_over_processes_what_a_subclass_logs_and_not_what_is_summed(monkeypatch):
    logged = "lightning.pytorch.trainer.connectors.logger_connector.result"
    monkeypatch.setattr(f"{logged}._distributed_is_initialized", lambda: True)
    monkeypatch.setattr(f"{logged}.warning_cache", WarningCache())
    with pytest.warns(UserWarning, match="sync_dist=True") as heard, lightning_quieted():
        L.Trainer(**QUIET).validate(Noting(**SMALL), vitlab.Digits(subset=0.1, batch_size=16), verbose=False)
    assert len(heard) == 1 and "`self.log('val/own', " in str(heard[0].message)


def test_a_checkpoint_watches_what_a_task_watches_once_it_knows_its_targets(tmp_path):
    arrays = vitlab.data.Arrays(torch.rand(24, 1, 8, 8).numpy(), (torch.rand(24, 3) > 0.5).int().numpy(), num_workers=0)
    assert arrays.targets["kind"] == "multilabel"
    task, keeper = vitlab.Classifier(**SMALL, loss="bce"), vitlab.callbacks.Checkpoint()
    trainer = L.Trainer(logger=False, callbacks=[keeper], default_root_dir=tmp_path, accelerator="cpu")
    trainer.datamodule = arrays
    keeper.setup(trainer, task, "fit")
    assert (keeper.mode, keeper.monitor) == ("max", "val/map")


def test_weights_do_not_depend_on_whether_sizes_are_given_or_learned_from_the_data():
    data = vitlab.Digits(subset=0.1, batch_size=16)
    task = vitlab.Classifier(**SMALL)
    torch.manual_seed(3)
    task.take_sizes(data)
    torch.manual_seed(3)
    expected = vitlab.Classifier(**SMALL, img_size=8, in_chans=1, num_classes=10)
    assert all(torch.equal(v, expected.state_dict()[k]) for k, v in task.state_dict().items())


def test_a_network_with_changed_weights_is_not_built_again():
    data = vitlab.Digits(subset=0.1, batch_size=16)
    fits = vitlab.Classifier(**SMALL, img_size=8, in_chans=1, num_classes=10)
    with torch.no_grad():
        fits.net.head.weight.fill_(3)
    fits.take_sizes(data)
    assert (fits.net.head.weight == 3).all()
    other = vitlab.Classifier(**SMALL)
    with torch.no_grad():
        other.net.head.weight.fill_(3)
    with pytest.raises(ValueError, match=r"build it with img_size=\[8, 8\], in_chans=1, num_classes=10"):
        other.take_sizes(data)


def test_what_was_frozen_or_replaced_counts_as_changed():
    task = vitlab.Classifier(**SMALL)
    assert task.is_as_built()
    task.net.head.requires_grad_(False)
    assert not task.is_as_built()


def step_with(task, optimizer):
    for weight in task.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()


@pytest.mark.parametrize(
    "write",
    [
        lambda task: step_with(task, torch.optim.AdamW(task.parameters(), lr=1e-3, fused=True)),
        lambda task: step_with(task, torch.optim.SGD(task.parameters(), lr=1e-3, fused=True)),
        lambda task: task.net.head.bias.data.fill_(3.0),
    ],
    ids=["fused AdamW", "fused SGD", "data"],
)
def test_weights_written_without_a_new_version_count_as_changed_and_a_run_starts_with_them(write):
    task = vitlab.Classifier(**SMALL)
    assert _weights_of(task) is None
    write(task)
    assert not task.is_as_built()
    assert torch.equal(_weights_of(task)["net.head.bias"], task.net.head.bias)
