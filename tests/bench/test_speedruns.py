"""The script that times recipes to a stated accuracy."""

import importlib.util
import json
import statistics
from pathlib import Path

import pytest
import torch

from vitlab.config.parser import VitlabCLI

ROOT = Path(__file__).parents[2]
CONFIG = "configs/fashion_mnist_speedrun.yaml"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("speedruns", ROOT / "benchmarks" / "speedruns.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_idea_changes_the_recipe(script, tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for kind in ("images-idx3", "labels-idx1"):
        (raw / f"train-{kind}-ubyte").write_bytes(b"")
    seen = []
    for change in script.IDEAS.values():
        words = ["--config", str(ROOT / CONFIG), "--data.root", str(tmp_path), "--trainer.logger=false", *script.SHORT]
        with torch.device("meta"):
            config = VitlabCLI([*words, *change]).config.as_dict()
        assert config["trainer"]["max_epochs"] == 4
        seen.append(str(config))
    assert len(set(seen)) == len(seen)


def test_the_readme_and_the_config_state_what_was_measured():
    rows = json.loads((ROOT / "benchmarks" / "speedruns.json").read_text())
    rows = [row for row in rows if row["config"] == CONFIG and "acc1" in row]
    accuracies = sorted(100 * row["acc1"] for row in rows)
    minutes = statistics.median(row["seconds"] for row in rows) / 60
    assert len(rows) == 5 and accuracies[2] >= rows[0]["goal"]
    readme, config = (ROOT / "README.md").read_text(), (ROOT / CONFIG).read_text()
    assert (
        f"reaches {accuracies[2]:.1f} % on the test images of Fashion-MNIST in [{minutes:.1f} minutes](bench" in readme
    )
    stated = f"{accuracies[2]:.1f} % of the 10,000 test images in {minutes:.1f} minutes"
    assert f"{stated}: median of five seeds, {accuracies[0]:.1f} to {accuracies[-1]:.1f} %" in config


def test_the_page_has_a_row_for_each_recipe_and_each_idea(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "HERE", tmp_path)
    row = {"config": CONFIG, "seconds": 120.0, "cpu": 240.0, "commit": "c0ffee", "machine": "a machine"}
    runs = [row | {"seed": i, "goal": 90.0, "acc1": 0.9 + i / 1000, "losses": [0.8, 0.4]} for i in range(3)]
    ideas = [
        row | {"seed": i, "idea": "a line", "change": ["--model.lr_scheduler=linear"], "val_acc1": 0.88 + i / 100}
        for i in range(2)
    ]
    script.write(runs)
    assert "What each idea" not in (tmp_path / "speedruns.md").read_text()
    script.write([*runs, *ideas])
    text = (tmp_path / "speedruns.md").read_text()
    assert f"| `{CONFIG}` | 90 % | 90.10 [90.00, 90.20] | 3 | 2.00 | 4.00 | c0ffee |" in text
    assert "| a line | `--model.lr_scheduler=linear` | 88.00, 89.00 | 4.00 |" in text
    assert "seed 0: 0.80, 0.40; a machine" in text
