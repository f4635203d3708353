"""With an average of the weights, that is what is measured and what leaves the run."""

import json
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from safetensors.torch import load_file

from vitlab.callbacks.ema import EMA as Average
from vitlab.cli.main import main

CONFIG = Path(__file__).parents[2] / "configs" / "vit.yaml"
EMA = '--trainer.callbacks=[{"class_path": "EMA", "init_args": {"decay": 0.9}}]'


@pytest.mark.slow
def test_the_average_is_what_is_validated_kept_and_exported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        main(["fit", "--config", str(CONFIG), "--trainer.logger=false", "--trainer.max_epochs=2", EMA, "--name=a"]) == 0
    )
    checkpoint = torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)
    average = {key.removeprefix("net."): v for key, v in checkpoint["state_dict"].items() if key.startswith("net.")}
    raw = checkpoint["current_model_state"]
    assert not torch.equal(average["head.weight"], raw["net.head.weight"])
    assert main(["export", "runs/a/checkpoints/last.ckpt", "--to", "safetensors", "-o", "a.safetensors"]) == 0
    for exported in (load_file("a.safetensors"), load_file("runs/a/weights/last.safetensors")):
        assert exported.keys() == average.keys()
        assert all(torch.equal(exported[name], average[name]) for name in average)
    rows = [json.loads(line) for line in Path("runs/a/metrics.jsonl").read_text().splitlines()]
    during = [row["val/loss"] for row in rows if "val/loss" in row][-1]
    assert main(["validate", "runs/a/checkpoints/last.ckpt"]) == 0
    after = json.loads(Path("runs/a/results.json").read_text())["val"]
    assert after["weights"] == "ema"
    assert after["loss"] == pytest.approx(during, rel=1e-6)


def test_the_average_follows_the_network_to_its_device():
    module, average = L.LightningModule(), Average()
    trainer = SimpleNamespace(global_step=1, precision="32-true")
    module.net = torch.nn.Linear(3, 2)
    average.setup(trainer, module, "fit")  # Lightning copies the network before it moves it
    module.to("meta")  # of other devices, the one that every machine has
    average.on_fit_start(trainer, module)
    average.on_train_start(trainer, module)
    average.on_train_batch_end(trainer, module, None, None, 0)
    assert {parameter.device.type for parameter in average._average_model.parameters()} == {"meta"}


def test_the_average_has_the_buffers_of_the_network():
    module, average = L.LightningModule(), Average(decay=0.5)
    trainer = SimpleNamespace(global_step=1, precision="32-true")
    module.net = torch.nn.BatchNorm1d(2)
    average.setup(trainer, module, "fit")
    average.on_train_start(trainer, module)
    module.net(torch.tensor([[1.0, 3.0], [2.0, 5.0]]))
    average.on_train_batch_end(trainer, module, None, None, 0)
    assert torch.equal(average.average.net.running_mean, module.net.running_mean) and module.net.running_mean.all()
    assert average.average.net.num_batches_tracked == 1


def test_a_buffer_that_a_task_gets_after_the_copy_is_not_taken_for_another():
    module, average = L.LightningModule(), Average(decay=0.5)
    trainer = SimpleNamespace(global_step=1, precision="32-true")
    module.register_buffer("loss_weights", None)
    module.net = torch.nn.BatchNorm1d(2)
    average.setup(trainer, module, "fit")
    module.loss_weights = torch.tensor([3.0, 4.0])  # as a task counts the images of each class in its setup
    module.net.running_mean.fill_(7.0)
    average.on_train_start(trainer, module)
    average.on_train_batch_end(trainer, module, None, None, 0)
    for _ in range(2):  # to the average and back
        average._swap_models(module)
        assert module.loss_weights.tolist() == [3.0, 4.0] and module.net.running_mean.tolist() == [7.0, 7.0]
    average._copy_average_to_current(module)
    assert module.loss_weights.tolist() == [3.0, 4.0] and average.average.net.running_mean.tolist() == [7.0, 7.0]


def test_the_average_of_a_second_training_is_that_of_its_own_network():
    average = Average(decay=0.5)
    for steps in (5, 1):
        module, trainer = L.LightningModule(), SimpleNamespace(global_step=steps, precision="32-true")
        module.net = torch.nn.Linear(3, 2)
        start = module.net.weight.detach().clone()
        average.setup(trainer, module, "fit")
        average.on_train_start(trainer, module)
        module.net.weight.data += 1
        average.on_train_batch_end(trainer, module, None, None, 0)
        moved = 1 - min(0.5, (1 + steps) / (10 + steps))
        torch.testing.assert_close(average.average.net.weight.detach(), start + moved)


def test_another_network_is_validated_with_its_own_weights_after_a_training():
    trained, other, average = L.LightningModule(), L.LightningModule(), Average(decay=0.5)
    trainer = SimpleNamespace(global_step=1, precision="32-true")
    for module in (trained, other):
        module.net = torch.nn.Linear(3, 2)
    own = other.net.weight.detach().clone()
    average.setup(trainer, trained, "fit")
    average.on_train_end(trainer, trained)
    average.setup(trainer, other, "validate")
    average.on_validation_epoch_start(trainer, other)
    assert torch.equal(other.net.weight, own) and average.average is None
