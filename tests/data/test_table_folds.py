"""Tables as they come: a column of folds, empty targets, and files read by column."""

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from PIL import Image

from vitlab.ablation.evidence.verify import told_by_predictions
from vitlab.ablation.file.arms import NAME
from vitlab.cli.main import main
from vitlab.config.table_folds import folds_of_config
from vitlab.data import Table
from vitlab.data.files.table_file import read_table
from vitlab.data.record import Trained, measured
from vitlab.tasks import MultiTask, Regressor
from vitlab.tasks.regressor import Errors

N = 20


@pytest.fixture
def table(tmp_path):
    """Write a table of N small arrays, with these columns instead of or beside the usual ones."""

    def write(file="table.csv", **columns):
        rng = np.random.default_rng(0)
        for i in range(N):
            np.save(tmp_path / f"{i}.npy", rng.normal(size=(1, 4, 4)).astype(np.float32))
        rows = {"path": [f"{i}.npy" for i in range(N)], "y": rng.normal(size=N), "z": 100 * rng.normal(size=N)}
        frame = pd.DataFrame(rows | {"fold": np.arange(N) % 5} | columns)
        if file.endswith(".csv"):
            frame.to_csv(tmp_path / file, index=False)
        else:
            (frame.to_parquet if file.endswith(".parquet") else frame.to_feather)(tmp_path / file)
        return str(tmp_path / file)

    return write


def _open(path, **settings):
    data = Table(path, **{"targets": ["y", "z"], "batch_size": 4, "num_workers": 0, **settings})
    data.setup("fit")
    return data


def _rows(images):
    return sorted(int(name.decode().removesuffix(".npy")) for name in images.ids)


def test_one_fold_validates_and_the_others_train(table):
    path = table()
    for fold in (0, "3"):
        data = _open(path, fold=fold)
        assert _rows(data.splits["val"]) == [i for i in range(N) if i % 5 == int(fold)]
        assert _rows(data.splits["train"]) == [i for i in range(N) if i % 5 != int(fold)]
        assert data.fingerprint()["split_rule"]["named_fold"] == str(fold) and "fold" not in " ".join(data.notes)
    with pytest.raises(ValueError, match="the test split has no image: the column of folds divides all rows"):
        data.setup("test")


def test_an_unused_column_of_folds_is_reported(table):
    path = table()
    for settings in ({}, {"fold": "1/4"}):
        (note,) = [note for note in _open(path, **settings).notes if "fold" in note]
        assert "the column fold (0, 1, 2, 3, 4) is not used" in note and "--data.fold=VALUE" in note
    assert "named_fold" not in _open(path).fingerprint()["split_rule"]
    assert "`vitlab cv` goes through all values" in note
    assert not [note for note in _open(path, fold_column=None).notes if "column fold" in note]


def test_test_rows_of_a_split_column_stay_apart_and_need_no_fold(table):
    fold = [np.nan if i < 4 else i % 2 for i in range(N)]
    data = _open(table(split=["test"] * 4 + ["train"] * (N - 4), fold=fold), fold=1)
    assert _rows(data.splits["val"]) == list(range(5, N, 2))
    data.setup("test")
    assert _rows(data.splits["test"]) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "columns, settings, message",
    [
        ({}, {"fold": 7}, r"`data.fold` is 7, and the column fold of .*table.csv has 0, 1, 2, 3, 4"),
        ({}, {"fold": 3, "fold_column": None}, r"is 3, and .*table.csv has no column of folds .* 1/5, draws folds"),
        ({}, {"fold": 3, "targets": "fold"}, r"has no column of folds beside the targets"),
        ({"fold": [0] * 3 + [None] + [1] * (N - 4)}, {"fold": 1}, r"table.csv, row 4: the column fold names no fold"),
        ({"time": range(N)}, {"fold": 1, "split_by": "time"}, r"and so does `data.split_by: time`"),
        ({"group": ["a"] * N}, {"fold": 1}, r"row 2: the group a of .* is in fold 1, and in row 1 in fold 0"),
        ({"y": [1.5, None] + [2] * (N - 2)}, {}, r"row 2: the column y is empty; --data.missing=drop .*mask"),
        ({"y": [None] * N}, {"missing": "drop"}, r"every row has an empty target among y, z"),
        ({"y": [1.5, "low"] + [2] * (N - 2)}, {"target_type": "number"}, r"row 2: the column y must hold numbers"),
        ({"y": [1.5, None, "low"] + [2] * (N - 3)}, {"target_type": "number", "missing": "drop"}, r"row 3: the column"),
        ({"y": [0, None] + [1] * (N - 2), "z": [1] * N}, {"missing": "mask"}, r"row 2: the column y is empty"),
        ({}, {"missing": "skip"}, r"`data.missing` must be one of refuse, drop, mask, got 'skip'"),
        ({"y": ["a", "b", 7] + ["a"] * (N - 3)}, {}, r"table.csv, row 1: the column y holds 'a', and numbers"),
        ({"y": [1.5, "b"] * (N // 2)}, {"targets": "y"}, r"row 2: the column y holds 'b', and numbers such as 1.5 in"),
        ({"y": ["a"] * N}, {}, r"table.csv: the column y has one class, a"),
        ({}, {"target_type": ["class"]}, r"one for each of y, z, got \['class'\]"),
        ({}, {"target_type": ["multilabel", "number"]}, r"is class or number for each, got multilabel"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_its_settings_is_refused_with_row_and_column(table, columns, settings, message):
    with pytest.raises(ValueError, match=message):
        _open(table(**columns), **settings)


def test_rows_with_empty_targets_are_dropped_or_masked(table):
    y, z = np.random.default_rng(1).normal(size=(2, N))
    y[[1, 2]], z[[2, 3, 4]] = np.nan, np.nan
    path = table(y=y, z=z)
    dropped, masked = (_open(path, missing=way, fold=0) for way in ("drop", "mask"))
    assert _rows(dropped.splits["train"]) == [i for i in range(N) if i % 5 and i > 4]
    assert _rows(masked.splits["train"]) == [i for i in range(N) if i % 5 and i != 2]
    assert "4 of 20 rows with an empty target are left out (`data.missing: drop`)" in dropped.notes
    assert "1 of 20 rows without any target are left out (`data.missing: mask`)" in masked.notes
    assert "3 empty targets do not count in loss and metrics (`data.missing: mask`)" in masked.notes
    train = [i for i in range(N) if i % 5 and i != 2]
    assert np.allclose(masked.targets["mean"], [np.nanmean(y[train]), np.nanmean(z[train])])
    assert np.isclose(masked.targets["present"], 1 - 3 / (2 * len(train))) and "present" not in dropped.targets


def test_whole_numbers_with_gaps_stay_classes_and_labels(table):
    kinds = [None if i == 3 else i % 3 for i in range(N)]
    data = _open(table(y=kinds), targets="y", missing="drop", fold=0)
    assert data.class_names == ["0", "1", "2"] and len(data.splits["train"]) == N - 5
    flags = [None if i == 3 else i % 2 for i in range(N)]
    data = _open(table(y=flags, z=flags[::-1]), missing="drop", fold=0)
    assert data.targets["kind"] == "multilabel" and set(data.splits["train"].labels.unique().tolist()) == {0, 1}


NET = {"img_size": 4, "in_chans": 1, "patch_size": 2, "embed_dim": 8, "depth": 1, "num_heads": 2}


def test_the_masked_loss_counts_only_the_given_values(table):
    facts = {"kind": "number", "names": ["y", "z"], "mean": [1.0, -2.0], "std": [2.0, 3.0]}
    masked, plain = Regressor(targets={**facts, "present": 0.75}, **NET), Regressor(targets=facts, **NET)
    outputs, targets = torch.randn(2, 8, 2)
    gaps = torch.zeros(8, 2, dtype=torch.bool)
    gaps[:2] = True
    outputs.requires_grad_()
    loss = masked.train_loss(outputs, targets.masked_fill(gaps, torch.nan))
    assert torch.isclose(loss, plain.train_loss(outputs[2:], targets[2:]))  # three quarters are there
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert (gradient[:2] == 0).all() and (gradient[2:] != 0).all()
    halves = [
        masked.train_loss(outputs[i], targets[i].masked_fill(gaps[i], torch.nan)) for i in (slice(4), slice(4, 8))
    ]
    assert torch.isclose(sum(halves) / 2, loss)  # of two processes
    weights = torch.rand(8)
    assert torch.isclose(
        masked.train_loss(outputs, targets, weights) * 0.75, plain.train_loss(outputs, targets, weights)
    )
    with pytest.raises(ValueError, match="`metrics` cannot leave out empty targets"):
        Regressor(targets={**facts, "present": 0.75}, metrics=["MeanSquaredError"], **NET)


def test_errors_of_each_target_count_only_its_given_values():
    outputs, targets = torch.randn(2, 30, 3)
    gaps = torch.rand(30, 3) < 0.4
    gaps[:, 2] = True
    errors = Errors(["a", "b", "c"], [0.5, -1.0, 0.0], [2.0, 3.0, 1.0])
    for part in range(0, 30, 10):
        errors.update(outputs[part : part + 10], targets.masked_fill(gaps, torch.nan)[part : part + 10])
    found = errors.compute()
    alone = []
    for k, name in enumerate("ab"):
        one = Errors([name], [0.0], [1.0])
        one.update(outputs[~gaps[:, k], k, None], targets[~gaps[:, k], k, None])
        alone.append(one.compute())
        for metric, value in alone[-1].items():
            assert torch.isclose(found[f"{metric}/{name}"], value, atol=1e-4), metric
    for metric in ("mae", "rmse", "r2"):
        assert torch.isclose(found[metric], (alone[0][metric] + alone[1][metric]) / 2, atol=1e-4)
    assert found["mae/c"].isnan()


def _pets(**columns):
    """Columns y of classes and z of numbers, each with gaps."""
    y, z = np.array(["cat", "dog", "owl", "cat"] * (N // 4), dtype=object), 5.0 + np.arange(N)
    y[[1, 2]], z[[2, 3, 4]] = None, np.nan
    return {"y": y, "z": z, **columns}


def test_classes_and_numbers_of_one_table_are_targets_together(table):
    path = table(**_pets())
    data = _open(path, missing="mask", fold=0)
    train = [i for i in range(N) if i % 5 and i != 2]  # row 2 has neither
    z = (5.0 + np.array(train))[[i not in (3, 4) for i in train]]
    assert data.targets["kind"] == "mixed" and data.targets["classes"] == [["cat", "dog", "owl"], []]
    assert np.allclose(data.targets["mean"], [0, z.mean()]) and np.allclose(data.targets["std"], [1, z.std()])
    assert np.allclose(data.targets["present"], [1 - 1 / len(train), 1 - 2 / len(train)])
    order = [int(i.decode()[:-4]) for i in data.splits["train"].ids]
    labels = dict(zip(order, data.splits["train"].labels.tolist(), strict=True))
    assert labels[6] == [2, 11] and labels[8] == [0, 13] and np.isnan(labels[1][0]) and np.isnan(labels[3][1])
    assert "targets are y (3 classes), z (a number), by their values" in data.notes
    assert len(_open(path, missing="drop", fold=0).splits["train"]) == len(train) - 3
    whole = _open(table(y=["cat", "owl"] * (N // 2), z=range(N)), target_type=["class", "class"])
    assert [len(names) for names in whole.targets["classes"]] == [2, N] and whole.num_classes == 0


PETS = {"kind": "mixed", "names": ["y", "z"], "classes": [["cat", "dog", "owl"], []], "mean": [0.0, 4.0],
        "std": [1.0, 3.0], "present": [0.75, 0.5]}  # fmt: skip


def test_the_loss_of_classes_and_numbers_is_cross_entropy_plus_squared_error_of_given_values():
    task = MultiTask(targets=PETS, label_smoothing=0.0, target_weights={"z": 0.5}, **NET)
    outputs, targets = torch.randn(8, 4, requires_grad=True), torch.tensor([[0, 1, 2, 0] * 2, [3.0, 5, 7, 1] * 2]).T
    gaps = torch.zeros(8, 2, dtype=torch.bool)
    gaps[:2, 0], gaps[4:, 1] = True, True
    logits, numbers = outputs[2:, :3], outputs[:4, 3]
    mine = -logits.log_softmax(1)[torch.arange(6), targets[2:, 0].long()].sum() / 0.75 / 8
    mine = mine + 0.5 * (numbers - (targets[:4, 1] - 4) / 3).square().sum() / 0.5 / 8
    masked = targets.masked_fill(gaps, torch.nan)
    loss = task.train_loss(outputs, masked)
    assert torch.isclose(loss, mine) and torch.isclose(task.eval_loss(outputs, masked), loss)
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert (gradient[:2, :3] == 0).all() and (gradient[4:, 3] == 0).all() and (gradient[2:4] != 0).all()
    smooth = MultiTask(targets=PETS, **NET)
    assert smooth.train_loss(outputs, targets) != smooth.eval_loss(outputs, targets)  # smoothed in training alone
    images = torch.randn(3, 1, 4, 4)
    with torch.no_grad():
        assert torch.allclose(task.network_in_units()(images), task(images), atol=1e-5)
    for wrong, message in (({"x": 1}, "has x, and the targets are y, z"), ({"y": 0}, "must be above 0, got y: 0")):
        with pytest.raises(ValueError, match=f"`target_weights` {message}"):
            MultiTask(targets=PETS, target_weights=wrong, **NET)
    with pytest.raises(ValueError, match="the data has one kind: use --model=Regressor"):
        MultiTask(targets={"kind": "number", "names": ["y"]}, **NET).check_targets()


def test_metrics_of_classes_and_numbers_are_those_of_each_alone_and_follow_from_predictions(tmp_path):
    task = MultiTask(targets=PETS, **NET)
    outputs, targets = torch.randn(40, 4), torch.stack([torch.randint(3, (40,)), torch.randn(40)], dim=1)
    outputs[:20, :3] += 9 * torch.nn.functional.one_hot(targets[:20, 0].long(), 3)
    gaps = torch.rand(40, 2) < 0.3
    targets = targets.masked_fill(gaps, torch.nan)
    task.val_meter.update(outputs, targets, task.eval_loss(outputs, targets))
    found = task.val_meter.read("")
    right = (outputs[:, :3].argmax(1) == targets[:, 0])[~gaps[:, 0]].float().mean()
    alone = Errors(["z"], [0.0], [1.0])
    alone.update(outputs[~gaps[:, 1], 3:], targets[~gaps[:, 1], 1:])
    expected = {"acc1": right, "acc1/y": right} | {f"{k}{s}": v for k, v in alone.compute().items() for s in ("", "/z")}
    assert found.keys() == expected.keys() | {"loss", "n"}
    assert all(torch.isclose(found[name], value, atol=1e-4) for name, value in expected.items())
    columns = {}
    for k, (answer, share) in enumerate(task.answers(outputs)):
        columns |= {f"target_{k}": targets[:, k], f"prediction_{k}": answer}
        columns |= {} if share is None else {f"probability_{k}": share}
    pd.DataFrame({name: value.numpy() for name, value in columns.items()}).to_parquet(tmp_path / "val.parquet")
    told = told_by_predictions(tmp_path / "val.parquet")
    assert told == pytest.approx({"n": 40, "acc1": float(right), "mae": float(expected["mae"])})


def test_predictions_of_masked_numbers_give_the_mean_error_of_the_given_values(tmp_path):
    table = pd.DataFrame({"target_0": [1.0, np.nan, 3.0], "prediction_0": [2.0, 5.0, 3.0],
                          "target_1": [np.nan, np.nan, 1.0], "prediction_1": [0.0, 0.0, 4.0]})  # fmt: skip
    table.to_parquet(tmp_path / "val.parquet")
    assert told_by_predictions(tmp_path / "val.parquet")["mae"] == pytest.approx((0.5 + 3) / 2)


def test_another_split_or_table_is_measured_with_the_scale_and_classes_of_the_run(table):
    run = _open(table(**_pets()), missing="mask", fold=0)
    trained = Trained({**run.fingerprint(), "split_rule": None}, None, "val")
    y = np.where(np.arange(N) % 2, "owl", "dog")
    path = table("other.csv", y=y, z=100.0 + np.arange(N))
    with measured(trained):
        other, fold = _open(path, fold=1), _open(table(**_pets()), missing="mask", fold=1)
        with pytest.raises(ValueError, match="the column y has the classes emu, unknown to the run"):
            _open(table("other.csv", y=["emu", "owl"] * (N // 2)), fold=1)
    assert other.targets == fold.targets == run.targets
    labels = dict(zip((int(i.decode()[:-4]) for i in other.splits["val"].ids), other.splits["val"].labels, strict=True))
    assert [int(labels[i][0]) for i in (1, 6)] == [2, 1] and labels[6][1] == 106
    numbers = _open(table(), fold=0)
    with measured(Trained({**numbers.fingerprint(), "split_rule": None}, None, "val")):
        assert _open(table(), fold=1).targets == numbers.targets
        with pytest.raises(ValueError, match="is y, and the run was trained on y, z"):
            _open(table(), fold=1, targets="y")
        with pytest.raises(ValueError, match="is z, y, and the run was trained on y, z"):
            _open(table(), fold=1, targets=["z", "y"])
    later = _open(table(), fold=1)
    assert later.targets != numbers.targets
    later.load_state_dict(numbers.fingerprint() | {"seed": 0})
    assert later.targets == numbers.targets


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_columnar_files_are_read_by_column(table, suffix):
    path = table(f"table.{suffix}", long=["x" * 50] * N)
    plain, data = _open(table(), fold=2), _open(path, fold=2)
    assert torch.equal(plain.splits["train"].labels, data.splits["train"].labels)
    assert list(read_table(path, ["y", "nothing", "path"])) == ["path", "y"]
    assert "long" not in data.table.frame
    with pytest.raises(ValueError, match="must have the column x; there are path, y, z, fold, long"):
        _open(path, targets="x")


def test_cross_validation_goes_through_the_folds_of_a_table_and_of_arrays(table, tmp_path):
    path = table(fold=[("b/1", "a", 10)[i % 3] for i in range(N)])
    settings = [("data", "Table"), ("data.path", path)]
    assert folds_of_config([], settings) == {"fold-10": "10", "fold-a": "a", "fold-b-1": "b/1"}
    assert folds_of_config([], [*settings, ("data.fold_column", "z")]) and not folds_of_config(
        [], [*settings, ("data.fold_column", None)]
    )
    assert not folds_of_config([], [("data", "ImageFolder"), ("data.path", path)])
    np.savez(tmp_path / "a.npz", images=np.zeros((3, 4, 4)), targets=[0, 1, 0], fold=["b", "a", "b"])
    assert folds_of_config([], [("data", "Arrays"), ("data.path", f"{tmp_path}/a.npz")]) == {
        "fold-a": "a",
        "fold-b": "b",
    }
    path = table("cities.csv", fold=[("東京", "大阪", "---1", "京都")[i % 4] for i in range(N)])
    assert folds_of_config([], [("data", "Table"), ("data.path", path)]) == {
        "fold----1": "---1", "fold----2": "京都", "fold----3": "大阪", "fold----4": "東京",
    }  # fmt: skip
    path = table("cases.csv", fold=[("a", "A", "Site_2", "ÉTÉ")[i % 4] for i in range(N)])
    arms = folds_of_config([], [("data", "Table"), ("data.path", path)])
    assert arms == {"fold-a-1": "A", "fold-site_2": "Site_2", "fold-a-2": "a", "fold--t-": "ÉTÉ"}
    assert all(NAME.fullmatch(name) for name in arms)  # of an arm


def test_what_the_values_of_another_table_leave_open_is_as_in_the_run(table, recwarn):
    run = _open(table(), targets="y")
    with measured(Trained({**run.fingerprint(), "split_rule": None}, None, "test")):
        whole = _open(table("other.csv", y=np.arange(N) + 20), targets="y", test_share=0.5)
    assert whole.targets == run.targets and whole.splits["train"].labels.dtype == torch.float32
    birds, gaps = np.where(np.arange(N) % 2, "owl", "dog"), np.where(np.arange(N) % 3, 1.5, np.nan)
    run = _open(table(y=birds, z=gaps), missing="mask")
    with measured(Trained({**run.fingerprint(), "split_rule": None}, None, "test")):
        path = table("other.csv", y="owl", z=[np.nan] * N)
        other = Table(path, targets=["y", "z"], missing="mask", test_share=1.0, num_workers=0)
        other.setup("test")
    assert other.targets == run.targets and not recwarn
    owl, empty = other.splits["test"].labels.T
    assert torch.equal(owl, torch.ones(N)) and empty.isnan().all()
    with pytest.raises(ValueError, match="the column y has one class, owl"):
        _open(path, missing="mask", targets=["y", "z"])


def test_one_label_is_enough_to_measure_a_run_of_labels(table):
    run = _open(table("labels.parquet", y=[["cat", "dog"], ["cat"]] * (N // 2)), targets="y", fold=0)
    path = table("other.parquet", y=[["dog"], None] * (N // 2))
    with measured(Trained({**run.fingerprint(), "split_rule": None}, None, "val")):
        labels = _open(path, targets="y", fold=0).splits["val"].labels
    assert labels.tolist() == [[0, 1], [0, 0]] * 2
    with pytest.raises(ValueError, match="the column y has one label, dog"):
        _open(path, targets="y", fold=0)


def _written(tmp_path, **columns):
    """Write cells as they are given, and a photo for each path."""
    for path in columns.setdefault("path", [f"{i:04}" for i in range(N)]):
        Image.new("L", (8, 8), hash(path) % 256).save(tmp_path / path, "PNG")
    lines = [",".join(columns), *map(",".join, zip(*columns.values(), strict=True))]
    (tmp_path / "written.csv").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "written.csv")


def test_paths_classes_groups_and_folds_of_digits_stay_as_they_are_written(tmp_path):
    columns = {"c": ["01", "1", "10", "2"] * 5, "group": [f"{i % 10:03}" for i in range(N)], "fold": ["00", "01"] * 10}
    data = _open(_written(tmp_path, **columns), targets="c", group_column=None)
    assert data.class_names == ["01", "1", "10", "2"] and data.table.paths[0] == "0000"
    assert data.folds[:2] == ["00", "01"] and len(data.splits["train"]) + len(data.splits["val"]) == 16
    assert _open(_written(tmp_path, **columns), targets="c").table.groups[1] == "1"  # as ever: splits stand on it
    columns["group"] = ["001", "1", "2", "3", "4"] * 4
    assert _open(_written(tmp_path, **columns), targets="c").table.groups[:2] == ["001", "1"]


def test_classes_of_numbers_keep_names_and_order_and_large_ones_stay_apart_beside_empty_cells(tmp_path):
    data = _open(_written(tmp_path, c=[*map(str, range(1, 11))] * 2), targets="c")
    assert data.class_names == ["1", "10", *"23456789"]
    data = _open(_written(tmp_path, c=["1", "2", "", "2"] * 5), targets="c", missing="drop")
    assert data.class_names == ["1", "2"]
    large = ["9007199254740993", "9007199254740992", "", "9007199254740992"]
    assert _open(_written(tmp_path, c=large * 5), targets="c", missing="drop").class_names == sorted({*large} - {""})
    assert _open(_written(tmp_path, c=["01.50", "1.5", "2", "3"] * 5), targets="c").targets["kind"] == "number"


def test_a_run_that_called_the_class_01_of_a_table_1_still_reads_it(tmp_path):
    path = _written(tmp_path, c=["01", "02", "10", "02"] * 5)
    assert _open(path, targets="c").class_names == ["01", "02", "10"]
    data = _open(path, targets="c")
    data.adopt_classes(["1", "10", "2"])
    assert data.class_names == ["1", "10", "2"] and data.targets_of(np.arange(3)).tolist() == [0, 2, 1]


def test_any_name_of_a_fold_but_null_can_be_chosen_and_reaches_its_rows(table):
    names = ["00", "01", "a/b", "1/2"]
    path = table("table.parquet", fold=[names[i % 4] for i in range(N)])
    arms = folds_of_config([], [("data", "Table"), ("data.path", path)])
    assert sorted(arms.values()) == sorted(names)
    for k, name in enumerate(names):
        data = _open(path, fold=name)
        assert [int(x.decode()[:-4]) % 4 for x in data.splits["val"].ids] == [k] * 5
    assert len(_open(path, fold=1).splits["val"]) == 5 and len(_open(path, fold="1/5").splits["val"]) == 3
    for null in ("null", "~"):
        path = table("other.csv", fold=[("a", "b", null)[i % 3] for i in range(N)])
        assert [*folds_of_config([], [("data", "Table"), ("data.path", path)]).values()] == ["a", "b"]
        with pytest.raises(ValueError, match="row 3: the column fold names no fold; only rows of the split test may"):
            _open(path, fold="a")
    assert _open(table("third.csv", fold=[0, 1, "NA", 2] * 5), fold_column="fold").folds[:3] == ["0", "1", ""]


@pytest.mark.slow
def test_a_command_hands_over_the_name_of_a_fold_as_it_is_written(table, here, capsys):
    path = table(fold=["a", "b"] * (N // 2))
    (here / "arm.yaml").write_text(yaml.safe_dump({"data": {"init_args": {"fold": "010"}}}))
    words = ["fit", "--config", "vit", "--data=Table", f"--data.path={path}", "--data.targets=y", "--dry_run"]
    for more in (["--data.fold=010"], ["--config", str(here / "arm.yaml")]):
        assert main([*words, *more]) == 2 and "`data.fold` is 010, and the column fold" in capsys.readouterr().err
