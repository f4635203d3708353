"""Modules and data that know nothing of vitlab: trained, stopped, resumed and measured by its commands."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

import vitlab
from tests.cli.own import BARS, FACTS, NET, SHORT, TESTS, VIT, one_line, save_digit
from vitlab.class_paths import choice_text
from vitlab.cli.main import main
from vitlab.config import trust
from vitlab.jobs.restore import restore
from vitlab.runs.directory import RunDir

pytestmark = pytest.mark.usefixtures("userpkg")


def test_a_dry_run_takes_a_module_and_data_that_know_nothing_of_vitlab(here, capsys):
    assert main(["fit", *NET, *BARS, *SHORT, "--dry_run"]) == 0
    assert "everything can be built" in capsys.readouterr().out
    scaled = ["--model.lr=0.001", "--model.lr_scale=linear", "--trainer.accumulate_grad_batches=4"]
    assert main(["fit", *VIT, *FACTS, *BARS, *SHORT, *scaled, "--dry_run"]) == 0
    assert ", adamw, lr 0.004, " in capsys.readouterr().out  # which is that of its training
    assert list(here.iterdir()) == []


def read(run, name):
    return json.loads((Path("runs") / run / name).read_text())


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


def test_a_run_on_data_that_deals_samples_and_state_nothing_is_measured(monkeypatch):
    """What only the command line stated of them was not stored, and neither test nor resume built the network."""
    import userpkg

    monkeypatch.setattr(userpkg.Bars, "deals_samples", True, raising=False)
    short = ["--trainer.accelerator=cpu", "--trainer.max_steps=1", "--name=own"]
    assert main(["fit", *VIT, *FACTS, *BARS, *short]) == 0
    assert main(["test", "own", "--trust_imports=userpkg"]) == 0
    assert read("own", "run.json")["promises"] == {}  # vitlab does not know how they divide


@pytest.mark.slow
def test_files_to_predict_are_divided_among_processes_once_on_own_data_too():
    """Lightning divided the share of each process again: half of the predictions were missing."""
    assert main(["fit", *VIT, *FACTS, *BARS, "--trainer.accelerator=cpu", "--trainer.max_steps=1", "--name=own"]) == 0
    run, two = RunDir("runs/own"), ["--trainer.accelerator=cpu", "--trainer.devices=2"]
    divides = [
        restore(run, run.path / "checkpoints/last.ckpt", two, **settings).trainer._accelerator_connector
        for settings in ({"use_distributed_sampler": False}, {})
    ]
    assert [connector.use_distributed_sampler for connector in divides] == [False, True]


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
