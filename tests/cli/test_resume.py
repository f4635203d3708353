"""A stopped run continues to the same numbers, whatever stopped it and wherever."""

import contextlib
import json
import random
import shutil
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.cli.commands import finish, start
from vitlab.callbacks.record import RunRecord
from vitlab.cli.main import main
from vitlab.data import ImageFolder
from vitlab.errors import Stopped
from vitlab.jobs.train import facts
from vitlab.look.moments import Moments
from vitlab.tasks import Classifier

CONFIG = Path(__file__).parents[2] / "configs" / "t2t.yaml"
EMA = '[{"class_path": "EMA", "init_args": {"decay": 0.9}}]'
HARD = ["--model.drop_path_rate=0.2", "--data.mixup=0.4", "--data.augment=crop-flip", f"--trainer.callbacks={EMA}"]
FIT = ["fit", "--config", str(CONFIG), "--trainer.logger=false", "--trainer.log_every_n_steps=1", *HARD]
FIT += ["--model.depth=2"]  # of which the second block drops paths
FIT += ["--trainer.max_epochs=3", "--data.batch_size=32", "--data.subset=0.3"]  # ten steps an epoch
DDP = ["--trainer.devices=2", "--trainer.strategy=ddp"]
POINTS = random.Random(24).sample(range(3, 24), 3)  # steps of 30


def finish_here(arguments, cwd):
    """Run a command to its end in this process, which saves a start."""
    with contextlib.chdir(cwd):
        assert main(arguments) == 0


def stop_at(step, number, arguments, cwd, name):
    """Start a run, send it a signal once it has made ``step`` steps, and return its exit code and output."""
    process = start([*arguments, "--name", name], cwd)
    rows = cwd / "runs" / name / "metrics.jsonl"
    until = time.monotonic() + 300
    while time.monotonic() < until and process.poll() is None:
        if rows.exists() and f'"step": {step},' in rows.read_text():
            break
        time.sleep(0.005)
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def curve(run):
    """The metrics of a run by step: the last word on each, without what depends on the clock."""
    rows = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        kind = "val" if "val/loss" in row else "train"
        rows[kind, row["step"]] = {k: v for k, v in row.items() if "/" in k or k in ("lr", "grad_norm", "epoch")}
    return rows


def same(one, other):
    ours, theirs = (load_file(run / "weights" / "last.safetensors") for run in (one, other))
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert curve(one) == curve(other)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    finish_here([*FIT, "--name", "whole"], folder)
    return folder / "runs" / "whole"


@pytest.mark.parametrize(
    ("name", "number", "step", "code"),
    [
        ("term", signal.SIGTERM, POINTS[0], 75),
        pytest.param("usr1", signal.SIGUSR1, POINTS[1], 75, marks=pytest.mark.rare),
        pytest.param("int", signal.SIGINT, POINTS[2], 130, marks=pytest.mark.rare),
    ],
)
def test_a_signal_saves_leaves_and_the_rest_is_bit_identical(whole, name, number, step, code):
    folder = whole.parents[1]
    returned, output = stop_at(step, number, FIT, folder, name)
    assert returned == code, output
    assert "Traceback" not in output
    assert json.loads((folder / "runs" / name / "run.json").read_text())["status"] == "preempted"
    finish_here(["fit", "--resume", name], folder)
    same(whole, folder / "runs" / name)


@pytest.mark.rare  # the signal of the test above goes the same way back, each time
@pytest.mark.parametrize("every", [0, 5])  # from the end of the epoch before, and from its middle
def test_a_kill_loses_nothing(whole, every):
    folder, name = whole.parents[1], f"kill{every}"
    arguments = [*FIT, f"--checkpoint.every_n_steps={every}"] if every else FIT
    returned, _ = stop_at(17, signal.SIGKILL, arguments, folder, name)
    assert returned == -signal.SIGKILL
    assert json.loads((folder / "runs" / name / "run.json").read_text())["status"] == "running"
    finish_here([*arguments, "--name", name, "--resume", "--data.num_workers=1"], folder)
    assert json.loads((folder / "runs" / name / "run.json").read_text())["attempts"] == 2
    same(whole, folder / "runs" / name)


def test_a_run_limited_by_steps_resumes_after_an_epoch_with_the_next_one(here, monkeypatch):
    words = ["fit", "--config", str(CONFIG.with_name("vit.yaml")), "--trainer.logger=false", "--model.depth=1"]
    words += ["--trainer.max_epochs=-1", "--trainer.max_steps=20", "--data.batch_size=32", "--data.subset=0.3"]
    assert main([*words, "--name", "whole"]) == 0  # ten steps an epoch

    def ends(self, trainer, task, batch, batch_idx):
        if trainer.global_step == 12:
            raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(RunRecord, "on_train_batch_start", ends)
        with pytest.raises(RuntimeError, match="killed"):
            main([*words, "--name", "killed"])
    assert main(["fit", "--resume", "killed"]) == 0
    same(here / "runs" / "whole", here / "runs" / "killed")


@pytest.mark.rare
def test_two_processes_stop_together_and_continue_to_the_same_bits_or_as_one(tmp_path, capsys):
    two, runs = [*FIT, *DDP, "--trainer.max_epochs=2"], tmp_path / "runs"
    finish([*two, "--name", "whole"], tmp_path)
    for i, step in enumerate(sorted(point // 2 for point in POINTS)):  # steps of 20, in one run
        returned, output = stop_at(step, signal.SIGTERM, [*two, *(["--resume"] if i else [])], tmp_path, "parts")
        assert returned == 75, output
        if i == 0:
            shutil.copytree(runs / "parts", runs / "one")
    finish(["fit", "--resume", "parts"], tmp_path)
    same(runs / "whole", runs / "parts")
    finish_here(["fit", "--resume", "one", "--trainer.devices=1", "--trainer.strategy=auto"], tmp_path)
    assert "(continued)" in capsys.readouterr().out
    assert {step for kind, step in curve(runs / "one") if kind == "train"} == set(range(1, 21))


def test_a_run_of_an_older_vitlab_resumes_with_defaults_for_newer_options(here, monkeypatch, capsys):
    words = ["--config=vit", "--data.subset=0.2", "--trainer.logger=false", "--trainer.max_epochs=1", "--name=old"]
    assert main(["fit", *words]) == 0
    config = here / "runs/old/config.yaml"
    older = [line for line in config.read_text().splitlines() if "lr_scheduler:" not in line and "metrics:" not in line]
    config.write_text("\n".join(older))
    more = ["fit", "--resume=old", "--trainer.max_epochs=2"]
    assert main([*more, "--model.lr_scheduler=wsd"]) == 2
    assert "model.lr_scheduler: None -> wsd" in capsys.readouterr().err
    with monkeypatch.context() as other:  # what torch says of groups that another version has made
        wrong = ValueError("loaded state dict contains a parameter group that doesn't match")
        other.setattr(torch.optim.Optimizer, "load_state_dict", Mock(side_effect=wrong))
        assert main(more) == 2
    assert "start a new run --init_from runs/old" in capsys.readouterr().err
    assert main(more) == 0


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A folder with a finished run on 2 x 20 images, and other images of the same classes, and of others."""
    folder = tmp_path_factory.mktemp("refused")
    for seed, (root, names) in enumerate({"photos": "ab", "others": "ab", "strange": "xy"}.items()):
        pixels = np.random.default_rng(seed).integers(0, 256, (2, 20, 8, 8, 3), dtype=np.uint8)
        for name, images in zip(names, pixels, strict=True):
            (folder / root / name).mkdir(parents=True)
            for i, image in enumerate(images):
                Image.fromarray(image).save(folder / root / name / f"{i}.png")
    words = ["fit", "--config", str(CONFIG.with_name("vit.yaml")), "--data=ImageFolder", "--data.root=photos"]
    words += ["--data.img_size=8", "--data.batch_size=8", "--data.num_workers=0", "--model.depth=1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITLAB_CACHE", str(folder / "cache"))
        finish_here([*words, "--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--name", "done"], folder)
    return folder


@pytest.fixture
def resumed(done, here, monkeypatch):
    """A copy of it, where the test is."""
    shutil.copytree(done, here, dirs_exist_ok=True, symlinks=True)
    monkeypatch.setenv("VITLAB_CACHE", str(here / "cache"))
    return ["fit", "--resume", "done", "--trainer.max_epochs=2"]


def content(folder):
    return {p: p.is_symlink() or not p.is_file() or p.read_bytes() for p in folder.rglob("*")}


REFUSALS = {
    "other images": ["--data.root=others"],
    "other classes": pytest.param(["--data.root=strange"], marks=pytest.mark.rare),
    "a batch above the images": ["--data.batch_size=400"],
    "no images": pytest.param(["--data.root=nowhere"], marks=pytest.mark.rare),
    "another average": [f"--trainer.callbacks={EMA}"],
    "a precision": pytest.param(["--trainer.precision=16-true"], marks=pytest.mark.rare),
    "processes that do not divide the batch": ["--trainer.devices=3"],
}
RAISING = [  # where code of a user's, or an object that no longer fits its state, may refuse
    (ImageFolder, "setup", ValueError("no")),
    (Classifier, "load_state_dict", RuntimeError("Error(s) in loading state_dict")),
    (torch.optim.AdamW, "load_state_dict", ValueError("another parameter group")),
    (Classifier, "training_step", TypeError("no")),
]
SELDOM_RAISING = [(ImageFolder, "prepare_data", ValueError("no")), (Moments, "on_train_start", ValueError("no"))]


@pytest.mark.parametrize("words", REFUSALS.values(), ids=REFUSALS)
def test_a_refused_resume_leaves_a_finished_run_byte_for_byte_as_it_was(resumed, words, capsys):
    before = content(Path("runs/done"))
    assert main([*resumed, *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert content(Path("runs/done")) == before


def test_until_its_first_step_a_resume_leaves_the_configuration_and_data_of_the_run(resumed, monkeypatch):
    """Whatever ends it, SIGKILL too; a signal that it can catch keeps what was asked for."""
    files, seen = [Path("runs/done", name) for name in ("config.yaml", "data.json")], list[list[str]]()
    before = [path.read_text() for path in files]
    usual = facts.fingerprint
    monkeypatch.setattr(facts, "fingerprint", lambda data: usual(data) | {"data": "Others"})

    def stopped(*args):
        seen.append([path.read_text() for path in files])
        raise Stopped(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "training_step", stopped)
        assert main(resumed) == 75
    assert seen == [before] and "max_epochs: 1\n" in before[0]
    assert files[0].read_text() == before[0].replace("max_epochs: 1\n", "max_epochs: 2\n")
    assert json.loads(files[1].read_text()) == json.loads(before[1]) | {"data": "Others"}
    for path, text in zip(files, before, strict=True):
        path.write_text(text)
    assert main(resumed) == 0 and "max_epochs: 2\n" in files[0].read_text()


def test_a_refused_start_does_not_overwrite_a_run(resumed, monkeypatch):
    words = ["fit", "--config", "runs/done/config.yaml", "--name", "done", "--overwrite"]
    before = content(Path("runs/done"))
    assert main([*words, "--data.batch_size=400"]) == 2
    assert content(Path("runs/done")) == before
    with monkeypatch.context() as patch:
        patch.setattr(ImageFolder, "setup", Mock(side_effect=Stopped(signal.SIGTERM)))
        assert main(words) == main(words) == 75  # the second replaces the first, which never made a step
    assert main([*words, "--data.batch_size=400"]) == 2
    assert content(Path("runs/done")) == before
    assert main(words) == 0
    assert {path.name for path in Path("runs/done").glob(".*")} == set()
    assert json.loads(Path("runs/done/run.json").read_text())["attempts"] == 1


@pytest.mark.parametrize("raising", [RAISING, pytest.param(SELDOM_RAISING, marks=pytest.mark.rare)])
def test_so_does_one_that_fails_before_its_first_step(resumed, raising, monkeypatch):
    before = content(Path("runs/done"))
    for owner, name, error in raising:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Mock(side_effect=error))
            with contextlib.suppress(type(error)):
                assert main(resumed) == 2, name
        assert content(Path("runs/done")) == before, name
    assert main(resumed) == 0
    assert json.loads(Path("runs/done/run.json").read_text())["attempts"] == 2


def test_a_measurement_on_other_images_than_the_run_had_says_so(resumed, capsys):
    assert main(["test", "done", "--trainer.accelerator=cpu"]) == 0
    assert "other data" not in capsys.readouterr().out
    config = Path("runs/done/config.yaml")
    config.write_text(config.read_text().replace("root: photos", "root: others"))
    for command in ("test", "validate"):
        assert main([command, "done", "--trainer.accelerator=cpu"]) == 0
        assert "measured on other data than the run's: the training split is now" in capsys.readouterr().out
    assert main(["analyze", "errors", "done", "--data.root=strange"]) == 2
    assert capsys.readouterr().err.startswith("vitlab: runs/done: the checkpoint does not know the classes x, y")
