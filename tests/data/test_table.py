"""Images named in a table: classes and numbers, photos and arrays, groups and splits."""

import json
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from vitlab.data import Table
from vitlab.data.files.array_images import is_array, read_array
from vitlab.data.files.decode import ImageError, decode
from vitlab.data.files.rows import Rows, fold_names
from vitlab.data.files.table_file import read_table
from vitlab.data.record import Trained, measured


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
    data.train_dataloader()
    return data


def test_arrays_stay_numbers_and_are_normalized_by_the_training_split(tmp_path):
    arrays = _arrays(tmp_path)
    data = _open(tmp_path, targets=["bright", "other"])
    assert data.img_size == (6, 10) and data.in_chans == 3 and data.targets["kind"] == "number"
    rows = [int(path.decode().removesuffix(".npy")) for path in data.splits["train"].ids]
    train = arrays[rows].astype(float)
    assert np.allclose(data.mean, train.mean((0, 2, 3))) and np.allclose(data.std, train.std((0, 2, 3)))
    images, targets = next(data.iterate_batches(data.val_dataloader()))
    first = int(data.splits["val"].ids[0].decode().removesuffix(".npy"))
    mean, std = (np.array(x)[:, None, None] for x in data.statistics())
    assert np.allclose(images[0], (arrays[first] - mean) / std, atol=1e-5)
    assert torch.allclose(targets[0], torch.tensor([10 * arrays[first][0].mean(), first]))
    both = np.stack([10 * train[:, 0].mean((1, 2)), rows], 1)
    assert np.allclose(data.targets["mean"], both.mean(0)) and np.allclose(data.targets["std"], both.std(0))


def test_arrays_larger_than_the_input_are_read_whole(tmp_path):
    _arrays(tmp_path)
    data = _open(tmp_path, img_size=4)
    assert data.pipeline.native_size == (6, 10) and data.splits["train"].images.shape[1:] == (3, 6, 10)


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
    images, labels = next(data.iterate_batches(data.train_dataloader()))
    assert images.shape == (4, 1, 16, 16) and labels.dtype == torch.int64
    assert data.notes[0].startswith("targets are classes (kind), by type ")


@pytest.mark.parametrize("channels", [0, 4])
def test_a_number_of_channels_that_photos_do_not_have_is_refused_at_once(channels, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    pd.DataFrame({"path": ["a.png"] * 4, "bright": [0.5, 1, 2, 3]}).to_csv(tmp_path / "table.csv", index=False)
    with pytest.raises(
        ValueError, match=rf"`data.in_chans` must be 3 \(RGB\) or 1 \(gray\) for photos, got {channels}"
    ):
        Table(str(tmp_path / "table.csv"), "bright", in_chans=channels)


def test_cells_behind_the_last_column_and_names_of_rows_are_no_columns(tmp_path):
    plain = pd.DataFrame({"path": ["a.png", "b.png"], "y": ["01", "x"]})
    for text in (
        "path,y,\na.png,01,\nb.png,x,\n",
        "path,y\na.png,01,,\nb.png,x,,\n",
        "path,y\n7,a.png,01\n8,b.png,x\n",
    ):
        (tmp_path / "a.csv").write_text(text)
        assert read_table(str(tmp_path / "a.csv"), text=["y"])[["path", "y"]].equals(plain), text
    for table in (plain.set_index("path"), plain.set_axis([30, 40]), plain.set_axis(["r", "s"])):
        table.to_parquet(tmp_path / "a.parquet")
        read = read_table(str(tmp_path / "a.parquet"), ["path", "y"], ["path", "y"])
        assert read.equals(plain), table
    assert read_table(str(tmp_path / "a.parquet"), ["z"], ["z"]).columns.tolist() == ["path", "y"]


def test_groups_are_never_in_two_splits(tmp_path):
    groups = [f"p{i // 3}" for i in range(30)]
    _arrays(tmp_path, group=groups)
    of = dict(zip([f"{i}.npy" for i in range(30)], groups, strict=True))
    for settings in ({}, {"fold": "2/3"}, {"split_seed": 4}):
        data = _open(tmp_path, **settings)
        seen = [{of[path.decode()] for path in images.ids} for images in data.splits.values()]
        assert not seen[0] & seen[1] and not seen[0] & seen[2] and not seen[1] & seen[2]
        assert sum(len(images) for images in data.splits.values()) == 30


def test_a_split_column_decides_the_splits(tmp_path):
    _arrays(tmp_path, split=["train"] * 20 + ["Val"] * 6 + ["test"] * 4)
    data = _open(tmp_path)
    assert {name: [int(i[:-4]) for i in images.ids] for name, images in data.splits.items()} == {
        "train": list(range(20)), "val": list(range(20, 26)), "test": list(range(26, 30)),
    }  # fmt: skip


def test_an_index_of_a_split_file_is_a_row_of_the_table_also_where_others_are_for_testing(tmp_path):
    targets = [None, *np.arange(29.0)]
    _arrays(tmp_path, split=["test"] * 10 + ["train"] * 20, kind=targets[::-1])
    (path := tmp_path / "split.json").write_text(json.dumps({"train": [10, 28], "val": [12, 11]}))
    data = _open(tmp_path, targets="kind", missing="drop", split_file=str(path), batch_size=1)
    assert [i.decode() for i in data.splits["val"].ids] == ["12.npy", "11.npy"] and len(data.splits["test"]) == 10
    for row in (9, 29):  # for testing, and left out
        path.write_text(json.dumps({"train": [10], "val": [row]}))
        with pytest.raises(ValueError, match=f"lists {row} under val, which is not in the data"):
            _open(tmp_path, targets="kind", missing="drop", split_file=str(path), batch_size=1)


@pytest.mark.parametrize("others", ["test", "val"])
def test_a_column_of_splits_without_test_rows_says_which_are_tested_on(others, tmp_path):
    _arrays(tmp_path, split=["train"] * 20 + [others] * 10)
    note = (
        "the column split names no test rows: those of val are the test split, and validation is a part of the others"
    )
    assert (note in Table(str(tmp_path / "table.csv"), "bright").notes) == (others == "val")


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ";"), ("a.csv", "\t"), ("a.TSV", ",")])
def test_a_table_whose_columns_stand_apart_by_another_mark_is_told_so(name, mark, tmp_path):
    (tmp_path / name).write_text(mark.join(["path", "bright"]) + "\n" + mark.join(["a.png", "1"]))
    line = f"there are path{mark}bright: columns stand apart by commas, those of a .tsv file by tabs"
    with pytest.raises(ValueError, match=line):
        Table(str(tmp_path / name), targets="bright")


@pytest.mark.parametrize("targets", ["bright", "class"])
@pytest.mark.parametrize("word", ["test", "val"])
def test_a_run_is_measured_on_all_rows_of_a_table_of_one_split_without_train(word, targets, tmp_path):
    _arrays(tmp_path, split=["train"] * 20 + [word] * 10, **{"class": ["a", "b", "c"] * 10})
    run = _open(tmp_path, targets=targets)
    pd.read_csv(tmp_path / "table.csv")[20:].to_csv(tmp_path / "rest.csv", index=False)
    settings = {"targets": targets, "num_workers": 0}
    with pytest.raises(ValueError, match="the column split has no train"):
        Table(str(tmp_path / "rest.csv"), **settings)
    with measured(Trained(run.fingerprint(), None, "test")):
        rest = Table(str(tmp_path / "rest.csv"), **settings)
        rest.setup("test")
    assert [int(i[:-4]) for i in rest.splits["test"].ids] == list(range(20, 30))
    assert rest.targets == run.targets
    assert torch.equal(rest.splits["test"].labels, run.splits["test"].labels)


@pytest.mark.parametrize(
    "columns, settings, message",
    [
        ({}, {"targets": "brigt"}, "must have the column brigt; there are path, bright, other"),
        ({}, {"path_column": "file"}, "must have the column file; .*: name that of the path by --data.path_column"),
        ({"bright": [np.inf, *range(29)]}, {}, "row 1: the column bright is inf, not finite"),
        ({"split": ["train"] * 29 + ["rest"]}, {}, "row 30: the column split says rest: rows must be"),
        (
            {"split": ["train"] * 20 + ["test"] * 10, "group": ["a"] * 30},
            {},
            "row 21: the group a of .* is in test, and in row 1 in",
        ),
        ({}, {"in_chans": 1}, "`data.in_chans` is 1, the arrays of .* have 3 channels"),
        ({}, {"augment": "rand-m9-mstd0.5-inc1"}, "`data.augment` must be none or crop-flip for arrays"),
        ({}, {"targets": ["bright", "other"], "target_type": "multilabel"}, "row 1: the column bright of labels must"),
        ({"w": ["a"] * 30}, {"targets": "w", "target_type": "multilabel"}, "has one label, a; labels stand apart by"),
        ({}, {"group_column": "patient"}, "must have the column patient; there are path, bright, other"),
        ({}, {"split_by": "time"}, "`data.split_by: time` needs a column of times .*, and .*table.csv has none"),
        ({}, {"split_by": "time", "time_column": None}, "needs a column of times beside the targets"),
        ({"time": ["01/02/2024"] * 30}, {"split_by": "time"}, "or dates as 2024-03-09: .*01/02/2024.* ISO8601[^.]*$"),
        ({}, {"targets": ["bright", "bright"]}, "`data.targets` names bright twice"),
        ({}, {"label_separator": ""}, "`data.label_separator` must not be empty"),
        ({"time": [1] * 30}, {"split_by": "time"}, "the val split has no image: there are too few images, groups or t"),
        (
            {"time": range(30), "split": ["train", "val", "test"] * 10},
            {"split_by": "time"},
            "and so does the column sp",
        ),
        ({"weight": [-1, *range(29)]}, {}, "row 1: the column weight must hold no weight below 0, got -1"),
        ({}, {"sampling": "balanced"}, "`data.sampling: balanced` draws classes, and the targets are numbers"),
    ],
)
def test_mistakes_in_a_table_are_reported(tmp_path, columns, settings, message):
    _arrays(tmp_path, **columns)
    with pytest.raises(ValueError, match=message) as error:
        _open(tmp_path, **settings)
    assert "\n" not in str(error.value)


def test_an_array_of_another_shape_and_one_with_nan_are_named(tmp_path):
    _arrays(tmp_path)
    np.save(tmp_path / "3.npy", np.zeros((3, 6, 11), np.float32))
    with pytest.raises(
        ValueError, match=r"row 4, column path: .*3\.npy has the shape \(3, 6, 11\), others have \(3, 6, 10\)"
    ):
        _open(tmp_path)
    np.save(tmp_path / "3.npy", np.full((3, 6, 10), np.nan))
    with pytest.raises(ValueError, match=r"table\.csv, row 4, column path: .*3\.npy has values that are not finite"):
        _open(tmp_path)


def test_an_npy_file_with_its_channels_last_is_refused_as_arrays_are(tmp_path):
    _arrays(tmp_path, shape=(10, 6, 3))
    with pytest.raises(
        ValueError, match=r"row 1, column path: .*0\.npy: channels stand before height and width, got \(10"
    ):
        _open(tmp_path)


def _pairs(folder, n=20):
    """A table with two columns of photos, which differ as much as the target says; return the photos."""
    rng = np.random.default_rng(0)
    photos = rng.integers(0, 200, (n, 2, 6, 10, 3), dtype=np.uint8)
    for i, pair in enumerate(photos):
        for name, photo in zip(("before", "after"), pair, strict=True):
            Image.fromarray(photo).save(folder / f"{name}-{i}.png")
    paths = {name: [f"{name}-{i}.png" for i in range(n)] for name in ("before", "after")}
    change = photos[:, 1].mean((1, 2, 3)) - photos[:, 0].mean((1, 2, 3))
    pd.DataFrame({**paths, "bright": change}).to_csv(folder / "table.csv", index=False)
    return photos


def test_images_of_two_columns_are_stacked_on_channels(tmp_path):
    photos = _pairs(tmp_path)
    data = _open(tmp_path, path_column=["before", "after"])
    assert data.in_chans == 6 and data.img_size == (6, 10)
    images, rows = data.splits["train"], []
    for i, (image, name) in enumerate(zip(images.images, images.names, strict=True)):
        rows.append(row := int(name.removesuffix(".png").rpartition("-")[2]))
        assert name == f"before-{row}.png + after-{row}.png"
        assert torch.equal(image, torch.from_numpy(photos[row]).permute(0, 3, 1, 2).flatten(0, 1).float())
        assert images.labels[i].item() == pytest.approx(photos[row, 1].mean() - photos[row, 0].mean(), abs=1e-4)
    seen = photos[rows].transpose(1, 4, 0, 2, 3).reshape(6, -1)
    assert np.allclose(data.mean, seen.mean(1)) and np.allclose(data.std, seen.std(1))
    stacked = photos[rows[0]].transpose(0, 3, 1, 2).reshape(6, 6, 10)
    np.save(tmp_path / "pair.npy", stacked)
    assert torch.equal(
        data.eval_file(tmp_path / "pair.npy"),
        data.pipeline.normalize(images.images[:1], data.statistics())[0],
    )
    with pytest.raises(ImageError, match="an image of 3 channels, the network takes 6: give an array"):
        data.eval_file(tmp_path / "before-0.png")


def test_a_pair_that_does_not_fit_is_reported_with_row_and_column(tmp_path):
    _pairs(tmp_path)
    both = {"path_column": ["before", "after"]}
    with pytest.raises(ValueError, match=r"column later; there are before, after, bright: .*by --data\.path_column$"):
        _open(tmp_path, path_column=["before", "later"])
    Image.new("RGB", (7, 6)).save(tmp_path / "after-3.png")
    with pytest.raises(ValueError, match=r"row 4, column after: .*after-3.png has 6 x 7 pixels, and that of before 6"):
        _open(tmp_path, **both)
    (tmp_path / "after-3.png").unlink()
    with pytest.raises(ValueError, match=r"table.csv, row 4, column after: .*after-3.png: No such file"):
        _open(tmp_path, **both)


def test_an_unreadable_photo_is_reported_with_its_row(tmp_path):
    _pairs(tmp_path)
    (tmp_path / "before-3.png").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"before-3.png: not one of .*\(\S*table.csv, row 4, column before\)$"):
        _open(tmp_path, path_column="before")


def test_a_table_that_is_not_utf8_names_its_line(tmp_path):
    (tmp_path / "table.csv").write_bytes("path,bright\na.png,1\n\xe9.png,2\n".encode("latin1"))
    with pytest.raises(ValueError, match=r"table\.csv must be UTF-8, and its line 3 is not"):
        _open(tmp_path)


def test_the_record_of_a_run_is_plain(tmp_path):
    _arrays(tmp_path)
    facts = _open(tmp_path).fingerprint()
    assert json.loads(json.dumps(facts)) == facts and facts["splits"]["train"].keys() == {"n", "hash"}


def _photos(folder, n=20, **columns):
    rng = np.random.default_rng(0)
    for i in range(n):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    pd.DataFrame({"path": [f"{i}.png" for i in range(n)], **columns}).to_parquet(folder / "table.parquet")


def test_labels_are_columns_of_0_and_1_lists_or_separated_words(tmp_path):
    cat, dog = [i % 2 for i in range(20)], [int(i % 5 == 0) for i in range(20)]
    names = [[name for name, has in (("cat", c), ("dog", d)) if has] for c, d in zip(cat, dog, strict=True)]
    _photos(tmp_path, cat=cat, dog=dog, list=names, words=["; ".join(found) or None for found in names])
    data = [
        _open(tmp_path, "table.parquet", targets=["cat", "dog"]),
        _open(tmp_path, "table.parquet", targets="list"),
        _open(tmp_path, "table.parquet", targets="words", target_type="multilabel"),
    ]
    assert "targets are 2 labels (cat, dog), of which an image may have several, by their values" in data[0].notes[0]
    for one in data:
        assert one.targets == {"kind": "multilabel"} and one.class_names == ["cat", "dog"]
        for images in one.splits.values():
            rows = [int(file[:-4]) for file in images.files]
            assert images.labels.tolist() == [[cat[i], dog[i]] for i in rows]
        assert sum(np.array(x["class_counts"]) for x in one.fingerprint()["splits"].values()).tolist() == [10, 4]
        assert all(images.labels[:, 1].any() for images in one.splits.values())  # the rare label is in each split
    assert _open(tmp_path, "table.parquet", targets=["cat", "dog"], target_type="number").targets["kind"] == "number"


@pytest.mark.parametrize("nothing", [None, float("nan"), pd.NA])
def test_an_empty_cell_among_lists_has_no_label(nothing):
    lists = [nothing, ["cat", "dog"], ["cat", None]]
    rows = Rows("a.parquet", pd.DataFrame({"path": list("abc"), "tags": lists}), ["tags"], {})
    assert (rows.kind, rows.names, rows.values.tolist()) == ("multilabel", ["cat", "dog"], [[0, 0], [1, 1], [1, 0]])
    assert rows.why == "by its lists" and fold_names(pd.Series([1, nothing], dtype=object)) == ["1", ""]


def test_words_for_nothing_are_classes_and_mark_empty_cells_among_numbers(tmp_path):
    grades, ages = ["None", "NA", "mild", ""] * 5, ["1.5", "NA", "null", ""] * 5
    rows = "".join(f"{i}.png,{grade},{age}\n" for i, (grade, age) in enumerate(zip(grades, ages, strict=True)))
    (tmp_path / "t.csv").write_text(f"path,grade,age\n{rows}")
    table = read_table(str(tmp_path / "t.csv"))
    assert table["age"].dtype == float and table["age"].notna().sum() == 5
    rows = Rows("t.csv", table, ["grade"], {}, missing="drop")
    assert rows.names == ["None", "NA", "mild"] * 5
    assert "a cell with NA or None is of that class: only one without any text is empty" in rows.notes
    table = read_table(str(tmp_path / "t.csv"), ["path", "grade"])
    with pytest.raises(ValueError, match="row 4: the column grade is empty"):
        Rows("t.csv", table, ["grade"], {})


def test_classes_and_groups_that_differ_only_in_spaces_or_case_are_told():
    frame = pd.DataFrame({"path": list("abcd"), "y": ["cat", "cat ", "A", "a"], "group": ["p1", "P1", "p2", "p3"]})
    rows = Rows("a.csv", frame, ["y"], {"group": "group"})
    assert [note.partition(", and")[0] for note in rows.notes] == [
        "'P1' and 'p1' count as two groups", "'cat' and 'cat ' count as two classes",
    ]  # fmt: skip
    labels = Rows("a.csv", frame.assign(y=["cat;Dog", "dog", "cat", "cat"]), ["y"], {}, kind="multilabel")
    assert len(labels.notes) == 1 and labels.notes[0].startswith("'Dog' and 'dog' count as two classes")


def test_numbers_that_32_bits_would_merge_are_refused_in_training_alone():
    table = pd.DataFrame({"path": list("abcd"), "seconds": 1.7e9 + np.array([0.0, 18, 90, 170])})
    with pytest.raises(
        ValueError, match=r"t\.csv: numbers .* the column seconds by up to 42, .* subtract 1700000000 fr"
    ):
        Rows("t.csv", table, ["seconds"], {})
    assert Rows("t.csv", table, ["seconds"], {}, trained={"kind": "number"}).values.dtype == np.float32
    for column in (table["seconds"] - 1.7e9, table["seconds"] * [1, 2, 3, 4], [0.1] * 4, [1.7e9 + 1] * 4):
        Rows("t.csv", table.assign(seconds=column), ["seconds"], {}, "number")
    gaps = pd.DataFrame({"path": list("ab"), "x": [None, 0.1], "y": [0.3, 0.4]})
    Rows("t.csv", gaps, ["x", "y"], {}, missing="mask")


def test_a_gap_in_the_column_of_times_matters_only_to_split_by_time(tmp_path):
    _arrays(tmp_path, time=[None, *range(29)])
    assert len(_open(tmp_path).splits["train"])
    with pytest.raises(ValueError, match="row 1: the column time is empty"):
        _open(tmp_path, split_by="time")


def test_columns_of_0_and_1_are_masked_as_numbers():
    table = pd.DataFrame({"path": list("abcd"), "cat": [0, 1, np.nan, 1], "dog": [1, 0, 1, 0]})
    with pytest.raises(ValueError, match=r"row 3: the column cat is empty; .*; mask .*--data\.target_type"):
        Rows("t.csv", table, ["cat", "dog"], {}, missing="mask")
    masked = Rows("t.csv", table, ["cat", "dog"], {}, "number", missing="mask")
    assert np.array_equal(masked.values, [[0, 1], [1, 0], [np.nan, 1], [1, 0]], equal_nan=True)


def test_split_by_time_tests_on_the_latest_rows_and_divides_neither_days_nor_groups(tmp_path):
    days = [f"2024-{1 + i // 10:02}-{1 + i % 10 // 2:02}" for i in range(30)]
    _arrays(tmp_path, time=days[::-1])
    row = lambda images: [29 - int(path.decode()[:-4]) for path in images.ids]  # noqa: E731
    splits = {name: sorted(row(images)) for name, images in _open(tmp_path, split_by="time").splits.items()}
    assert splits == {"train": list(range(20)), "val": list(range(20, 24)), "test": list(range(24, 30))}
    folds = [_open(tmp_path, split_by="time", fold=f"{k}/3").splits for k in (1, 2, 3)]
    assert [(len(x["train"]), min(row(x["val"])), max(row(x["val"]))) for x in folds] == [
        (6, 6, 11), (12, 12, 17), (18, 18, 23),
    ]  # fmt: skip
    last = _open(tmp_path, split_by="time", subset=0.5).splits["train"]
    assert sorted(row(last)) == list(range(10, 20))
    table = pd.read_csv(tmp_path / "table.csv")
    groups = [f"g{i // 3}" for i in range(30)]
    table.assign(group=groups, time=range(30)).to_csv(tmp_path / "table.csv", index=False)
    of = {name: {groups[29 - i] for i in row(x)} for name, x in _open(tmp_path, split_by="time").splits.items()}
    assert not of["train"] & of["val"] and not of["test"] & of["val"] and "g9" in of["test"]
    assert _open(tmp_path, split_by="time").split_rule()["by"] == "time" and "by" not in _open(tmp_path).split_rule()


def test_the_weight_of_a_row_comes_with_its_image(tmp_path):
    weights = [1.0 + i for i in range(30)]
    arrays = _arrays(tmp_path, weight=weights)
    data = _open(tmp_path)
    rows = [int(path.decode()[:-4]) for path in data.splits["train"].ids]
    mean = np.mean([weights[i] for i in rows])
    for _, batch in zip(range(3), data.train_dataloader(), strict=False):
        images, _, given = data.on_after_batch_transfer(batch, 0)
        bright = images.mean((2, 3))[:, 0] * data.std[0] + data.mean[0]
        found = [int(np.abs(arrays[:, 0].mean((1, 2)) - float(value)).argmin()) for value in bright]
        assert np.allclose(given, [weights[i] / mean for i in found])
    assert len(data.on_after_batch_transfer(next(iter(data.val_dataloader())), 0)) == 2
    assert _open(tmp_path, weight_column=None).sample_weights is None
    with pytest.raises(ValueError, match="mix classes, and rows have weights"):
        _open(tmp_path, targets="weight", target_type="class", mixup=0.5, weight_column="other").train_dataloader()


def test_a_data_set_of_hugging_face_is_a_table_too(tmp_path):
    datasets = pytest.importorskip("datasets")
    _photos(tmp_path)
    rows = {"photo": [str(tmp_path / f"{i}.png") for i in range(20)], "age": [i / 2 for i in range(20)],
            "group": [i // 2 for i in range(20)]}  # fmt: skip
    features = datasets.Features({"photo": datasets.Image(), "age": datasets.Value("float32"),
                                  "group": datasets.Value("int64")})  # fmt: skip
    whole = datasets.Dataset.from_dict(rows, features=features)
    whole.save_to_disk(tmp_path / "whole")
    data = _open(tmp_path, "whole", targets="age", path_column="photo", img_size=8)
    groups = [{int(2 * age) // 2 for age in images.labels[:, 0]} for images in data.splits.values()]
    assert sum(map(len, groups)) == 10 == len(set.union(*groups)) and data.targets["names"] == ["age"]
    first = data.splits["val"]
    with Image.open(tmp_path / f"{int(2 * first.labels[0])}.png") as image:
        assert np.array_equal(np.asarray(image), np.asarray(first.image(0)))
    datasets.DatasetDict(train=whole, test=whole.select(range(4))).save_to_disk(tmp_path / "both")
    both = _open(tmp_path, "both", targets="age", path_column="photo", img_size=8, group_column=None)
    assert len(both.splits["test"]) == 4 and both.has_test_split
    with pytest.raises(ValueError, match=r"a column of images in .*, got path; there are photo \(Image\)"):
        _open(tmp_path, "whole", targets="age")


@pytest.mark.parametrize("kind", ["uint16", "float32"])
def test_pages_of_16_bits_and_floats_keep_their_values(tmp_path, kind):
    array = (np.random.default_rng(0).random((5, 6, 7)) * 60_000).astype(kind)
    first, *others = [Image.fromarray(page) for page in array]
    first.save(tmp_path / "a.tif", save_all=True, append_images=others)
    assert is_array(tmp_path / "a.tif") and (read_array(tmp_path / "a.tif") == array.astype(np.float32)).all()


@pytest.mark.parametrize("kind", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("channels", [2, 3, 5])
def test_channels_of_a_tiff_file_may_be_values_of_a_pixel_or_planes(tmp_path, kind, channels):
    tifffile = pytest.importorskip("tifffile")
    array = (np.random.default_rng(0).random((channels, 7, 9)) * 200).astype(kind)
    for planes in ("contig", "separate"):
        for compression in (None, "zlib"):
            stored = array if planes == "separate" else np.moveaxis(array, 0, -1)
            path = tmp_path / f"{planes}-{compression}.tif"
            tifffile.imwrite(path, stored, photometric="minisblack", planarconfig=planes, compression=compression)
            assert is_array(path) and (read_array(path) == array.astype(np.float32)).all(), path
            with pytest.raises(ImageError):  # no photo
                decode(path)


def test_a_tiff_file_that_pillow_cannot_read_names_the_package_to_install(tmp_path, monkeypatch):
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(
        path := tmp_path / "a.tif", np.ones((7, 9, 5), np.uint16), photometric="minisblack", planarconfig="contig"
    )
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(
        ValueError, match=r"a\.tif: a TIFF file that Pillow does not read: `pip install 'vitlab\[tiff\]'"
    ):
        read_array(path)
    monkeypatch.undo()
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ValueError, match=r"a\.tif: ") as told:
        read_array(path)
    assert "\n" not in str(told.value)


def test_labels_that_a_class_map_joins_are_there_if_one_of_them_is(tmp_path):
    rows = [(1, 0, 0), (0, 1, 0), (1, 1, 1), (0, 0, 1)] * 5
    columns = dict(zip(("dog", "puppy", "cat"), zip(*rows, strict=True), strict=True))
    _arrays(tmp_path, 20, **columns)
    (tmp_path / "map.json").write_text('{"puppy": "dog"}')
    for targets in (["dog", "puppy", "cat"], ["puppy", "dog", "cat"]):
        data = _open(tmp_path, targets=targets, class_map=str(tmp_path / "map.json"))
        assert data.class_names == ["dog", "cat"]
        assert data.targets_of(np.arange(4)).tolist() == [[1, 0], [1, 0], [1, 1], [0, 1]]
