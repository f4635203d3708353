"""Cross-validation: folds as an ablation, one table."""

import csv
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.ablation.conftest import TOY
from vitlab.ablation import folds
from vitlab.ablation.execution.status import Status
from vitlab.ablation.file.spec import read_ablation
from vitlab.ablation.folds import Folds, _finished, cross_validate
from vitlab.ablation.inference.measured import collect
from vitlab.cli.main import main
from vitlab.config import trust
from vitlab.config.table_folds import check_takes_folds
from vitlab.data import Table

TESTS = Path(__file__).parents[1]


@pytest.fixture
def toy(tmp_path, monkeypatch):
    for module in ("resolve", "probe", "commands"):
        monkeypatch.setattr(f"vitlab.ablation.execution.{module}.command", lambda ablation: [sys.executable, str(TOY)])
    monkeypatch.setenv("TOY_STARTS", str(tmp_path / "starts"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("trainer: {max_epochs: 3}\nmodel: {pos_embed: none, lr: 0.001}\ndata: {}\n")
    return tmp_path


def _starts(toy):
    return len((toy / "starts").read_text().splitlines())


@pytest.mark.slow  # starts processes, of a stand-in for vitlab
def test_folds_are_trained_once_and_collected_in_one_table(toy, capsys):
    words = ["cv", "base.yaml", "--folds=3", "--workers=2", "--model.pos_embed=learned", "--seed=4"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"fold2of3 +10,000 .*\nfold3of3 .*\nmean .*\nsd .*\n95 % +- ", out)  # the folds agree
    rows = list(csv.DictReader((toy / "runs/ablations/cv-base/folds.csv").read_text().splitlines()))
    assert [row["fold"] for row in rows] == ["fold1of3", "fold2of3", "fold3of3"] and float(rows[0]["acc1"]) > 0.5
    configs = sorted((toy / "runs/ablations/cv-base").glob("fold*/s4-*/config.yaml"))
    assert ["fold: 1/3" in path.read_text() for path in configs] == [True, False, False] and _starts(toy) == 6
    assert main(words) == 0 and _starts(toy) == 6


@pytest.mark.parametrize(
    ("states", "told"),
    [
        (["missing"] * 4, "is done: 4 missing; the same command continues them"),
        (
            ["failed", "missing"],
            "is done: 1 failed, 1 missing; the same command continues them, with --retry_failed if",
        ),
    ],
)
def test_folds_of_which_none_is_done_are_told_in_one_line_with_the_way_on(toy, monkeypatch, states, told):
    status = Status([{"state": state} for state in states], ["fold-0  1 missing", "fold-1  1 missing"])
    monkeypatch.setattr("vitlab.ablation.lab.Lab.run", lambda *args, **options: status)
    with pytest.raises(ValueError, match=told) as error:
        cross_validate(["base.yaml"], folds=len(states))
    assert "\n" not in str(error.value)


def test_a_count_of_images_that_were_trained_on_has_no_interval():
    rows = [{"fold": name, "n": 8, "acc1": acc1, "trained_on": 8.0} for name, acc1 in (("a", 0.5), ("b", 0.7))]
    lines = str(Folds(Status([], []), rows, Path("folds.csv"))).splitlines()
    assert lines[1].split() == ["a", "8", "0.5", "8"] and [*map(len, map(str.split, lines[3:5]))] == [2, 2]


def test_a_fold_that_counts_no_image_that_was_trained_on_has_none(monkeypatch):
    """It had nan."""
    cells = {}
    for fold, more in (("a", {"trained_on": 8.0, "acc1_of_others": 0.5}), ("b", {})):
        cells[fold, 0] = SimpleNamespace(run=SimpleNamespace(data={}), numbers={"n": 16.0, "acc1": 0.5, **more})
    monkeypatch.setattr("vitlab.ablation.folds.collect", lambda *args: SimpleNamespace(cells=cells))
    monkeypatch.setattr("vitlab.ablation.folds.known", lambda ablation: [])
    rows = _finished(None)
    assert [row["trained_on"] for row in rows] == [8, 0] and math.isnan(rows[1]["acc1_of_others"])


@pytest.mark.slow
def test_a_name_with_a_comma_is_one_column_of_the_file(toy, monkeypatch):
    def collected(*args):
        results = collect(*args)
        for cell in results.cells.values():
            cell.numbers["mae/width, in cm"] = 1.5
        return results

    monkeypatch.setattr("vitlab.ablation.folds.collect", collected)
    file = cross_validate(["base.yaml"], folds=2, workers=2).file
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [row["mae/width, in cm"] for row in rows] == ["1.5", "1.5"] and None not in rows[0]


@pytest.mark.slow
def test_folds_of_an_own_module_are_shown_by_what_it_logs(toy, monkeypatch):
    def collected(*args):
        results = collect(*args)
        for cell in results.cells.values():
            del cell.numbers["n"], cell.numbers["loss"]
        return results

    monkeypatch.setattr("vitlab.ablation.folds.collect", collected)
    monkeypatch.setattr("vitlab.ablation.execution.probe._metrics", lambda *_: ["test_acc", "val_acc", "val_loss"])
    found = cross_validate(["base.yaml"], folds=2, workers=2)
    assert read_ablation(found.file.with_name("cv.yaml")).primary == "val_loss"
    assert [row["n"] for row in found.rows] == [10_000] * 2 and "loss" not in found.rows[0]
    assert str(Folds(found.status, [{**row, "n": None} for row in found.rows], found.file)).count(" ? ") == 2


def test_what_a_line_shows_of_a_fold_is_not_of_the_test_split(monkeypatch):
    for logged, shown in {
        ("acc1", "loss"): None, (): None, ("test_acc", "val_acc"): "val_acc", ("mae", "val_loss"): "val_loss",
    }.items():  # fmt: skip
        monkeypatch.setattr(folds, "known", lambda ablation, logged=logged: [SimpleNamespace(metrics=logged)])
        assert folds._logged(None) == shown


def test_the_table_has_mean_spread_and_interval_of_the_finished_folds(tmp_path):
    rows = [{"fold": f"fold{i}of5", "n": 1000, "acc1": x, "r2": np.nan} for i, x in enumerate((0.5, 0.6, 0.7))]
    lines = str(Folds(Status([], []), rows, tmp_path)).splitlines()
    assert lines[4].split() == ["mean", "0.6"] and lines[5].split() == ["sd", "0.1"]
    assert lines[6].split() == ["95", "%", "0.3516", "to", "0.8484"]  # 0.6 +- 4.3027 x 0.1 / sqrt(3)
    assert len(str(Folds(Status([], []), rows[:1], tmp_path)).splitlines()) == 3
    two = [{"fold": f"fold{i}of2", "n": 10, "acc1": x, "mae/w, cm": 9 * x} for i, x in enumerate((0.9, 0.98))]
    tied = [{**row, "acc1": 0.5} for row in rows]
    assert str(Folds(Status([], []), tied, tmp_path)).splitlines()[6].split() == ["95", "%", "-"]
    assert "0.4318 to 1 " in str(Folds(Status([], []), two, tmp_path))  # 0.94 +- 0.508: no accuracy is above 1


@pytest.mark.parametrize(
    "words, message",
    [
        (["base.yaml", "--folds=1"], "`--folds` must be at least 2, got 1"),
        (["base.yaml", "--workers=0"], "argument --workers: must be a whole number, 1 or more, got 0"),
        (["base.yaml", "--workers=x"], "argument --workers: must be a whole number, 1 or more, got x"),
        (["base.yaml", "--data.fold=1/2"], "`data.fold` is set by cross-validation"),
        (
            ["base.yaml", "--trainer.devices=2"],
            "`trainer.devices` is set by cross-validation: a fold runs on one device",
        ),
        (["base.yaml", "--seed_everything=1"], "use `--seed`"),
        (["base.yaml", "--init_from=last"], "must name its run: `last` is another one when it goes on"),
        (["base.yaml", "--init_from", "mae"], 'no run or checkpoint called "mae"'),
        (["base.yaml", "--resize=rescale"], "set `resize` in the init_args of `model.pos_embed`"),
        (["base.yaml", "--init_grid=4,4"], "state the network of the weights in FILE.json beside them"),
        (
            ["base.yaml", "--name=../.."],
            "`--name` must be a-z 0-9 _ . -, beginning with a letter or digit, got '../..'",
        ),
        (["base.yaml", "--name="], "got ''"),
        (["latin.yaml", "--folds=2"], "latin.yaml` cannot be read: 'utf-8' codec can't decode byte 0xfc"),
        (["no-such-config"], "no-such-config"),
        (["base.yaml", "--model.lr=1", "x"], "`x` is out of place"),
        (["base.yaml", "--model.lr=1", "--dry_run"], "`--dry_run` is out of place"),
        (["base.yaml", "--data.batch_size"], "`--data.batch_size` is out of place"),
        (
            ["base.yaml", "--folds=3", "--data=userpkg.data.Bars", "--trust_imports=userpkg"],
            "`vitlab cv` sets `data.fold`, and userpkg.data.Bars has no argument `fold`: give it one, which is 1/5 for",
        ),
        (["base.yaml", "--data=userpkg.data.Bars"], 'the class path "userpkg.data.Bars" is refused'),
    ],
)
def test_mistakes_in_cross_validation_are_one_line_and_leave_nothing(toy, monkeypatch, capsys, words, message):
    monkeypatch.syspath_prepend(str(TESTS))
    (toy / "latin.yaml").write_bytes("model: {x: ü}".encode("latin-1"))
    assert main(["cv", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert {path.name for path in toy.iterdir()} <= {"base.yaml", "latin.yaml"}


class WithFold(Table):
    def __init__(self, path, **table):
        super().__init__(path=path, **table)


class Foldless(Table):
    def __init__(self, path):
        super().__init__(path=path)


def test_data_of_ones_own_must_have_an_argument_for_the_fold():
    trust.trust_classes([f"{__name__}.WithFold"])
    check_takes_folds([], [("data", f"{__name__}.WithFold")])
    with pytest.raises(ValueError, match="Foldless has no argument `fold`"):
        check_takes_folds([], [("data.root", "photos"), ("data", f"{__name__}.Foldless")])


@pytest.mark.parametrize("config, name", [("my config", "cv-my-config"), ("Größe_2", "cv-gr-e_2"), ("a.B", "cv-a.b")])
def test_the_folder_of_a_config_with_any_name_has_a_name_that_an_ablation_may_have(toy, monkeypatch, config, name):
    (toy / "base.yaml").rename(toy / f"{config}.yaml")
    monkeypatch.setattr(folds, "Lab", lambda file, *words: pytest.exit(read_ablation(file).name))
    with pytest.raises(pytest.exit.Exception, match=f"^{name}$"):
        cross_validate([f"{config}.yaml"], folds=2)


def test_every_fold_starts_from_the_given_weights(toy, monkeypatch):
    (toy / "mae-4.pt").touch()
    monkeypatch.setattr(folds, "Lab", lambda file, *words: pytest.exit(read_ablation(file)))
    with pytest.raises(pytest.exit.Exception) as found:
        cross_validate(["base.yaml"], [("init_from", "mae-{seed}.pt"), ("model.lr", 0.1)], folds=2, seed=4)
    ablation = found.value.msg
    assert [arm.weights(4) for arm in ablation.arms] == ["mae-4.pt", "mae-4.pt"]
    assert "init_from" not in (toy / "runs/ablations/cv-base/settings.yaml").read_text()


@pytest.mark.parametrize("given", [False, True], ids=["undivided", "with a split column"])
def test_folds_cover_all_images_and_keep_groups_together(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.zeros((1, 4, 4), np.float32))
    lines = ["path,target,group" + ",split" * given]
    for i in range(60):
        np.save(f"{i}.npy", np.full((1, 4, 4), i, np.float32))
        split = ["train", "val", "test"][max(0, i // 3 % 10 // 2 - 2)]  # of ten groups, 6, 2 and 2
        lines.append(f"{i}.npy,{'ab'[i % 2]},g{i // 3}" + f",{split}" * given)
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    seen = []
    for k in (1, 2, 3):
        data = Table("table.csv", fold=f"{k}/3", batch_size=4)
        data.setup("fit")
        parts = {name: {int(i.decode()[:-4]) // 3 for i in images.ids} for name, images in data.splits.items()}
        assert not parts["train"] & parts["val"]
        seen += sorted(parts["val"])
    assert len(seen) == len(set(seen)) == 16


def test_the_file_names_the_packages_that_the_command_trusts_and_the_configs_use(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folds, "TRUSTED", ["mine", "ours", "unused", "runs/a/parts.py"])
    (tmp_path / "base.yaml").write_text("model: {class_path: mine.Net}\n")
    levels = {f"fold{k}of2": {"data.fold": f"{k}/2"} for k in (1, 2)}
    file = folds._File("own", ["base.yaml"], [("data", "ours.Data")], levels, 0)
    assert read_ablation(file.written()).trust_imports == ("mine", "ours")
