"""The commands of docs/data.md for a table with folds and empty cells."""

import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd

from vitlab.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
SMALL = ["--model.embed_dim=8", "--model.depth=1", "--model.num_heads=2", "--trainer.max_epochs=1",
         "--trainer.accelerator=cpu", "--data.batch_size=8", "--data.num_workers=0"]  # fmt: skip


def test_a_table_with_folds_and_empty_cells_is_trained_cross_validated_and_predicted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    (tmp_path / "new").mkdir()
    for i in range(26):
        np.save(f"{i}.npy" if i < 24 else f"new/{i}.npy", rng.normal(size=(1, 20, 20)).astype(np.float32))
    table = {"path": [f"{i}.npy" for i in range(24)], "fold": np.arange(24) % 2 + 2}
    table |= {"up": rng.normal(size=24), "side": 50 + 9 * rng.normal(size=24)}
    table["side"][[1, 2, 6]] = np.nan
    pd.DataFrame(table).to_csv("plates.csv", index=False)
    page = PAGE.read_text()
    block = re.search(r"```\n(vitlab fit [^`]*vitlab cv [^`]*)```", page)[1]
    fit, cv, predict = (shlex.split(line)[1:] for line in block.strip().splitlines())

    assert main([*fit, *SMALL]) == 0
    told = capsys.readouterr()
    assert "3 empty targets do not count in loss and metrics" in told.out + told.err

    assert main([*cv, *SMALL, "--workers=1"]) == 0
    folds = pd.read_csv("runs/ablations/cv-vit/folds.csv")
    assert folds["fold"].tolist() == ["fold-2", "fold-3"] and folds["n"].tolist() == [12, 12]
    assert np.isfinite(folds[["loss", "mae/up", "mae/side", "rmse/side"]].to_numpy()).all()

    assert main(predict) == 0
    predicted = pd.read_csv("predicted.csv")
    assert len(predicted) == 2 and np.isfinite(predicted.select_dtypes("number").to_numpy()).all()
    assert {"up", "side"} <= {name.rpartition("/")[2] for name in predicted} | set(predicted)
