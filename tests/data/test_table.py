"""Images named in a table: classes and numbers, photos and arrays, groups and splits."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from vitlab.data import Table


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))


def _arrays(folder, n=30, shape=(3, 6, 10), **columns):
    """A table of arrays whose first target is ten times the mean of the first channel."""
    rng = np.random.default_rng(0)
    arrays = rng.normal(100, 20, (n, *shape)).astype(np.float32)
    for i, array in enumerate(arrays):
        np.save(folder / f"{i}.npy", array)
    table = {"path": [f"{i}.npy" for i in range(n)], "bright": 10 * arrays[:, 0].mean((1, 2)), "other": range(n)}
    pd.DataFrame({**table, **columns}).to_csv(folder / "table.csv", index=False)
    return arrays


def _open(folder, file="table.csv", **settings):
    data = Table(str(folder / file), **{"targets": "bright", "batch_size": 4, "num_workers": 0, **settings})
    data.setup("fit")
    data.setup("test")
    return data


def test_arrays_stay_numbers_and_are_normalised_by_the_training_split(tmp_path):
    arrays = _arrays(tmp_path)
    data = _open(tmp_path, targets=["bright", "other"])
    assert data.img_size == (6, 10) and data.in_chans == 3 and data.targets["kind"] == "number"
    rows = [int(path.decode().removesuffix(".npy")) for path in data.splits["train"].ids]
    train = arrays[rows].astype(float)
    assert np.allclose(data.mean, train.mean((0, 2, 3))) and np.allclose(data.std, train.std((0, 2, 3)))
    images, targets = next(data.finished(data.val_dataloader()))
    first = int(data.splits["val"].ids[0].decode().removesuffix(".npy"))
    mean, std = (np.array(x)[:, None, None] for x in data.statistics())
    assert np.allclose(images[0], (arrays[first] - mean) / std, atol=1e-5)
    assert torch.allclose(targets[0], torch.tensor([10 * arrays[first][0].mean(), first]))
    both = np.stack([10 * train[:, 0].mean((1, 2)), rows], 1)
    assert np.allclose(data.targets["mean"], both.mean(0)) and np.allclose(data.targets["std"], both.std(0))


def test_pages_of_a_tiff_file_are_channels(tmp_path):
    arrays = _arrays(tmp_path)
    for i, array in enumerate(arrays):
        pages = [Image.fromarray(page) for page in array]
        pages[0].save(tmp_path / f"{i}.tif", save_all=True, append_images=pages[1:])
    table = pd.read_csv(tmp_path / "table.csv")
    table.assign(path=table["path"].str.replace("npy", "tif")).to_parquet(tmp_path / "table.parquet")
    npy, tif = _open(tmp_path), _open(tmp_path, "table.parquet")
    images = {name: dict(zip([i[:-4] for i in x.ids], x.images, strict=True)) for name, x in
              (("npy", npy.read("all")), ("tif", tif.read("all")))}  # fmt: skip
    assert all(torch.equal(images["npy"][key], images["tif"][key]) for key in images["npy"])


def test_photos_in_a_table_are_photos_in_a_folder(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(20):
        Image.fromarray(rng.integers(0, 256, (20 + i, 30, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    rows = {"path": [f"{i}.png" for i in range(20)], "kind": ["cat", "dog"] * 10}
    pd.DataFrame(rows).to_csv(tmp_path / "table.tsv", index=False, sep="\t")
    data = _open(tmp_path, "table.tsv", targets="kind", img_size=16, in_chans=1, augment="crop-flip")
    assert data.class_names == ["cat", "dog"] and data.targets == {"kind": "class"}
    images, labels = next(data.finished(data.train_dataloader()))
    assert images.shape == (4, 1, 16, 16) and labels.dtype == torch.int64
    assert data.notes[0].startswith("targets are classes (kind), by type ")


def test_groups_are_never_in_two_splits(tmp_path):
    groups = [f"p{i // 3}" for i in range(30)]
    _arrays(tmp_path, group=groups)
    of = dict(zip([f"{i}.npy" for i in range(30)], groups, strict=True))
    for settings in ({}, {"fold": "2/3"}, {"split_seed": 4}):
        data = _open(tmp_path, **settings)
        seen = [{of[path.decode()] for path in images.ids} for images in data.splits.values()]
        assert not seen[0] & seen[1] and not seen[0] & seen[2] and not seen[1] & seen[2]
        assert sum(len(images) for images in data.splits.values()) == 30


def test_a_split_column_is_what_it_says(tmp_path):
    _arrays(tmp_path, split=["train"] * 20 + ["Val"] * 6 + ["test"] * 4)
    data = _open(tmp_path)
    assert {name: [int(i[:-4]) for i in images.ids] for name, images in data.splits.items()} == {
        "train": list(range(20)), "val": list(range(20, 26)), "test": list(range(26, 30)),
    }  # fmt: skip


@pytest.mark.parametrize(
    "columns, settings, message",
    [
        ({}, {"targets": "brigt"}, "must have the column brigt; there are path, bright, other"),
        ({"bright": [None, *range(29)]}, {}, "row 1: the column bright is empty"),
        ({"bright": [np.inf, *range(29)]}, {}, "row 1: bright is inf, not finite"),
        ({"bright": ["x", *range(29)]}, {"target_type": "number"}, "the column bright must hold numbers"),
        ({"split": ["train"] * 29 + ["rest"]}, {}, "has rest in its split column: rows must be in train, val or test"),
        ({"split": ["train"] * 20 + ["test"] * 10, "group": ["a"] * 30}, {}, "the group a is in train and in test"),
        ({}, {"in_chans": 1}, "`data.in_chans` is 1, the arrays of .* have 3 channels"),
        ({}, {"augment": "rand-m9-mstd0.5-inc1"}, "`data.augment` must be none or crop-flip for arrays"),
        ({}, {"targets": ["bright", "other"], "target_type": "class"}, "must be one column of classes"),
    ],
)
def test_mistakes_in_a_table_are_told(tmp_path, columns, settings, message):
    _arrays(tmp_path, **columns)
    with pytest.raises(ValueError, match=message):
        _open(tmp_path, **settings)


def test_an_array_of_another_shape_and_one_with_nan_are_named(tmp_path):
    _arrays(tmp_path)
    np.save(tmp_path / "3.npy", np.zeros((3, 6, 11), np.float32))
    with pytest.raises(ValueError, match=r"3\.npy has the shape \(3, 6, 11\), others have \(3, 6, 10\)"):
        _open(tmp_path)
    np.save(tmp_path / "3.npy", np.full((3, 6, 10), np.nan))
    with pytest.raises(ValueError, match=r"3\.npy has values that are not finite"):
        _open(tmp_path)


def test_the_record_of_a_run_is_plain(tmp_path):
    _arrays(tmp_path)
    facts = _open(tmp_path).fingerprint()
    assert json.loads(json.dumps(facts)) == facts and facts["splits"]["train"].keys() == {"n", "hash"}
