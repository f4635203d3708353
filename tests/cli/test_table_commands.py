"""The commands of docs/data.md for a table with folds and empty cells."""

import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import vitlab
from vitlab.ablation.evidence.verify import told_by_predictions
from vitlab.cli.main import main
from vitlab.config.table_folds import folds_of_config
from vitlab.jobs.restore import restore
from vitlab.runs.directory import RunDir

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
SMALL = ["--model.embed_dim=8", "--model.depth=1", "--model.num_heads=2", "--trainer.max_epochs=1",
         "--trainer.accelerator=cpu", "--trainer.logger=false", "--data.batch_size=8",
         "--data.num_workers=0"]  # fmt: skip


def _commands(name):
    """Return the words of the three commands of the page for a table."""
    blocks = re.findall(r"```\n(vitlab fit [^`]*vitlab cv [^`]*)```", PAGE.read_text())
    (block,) = [block for block in blocks if f"data.path={name}.csv" in block]
    return [shlex.split(line)[1:] for line in block.strip().splitlines()]


def test_a_table_with_folds_and_empty_cells_is_trained_and_predicted(here, monkeypatch, capsys):
    monkeypatch.setenv("VITLAB_CACHE", str(here / "cache"))
    rng = np.random.default_rng(0)
    (here / "new").mkdir()
    for i in range(26):
        np.save(f"{i}.npy" if i < 24 else f"new/{i}.npy", rng.normal(size=(1, 20, 20)).astype(np.float32))
    table = {"path": [f"{i}.npy" for i in range(24)], "fold": np.arange(24) % 2 + 2}
    table |= {"up": rng.normal(size=24), "side": 50 + 9 * rng.normal(size=24)}
    table["side"][[1, 2, 6]] = np.nan
    pd.DataFrame(table).to_csv("plates.csv", index=False)
    fit, cv, predict = _commands("plates")

    assert main([*fit, *SMALL]) == 0
    told = capsys.readouterr()
    assert "3 empty targets do not count in loss and metrics" in told.out + told.err
    assert "the test split has no image" in told.out and told.out.splitlines()[-1].startswith("next  vitlab validate ")

    words = [word for word in fit if word.startswith(("--model", "--data")) and "fold" not in word]
    assert cv == ["cv", "vit", *words]  # the next test goes through folds
    settings = [tuple(word[2:].split("=", 1)) for word in words]
    assert folds_of_config([], settings) == {"fold-2": "2", "fold-3": "3"}

    assert main(predict) == 0
    predicted = pd.read_csv("predicted.csv")
    assert len(predicted) == 2 and np.isfinite(predicted.select_dtypes("number").to_numpy()).all()
    assert {"up", "side"} <= {name.rpartition("/")[2] for name in predicted} | set(predicted)


@pytest.mark.rare
def test_classes_and_numbers_of_a_table_are_trained_cross_validated_and_predicted(here, monkeypatch, capsys):
    monkeypatch.setenv("VITLAB_CACHE", str(here / "cache"))
    rng = np.random.default_rng(0)
    kinds, size = rng.integers(0, 2, 66), rng.uniform(10, 50, 66)
    (here / "new").mkdir()
    for i, kind in enumerate(kinds):  # the left or the right half is bright, and the upper one as its size
        array = rng.normal(0, 0.1, (1, 20, 20))
        array[:, :, 10 * kind : 10 * kind + 10] += 1
        array[:, :10] += size[i] / 20
        np.save(f"{i}.npy" if i < 60 else f"new/{i}.npy", array.astype(np.float32))
    species = np.array(["ash", "oak"], dtype=object)[kinds]
    table = pd.DataFrame({"path": [f"{i}.npy" for i in range(60)], "fold": np.arange(60) % 2})
    table["species"], table["size"] = species[:60], size[:60]
    table.loc[[1, 6], "size"], table.loc[[2, 6], "species"] = np.nan, None
    table.to_csv("leaves.csv", index=False)
    fit, cv, predict = _commands("leaves")

    assert main([*fit, *SMALL, "--trainer.max_epochs=12", "--model.lr=0.005", "--model.embed_dim=24"]) == 0
    told = "".join(capsys.readouterr())
    assert "targets are species (2 classes), size (a number), by their values" in told and "2 targets each" in told
    assert "1 of 60 rows without any target are left out" in told, told
    assert "acc1/species 1.0000" in told, told

    assert main([*cv, *SMALL, "--workers=1"]) == 0
    folds = pd.read_csv("runs/ablations/leaves/folds.csv")
    assert folds["fold"].tolist() == ["fold-0", "fold-1"] and folds["n"].tolist() == [29, 30]
    assert np.isfinite(folds[["loss", "acc1", "acc1/species", "mae/size", "r2/size"]].to_numpy()).all()
    told = told_by_predictions(next(Path("runs/ablations/leaves/fold-0").rglob("val.parquet")))
    assert {name: folds[name][0] for name in ("acc1", "mae", "n")} == pytest.approx(told, rel=1e-3)

    assert main(predict) == 0
    predicted = pd.read_csv("leaves_predicted.csv")
    assert list(predicted) == ["path", "species", "probability/species", "size"]
    assert (predicted["species"] == species[60:]).mean() > 0.7 and {*predicted["species"]} <= {"ash", "oak"}
    assert np.corrcoef(predicted["size"], size[60:])[0, 1] > 0.8
    assert main(["analyze", "confusion", "runs/leaves"]) == 2
    assert "leaves predicts species, size, and this measures targets of one kind" in capsys.readouterr().err
    images = torch.randn(3, 1, 20, 20)
    task = restore(RunDir("runs/leaves"), RunDir("runs/leaves").checkpoint()).model
    with torch.no_grad():
        assert torch.allclose(vitlab.load("runs/leaves").net(images), task(images), rtol=1e-4, atol=1e-4)
