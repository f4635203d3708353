"""Several processes: what each strategy does, refuses, and leaves behind."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vitlab.cli.main import main

CONFIG = str(Path(__file__).parents[2] / "configs" / "vit.yaml")
FIT = ["fit", "--config", CONFIG, "--trainer.logger=false", "--trainer.max_epochs=2", "--data.subset=0.3"]
FIT += ["--data.batch_size=32", "--trainer.log_every_n_steps=1", "--trainer.gradient_clip_val=0.5"]
TWO = ["--trainer.devices=2", "--trainer.strategy=fsdp2"]
EMA = '--trainer.callbacks=[{"class_path": "EMA"}]'


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--trainer.strategy=ddp_bf16"], "through NCCL; on a CPU use ddp"),
        (
            ["--trainer.strategy=ddp_static", "--trainer.accumulate_grad_batches=2"],
            "`trainer.strategy=ddp_static` does",
        ),
        (["--trainer.strategy=fsdp2", EMA], "keeps no EMA"),
        (["--trainer.strategy=fsdp2", "--model.opt=sgd"], "got `model.opt=sgd`"),
    ],
)
def test_what_a_strategy_cannot_do_is_refused(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*FIT, *arguments]) == 2
    assert told in capsys.readouterr().err


def run(arguments, cwd):
    words = [sys.executable, "-m", "vitlab", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows(cwd, name):
    lines = (cwd / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "train/loss" in row]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A folder with a finished run of two processes, called two."""
    folder = tmp_path_factory.mktemp("sharded")
    assert "Traceback" not in run([*FIT, *TWO, "--name", "two"], folder)
    return folder


@pytest.mark.rare
def test_sharded_training_is_that_of_one_process(sharded, tmp_path, monkeypatch, capsys):
    shutil.copytree(sharded, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert main([*FIT, "--name", "one"]) == 0
    one, two = rows(tmp_path, "one"), rows(tmp_path, "two")
    assert len(one) == len(two)
    for ours, theirs in zip(one, two, strict=True):
        for name in ("train/loss", "grad_norm", "lr"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3)
    ours, theirs = (load_file(f"runs/{name}/weights/last.safetensors") for name in ("one", "two"))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-3)  # of weights near 0.1
    assert main(["test", "two", "--trainer.devices=1", "--trainer.strategy=auto"]) == 0
    for name, strategy in (("one", "fsdp2"), ("two", "ddp")):
        assert main(["fit", "--resume", name, f"--trainer.strategy={strategy}", "--trainer.max_epochs=3"]) == 2
        assert f"-> {strategy}" in capsys.readouterr().err


@pytest.mark.rare
def test_sharded_training_continues_sharded(sharded, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums of several threads round differently
    stop = "import sys, signal; from vitlab.tasks import Classifier as C; from vitlab.cli.main import main\n"
    stop += "step = C.training_step\ndef stopping(self, batch, i):\n"
    stop += (
        "    if self.trainer.global_step == 14: signal.raise_signal(signal.SIGTERM)\n    return step(self, batch, i)\n"
    )
    stop += "C.training_step = stopping\nsys.exit(main())"
    (tmp_path / "stop.py").write_text(stop)
    words = [sys.executable, "stop.py", *FIT, *TWO, "--name", "parts"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 75, done.stdout + done.stderr
    run(["fit", "--resume", "parts"], tmp_path)
    runs = sharded / "runs" / "two", tmp_path / "runs" / "parts"
    ours, theirs = (load_file(run / "weights" / "last.safetensors") for run in runs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    run(["fit", "--resume", "parts", "--trainer.devices=1", "--trainer.max_epochs=3"], tmp_path)
    steps = [row["step"] for row in rows(tmp_path, "parts")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) * 2 == len(rows(sharded, "two")) * 3
