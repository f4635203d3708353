"""Runs that predict numbers, by the command: in the unit of the table, and never of classes."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

from vitlab.analysis.attribution.maps import cells, occlusion
from vitlab.analysis.outcomes.outcome import outcome_of
from vitlab.cli.main import main
from vitlab.data import FakeData
from vitlab.errors import UsageError
from vitlab.jobs.find_subject import subject_at
from vitlab.jobs.restore import restore
from vitlab.jobs.view import View
from vitlab.look.viewer import pictures_of
from vitlab.runs.directory import RunDir
from vitlab.tasks import Regressor

CONFIG = ["fit", "--config", str(Path(__file__).parents[2] / "configs" / "vit.yaml"), "--trainer.logger=false",
          "--trainer.accelerator=cpu", "--model.depth=1", "--model.embed_dim=24", "--model.num_heads=2",
          "--model.patch_size=4", "--data.num_workers=0", "--data.batch_size=16"]  # fmt: skip
TABLE = ["--data=Table", "--data.path=table.csv", "--model=Regressor"]


@pytest.fixture
def arrays(here, monkeypatch):
    """160 arrays of 8 x 12 numbers: one half brighter than the other, which is what there is to predict."""
    monkeypatch.setenv("VITLAB_CACHE", str(here / "cache"))
    rng = np.random.default_rng(0)
    steps = rng.uniform(-1, 1, (160, 2))
    for i, (left, low) in enumerate(steps):
        array = rng.normal(0, 0.1, (8, 12))
        array[:, :6] += left
        array[4:] += low
        np.save(here / f"{i}.npy", array)
    table = {"path": [f"{i}.npy" for i in range(160)], "left": 1000 + 50 * steps[:, 0], "low": 0.01 * steps[:, 1]}
    pd.DataFrame(table).to_csv("table.csv", index=False)
    return pd.DataFrame(table).set_index("path")


def test_two_numbers_are_learned_measured_and_predicted_in_their_units(arrays, capsys):
    fit = [*CONFIG, *TABLE, "--data.targets=[left, low]", "--trainer.max_epochs=30", "--model.lr=0.005", "--name=run"]
    assert main([*fit, "--trainer.check_val_every_n_epoch=15"]) == 0
    out = capsys.readouterr().out
    assert "96 training and 26 validation images" in out or "of 1x8x12, 2 numbers each, whole images" in out
    assert "targets are 2 numbers (left, low), by their number" in out
    assert main(["test", "run"]) == 0
    shown = capsys.readouterr().out
    found = RunDir("runs/run").results["test"]
    assert found["r2"] > 0.8 and "test/r2/left 0." in shown and "test/mae/low 0." in shown
    table = pd.read_parquet("runs/run/predictions/test.parquet")
    error = table["prediction_0"] - table["target_0"]
    assert found["mae/left"] == pytest.approx(error.abs().mean(), rel=1e-3)
    assert found["rmse/left"] == pytest.approx((error**2).mean() ** 0.5, rel=1e-3)
    rest = ((table["target_0"] - table["target_0"].mean()) ** 2).mean()
    assert found["r2/left"] == pytest.approx(1 - (error**2).mean() / rest, abs=1e-3)
    assert found["mae"] == pytest.approx((found["mae/left"] + found["mae/low"]) / 2)

    assert main(["predict", "run", "3.npy", "4.npy", "-o", "out.csv"]) == 0
    predicted = pd.read_csv("out.csv").set_index("path")
    assert (
        list(predicted) == ["left", "low"]
        and (predicted["left"] - arrays.loc[predicted.index, "left"]).abs().max() < 40
    )
    task = restore(RunDir("runs/run"), RunDir("runs/run").checkpoint()).model
    assert torch.allclose(task.target_mean, torch.tensor([1000.0, 0.0]), atol=20)
    images = torch.randn(5, 1, 8, 12)
    with torch.no_grad():
        assert torch.allclose(task.network_in_units()(images), task(images), rtol=1e-4, atol=1e-4)
    assert main(["export", "run", "--to", "safetensors", "-o", "out.safetensors", "--check"]) == 0
    head = load_file("out.safetensors")["head.bias"]
    assert torch.allclose(head, task.network_in_units().head.bias) and head[0] > 500
    again = Regressor.load_from_checkpoint("runs/run/checkpoints/best.ckpt", weights_only=True)
    assert torch.equal(again.target_mean, task.target_mean)

    capsys.readouterr()
    assert main(["analyze", "attribution", "run"]) == 2  # a number is no score of a class
    assert "attribution needs class scores, and run predicts left, low" in capsys.readouterr().err
    subject = subject_at("run", View())[0]
    entry = pictures_of(subject, count=1)[0]
    assert entry["said"] == "" and "class" not in entry and entry["maps"] == {}
    arrays.assign(left=arrays["left"] + 5000).to_csv("other.csv")
    words = ["--data=Table", "--data.path=other.csv", "--data.num_workers=0", "--data.batch_size=16"]
    other = outcome_of(subject_at("run", View(), [*words, "--data.targets=[left, low]"])[0])
    assert other.targets[:, 0].min() > 5900 and (other.outputs[:, 0] - 1000).abs().max() < 100  # in the run's scale
    with pytest.raises(UsageError, match=r"is low, left, and the run was trained on left, low: give them by"):
        subject_at("run", View(), [*words, "--data.targets=[low, left]"])


def test_classes_are_refused_where_numbers_are_needed_and_the_other_way_round(arrays, capsys):
    for more in ([], ["--dry_run"]):
        assert main([*CONFIG, "--model=Regressor", "--name=run", *more]) == 2
        error = capsys.readouterr().err
        assert "needs numbers, and the data has classes: name a column of numbers, --data=Table" in error
        assert "--data.target_type=number shows a cell that is none, or use --model=Classifier" in error
        assert error.count("\n") == 1 and not Path("runs/run").exists()
    assert main([*CONFIG, *TABLE[:2], "--data.targets=left", "--dry_run"]) == 2
    assert "needs classes, and the data has numbers (left): use --model=Regressor" in capsys.readouterr().err
    assert main([*CONFIG, *TABLE, "--data.targets=left", "--data.mixup=0.5", "--dry_run"]) == 2
    assert "`data.mixup` and `data.cutmix` mix classes" in capsys.readouterr().err
    assert main([*CONFIG, *TABLE, "--data.targets=left", "--model.num_targets=2", "--dry_run"]) == 2
    assert "`model.num_targets` is 2, the data has 1: left" in capsys.readouterr().err


def test_a_file_of_another_shape_is_listed_and_the_others_are_predicted(arrays, capsys):
    assert main([*CONFIG, *TABLE, "--data.targets=left", "--trainer.max_epochs=1", "--name=run"]) == 0
    np.save("wide.npy", np.zeros((3, 8, 12)))
    assert main(["predict", "run", "3.npy", "wide.npy", "-o", "out.csv"]) == 1
    assert "an array of 3 channels, the network takes 1" in "".join(capsys.readouterr())
    assert pd.read_csv("out.csv")["path"].tolist() == ["3.npy"]


def test_a_regressor_that_was_trained_on_class_numbers_still_measures():
    net = {"img_size": 32, "patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 2}
    task, data = Regressor(**net, targets={"kind": "class"}), FakeData(batch_size=8)
    data.setup("test")
    images, labels = next(data.iterate_batches(data.test_dataloader()))
    outputs = task(images)
    assert torch.allclose(task.eval_loss(outputs, task.as_targets(labels)), ((outputs[:, 0] - labels) ** 2).mean())


@pytest.mark.rare
def test_labels_and_classes_in_folders_are_measured_predicted_and_shown(here, monkeypatch, capsys):
    monkeypatch.setenv("VITLAB_CACHE", str(here / "cache"))
    rng = np.random.default_rng(0)
    red = [int(i % 2 == 0) for i in range(80)]
    low = [int(i % 3 == 0) for i in range(80)]
    for i in range(80):
        pixels = rng.integers(0, 60, (8, 8, 3))
        pixels[:4, :, 0] += 150 * red[i]
        pixels[4:, :, 1] += 150 * low[i]
        path = here / "photos" / ("red" if red[i] else "other") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    names = [f"photos/{'red' if r else 'other'}/{i}.png" for i, r in enumerate(red)]
    pd.DataFrame({"path": names, "red": red, "low": low, "weight": 1.5}).to_csv("table.csv", index=False)
    few = ["--trainer.max_epochs=8", "--model.lr=0.01", "--model.depth=1"]

    assert main([*CONFIG, *TABLE[:2], "--data.targets=[red, low]", "--dry_run"]) == 2
    assert "may have several labels: use --model.loss=bce" in capsys.readouterr().err
    assert main([*CONFIG, *TABLE[:2], "--data.targets=[red, low]", "--model.loss=bce", *few, "--name=labels"]) == 0
    assert "rows are weighted in the training loss by the column weight" in capsys.readouterr().out
    assert main(["test", "labels"]) == 0 and "test/map 1.0000" in capsys.readouterr().out
    kept = pd.read_parquet("runs/labels/predictions/test.parquet")
    assert set(kept["path"]) <= set(names) and (kept["target_0"] == kept["path"].str.contains("red")).all()
    assert main(["predict", "labels", names[0], names[1], "-o", "out.csv"]) == 0
    predicted = pd.read_csv("out.csv")
    assert list(predicted) == ["path", "red", "low"] and predicted["red"][0] > 0.5 > predicted["red"][1]
    subject = subject_at("labels", View(images=names[0]))[0]  # red and low
    entry, whole = pictures_of(subject, count=1)[0], subject.net(subject.pictures).sigmoid()[0]
    assert entry["said"] == f"{['red', 'low'][whole.argmax()]}, {whole.max():.0%}"
    covered = subject.pictures * (1 - cells(subject.net, F.one_hot(torch.tensor([0]), 4).float()))
    drop = whole[0] - subject.net(covered).sigmoid()[0, 0]
    assert torch.allclose(occlusion(subject.net, subject.pictures, torch.tensor([0]))[0, 0], drop, atol=1e-5)

    folder = ["--data=ImageFolder", "--data.root=photos", "--data.sampling=balanced", "--model.class_weights=balanced"]
    assert main([*CONFIG, *folder, *few, "--name=classes"]) == 0
    capsys.readouterr()
    assert main(["test", "classes"]) == 0
    shown, found = capsys.readouterr().out, RunDir("runs/classes").results["test"]
    kept = pd.read_parquet("runs/classes/predictions/test.parquet")
    recall = (kept["prediction"] == kept["target"]).groupby(kept["target"]).mean()
    assert found["recall"] == pytest.approx({"other": recall[0], "red": recall[1]})
    assert found["acc1_macro"] == pytest.approx(recall.mean()) and "test/f1_macro" in shown and "recall: " in shown
    shares = np.stack(kept["probabilities"])
    assert np.allclose(shares.sum(1), 1) and np.allclose(shares.max(1), kept["probability"])
    assert [name.split("/")[0] == "red" for name in kept["path"]] == kept["target"].tolist()
    assert main(["predict", "classes", "photos", "table.csv", "-o", "out.csv"]) == 1
    assert [path.split("/")[1] for path in pd.read_csv("out.csv")["path"]] == pd.read_csv("out.csv")["target"].tolist()
    assert main(["analyze", "errors,confusion,calibration", "classes", "--split", "test"]) == 0
    assert "confusion.png" in capsys.readouterr().out and Path("runs/classes/analysis/split=test/errors.png").is_file()
