"""A stopped run continues to the same numbers, whatever stopped it and wherever."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

CONFIG = Path(__file__).parents[2] / "configs" / "t2t.yaml"
EMA = '[{"class_path": "EMA", "init_args": {"decay": 0.9}}]'
HARD = ["--model.drop_path_rate=0.2", "--data.mixup=0.4", "--data.augment=crop-flip", f"--trainer.callbacks={EMA}"]
FIT = ["fit", "--config", str(CONFIG), "--trainer.logger=false", "--trainer.log_every_n_steps=1", *HARD]
FIT += ["--trainer.max_epochs=4", "--data.batch_size=32"]  # 35 steps an epoch
DDP = ["--trainer.devices=2", "--trainer.strategy=ddp"]
POINTS = random.Random(1).sample(range(3, 111), 3)  # steps of 140


def start(arguments, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "vitlab", *arguments]
    return subprocess.Popen(
        words, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(arguments, cwd, code=0):
    process = start(arguments, cwd)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == code, output
    return output


def stop_at(step, number, arguments, cwd, name):
    """Start a run, send it a signal once it has made ``step`` steps, and return its exit code and output."""
    process = start([*arguments, "--name", name], cwd)
    rows = cwd / "runs" / name / "metrics.jsonl"
    until = time.monotonic() + 200
    while time.monotonic() < until and process.poll() is None:
        if rows.exists() and f'"step": {step},' in rows.read_text():
            break
        time.sleep(0.005)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
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
    finish([*FIT, "--name", "whole"], folder)
    return folder / "runs" / "whole"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number", "step", "code"),
    [
        ("term", signal.SIGTERM, POINTS[0], 75),
        ("usr1", signal.SIGUSR1, POINTS[1], 75),
        ("int", signal.SIGINT, POINTS[2], 130),
    ],
)
def test_a_signal_saves_leaves_and_the_rest_is_bit_identical(whole, name, number, step, code):
    folder = whole.parents[1]
    returned, output = stop_at(step, number, FIT, folder, name)
    assert returned == code, output
    assert "Traceback" not in output
    assert json.loads((folder / "runs" / name / "run.json").read_text())["status"] == "preempted"
    finish(["fit", "--resume", name], folder)
    same(whole, folder / "runs" / name)


@pytest.mark.slow
def test_a_kill_after_a_checkpoint_in_the_middle_of_an_epoch_loses_nothing(whole):
    folder = whole.parents[1]
    arguments = [*FIT, "--checkpoint.every_n_steps=5"]
    returned, _ = stop_at(59, signal.SIGKILL, arguments, folder, "kill")
    assert returned == -signal.SIGKILL
    finish([*arguments, "--name", "kill", "--resume", "--data.num_workers=1"], folder)
    same(whole, folder / "runs" / "kill")


@pytest.mark.slow
def test_two_processes_stop_together_and_one_continues(tmp_path):
    returned, output = stop_at(20, signal.SIGTERM, [*FIT, *DDP], tmp_path, "two")
    assert returned == 75, output
    output = finish(["fit", "--resume", "two", "--trainer.devices=1", "--trainer.strategy=auto"], tmp_path)
    assert "(continued)" in output
    rows = curve(tmp_path / "runs" / "two")
    assert {step for kind, step in rows if kind == "train"} == set(range(1, 141))


@pytest.mark.slow
def test_two_processes_continue_to_the_same_bits(tmp_path):
    two = [*FIT, *DDP, "--trainer.max_epochs=2"]
    finish([*two, "--name", "whole"], tmp_path)
    for i, step in enumerate(sorted(point // 2 for point in POINTS)):  # steps of 70, in one run
        returned, output = stop_at(step, signal.SIGTERM, [*two, *(["--resume"] if i else [])], tmp_path, "parts")
        assert returned == 75, output
    finish(["fit", "--resume", "parts"], tmp_path)
    same(*(tmp_path / "runs" / name for name in ("whole", "parts")))
