"""What commands say of numbers that are not, or not any more, those of the run's checkpoint."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import vitlab
from vitlab.cli.main import main
from vitlab.jobs.evaluate import _add_class_means, _of_absent_classes, _with_paths, _write, unlike
from vitlab.jobs.train.close import log_summary
from vitlab.jobs.train.wandb import SafeWandbLogger
from vitlab.runs.directory import RunDir
from vitlab.tasks import Classifier

CONFIG = str(Path(__file__).parents[2] / "configs" / "vit.yaml")
SMALL = ["--model.depth=1", "--model.embed_dim=24", "--model.pos_embed=sincos2d", "--data.subset=0.3"]
SMALL += ["--model.lr=0.0005", "--model.warmup_epochs=0", "--checkpoint.monitor=val/loss"]
SMALL += ["--trainer.logger=false", "--quiet"]  # so that the second epoch is better on any machine


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one epoch, `first`, that was tested and analyzed; for all to copy."""
    place = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["fit", "--config", CONFIG, "--name", "first", "--trainer.max_epochs=1", *SMALL]) == 0
        shutil.copytree("runs/first", "runs/untested")
        assert main(["test", "first", "--quiet"]) == 0
        assert main(["analyze", "confusion", "first", "--quiet"]) == 0
    return place


@pytest.fixture
def place(trained, here, capsys):
    shutil.copytree(trained / "runs", here / "runs")
    capsys.readouterr()
    return here


def page_of(*names):
    assert main(["look", *names, "-o", "page.html", "--overwrite", "--pictures=0", "--quiet"]) == 0
    return Path("page.html").read_text()


@pytest.mark.rare
def test_after_a_resume_results_and_look_leave_out_the_old_number_until_a_new_test(place, capsys):
    assert re.search(r'big">[\d.]+ %</div>\s*accuracy on 359 images of test', page_of("first"))
    old = vitlab.Run("first").results["test"]
    assert main(["fit", "--resume", "first", "--trainer.max_epochs=2", "--quiet"]) == 0
    capsys.readouterr()
    why = "its test result was measured before it went on; run `vitlab test runs/first`"
    assert main(["results", "first"]) == 2
    assert capsys.readouterr().err == f"vitlab: runs/first: {why}\n"
    assert main(["results"]) == 2
    assert (
        "no run in runs/ has an accuracy on its test split; the test result of runs/first was"
        in capsys.readouterr().err
    )
    page = page_of("first")
    assert "The result on test was measured before it went on; run <code>vitlab test runs/first</code>." in page
    assert "images of test" not in page and "accuracy on 288 validation images, of best.ckpt, saved in epoch 2" in page
    assert "Left out: measured before it went on; run <code>vitlab analyze confusion runs/first</code>" in page
    found = vitlab.Run("first").results
    assert "test" not in found and found["stale"][0]["acc1"] == old["acc1"] and found["val"]["epoch"] == 1
    card = vitlab.Run("first").export("safetensors", "first.safetensors")
    assert set(json.loads(Path(f"{card}.json").read_text())["measured"]) == {"val"}
    assert main(["test", "untested", "--quiet"]) == main(["results"]) == 0  # the others are still tabulated
    told = capsys.readouterr()
    assert told.err == f"left out runs/first: {why}\n" and told.out.count("\n") == 3
    assert main(["test", "first", "--quiet"]) == main(["results", "first"]) == 0
    new = vitlab.Run("first").results["test"]
    assert new["loss"] != old["loss"] and f"| 2 | 1 | {100 * new['acc1']:.1f} % of 359 |" in capsys.readouterr().out
    assert set(json.loads(Path(f"{vitlab.Run('first').export('pt2', 'first.pt2')}.json").read_text())["measured"]) == {
        "val", "test"
    }  # fmt: skip


def test_before_a_test_the_page_heads_with_the_validation_result_and_names_it(place):
    acc1 = vitlab.Run("untested").results["val"]["acc1"]
    page = page_of("untested")
    assert f'big">{100 * acc1:.2f} %</div>\naccuracy on 288 validation images, of best.ckpt, saved in epoch 1' in page
    assert "<code>vitlab test runs/untested</code> measures others" in page


def test_a_result_of_another_checkpoint_is_marked_wherever_it_is_shown(place, capsys):
    assert main(["fit", "--resume", "first", "--trainer.max_epochs=2", "--quiet"]) == 0
    assert main(["test", "runs/first/checkpoints/previous.ckpt", "--quiet"]) == main(["results", "first"]) == 0
    told = capsys.readouterr()
    assert re.search(r"\| [\d.]+ % of 359, with previous.ckpt \|", told.out)
    assert told.err == "note     runs/first: measured with previous.ckpt; `vitlab test runs/first` measures best.ckpt\n"
    assert re.search("accuracy on 359 images of test, .*, of previous.ckpt, saved in epoch 1", page_of("first"))


def test_an_unfinished_run_states_how_far_it_came(place, capsys):
    run = RunDir("runs/first")
    run.config.write_text(run.config.read_text().replace("max_epochs: 1", "max_epochs: 30"))
    run.update("run.json", status="preempted")
    assert main(["results", "first"]) == 0
    assert "| 1 of 30 | 1 |" in capsys.readouterr().out


def test_a_result_of_an_older_vitlab_is_shown_and_marked_as_such(place, capsys):
    run = RunDir("runs/first")
    run.update("results.json", test={k: v for k, v in run.stored["test"].items() if k != "sha256"})
    assert main(["results", "first"]) == 0
    assert "note     runs/first: measured without noting the checkpoint's checksum" in capsys.readouterr().err


def test_another_number_of_the_same_weights_and_images_is_said_to_be_one(place, capsys):
    run = RunDir("runs/first")
    stored = run.stored["test"]
    run.update("results.json", test={**stored, "acc1": stored["acc1"] - 0.2})
    assert main(["test", "first"]) == 0
    line = f"acc1 is {stored['acc1']:.4f}, and these weights gave {stored['acc1'] - 0.2:.4f} before on this split"
    assert line in capsys.readouterr().out
    assert RunDir("runs/first").stored["test"] == stored


def test_numbers_of_the_same_weights_differ_by_more_than_three_images_a_hundredth_and_five_percent():
    def is_told(n, old, new, name="acc1"):
        before, now = ({name: value, "sha256": "e3b0", "n": n} for value in (old, new))
        return bool(unlike(before, now)) and bool(unlike(now, before))

    assert is_told(100.0, 0.1, 0.14) and not is_told(100.0, 0.1, 0.125)
    assert is_told(1e6, 0.1, 0.115) and not is_told(1e6, 0.1, 0.109)
    assert is_told(1e6, 2.0, 2.2, "loss") and not is_told(1e6, 2.0, 2.09, "loss")


def test_a_variation_replaces_the_one_of_the_same_split_and_settings_alone(tmp_path):
    run = RunDir(tmp_path)
    for acc1, split, settings in ((0.1, "val", {"a": 1}), (0.2, "val", {"a": 2}), (0.3, "test", {"a": 1}),
                                  (0.4, "val", {"a": 1})):  # fmt: skip
        _write(run, split, {"acc1": acc1, "overrides": settings}, pd.DataFrame())
    found = [(each["split"], each["overrides"]["a"], each["acc1"]) for each in run.read("results.json")["variations"]]
    assert found == [("val", 2, 0.2), ("test", 1, 0.3), ("val", 1, 0.4)]


def test_means_over_classes_and_paths_are_those_of_the_images_that_were_predicted():
    table = pd.DataFrame({"index": [4, 0, 1, 3, 2], "target": [0, 0, 0, 1, 1], "prediction": [0, 0, 1, 1, 3]})
    values, recall = _add_class_means(table, ["a", "b", "c", "d"], {"loss": 2.0, "n": 5.0})
    assert recall == {"recall": {"a": pytest.approx(2 / 3), "b": 0.5}}  # of the others there are no images
    assert values == {"loss": 2, "acc1_macro": pytest.approx(7 / 12), "f1_macro": pytest.approx(0.65), "n": 5}
    numbered = table.assign(probabilities=[[0.25] * 4] * len(table))
    assert _add_class_means(numbered, [], {})[1]["recall"].keys() <= set("0123"), "data that name no classes"
    assert list(values)[-1] == "n" and _add_class_means(table, ["a"], {"n": 5.0}) == ({"n": 5.0}, {})
    beyond = table.assign(target=0)  # an output that no name is known for is predicted
    assert _add_class_means(beyond, ["a", "b", "c"], {"n": 5.0}) == ({"n": 5.0}, {})
    images = SimpleNamespace(names=["0.png", "1.png", "2.png", "3.png", "4.png"])
    assert list(_with_paths(table, images)["path"]) == ["4.png", "0.png", "1.png", "3.png", "2.png"]


def test_a_variation_is_named_as_such_on_the_terminal(place, capsys):
    before = vitlab.Run("first").results["test"]
    assert main(["test", "first", "--model.pos_embed=none", "--data.batch_size=7"]) == 0
    out = capsys.readouterr().out
    assert "\nvariation with model.pos_embed=none data.batch_size=7: test/loss" in f"\n{out}"
    assert vitlab.Run("first").results["test"] == before
    assert main(["test", "first"]) == 0
    assert "variation" not in capsys.readouterr().out


def test_what_changes_no_number_makes_no_variation(place, capsys):
    (Path("runs/first") / "results.json").write_text("{}")
    assert main(["test", "first", "--data.num_workers=0", "--trainer.devices=1", "--trainer.accelerator=cpu"]) == 0
    assert "variation" not in capsys.readouterr().out
    assert main(["results", "first"]) == 0


def test_a_checkpoint_that_is_replaced_while_it_is_measured_gives_no_number(place, capsys, monkeypatch):
    from vitlab.jobs import evaluate

    before, run = RunDir("runs/first").stored, evaluate._run

    def replaced(*given):
        run(*given)
        Path("runs/first/checkpoints/best.ckpt").unlink()
        Path("runs/first/checkpoints/best.ckpt").write_bytes(b"of the next epoch")

    monkeypatch.setattr(evaluate, "_run", replaced)
    assert main(["test", "first", "--quiet"]) == 2
    assert "best.ckpt was replaced while it was measured, as its training goes on" in capsys.readouterr().err
    assert RunDir("runs/first").stored == before


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--trainer.check_val_every_n_epoch=4"],
         "never validated (trainer.check_val_every_n_epoch=4); the last epoch is kept"),
        (["--trainer.limit_val_batches=0"], "never validated; the last epoch is kept"),
    ],
)  # fmt: skip
def test_a_run_that_never_validates_says_so(here, capsys, words, line):
    small = [word for word in SMALL if word != "--quiet"]
    assert main(["fit", "--config", CONFIG, "--name", "a", "--trainer.max_epochs=1", *small, *words]) == 0
    out = capsys.readouterr().out
    assert out.count(line) == 1 and "best epoch" not in out


def test_a_run_of_which_only_the_weights_are_left_is_tested_to_the_same_number(place):
    """Before, `vitlab test` called its whole safetensors file truncated."""
    old = vitlab.Run("first").results["test"]
    for path in Path("runs/first/checkpoints").glob("*.ckpt"):
        path.unlink()
    assert main(["test", "first", "--quiet"]) == 0
    new = vitlab.Run("first").results["test"]
    assert new["checkpoint"] == "best.safetensors" and new["sha256"] == old["sha256"]
    assert {k: new[k] for k in ("acc1", "loss", "n")} == {k: old[k] for k in ("acc1", "loss", "n")}


def test_the_summary_of_wandb_keeps_no_number_of_validated_weights_that_went_on(place):
    sent = {}

    class Logger(SafeWandbLogger):
        def __init__(self):
            self.log_summary, self.keep_checkpoint = sent.update, lambda *words, **more: None

    run = RunDir("runs/first")
    run.update("results.json", val={**run.stored["val"], "acc1_macro": 0.1})
    best = run.checkpoints / "best.ckpt"
    best.write_bytes(best.read_bytes() + b"more")  # it went on
    job = SimpleNamespace(run=run, trainer=SimpleNamespace(loggers=[Logger()]), keeper=None)
    reached = SimpleNamespace(best={"val/acc1": 0.6, "val/loss": 1.0, "epoch": 3}, ending=None)
    log_summary(job, reached)
    assert sent["val/acc1_macro"] is sent["val/weights"] is sent["test/acc1"] is None
    assert "val/acc1" not in sent and sent["best/val/acc1"] == 0.6  # training logs it anew


OWN = """
import lightning as L, torch, torch.nn.functional as F
from torch import nn

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU()), nn.Linear(32, 10)
    def forward(self, images):
        return self.head(self.net(images))
    def training_step(self, batch, i):
        return F.cross_entropy(self(batch[0]), batch[1])
    def validation_step(self, batch, i, name="val"):
        self.log(f"{name}/loss", F.cross_entropy(self(batch[0]), batch[1]))
        self.log(f"{name}/acc1", (self(batch[0]).argmax(1) == batch[1]).float().mean())
    def test_step(self, batch, i):
        self.validation_step(batch, i, "test")
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
"""
CPU = ["--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.logger=false", "--quiet", "--overwrite"]
MAE = ["--model=MAE", "--data=Digits", "--model.patch_size=2", "--model.embed_dim=16", "--model.depth=1"]
MAE += ["--model.num_heads=2", "--model.decoder_dim=16", "--model.decoder_depth=1", "--model.decoder_heads=2"]


def test_a_module_with_weights_outside_its_net_is_measured_to_the_same_number_by_its_weights(here, monkeypatch, capsys):
    monkeypatch.syspath_prepend(here)
    Path("outside.py").write_text(OWN)
    trusted = ["--trust_imports", "outside"]
    assert main(["fit", "--model=outside.Net", "--data=Digits", "--name=own", *trusted, *CPU]) == 0
    assert main(["test", "own", "--quiet", *trusted]) == 0
    measured = vitlab.Run("own").results["test"]
    assert main(["runs", "clean", "own", "--what", "checkpoints", "--yes"]) == 0
    assert not list(Path("runs/own/checkpoints").glob("*.ckpt"))
    assert main(["test", "own", "--quiet", *trusted]) == 0
    again = vitlab.Run("own").results["test"]
    assert again["checkpoint"] == "best.safetensors" and again["acc1"] == measured["acc1"]
    assert again["loss"] == pytest.approx(measured["loss"], rel=1e-6)
    capsys.readouterr()
    assert main(["results"]) == 0  # it does not count its images
    assert f"{100 * measured['acc1']:.1f} % |" in capsys.readouterr().out


@pytest.mark.rare
def test_what_the_network_alone_cannot_tell_is_refused(here, capsys):
    assert main(["fit", *MAE, "--name=mae", *CPU]) == 0
    assert main(["validate", "mae", "--quiet", "--data.img_size=12"]) == 0  # with its decoder
    larger = json.loads(Path("runs/mae/results.json").read_text())["variations"][0]["loss"]
    assert larger < 1.5, "a decoder as it was trained, not a new one"
    assert main(["runs", "clean", "mae", "--what", "checkpoints", "--yes"]) == 0
    capsys.readouterr()
    assert main(["validate", "mae", "--quiet"]) == 2
    assert re.search(
        r"would give the network alone, and MAE is measured with decoder\.\S+ and its like", capsys.readouterr().err
    )
    assert main(["analyze", "reconstruction", "mae", "--quiet"]) == 2
    assert "needs a checkpoint of a masked autoencoder" in capsys.readouterr().err
    table = "path,y\n" + "".join(f"{i}.npy,{i}\n" for i in range(24))
    Path("numbers.csv").write_text(table)
    for i in range(24):
        np.save(f"{i}.npy", np.full((1, 8, 8), i, dtype=np.float32))
    vit = ["--model.patch_size=4", "--model.embed_dim=16", "--model.depth=1", "--model.num_heads=2"]
    words = ["--model=Regressor", "--data=Table", "--data.path=numbers.csv", "--data.targets=y"]
    words += ["--data.target_type=number"]
    assert main(["fit", *words, *vit, "--data.batch_size=8", "--name=numbers", *CPU]) == 0
    assert main(["export", "numbers", "--to", "safetensors", "--quiet"]) == 0
    capsys.readouterr()
    exported, fit = "runs/numbers/export/best.safetensors", ["fit", *words, *vit, "--data.batch_size=8", *CPU]
    for told in (["test"], ["analyze", "errors"], [*fit, "--name=again", "--init_from"]):
        assert main([*told, exported]) == 2
        assert "whose outputs are in the units of the targets already" in capsys.readouterr().err


def test_a_page_about_checkpoints_has_only_numbers_of_these(place):
    paths = [f"runs/first/checkpoints/{name}.ckpt" for name in ("best", "other")]
    content = torch.load(paths[0], weights_only=True)
    content["state_dict"]["net.head.bias"] += 1.0
    torch.save(content, paths[1])
    page = page_of(*paths)
    assert "Of these checkpoints" not in page and "accuracy on 359 images of test" in page
    assert f"measured with best.ckpt; run <code>vitlab test {paths[1]}</code>" in page
    assert main(["test", paths[1], "--quiet"]) == 0
    assert f"measured with other.ckpt; run <code>vitlab test {paths[0]}</code>" in page_of(*paths)


def test_a_run_that_has_not_ended_keeps_its_checkpoints(place, capsys):
    record = Path("runs/first/run.json")
    record.write_text(record.read_text().replace('"status": "done"', '"status": "preempted"'))
    assert main(["runs", "clean", "first", "--what", "checkpoints", "--yes"]) == 0
    said = capsys.readouterr()
    assert "its last weights are in its checkpoints alone" in said.out + said.err
    assert Path("runs/first/checkpoints/last.ckpt").is_file()


def test_what_was_exported_is_named_before_its_checkpoint_goes(place, capsys):
    assert main(["export", "first", "--to", "safetensors", "--quiet"]) == 0
    assert main(["runs", "clean", "first", "--what", "checkpoints"]) == 0
    assert "export best.safetensors" in capsys.readouterr().out


def test_means_of_torchmetrics_over_classes_without_images_are_told_beside_those_of_vitlab():
    """F1Score said 0.2 and f1_macro 0.2667 of the same predictions, each of other classes."""
    net = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
    task = Classifier(3, metrics=[{"class_path": "F1Score", "init_args": {"average": "macro"}}], **net)
    table = pd.DataFrame({"target": [0, 1], "prediction": [0, 2], "probabilities": [[0.2, 0.3, 0.5]] * 2})
    (line,) = _of_absent_classes(task, table)
    assert line.startswith("F1Score: 1 class without images; a class that is predicted for others counts with 0")
    assert not _of_absent_classes(task, pd.concat([table, table.assign(target=2)]))
    assert not _of_absent_classes(Classifier(3, **net), table)
