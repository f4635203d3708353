import json
from pathlib import Path

import pytest
import torch

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.cli.main import main
from vitlab.tasks import Classifier

CONFIG = str(Path(__file__).parents[2] / "configs" / "t2t.yaml")
FIT = ["fit", "--config", CONFIG, "--trainer.logger=false", "--trainer.max_epochs=3", "--data.batch_size=32"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_samples(here, capsys, monkeypatch):
    loss = Classifier.train_loss

    def broken(self, outputs, targets):
        factor = float("nan") if self.trainer.global_step == 40 else 1.0  # the sixth batch of the second epoch
        return loss(self, outputs, targets) * factor

    monkeypatch.setattr(Classifier, "train_loss", broken)
    assert main([*FIT, "--name", "nan"]) == 1
    out = capsys.readouterr().out
    assert "the loss is not finite in epoch 2, batch 6" in out
    assert "training samples [" in out
    run = here / "runs" / "nan"
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["epoch"] == 0
    assert all(torch.isfinite(v).all() for v in state["state_dict"].values())


def test_weights_that_are_not_finite_are_never_saved(here, monkeypatch, capsys):
    def spoil(self, trainer, task):
        if trainer.current_epoch == 1:
            task.net.head.weight.data[0, 0] = float("inf")
        end(self, trainer, task)

    end = Checkpoint.on_train_epoch_end
    monkeypatch.setattr(Checkpoint, "on_train_epoch_end", spoil)
    assert main([*FIT, "--name", "inf"]) == 1
    assert "the weights are not finite (first: net.head.weight)" in capsys.readouterr().out
    assert torch.load(here / "runs/inf/checkpoints/last.ckpt", weights_only=True)["epoch"] == 0


def test_running_out_of_memory_names_the_ways_out(here, monkeypatch, capsys):
    def full(self, outputs, targets):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Classifier, "train_loss", full)
    assert main([*FIT, "--name", "full"]) == 1
    assert "lower `data.batch_size`" in capsys.readouterr().out


def test_the_manifest_has_the_checksum_of_each_checkpoint(here):
    import hashlib

    assert main([*FIT, "--name", "sums", "--data.subset=0.1"]) == 0
    folder = here / "runs" / "sums" / "checkpoints"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest) == {"last.ckpt", "best.ckpt"}
    for name, entry in manifest.items():
        assert entry["sha256"] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert sorted(p.name for p in folder.iterdir()) == ["best.ckpt", "last.ckpt", "manifest.json"]
