"""Runs whose weights have 16 or 64 bits: images are normalized after Lightning has converted the batch."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image

from vitlab.cli.main import main
from vitlab.run import Run
from vitlab.tasks import Classifier, Regressor
from vitlab.tasks.regressor import Errors

CONFIG = ["fit", "--config", str(Path(__file__).parents[2] / "configs" / "vit.yaml"), "--trainer.logger=false"]
SHORT = ["--trainer.max_epochs=2", "--model.depth=1", "--data.subset=0.2", "--data.num_workers=0", "--quiet"]


def losses(name):
    rows = [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return [row["val/loss"] for row in rows if "val/loss" in row]


@pytest.mark.rare
@pytest.mark.parametrize(
    "more", [[], ["--data.mixup=0.5", "--model.pos_embed=[learned, relpos]"]], ids=["plain", "mix"]
)
def test_training_with_weights_of_16_or_64_bits_is_that_of_32_to_rounding(more, here):
    for precision in ("32-true", "64-true", "bf16-true"):
        assert main([*CONFIG, *SHORT, *more, f"--trainer.precision={precision}", f"--name={precision}"]) == 0
    whole = losses("32-true")
    assert losses("64-true") == pytest.approx(whole, rel=1e-4) and losses("64-true") != whole
    assert losses("bf16-true") == pytest.approx(whole, rel=0.05)
    assert main(["test", "64-true", "--quiet"]) == main(["test", "32-true", "--trainer.precision=16-true"]) == 0
    assert main(["fit", "--resume", "bf16-true", "--trainer.max_epochs=3", "--quiet"]) == 0
    assert len(losses("bf16-true")) == 3


def test_the_mean_loss_of_an_epoch_is_right_in_16_bits(monkeypatch):
    """Added up in bfloat16, a sum of 64 images a step stops to grow at 256 steps."""
    net = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
    task = Classifier(num_classes=10, **net).bfloat16()
    loss = torch.tensor(2.3, dtype=torch.bfloat16)
    monkeypatch.setattr(task, "step_loss", lambda batch: (loss, {"errors": loss * 64}))
    for i in range(1000):
        task.training_step((torch.zeros(64, 1), torch.zeros(64)), i)
    sums = task.train_sums
    assert sums["loss"] / sums["n"] == pytest.approx(sums["errors"] / sums["n"]) == pytest.approx(float(loss))


@pytest.mark.parametrize(("precision", "mixed"), [("bf16-true", "bf16-mixed"), ("16-true", "16-mixed")])
def test_an_average_of_weights_of_16_bits_is_refused_as_it_would_hardly_move(precision, mixed, here, capsys):
    words = [*CONFIG, *SHORT, f"--trainer.precision={precision}", "--trainer.callbacks=[EMA]"]
    assert main([*words, "--dry_run"] if mixed == "bf16-mixed" else words) == 2
    assert capsys.readouterr().err == (
        f"vitlab: EMA needs weights of 32 bits: set --trainer.precision={mixed}, got {precision}\n"
    )


def test_an_average_has_the_precision_of_the_weights(here):
    for precision in ("32-true", "64-true"):
        ema = "--trainer.callbacks=[{class_path: EMA, init_args: {decay: 0.5}}]"
        assert main([*CONFIG, *SHORT, f"--trainer.precision={precision}", f"--name={precision}", ema]) == 0
    assert losses("64-true") == pytest.approx(losses("32-true"), rel=1e-4)
    assert main(["validate", "64-true", "--quiet"]) == 0


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_numpy_does_not_take_is_refused(seed, capsys):
    assert main([*CONFIG, f"--seed_everything={seed}", "--dry_run"]) == 2
    assert capsys.readouterr().err == f"vitlab: `seed_everything` must be in [0, 4294967295], got {seed}\n"


def years(folder, count=160):
    """Write gray images whose level is a year, and their table; return its path."""
    folder.mkdir()
    lines = ["path,year,kind"]
    for i in range(count):
        year = 1971 + i
        Image.new("L", (8, 8), i).save(folder / f"{i}.png")
        lines.append(f"{i}.png,{year},k{i % 3}")
    (folder / "t.csv").write_text("\n".join(lines))
    return folder / "t.csv"


@pytest.mark.rare
@pytest.mark.parametrize("model", ["Regressor", "MultiTask"])
def test_targets_and_their_units_are_not_rounded_to_16_bits(model, here):
    """In bfloat16, years are multiples of 8."""
    table, targets = years(here / "y"), "[year, kind]" if model == "MultiTask" else "[year]"
    net = ["--model.patch_size=4", "--model.embed_dim=16", "--model.depth=1", "--model.num_heads=2"]
    data = ["--data=Table", f"--data.path={table}", f"--data.targets={targets}", "--data.img_size=8"]
    data += ["--data.batch_size=32"]
    data += ["--data.target_type=number"] if model == "Regressor" else []
    more = [f"--model={model}", *net, *data, "--data.in_chans=1", "--data.num_workers=0", "--trainer.max_epochs=1"]
    for precision in ("32-true", "bf16-true"):
        assert main([*CONFIG, *more, "--quiet", f"--trainer.precision={precision}", f"--name={precision}"]) == 0
        assert main(["test", precision, "--quiet"]) == 0
    whole, half = (Run(name) for name in ("32-true", "bf16-true"))
    of_years = next(name for name in whole.results["test"] if name.startswith("mae"))
    assert half.results["test"][of_years] == pytest.approx(whole.results["test"][of_years], rel=0.1)
    found = pd.read_parquet(half.path / "predictions/test.parquet")
    column = next(name for name in found.columns if name in ("target_0", "target_year", "year"))
    assert sorted(found[column]) == sorted(pd.read_parquet(whole.path / "predictions/test.parquet")[column])


def test_a_scale_moves_but_is_not_rounded():
    facts = {"kind": "number", "names": ["year"], "mean": [1998.0], "std": [11.0]}
    net = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
    task = Regressor(targets=facts, **net).bfloat16()
    assert task.in_units(torch.zeros(1, 1, dtype=torch.bfloat16)).item() == 1998.0
    (errors,) = (part for part in task.val_meter.modules() if isinstance(part, Errors))
    assert errors.mean.item() == 1998.0
    assert task.to("meta").target_mean.device.type == "meta" and task.target_mean.dtype == torch.float32
