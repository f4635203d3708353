"""Tables as they come: a column of folds, empty targets, and files read by column."""

import numpy as np
import pandas as pd
import pytest
import torch

from vitlab.config.table_folds import folds_of_config
from vitlab.data import Table
from vitlab.data.files.rows import read_table
from vitlab.tasks import Regressor
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


def test_a_fold_is_for_validation_and_the_others_for_training(table):
    path = table()
    for fold in (0, "3"):
        data = _open(path, fold=fold)
        assert _rows(data.splits["val"]) == [i for i in range(N) if i % 5 == int(fold)]
        assert _rows(data.splits["train"]) == [i for i in range(N) if i % 5 != int(fold)]
        assert data.fingerprint()["split_rule"]["named_fold"] == str(fold) and "fold" not in " ".join(data.notes)
    with pytest.raises(ValueError, match="the test split has no image: the column of folds divides all rows"):
        data.setup("test")


def test_a_column_of_folds_that_is_not_used_is_told(table):
    path = table()
    for settings in ({}, {"fold": "1/4"}):
        (note,) = [note for note in _open(path, **settings).notes if "fold" in note]
        assert "the column fold (0, 1, 2, 3, 4) is not used" in note and "--data.fold=VALUE" in note
    assert "named_fold" not in _open(path).fingerprint()["split_rule"]
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
        ({}, {"fold": 3, "fold_column": None}, r"has no column None; k/n, such as 1/5, draws folds"),
        ({"fold": [0] * 3 + [None] + [1] * (N - 4)}, {"fold": 1}, r"table.csv, row 4: the column fold names no fold"),
        ({"time": range(N)}, {"fold": 1, "split_by": "time"}, r"and so does `data.split_by: time`"),
        ({"group": ["a"] * N}, {"fold": 1}, r"the group a is in the folds 0 and 1"),
        ({"y": [1.5, None] + [2] * (N - 2)}, {}, r"row 2: the column y is empty; --data.missing=drop .*mask"),
        ({"y": [None] * N}, {"missing": "drop"}, r"every row has an empty target among y, z"),
        ({"y": [1.5, "low"] + [2] * (N - 2)}, {"target_type": "number"}, r"row 2: the column y must hold numbers"),
        ({"y": [1.5, None, "low"] + [2] * (N - 3)}, {"target_type": "number", "missing": "drop"}, r"row 3: the column"),
        ({"y": [0, None] + [1] * (N - 2), "z": [1] * N}, {"missing": "mask"}, r"row 2: the column y is empty"),
        ({}, {"missing": "skip"}, r"`data.missing` must be one of refuse, drop, mask, got 'skip'"),
        ({}, {"targets": ["y", "x"]}, r"must have the column x; there are path, y, z, fold"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_place(table, columns, settings, message):
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


def test_the_masked_loss_is_that_of_the_values_that_are_there(table):
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


def test_errors_are_those_of_each_target_s_own_values():
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


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_columnar_files_are_read_by_column(table, suffix):
    path = table(f"table.{suffix}", long=["x" * 50] * N)
    plain, data = _open(table(), fold=2), _open(path, fold=2)
    assert torch.equal(plain.splits["train"].labels, data.splits["train"].labels)
    assert list(read_table(path, ["y", "nothing", "path"])) == ["path", "y"]
    assert "long" not in data.table.table
    with pytest.raises(ValueError, match="must have the column x; there are path, y, z, fold, long"):
        _open(path, targets="x")


def test_cross_validation_goes_through_the_folds_of_a_table(table):
    path = table(fold=[("b/1", "a", 10)[i % 3] for i in range(N)])
    settings = [("data", "Table"), ("data.path", path)]
    assert folds_of_config([], settings) == {"fold-10": "10", "fold-a": "a", "fold-b-1": "b/1"}
    assert folds_of_config([], [*settings, ("data.fold_column", "z")]) and not folds_of_config(
        [], [*settings, ("data.fold_column", None)]
    )
    assert not folds_of_config([], [("data", "ImageFolder"), ("data.path", path)])
