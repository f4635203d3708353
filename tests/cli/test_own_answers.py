"""Tasks that answer otherwise than the network that their arguments build."""

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from PIL import Image
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import vitlab
from tests.cli.own import VIT, one_line, save_digit
from vitlab.cli.main import main
from vitlab.errors import UsageError
from vitlab.interface import arguments_of_net, as_outputs, own_answer
from vitlab.jobs.checkpoint import save_weights
from vitlab.jobs.export import _scores, export
from vitlab.jobs.exported import ExportOptions
from vitlab.jobs.formats import Plain, network_arguments
from vitlab.models.load import load_network, load_weights
from vitlab.runs.directory import RunDir
from vitlab.tasks.distillation import read_teacher

pytestmark = pytest.mark.usefixtures("userpkg")


class _Named(torch.nn.Flatten):
    def forward(self, images):
        return {"logits": super().forward(images), "images": images}


def test_the_logits_of_a_dict_are_predicted_and_exported():
    """Such a module was trained and analyzed, and `predict` and `export` refused it."""
    images = torch.rand(2, 1, 4, 4)
    assert Plain(_Named(), 1, (4, 4))(images).equal(images.flatten(1))
    assert as_outputs(_Named()(images), None).equal(images.flatten(1))


def derived(name):
    """Train a task of userpkg.answers for a step."""
    size = [word.replace("embed_dim=48", "embed_dim=12") for word in VIT[1:]]
    words = [f"--model=userpkg.answers.{name}", *size, "--trust_imports=userpkg", "--data=Digits", "--data.subset=0.05"]
    words += ["--data.batch_size=16", "--model.init_std=0.5"]
    assert main(["fit", *words, "--trainer.max_steps=1", f"--name={name}", "--quiet"]) == 0
    return Path("runs") / name


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("OtherNet", r"`--to safetensors` is for networks of vitlab, got userpkg\.answers\.Both: use --to onnx or pt2"),
        (
            "Spread",
            r"the network of userpkg\.answers\.Spread is another one than vitlab builds from its arguments: use ",
        ),
        pytest.param("Warm", r"is for networks of vitlab, got userpkg\.answers\.Warm: use", marks=pytest.mark.rare),
    ],
)
def test_what_answers_otherwise_than_its_arguments_build_is_no_network_of_vitlab(name, told, capsys):
    run, way = derived(name), "must be a network that `vitlab export --to safetensors` takes"
    capsys.readouterr()
    assert main(["export", name, "--to=safetensors", "--trust_imports=userpkg"]) == 2
    assert re.search(told, one_line(capsys))
    weights = run / "weights" / "last.safetensors"
    if name != "Spread":  # nothing that a file could tell
        with pytest.raises(ValueError, match=way):
            read_teacher(str(run))
    if name == "OtherNet":
        with pytest.raises(ValueError, match=r"has the weights of userpkg\.answers\.Both, which does not compute"):
            load_network(weights)
        net = vitlab.VisionTransformer(8, 1, 10, patch_size=2, embed_dim=12, depth=1, num_heads=3)
        assert load_weights(net, weights)[0].startswith("weights: of userpkg.answers.Both, which computes something")
    loaded = vitlab.load(weights).net
    loaded(torch.zeros(1, 1, 8, 8))
    assert type(loaded).__name__ == {"OtherNet": "Both", "Spread": "VisionTransformer", "Warm": "Warm"}[name]


def test_a_network_with_an_added_weight_is_refused_with_the_way_out(capsys):
    """The line named a file of weights that was removed, and no way out."""
    derived("Extra")
    capsys.readouterr()
    assert main(["export", "Extra", "--to=safetensors", "--trust_imports=userpkg"]) == 2
    assert "Extra is another one than vitlab builds from its arguments: use --to onnx or pt2" in one_line(capsys)


class Fixed(L.LightningModule):
    """Saves its arguments, which are not all of its network's."""

    def __init__(self, img_size=(8, 8), in_chans=1, num_classes=10, patch_size=4, embed_dim=12, depth=1):
        super().__init__()
        self.save_hyperparameters()
        self.net = vitlab.VisionTransformer(**self.hparams, num_heads=2, act_layer="relu", init_std=0.5)


def test_weights_know_what_a_module_fixes_of_its_network(here):
    task, images = Fixed().eval(), torch.randn(2, 1, 8, 8)
    content = {"state_dict": task.state_dict(), "hyper_parameters": dict(task.hparams)}
    torch.save({**content, "network": arguments_of_net(task), "own": own_answer(task)}, here / "last.ckpt")
    save_weights(here / "last.ckpt", here / "last.safetensors", task)
    for file in ("last.ckpt", "last.safetensors"):
        torch.testing.assert_close(load_network(here / file)(images), task.net(images))
    assert network_arguments(task.net)["num_heads"] == 2


def test_weights_know_which_part_of_its_network_a_task_exchanged(here):
    from userpkg.answers import Relu

    size = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2, "num_classes": 3}
    task, what = Relu(**size), "a network with ReLU in place of GELU as blocks.0.mlp.act"
    content = {"state_dict": task.state_dict(), "hyper_parameters": dict(task.hparams), "own": own_answer(task)}
    torch.save(content, here / "last.ckpt")
    save_weights(here / "last.ckpt", here / "last.safetensors", task)
    for file in ("last.ckpt", "last.safetensors"):
        with pytest.raises(ValueError, match=f"{file} has the weights of {what}, which does not compute what"):
            load_network(here / file)
        told = [f"weights: of {what}, which computes something else than this network"]
        assert load_weights(vitlab.VisionTransformer(**size), here / file) == told
        assert load_weights(Relu(**size).net, here / file) == []


def test_what_changes_no_answer_and_what_fsdp2_makes_of_a_class_is_no_other_network():
    size = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2, "num_classes": 3}
    task = vitlab.Classifier(**size, freeze=["blocks"], drop_path_rate=0.1)
    net: Any = task.net
    net.blocks[0].drop_path.rate, net.blocks[0].mlp.dropout, net.grad_checkpoint = 0.3, nn.Identity(), True
    net.reset_head(0)
    for part in (net, net.blocks[0]):  # as `fully_shard` does
        part.__class__ = type(
            f"FSDP{type(part).__name__}", (FSDPModule, type(part)), {"__module__": fully_shard.__module__}
        )
    assert own_answer(task) == {}
    net.norm.eps, net.pos_embed = 0.5, nn.Identity()
    assert own_answer(task)["network"] == "a network with Identity in place of Learned as pos_embed, and 1 more"


def test_all_commands_take_the_answers_of_a_tasks_own_forward(here):
    derived("Flips")
    save_digit(here / "images")
    image = torch.arange(64).view(8, 8).mul(3)
    Image.fromarray(image.to(torch.uint8).numpy()).save(here / "images" / "a.png")
    net, transform = vitlab.load("runs/Flips")
    images = transform(Image.open(here / "images" / "a.png"))[None]
    with torch.no_grad():
        expected = (net.net(images) + net.net(images.flip(-1))) / 2
        torch.testing.assert_close(net(images), expected)
        assert not torch.allclose(net.net(images), expected, atol=1e-4)
    net.eval_loss, net.val_meter.update = lambda outputs, targets: 0.0, lambda outputs, *rest: seen.append(outputs)
    seen = []
    net.validation_step((images, torch.zeros(1, dtype=torch.long)), 0)
    torch.testing.assert_close(seen[0], expected)
    assert main(["predict", "Flips", "images", "--trust_imports=userpkg", "--topk=1", "--output=a.csv"]) == 0
    best = float(Path("a.csv").read_text().splitlines()[1].split(",")[-1])
    assert best == pytest.approx(float(expected.softmax(1).max()), rel=1e-4)
    with pytest.raises(UsageError, match="`--to onnx-int8` measures a network alone"):
        asked = ExportOptions("onnx-int8", here / "a.onnx")
        export(RunDir("runs/Flips"), Path("runs/Flips/checkpoints/last.ckpt"), asked)


def test_the_card_of_an_export_says_whether_scores_are_logits():
    from userpkg.answers import Warm

    size = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2, "num_classes": 3}
    labels = {"targets": {"kind": "multilabel"}, "loss": "bce"}
    assert _scores(vitlab.Classifier(**size), "class") == _scores(Warm(**size), "class") == {"scores": "logits"}
    assert _scores(vitlab.Classifier(**size, **labels), "multilabel") == {"scores": "logits"}
    assert _scores(Warm(**size, **labels), "multilabel") == {"scores": "probabilities"}
    words = "as `forward` of vitlab.models.vit.VisionTransformer returns them"
    assert _scores(Fixed(), "multilabel") == {"scores": words}
    assert _scores(Fixed(), "number") == _scores(Fixed(), "feature") == {}


@pytest.mark.rare
def test_a_graph_has_the_answers_of_a_tasks_own_forward(here):
    task, images = vitlab.load(derived("Flips"), trust_imports=["userpkg"]).net, torch.randn(1, 1, 8, 8)
    assert main(["export", "Flips", "--to=pt2", "--trust_imports=userpkg", "--quiet"]) == 0
    graph = torch.export.load("runs/Flips/export/last.pt2").module()
    torch.testing.assert_close(graph(images), task(images))
