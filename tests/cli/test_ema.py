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
from vitlab.errors import UsageError
from vitlab.pretraining import DINO

NETWORK = {"img_size": 8, "in_chans": 1, "patch_size": 2, "embed_dim": 16, "depth": 1, "num_heads": 2}
CONFIG = Path(__file__).parents[2] / "configs" / "vit.yaml"
EMA = '--trainer.callbacks=[{"class_path": "EMA", "init_args": {"decay": 0.9}}]'


def test_the_average_is_what_is_validated_kept_and_exported(here):
    few = ["--trainer.logger=false", "--trainer.max_epochs=2", "--data.subset=0.3", "--model.depth=1"]
    assert main(["fit", "--config", str(CONFIG), *few, EMA, "--name=a"]) == 0
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


def averaging(net=None, module=None, steps=1, decay=0.5):
    """Return a module with a network, its average after `setup`, and a trainer that has made so many steps."""
    module, average = module or L.LightningModule(), Average(decay=decay)
    if net is not None:
        module.net = net
    trainer = SimpleNamespace(global_step=steps, precision="32-true")
    average.setup(trainer, module, "fit")
    return module, average, trainer


def take_step(module, average, trainer):
    """Start a training and take a step in it, which moves each weight by one."""
    average.on_train_start(trainer, module)
    module.net.weight.data += 1
    average.on_train_batch_end(trainer, module, None, None, 0)


def test_a_network_that_setup_builds_has_no_average():
    module, average, trainer = averaging()
    module.net = torch.nn.Linear(3, 2)  # as Lightning calls the callbacks first
    with pytest.raises(UsageError, match=r"^EMA copies .*LightningModule before its `setup`, .* in `__init__`$"):
        average.on_train_start(trainer, module)


def test_the_average_follows_the_network_to_its_device():
    module, average, trainer = averaging(torch.nn.Linear(3, 2))  # Lightning copies the network before it moves it
    module.to("meta")  # of other devices, the one that every machine has
    average.on_fit_start(trainer, module)
    average.on_train_start(trainer, module)
    average.on_train_batch_end(trainer, module, None, None, 0)
    assert {parameter.device.type for parameter in average._average_model.parameters()} == {"meta"}


def test_the_average_has_the_buffers_of_the_network():
    module, average, trainer = averaging(torch.nn.BatchNorm1d(2))
    average.on_train_start(trainer, module)
    module.net(torch.tensor([[1.0, 3.0], [2.0, 5.0]]))
    average.on_train_batch_end(trainer, module, None, None, 0)
    assert torch.equal(average.average.net.running_mean, module.net.running_mean) and module.net.running_mean.all()
    assert average.average.net.num_batches_tracked == 1


def test_the_average_has_a_buffer_that_is_assigned_anew_or_grows():
    module = L.LightningModule()
    module.mask = torch.nn.Parameter(torch.tensor(-torch.inf), requires_grad=False)
    module.register_buffer("center", torch.zeros(()))
    module.register_buffer("bank", torch.zeros(0))
    _, average, trainer = averaging(torch.nn.Linear(1, 1), module, steps=0)
    average.on_train_start(trainer, module)
    for step in (1, 2, 3):
        trainer.global_step = step
        module.center = module.center + 1
        module.bank = torch.cat([module.bank, module.center[None]])
        average.on_train_batch_end(trainer, module, None, None, 0)
        assert average.average.center == step and average.average.bank.tolist() == [1.0, 2.0, 3.0][:step]
        average._swap_models(module)  # a validation
        assert module.center == step and len(module.bank) == step and module.mask == -torch.inf
        average._swap_models(module)
        assert module.center == step and len(module.bank) == step


class Keeps(torch.nn.Linear):
    """Keeps a number beside its tensors."""

    now = 0

    def get_extra_state(self):
        return {"now": self.now}

    def set_extra_state(self, state):
        self.now = state["now"]


def test_a_checkpoint_has_what_a_part_keeps_beside_tensors_as_it_is_in_training():
    module, average, trainer = averaging(Keeps(3, 2))
    take_step(module, average, trainer)
    module.net.now = 3
    for _ in range(2):  # in training, and after it, where the network holds the average
        checkpoint = {"state_dict": module.state_dict()}
        average.on_save_checkpoint(trainer, module, checkpoint)
        for state in "state_dict", "current_model_state":
            assert checkpoint[state]["net._extra_state"] == {"now": 3}
        average.on_train_end(trainer, module)


def test_a_buffer_that_a_task_gets_after_the_copy_is_not_taken_for_another():
    module = L.LightningModule()
    module.register_buffer("loss_weights", None)
    _, average, trainer = averaging(torch.nn.BatchNorm1d(2), module)
    module.loss_weights = torch.tensor([3.0, 4.0])  # as a task counts the images of each class in its setup
    module.net.running_mean.fill_(7.0)
    average.on_train_start(trainer, module)
    average.on_train_batch_end(trainer, module, None, None, 0)
    for _ in range(2):  # to the average and back
        average._swap_models(module)
        assert module.loss_weights.tolist() == [3.0, 4.0] and module.net.running_mean.tolist() == [7.0, 7.0]
    average.on_train_end(trainer, module)
    assert module.loss_weights.tolist() == [3.0, 4.0] and average.average.net.running_mean.tolist() == [7.0, 7.0]


def test_the_average_of_a_second_training_is_that_of_its_own_network():
    average = Average(decay=0.5)
    for steps in (100, 5, 1):  # beyond the warm-up, within it, and at its begin
        module, trainer = L.LightningModule(), SimpleNamespace(global_step=steps, precision="32-true")
        module.net = torch.nn.Linear(3, 2)
        start = module.net.weight.detach().clone()
        average.setup(trainer, module, "fit")
        average.on_train_start(trainer, module)
        module.net.weight.data += 1
        for batch in range(2):  # of one step
            average.on_train_batch_end(trainer, module, None, None, batch)
        moved = {100: 0.5, 5: 1 - 6 / 15, 1: 1 - 2 / 11}[steps]
        torch.testing.assert_close(average.average.net.weight.detach(), start + moved)


def test_another_network_is_validated_with_its_own_weights_after_a_training():
    trained, average, trainer = averaging(torch.nn.Linear(3, 2))
    other = averaging(torch.nn.Linear(3, 2))[0]
    own = other.net.weight.detach().clone()
    average.on_train_end(trainer, trained)
    average.setup(trainer, other, "validate")
    average.on_validation_epoch_start(trainer, other)
    assert torch.equal(other.net.weight, own) and average.average is None


@pytest.mark.parametrize("moment", ["in training", "in a validation", "after the training"])
def test_a_checkpoint_of_any_moment_has_average_and_weights_in_their_places(moment):
    module, average, trainer = averaging(torch.nn.Linear(3, 2))
    take_step(module, average, trainer)
    weights, averaged = (part.state_dict()["net.weight"].clone() for part in (module, average.average))
    if moment == "in a validation":
        average.on_validation_epoch_start(trainer, module)
    elif moment == "after the training":
        average.on_train_end(trainer, module)
    checkpoint = {"state_dict": module.state_dict()}
    average.on_save_checkpoint(trainer, module, checkpoint)
    assert torch.equal(checkpoint["state_dict"]["net.weight"], averaged)
    assert torch.equal(checkpoint["current_model_state"]["net.weight"], weights)
    assert torch.equal(module.net.weight, weights if moment == "in training" else averaged)


def test_the_average_begins_with_the_weights_that_the_training_begins_with():
    task = DINO(**NETWORK, prototypes=12, proj_hidden=10, proj_dim=6)
    with torch.no_grad():
        task.net.blocks[0].mlp.fc1.weight.add_(1.0)  # of the teacher, as --init_from loads them
    _, average, trainer = averaging(module=task, steps=0)
    task.on_fit_start()  # gives them to the student
    average.on_fit_start(trainer, task)
    average.on_train_start(trainer, task)
    name = "student.blocks.0.mlp.fc1.weight"
    assert torch.equal(average.average.state_dict()[name], task.state_dict()[name])


class Taught(L.LightningModule):
    """A module whose checkpoints leave a frozen teacher out."""

    def __init__(self):
        super().__init__()
        self.net, self.teacher = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).requires_grad_(False)

    def state_dict(self, *args, **kwargs):
        return {k: v for k, v in super().state_dict(*args, **kwargs).items() if not k.startswith("teacher.")}


@pytest.mark.parametrize("strict", [False, True])
def test_what_a_checkpoint_leaves_out_is_missed_only_where_a_module_loads_strictly(strict):
    module, average, trainer = averaging(module=Taught())
    take_step(module, average, trainer)
    checkpoint = {"state_dict": module.state_dict()}
    average.on_save_checkpoint(trainer, module, checkpoint)
    assert [*checkpoint["state_dict"]] == ["net.weight", "net.bias"]
    again, resumed, _ = averaging(module=Taught())
    again.strict_loading, teacher = strict, again.teacher.weight.clone()
    if strict:
        with pytest.raises(RuntimeError, match="Missing key"):
            resumed.on_load_checkpoint(trainer, again, checkpoint)
        return
    resumed.on_load_checkpoint(trainer, again, checkpoint)
    resumed.on_train_start(trainer, again)
    assert torch.equal(again.net.weight, module.net.weight) and torch.equal(again.teacher.weight, teacher)
    assert torch.equal(resumed.average.net.weight, average.average.net.weight)


def test_a_resumed_average_stays_what_it_was():
    module, average, trainer = averaging(torch.nn.Linear(3, 2), steps=7)
    current = {name: value.clone() for name, value in module.state_dict().items()}
    saved = {name: value + 1 for name, value in current.items()}
    state = {"n_averaged": torch.tensor(7)}
    average.on_load_checkpoint(
        trainer, module, {"state_dict": saved, "current_model_state": current, "averaging_state": state}
    )
    average.on_train_start(trainer, module)
    assert torch.equal(average.average.net.weight, saved["net.weight"])
    assert torch.equal(module.net.weight, current["net.weight"])
