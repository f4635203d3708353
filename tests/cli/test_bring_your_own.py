"""Modules and data that know nothing of vitlab: trained, stopped, resumed and measured by its commands."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from PIL import Image
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

import vitlab
from tests.training import QUIET
from vitlab.class_paths import choice_text
from vitlab.cli.main import main
from vitlab.config import trust
from vitlab.config.parser import VitlabCLI
from vitlab.errors import UsageError, in_own_code
from vitlab.interface import answering, arguments_of_net, as_outputs, own_answer
from vitlab.jobs.checkpoint import save_weights
from vitlab.jobs.export import _scores, export
from vitlab.jobs.exported import ExportOptions
from vitlab.jobs.formats import Plain, network_arguments
from vitlab.jobs.predict import _blank
from vitlab.jobs.train.endings import explain_mismatch
from vitlab.jobs.train.facts import model_facts
from vitlab.models.load import load_network, load_weights
from vitlab.runs.directory import RunDir
from vitlab.tasks.distillation import read_teacher

TESTS = Path(__file__).parents[1]
NET = ["--model=userpkg.Net", "--trust_imports", "userpkg"]
BARS = ["--data=userpkg.Bars", "--trust_imports", "userpkg"]
VIT = ["--model=Classifier", "--model.patch_size=2", "--model.embed_dim=48", "--model.depth=1", "--model.num_heads=3"]
FACTS = ["--model.img_size=8", "--model.in_chans=1", "--model.num_classes=10"]
SHORT = ["--trainer.accelerator=cpu", "--trainer.max_epochs=2"]


@pytest.fixture(autouse=True)
def _finds_userpkg(here, monkeypatch):
    monkeypatch.syspath_prepend(str(TESTS))


def test_a_dry_run_takes_a_module_and_data_that_know_nothing_of_vitlab(here, capsys):
    assert main(["fit", *NET, *BARS, *SHORT, "--dry_run"]) == 0
    assert "everything can be built" in capsys.readouterr().out
    scaled = ["--model.lr=0.001", "--model.lr_scale=linear", "--trainer.accumulate_grad_batches=4"]
    assert main(["fit", *VIT, *FACTS, *BARS, *SHORT, *scaled, "--dry_run"]) == 0
    assert ", adamw, lr 0.004, " in capsys.readouterr().out  # which is that of its training
    assert list(here.iterdir()) == []


def read(run, name):
    return json.loads((Path("runs") / run / name).read_text())


def save_digit(folder):
    folder.mkdir(parents=True)
    Image.new("L", (8, 8), 128).save(folder / "a.png")


COMBINATIONS = {
    "own module, own data": [*NET, *BARS],
    "own module, data of vitlab": [*NET, "--data=Digits", "--data.subset=0.2"],
    "task of vitlab, own data": [*VIT, *FACTS, *BARS],
}


@pytest.mark.parametrize("arguments", COMBINATIONS.values(), ids=COMBINATIONS)
def test_any_module_and_any_data_are_trained_measured_and_recorded(arguments, capsys):
    assert main(["fit", *arguments, *SHORT, "--name=own"]) == 0
    assert main(["fit", "--resume=own", "--trainer.max_epochs=3", "--trust_imports=userpkg"]) == 0
    for command in ("validate", "test"):
        assert main([command, "own", "--trust_imports=userpkg"]) == 0
    images = ["data/digits"] if "Digits" in str(arguments) else []
    for image in images:
        save_digit(Path(image))
    assert main(["predict", "own", *images, "--trust_imports=userpkg", "--output=table.csv"]) == 0
    assert len(Path("table.csv").read_text().splitlines()) == (2 if images else 65)
    if not images:  # each of two processes would print a part of the rows
        assert main(["predict", "own", "--trust_imports=userpkg", "--trainer.devices=2"]) == 2
        assert "takes one device: leave --trainer.devices out" in capsys.readouterr().err
    results = read("own", "results.json")
    assert any("acc" in name for name in results["test"])
    assert any("loss" in name for name in results["val"])
    assert read("own", "model.json")["parameters"] > 0
    assert read("own", "run.json")["status"] == "done"
    rows = [json.loads(line) for line in Path("runs/own/metrics.jsonl").read_text().splitlines()]
    assert {row["epoch"] for row in rows} == {0, 1, 2}
    assert any("train/loss" in row for row in rows)
    assert (Path("runs/own/weights/best.safetensors")).is_file()


def test_a_run_on_data_that_deals_samples_and_state_nothing_is_measured(monkeypatch, capsys):
    """What only the command line stated of them was not stored, and neither test nor resume built the network."""
    import userpkg

    monkeypatch.setattr(userpkg.Bars, "deals_samples", True, raising=False)
    short = ["--trainer.accelerator=cpu", "--trainer.max_steps=1", "--name=own"]
    assert main(["fit", *VIT, *FACTS, *BARS, *short]) == 0
    assert main(["test", "own", "--trust_imports=userpkg"]) == 0
    assert read("own", "run.json")["promises"] == {}  # vitlab does not know how they divide


@pytest.mark.rare
def test_two_processes_train_a_module_that_does_not_ask_for_its_number_of_steps(here):
    """Counting them is a collective: where the first process alone did so, it waited for the other for hours."""
    two = [*SHORT, "--trainer.devices=2", "--trainer.strategy=ddp", "--name=two"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "vitlab", "fit", *NET, *BARS, *two]
    done = subprocess.run(words, cwd=here, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (read("two", "run.json")["steps"], read("two", "run.json")["world_size"]) == (4, 2)


def test_a_custom_module_is_saved_on_a_signal_and_resumes(monkeypatch, capsys):
    monkeypatch.setenv("PREEMPT", "1")
    preempt = "--trainer.callbacks=[{class_path: userpkg.callback.Preempt}]"
    assert main(["fit", *NET, *BARS, *SHORT, "--name=own", preempt]) == 75
    monkeypatch.delenv("PREEMPT")
    assert torch.load("runs/own/checkpoints/last.ckpt", weights_only=True)["global_step"] == 6
    assert "sees other batches" in capsys.readouterr().out
    assert main(["fit", "--resume=own", "--trust_imports=userpkg"]) == 0
    assert torch.load("runs/own/checkpoints/last.ckpt", weights_only=True)["global_step"] == 8


PARTS = [
    *("--model.pos_embed=userpkg.pos.Coordinates", "--model.pos_embed.init_args.width=4", "--model.act_layer=Tanh"),
    *("--model.metrics=[F1Score, {class_path: userpkg.metric.Second, init_args: {first: 3}}]",),
    *("--model.lr_scheduler=userpkg.schedule.Harmonic", "--model.lr_scheduler.interval=step"),
    *("--model.lr=0.5", "--model.opt=SGD", "--model.opt.momentum=0.9", "--checkpoint.monitor=val/Second"),
]


def test_custom_parts_of_a_vitlab_task_are_recorded_and_resume_exactly(monkeypatch, capsys):
    preempt = "--trainer.callbacks=[{class_path: userpkg.callback.Preempt}]"
    words = ["fit", *VIT, *PARTS, "--data=Digits", "--data.subset=0.2", "--data.batch_size=32", *SHORT, preempt]
    assert main([*words, "--name=whole", "--trust_imports=userpkg"]) == 0
    monkeypatch.setenv("PREEMPT", "1")
    assert main([*words, "--name=own", "--trust_imports=userpkg"]) == 75
    monkeypatch.delenv("PREEMPT")
    assert main(["fit", "--resume=own", "--trust_imports=userpkg"]) == 0
    whole, own = (torch.load(f"runs/{n}/checkpoints/last.ckpt", weights_only=True) for n in ("whole", "own"))
    assert all(torch.equal(own["state_dict"][name], value) for name, value in whole["state_dict"].items())
    assert own["lr_schedulers"] == whole["lr_schedulers"]
    assert own["hyper_parameters"]["pos_embed"] == {"class_path": "userpkg.pos.Coordinates", "init_args": {"width": 4}}
    out = capsys.readouterr().out
    assert "position embedding userpkg.pos.Coordinates(width=4)" in out
    assert "continue with `vitlab fit --resume runs/own --trust_imports userpkg`" in out
    rows = [json.loads(line) for line in Path("runs/own/metrics.jsonl").read_text().splitlines()]
    scores = [row["val/Second"] for row in rows if "val/Second" in row]
    assert own["callbacks"]["Checkpoint"]["best_score"] == max(scores) != min(scores)
    assert main(["test", "own", "--trust_imports=userpkg"]) == 0
    assert {"Second", "F1Score", "acc1"} <= set(read("own", "results.json")["test"])
    assert main(["export", "own", "--to=safetensors", "--trust_imports=userpkg"]) == 0
    capsys.readouterr()
    assert main(["export", "own", "--to=timm", "--trust_imports=userpkg"]) == 2
    assert "does not have `pos_embed: userpkg.pos.Coordinates(width=4)`" in one_line(capsys)
    exported = next(Path("runs/own/export").glob("*.safetensors"))
    for source in ("own", exported):
        net, transform = vitlab.load(source, trust_imports=["userpkg"])
        assert net(transform(Image.new("L", (8, 8)))[None]).shape == (1, 10)
        trust.TRUSTED.clear()
        with pytest.raises(ValueError, match='add trust_imports="userpkg"'):
            vitlab.load(source)


class Misspelt(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.layer = nn.Linear(dim, width)  # noqa: F821

    def forward(self, x):
        return self.layer(x)


class Misfit(nn.Module):
    def forward(self, x):
        return x @ torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("Misspelt", r"test_bring_your_own\.py, line \d+, `self\.layer = .*`: NameError: name 'width' is not defined"),
        ("Misfit", r"fails in or after .*Misfit: .*test_bring_your_own\.py, line \d+, `return x @ .*`: RuntimeError"),
    ],
)
def test_a_mistake_in_a_part_of_ones_own_is_told_with_its_line(part, told, capsys):
    own = [f"--model.mlp_layer={__name__}.{part}", "--trust_imports", __name__]
    assert main(["fit", "--config", "vit", *own, "--dry_run"]) == 2
    said = capsys.readouterr().err
    assert re.search(told, said) and said.count("\n") == 1


def test_a_size_that_data_learn_in_their_setup_is_asked_for_as_one_that_they_lack():
    given: dict[str, Any] = {}
    cli = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(class_path="vitlab.tasks.Classifier")))
    cli.given_links = lambda: given
    data = SimpleNamespace(num_classes=None)
    with pytest.raises(UsageError, match=r"does not define `num_classes`: set --model\.num_classes"):
        VitlabCLI._reader(cli, "num_classes")(data)
    given["num_classes"] = 3
    assert VitlabCLI._reader(cli, "num_classes")(data) == 3
    data.num_classes = 10
    assert VitlabCLI._reader(cli, "num_classes")(data) == 10


def test_a_network_may_give_the_side_of_its_images():
    """`self.img_size = 8` in a network of one's own ended `fit` in a traceback."""
    task = L.LightningModule()
    task.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    task.net.img_size, data = 8, SimpleNamespace(img_size=(4, 4), in_chans=1)
    facts = model_facts(task, data)
    assert (facts["img_size"], facts["in_chans"], facts["macs"]) == ([8, 8], 1, 192)
    data = SimpleNamespace(img_size=8, in_chans=1, eval_transform=lambda image: torch.zeros(1, *image.size))
    assert _blank(data).shape == (1, 8, 8)  # in place of a picture that cannot be read


def test_what_needs_vitlabs_own_classes_is_refused_in_one_line(capsys, monkeypatch):
    assert main(["fit", *NET, *BARS, *SHORT, "--name=own"]) == 0
    capsys.readouterr()
    save_digit(Path("pictures"))
    for words, answer in {
        ("export", "own", "--to=safetensors"): "is for networks of vitlab, got userpkg.net.Net: use --to onnx or pt2",
        ("export", "own", "--to=pt2"): "let userpkg.data.Bars have `img_size` and `in_chans`; see docs/bring_your_own",
        ("predict", "own", "pictures"): "userpkg.data.Bars has no `eval_transform(image)`, which maps a PIL image",
        ("embed", "own", "pictures"): "userpkg.net.Net has no `embed(images)`, which returns features (B, D)",
        ("predict", "own", "picture.png"): "picture.png",
    }.items():
        assert main([*words, "--trust_imports=userpkg"]) == 2
        assert answer in one_line(capsys)
    for name, count in (("one", 64), ("both", 128)):
        assert main(["predict", "own", "--trust_imports=userpkg", f"--output={name}.csv"]) == 0
        rows = Path(f"{name}.csv").read_text().splitlines()
        assert len(rows) == 1 + count and rows[:65] == Path("one.csv").read_text().splitlines()
        both = lambda data: [data.test_dataloader(), data.val_dataloader()]  # noqa: E731
        monkeypatch.setattr("userpkg.data.Bars.predict_dataloader", both)
    assert len(vitlab.Run("own").predict()) == 128
    net, transform = vitlab.load("own", trust_imports=["userpkg"])
    assert net(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    with pytest.raises(ValueError, match="has no `eval_transform"):
        transform(Image.new("L", (8, 8)))


class _Named(torch.nn.Flatten):
    def forward(self, images):
        return {"logits": super().forward(images), "images": images}


def test_the_logits_of_a_dict_are_predicted_and_exported():
    """Such a module was trained and analyzed, and `predict` and `export` refused it."""
    images = torch.rand(2, 1, 4, 4)
    assert Plain(_Named(), 1, (4, 4))(images).equal(images.flatten(1))
    assert as_outputs(_Named()(images), None).equal(images.flatten(1))


def of_page(here):
    page = (TESTS.parent / "docs" / "bring_your_own.md").read_text()
    for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        if name := re.match(r"# (\w+\.py)\n", text):
            (here / name[1]).write_text(text)


@pytest.mark.rare
def test_the_module_of_the_page_is_trained_resumed_tested_and_exported(here, monkeypatch, capsys):
    of_page(here)
    monkeypatch.syspath_prepend(str(here))
    trusted = ["--trust_imports=mynet,mydata"]
    words = ["fit", "--model=mynet.MyNet", "--data=mydata.MyData", *SHORT, "--trainer.logger=false", "--name=own"]
    assert main([*words, *trusted]) == 0
    assert main(["fit", "--resume=own", "--trainer.max_epochs=3", *trusted]) == 0
    assert main(["test", "own", *trusted]) == 0
    save_digit(Path("pictures"))
    (Path("pictures") / "broken.png").write_text("no image")
    net, transform = vitlab.load("own", trust_imports=["mynet", "mydata"])
    outputs = net(transform(Image.open("pictures/a.png"))[None])
    assert outputs.shape == (1, 2)
    capsys.readouterr()
    assert main(["predict", "own", "pictures", "--output=table.csv", *trusted]) == 1  # one file is broken
    columns, row = Path("table.csv").read_text().splitlines()
    assert columns == "path,value_1,value_2"
    assert [float(text) for text in row.split(",")[1:]] == pytest.approx(outputs[0].tolist(), rel=1e-4, abs=1e-5)
    assert main(["embed", "own", "pictures/a.png", "--output=features.csv", *trusted]) == 0
    assert Path("features.csv").read_text().startswith("path,feature_1,feature_2,")
    assert main(["export", "own", "--to=pt2", "--check", *trusted]) == 0
    facts = json.loads(Path("runs/own/export/best.pt2.json").read_text())
    assert facts["images"] == {
        "shape": ["batch", 1, 8, 8],
        "values": "as `eval_transform` of mydata.MyData returns them",
    }
    assert main(["analyze", "errors,confusion,knn,attribution,cka", "own", "--num_images=16", *trusted]) == 0
    assert "not done" not in capsys.readouterr().out
    assert main(["look", "own", "--pictures=2", *trusted]) == 0
    page = Path("runs/own/look.html").read_text()
    assert "left out" not in capsys.readouterr().out and '"occlusion' in page and '"target": "class ' in page


def test_every_command_answers_with_all_that_a_checkpoint_holds_of_module_and_data(capsys):
    own = ["--model=userpkg.beside.Beside", "--data=userpkg.beside.Scaled", "--trust_imports", "userpkg"]
    trusted = ["--trust_imports", "userpkg"]
    short = ["--trainer.accelerator=cpu", "--trainer.logger=false"]
    assert main(["fit", *own, *short, "--trainer.max_epochs=6", "--name=own"]) == 0
    accuracy = vitlab.Run("own").validate()["acc"]
    assert accuracy > 0.3
    net, transform = vitlab.load("own")
    from userpkg.beside import Scaled

    images, labels = Scaled().bars(1).tensors
    pictures = [Image.fromarray((255 * image[0] / 3).byte().numpy()) for image in images]
    for i, picture in enumerate(pictures):
        picture.save(f"{i:02}.png")
    seen = torch.stack([3 * transform(picture) for picture in pictures])
    assert seen.max() < 1.05
    assert (net(seen).argmax(1) == labels).float().mean().item() == pytest.approx(accuracy, abs=0.05)
    assert main(["predict", "own", "00.png", *trusted, "-o", "found.csv"]) == 0
    assert "feature_1" not in Path("found.csv").read_text()
    assert main(["embed", "own", "00.png", *trusted, "-o", "features.csv"]) == 0
    assert "feature_12" in Path("features.csv").read_text() and "feature_13" not in Path("features.csv").read_text()
    capsys.readouterr()
    assert main(["fit", *own, *short, "--trainer.max_epochs=1", "--init_from=own", "--name=next"]) == 0
    assert "init   weights: those outside the network, too, classify" in capsys.readouterr().out
    shutil.rmtree("runs/own/checkpoints")
    with pytest.warns(UserWarning, match=r"has weights alone: what Beside.on_load_checkpoint reads stays as it is"):
        vitlab.Run("own").validate()
    assert "has weights alone: Scaled stays as it is built" in capsys.readouterr().out


@pytest.mark.rare
def test_a_module_and_data_that_know_nothing_of_vitlab_are_ablated_from_python(monkeypatch):
    from userpkg import Bars, Net

    monkeypatch.setenv("PYTHONPATH", f"{TESTS.parent}{os.pathsep}{TESTS}")  # for the cells, processes of their own
    base = {"model": Net, "data": Bars, "trainer": {"max_epochs": 1, "accelerator": "cpu", "logger": False}}
    lab = vitlab.ablate(
        {
            "name": "width",
            "base": base,
            "axes": {"model.width": [4, 8]},
            "seeds": [0],
            "baseline": {"width": "4"},
            "metric": {"primary": "val_acc", "mode": "max"},
            "match": {"params": 9},
        }
    )
    assert lab.run(workers=1).code == 0
    arms = lab.report().arms
    assert arms["arm"].tolist() == ["4", "8"] and arms["n"].tolist() == [1, 1] and arms["mean"].between(0, 1).all()


class Tuples(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(4, 2)

    def forward(self, images):
        return self.layers(images.flatten(1)), None


def test_outputs_other_than_a_tensor_and_a_missing_forward_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"must return a tensor .B, K., got a tuple: return the outputs alone"):
        Plain(Tuples(), 1, (2, 2))
    with pytest.raises(ValueError, match=r"has neither `forward.images.` nor a `net` with one"):
        answering(L.LightningModule())


def one_line(capsys):
    text = capsys.readouterr().err.strip()
    assert text.startswith("vitlab: ")
    assert "\n" not in text
    return text


WRONG = {
    "loaders of the module alone": (["--model=userpkg.Net"], "missing: --data; a module's own loaders are not used"),
    "a module without a training step": (
        ["--model=userpkg.wrong.NoStep", *BARS],
        "cannot be trained without `training_step`",
    ),
    "hyper-parameters that no checkpoint may hold": (["--model=userpkg.wrong.SavesObject", *BARS], 'ignore=["loss"]'),
    "data with a path that no checkpoint may hold": (
        [*NET, "--data=userpkg.wrong.SavesPath"],
        "userpkg.wrong.SavesPath saves `root`, a PosixPath, as a hyper-parameter",
    ),
    "several outputs": (
        ["--model=userpkg.wrong.Several", *BARS],
        "`forward` of userpkg.wrong.Several must return a tensor (B, K), got a tuple: return the outputs alone",
    ),
    "several outputs by other names": (
        ["--model=userpkg.wrong.Scores", *BARS],
        "got a dict: return the outputs alone, or as `logits`",
    ),
    "several outputs of the network": (
        ["--model=userpkg.wrong.SeveralOfNet", *BARS],
        "`net` of userpkg.wrong.SeveralOfNet must return a tensor (B, K), got a tuple: give the module a `forward",
    ),
    "batches of another form": ([*NET, "--data=userpkg.wrong.Dicts"], "net.py, line"),
    "batches that a task of vitlab does not take": (
        [*VIT, *FACTS, "--data=userpkg.wrong.Dicts"],
        "userpkg.wrong.Dicts for train is {image: tensor (16, 1, 8, 8), label: tensor (16,)}",
    ),
    "two loaders for validation": (
        [*VIT, *FACTS, "--data=userpkg.wrong.TwoLoaders"],
        "Classifier takes one loader for validation, one for tests, and userpkg.wrong.TwoLoaders gives several",
    ),
    "weights that only data of vitlab can give": (
        [*VIT, *FACTS, *BARS, "--model.class_weights=balanced"],
        "vitlab: `class_weights: balanced` needs a data set of vitlab",
    ),
    "data that do not say their size": ([*VIT, *BARS], "Bars does not define `data.img_size`: set --model.img_size"),
    "a position embedding that is none": (
        [*VIT, "--data=Digits", "--model.pos_embed=userpkg.Net"],
        "`model.pos_embed`: userpkg.Net must be a subclass of vitlab.layers.pos_embed.base.PosEmbed",
    ),
    "a metric of another task": (
        [*VIT, "--data=Digits", "--model.metrics=[{class_path: F1Score, init_args: {task: binary}}]"],
        "`model.metrics`: F1Score does not take outputs (B, 10) and class targets",
    ),
    "an argument that no optimizer takes": (
        [*VIT, "--data=Digits", "--model.opt=torch.optim.SGD", "--model.opt.init_args.momentun=0.9"],
        '`model.opt`: torch.optim.sgd.SGD takes no argument `momentun`; did you mean "momentum"?',
    ),
    "a metric whose good end is not known": ([*NET, *BARS, "--checkpoint.monitor=val_acc"], "`checkpoint.mode`"),
}


@pytest.mark.parametrize(("arguments", "answer"), WRONG.values(), ids=WRONG)
def test_a_module_that_cannot_be_trained_is_refused_in_one_line_and_leaves_nothing(arguments, answer, capsys):
    assert main(["fit", *arguments, *SHORT, "--name=wrong", "--trust_imports=userpkg"]) == 2
    assert answer in one_line(capsys)
    assert not Path("runs/wrong").exists()


def test_an_array_in_the_state_of_a_callback_is_refused_at_the_first_save(capsys):
    words = [*NET, *BARS, "--trainer.callbacks+=userpkg.wrong.Counts", *SHORT, "--name=counts"]
    assert main(["fit", *words, "--trust_imports=userpkg"]) == 2
    shown = capsys.readouterr()
    assert (
        "a checkpoint with `callbacks.Counts.seen`, a numpy.ndarray, could not be read again" in shown.out + shown.err
    )
    assert not [*Path("runs/counts/checkpoints").glob("*.ckpt")]


@pytest.mark.parametrize(("model", "says"), [(VIT, "for test is {image: tensor (16, 1, 8, 8)"), (NET, "net.py, line")])
def test_a_batch_that_a_test_does_not_take_is_named_in_one_line(model, says, capsys):
    words = [*model, *FACTS[: None if model is VIT else 0], "--data=userpkg.wrong.OtherTests"]
    assert main(["fit", *words, *SHORT, "--name=other", "--trust_imports=userpkg"]) == 0
    capsys.readouterr()
    assert main(["test", "other", "--trust_imports=userpkg"]) == 2
    assert says in one_line(capsys)


def test_the_page_runs_as_it_stands(capsys, monkeypatch):
    page = (TESTS.parent / "docs" / "bring_your_own.md").read_text()
    for block in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", page, re.DOTALL):
        Path(block[1]).write_text(block[0])
        assert block[0].count("\n") <= 34
    monkeypatch.syspath_prepend(".")
    monkeypatch.setattr("vitlab.analysis.subject.printed", lambda figure, *_: figure)  # a third of the time
    size = ["--model.depth=1", "--model.embed_dim=48", "--model.num_heads=3", "--trainer.accelerator=cpu"]
    few = {"fit": ["--trainer.limit_train_batches=2", "--trainer.limit_val_batches=2"], "look": ["--pictures=1"]}
    few["analyze"] = ["--num_images=16"]
    for line in re.findall(r"^vitlab (.*)$", page, re.MULTILINE):
        words = line.split()
        assert main([*words, *few.get(words[0], []), *(size if "Classifier" in line else [])]) == 0, line
    assert "multiply-adds per image" in capsys.readouterr().out
    assert yaml.safe_load(Path("runs/fading/config.yaml").read_text())["model"]["init_args"]["attn"] == {
        "class_path": "myattention.Fading",
        "init_args": {"start": 0.2, "qk_norm": True},
    }
    assert {"F1Score", "FirstThree"} <= set(read("parts", "results.json")["val"])
    assert read("own", "data.json")["data"] == "Digits"
    assert read("vit", "data.json")["splits"]["train"]["n"] == 64


@pytest.mark.rare
def test_the_attention_of_the_page_is_ablated_against_vitlabs(here, monkeypatch, capsys):
    page = (TESTS.parent / "docs" / "bring_your_own.md").read_text()
    code = re.search(r"```python\n(# myattention\.py\n.*?)```", page, re.DOTALL)[1]
    assert code.count("\n") <= 30
    Path("myattention.py").write_text(code)
    monkeypatch.syspath_prepend(".")
    Path("base.yaml").write_text(
        "trainer: {max_epochs: 1, limit_train_batches: 2, accelerator: cpu}\n"
        "model: {class_path: Classifier, init_args: {patch_size: 2, depth: 1, embed_dim: 16, num_heads: 2}}\n"
        "data: {class_path: Digits}\n"
    )
    Path("fading.yaml").write_text(
        "name: fading\nbase: base.yaml\ntrust_imports: [myattention]\n"
        "axes:\n  attn:\n    softmax: {model.attn: softmax}\n"
        "    fading: {model.attn: {class_path: myattention.Fading, init_args: {start: 0.2}}}\n"
        "    normed: {model.attn.qk_norm: true}\n"
        "seeds: 2\nbaseline: {attn: softmax}\nevaluate: val\nmetric: {primary: acc1, mode: max}\n"
        "match: {within: [], steps: exact, params: 0.05, flops: 0.05, on_violation: fail}\n"
        "run: {executor: local, workers: 1}\n"
    )
    assert main(["ablate", "run", "fading.yaml", "--trust_imports", "myattention"]) == 0, capsys.readouterr().err
    cells = [yaml.safe_load(path.read_text())["model"]["init_args"]["attn"] for path in Path().rglob("config.yaml")]
    found = [choice_text(attn) for attn in cells]
    assert {text: found.count(text) for text in found} == {
        "softmax": 2,
        "myattention.Fading(start=0.2)": 2,
        "softmax(qk_norm=True)": 2,
    }
    assert main(["ablate", "report", "fading.yaml", "--trust_imports", "myattention"]) == 0
    assert "normed" in next(Path().rglob("report.md")).read_text()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DataLoader worker exited")]
)
def test_a_lack_of_memory_in_own_code_is_no_mistake_of_it(error):
    try:
        raise error  # here, in code that is not vitlab's
    except RuntimeError as raised:
        assert in_own_code(raised) and explain_mismatch(raised, L.LightningModule(), None, "test") is None


class TwoSamples(L.LightningDataModule):
    def __init__(self, *samples):
        super().__init__()
        self.samples = samples

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=2)

    val_dataloader = train_dataloader


@pytest.mark.parametrize(
    ("sample", "found"),
    [
        (
            (torch.zeros(1, 8, 8), 2),
            r"is \(tensor \(2, 1, 8, 8\), tensor \(2,\)\): IndexError: Target 2 is out of bounds",
        ),
        ((torch.zeros(1, 8, 8).byte(), 1), r"is \(tensor \(2, 1, 8, 8\) uint8, tensor \(2,\)\): RuntimeError"),
        (
            (torch.zeros(1, 8, 8), torch.tensor(1).int()),
            r"tensor \(2,\) int32\): RuntimeError: expected (target|scalar)",
        ),
        ((Image.new("L", (8, 8)), 1), r"for train cannot be loaded: TypeError: default_collate"),
    ],
    ids=["classes from 1", "bytes", "32 bits", "pictures"],
)
def test_a_batch_that_does_not_fit_is_shown_beside_what_the_task_takes(sample, found):
    data, net = TwoSamples(sample, sample), {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1}
    task = vitlab.Classifier(num_classes=2, num_heads=2, **net)
    with pytest.raises((IndexError, RuntimeError, TypeError)) as raised:
        L.Trainer(**QUIET, max_steps=1).fit(task, data)
    error = raised.value.with_traceback(raised.value.__traceback__.tb_next)  # without this test, code of one's own
    told = explain_mismatch(error, task, data)
    assert (
        "takes batches of images (B, C, H, W), float32, and classes (B,), int64 from 0 to 1, and the first of" in told
    )
    assert re.search(found, told)


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
