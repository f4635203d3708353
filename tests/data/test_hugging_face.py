"""Data sets of the library `datasets`, all of them on disk."""

import hashlib
import io
import socket
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.config.table_folds import folds_of_config
from vitlab.data import HuggingFace, ImageFolder, Table
from vitlab.data.record import Trained, measured

datasets = pytest.importorskip("datasets")
CLASSES = ["cat", "dog"]


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("asks the network"))


def _png(seed):
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 10, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _rows(images, labels=None, **columns):
    labels = [i % 2 for i in range(len(images))] if labels is None else labels
    kind = datasets.ClassLabel(names=CLASSES) if isinstance(labels[0], int) else datasets.Value("string")
    images = [{"bytes": image, "path": None} for image in images]
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    return datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)


def _saved(folder, **splits):
    datasets.DatasetDict({name: _rows(images) for name, images in splits.items()}).save_to_disk(str(folder))
    return folder


def _open(path, *stages, **settings):
    data = HuggingFace(str(path), img_size=8, **{"num_workers": 0, "batch_size": 2, **settings})
    for stage in stages or ("fit", "test"):
        data.setup(stage)
    return data


def _digests(data):
    return {name: set(images.digests) for name, images in data.splits.items()}


def _pngs(n, seed=0):
    return [_png([seed, i]) for i in range(n)]


def test_splits_of_a_hugging_face_data_set_are_used_like_folders(tmp_path):
    rows = {"train": _pngs(12), "validation": _pngs(4, 1), "test": _pngs(6, 2)}
    data = _open(_saved(tmp_path / "three", **rows))
    expected = {"train": "train", "val": "validation", "test": "test"}
    for split, name in expected.items():
        assert data.splits[split].digests == [hashlib.blake2b(png, digest_size=16).digest() for png in rows[name]]
    assert (data.class_names, data.num_classes) == (CLASSES, 2)
    without_test = _open(_saved(tmp_path / "two", train=rows["train"], validation=rows["validation"]), val_share=0.25)
    assert {name: len(images) for name, images in without_test.splits.items()} == {"train": 9, "val": 3, "test": 4}
    assert _digests(without_test)["test"] == _digests(data)["val"]


def test_images_and_labels_are_those_of_the_same_files_in_a_folder(tmp_path):
    pngs = _pngs(12)
    for i, png in enumerate(pngs):
        (tmp_path / "photos" / CLASSES[i % 2]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / CLASSES[i % 2] / f"{i}.png").write_bytes(png)
    _rows(pngs).save_to_disk(str(tmp_path / "rows"))
    folder = ImageFolder(str(tmp_path / "photos"), img_size=8, num_workers=0)
    for stage in ("fit", "test"):
        folder.setup(stage)
    seen = []
    for data in (_open(tmp_path / "rows"), folder):
        images = {
            digest: (int(split.labels[i]), split.image(i).tobytes())
            for split in data.splits.values()
            for i, digest in enumerate(split.digests)
        }
        seen.append(images)
    assert seen[0] == seen[1] and len(seen[0]) == 12


def test_one_split_is_divided_by_content_so_that_other_rows_move_nothing(tmp_path):
    pngs = _pngs(40)
    before = _digests(_open(_saved(tmp_path / "before", all=pngs)))
    labels = [i % 2 for i in range(40)]
    order = np.random.default_rng(0).permutation(40)
    _rows([pngs[i] for i in order], [labels[i] for i in order]).save_to_disk(str(tmp_path / "shuffled"))
    assert _digests(_open(tmp_path / "shuffled")) == before
    more = _digests(_open(_saved(tmp_path / "more", all=pngs + _pngs(2, 1))))
    moved = [name for name in before for digest in before[name] if digest not in more[name]]
    assert len(moved) <= 4  # one over each cut of each class
    assert {name: len(x) for name, x in before.items()} == {"train": 26, "val": 6, "test": 8}


def test_a_folder_of_photos_and_parquet_files_are_read_too(tmp_path):
    place = tmp_path / "photos"
    for i, png in enumerate(_pngs(12)):
        (place / CLASSES[i % 2]).mkdir(parents=True, exist_ok=True)
        (place / CLASSES[i % 2] / f"{i}.png").write_bytes(png)
    (tmp_path / "parquet").mkdir()
    _rows(_pngs(12)).to_parquet(str(tmp_path / "parquet" / "train.parquet"))
    photos, parquet = (_open(path) for path in (place, tmp_path / "parquet"))
    assert _digests(photos) == _digests(parquet) and photos.mean == parquet.mean


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_unreadable_rows_are_refused_with_the_list_or_left_out_and_listed(tmp_path, num_workers):
    pngs = _pngs(20)
    pngs[3], pngs[6] = b"", pngs[7][:60]
    path = _saved(tmp_path / "rows", train=pngs, test=_pngs(4, 1))
    with pytest.raises(ValueError, match=r"2 files cannot be read.*allows 0.*train/3: the file is empty; train/6: "):
        _open(path, val_share=0.01)
    data = _open(path, max_unreadable=2, num_workers=num_workers)
    assert sorted(data.unreadable) == ["train/3", "train/6"]
    assert sum(len(data.splits[name]) for name in ("train", "val")) == 18
    assert sum(len(images) for images, _ in data.iterate_batches(data.train_dataloader())) in (14, 15)


def test_fit_does_not_read_the_test_split(tmp_path):
    path = _saved(tmp_path / "rows", train=_pngs(12), test=[b"broken"] * 2)
    data = _open(path, "fit", "validate")
    data.fingerprint()
    assert set(data.splits) == {"train", "val"}
    with pytest.raises(ValueError, match="test/0"):
        data.setup("test")


def test_rows_seen_before_are_not_decoded_again(tmp_path, monkeypatch):
    path = _saved(tmp_path / "rows", train=_pngs(12))
    first = _open(path).fingerprint()
    monkeypatch.setattr("vitlab.data.files.scan.decode_bytes", lambda *_, **__: pytest.fail("decoded again"))
    assert _open(path).fingerprint() == first


def test_the_column_may_hold_names_of_classes(tmp_path):
    _rows(_pngs(12), ["tiger", "ape", "cow"] * 4).save_to_disk(str(tmp_path / "rows"))
    data = _open(tmp_path / "rows")
    assert data.class_names == ["ape", "cow", "tiger"]
    counts = [summary["class_counts"] for summary in data.fingerprint()["splits"].values()]
    assert torch.tensor(counts).sum(0).tolist() == [4, 4, 4]


def test_a_row_without_a_class_is_refused(tmp_path):
    splits = {"train": _rows(_pngs(12)), "test": _rows(_pngs(2, 1), [0, -1])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "rows"))
    with pytest.raises(ValueError, match=r"test, row 1: -1 is no label; .* --data\.targets=label --data\.missing=drop"):
        _open(tmp_path / "rows")
    _rows(_pngs(12), ["ape", "cow", None] * 4).save_to_disk(str(tmp_path / "words"))
    with pytest.raises(ValueError, match="all, row 2: None is no label"):
        _open(tmp_path / "words")


@pytest.mark.parametrize("mark", [-1, None])
def test_a_row_without_a_label_is_an_empty_cell_of_a_table(tmp_path, mark):
    _rows(_pngs(12), [0, 1, mark] * 4).save_to_disk(str(tmp_path / "rows"))
    settings = {"path": str(tmp_path / "rows"), "targets": "label", "path_column": "image", "num_workers": 0}
    with pytest.raises(ValueError, match=r"row 3: the column label is empty; --data\.missing=drop"):
        Table(**settings)
    data = Table(missing="drop", **settings)
    assert data.class_names == CLASSES and data.table.names == CLASSES * 4


def test_further_splits_are_left_out_by_both_classes_and_told(tmp_path):
    parts = {"train": _rows(_pngs(12), [0, 1, -1] * 4), "test": _rows(_pngs(2, 1)), "extra": _rows(_pngs(3, 2))}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "rows"))
    settings = {"path": str(tmp_path / "rows"), "targets": "label", "path_column": "image", "missing": "drop"}
    data = Table(**settings, num_workers=0)
    assert len(data.table.paths) == 10 and data.parts == {"train": "train", "test": "test"}
    assert "splits that are none of train, val and test are left out: extra" in data.notes
    assert Table(**settings, split_column=None, num_workers=0).table.splits is None  # all rows, as ever
    data = HuggingFace(settings["path"])
    assert "splits that are none of train, val and test are left out: extra" in data.notes
    del parts["train"]
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(ValueError, match="says extra: rows must be in train, val or test"):
        Table(**settings | {"path": str(tmp_path / "other")})


def test_cross_validation_goes_through_the_folds_of_a_data_set(tmp_path):
    parts = {
        "train": _rows(_pngs(4)).add_column("fold", [7, 8, 7, 8]),
        "test": _rows(_pngs(1, 1)).add_column("fold", [-1]),
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "rows"))
    settings = {"data": "Table", "data.path": str(tmp_path / "rows"), "data.path_column": "image"}
    assert folds_of_config([], [*settings.items()]) == {"fold-7": "7", "fold-8": "8"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_column": "img"}, r"`data\.image_column` .*got img; there are image \(Image\), label \(ClassLabel\)"),
        ({"label_column": "image"}, r"`data\.label_column` .*got image; there are"),
        ({"path": "somebody/something"}, r"got somebody/something; with --data\.download=true"),
    ],
)
def test_a_missing_split_or_column_is_named_in_one_line(tmp_path, settings, message):
    path = _saved(tmp_path / "rows", train=_pngs(4))
    with pytest.raises(ValueError, match=message) as error:
        HuggingFace(**{"path": str(path), **settings})
    assert "\n" not in str(error.value)


def test_splits_without_train_are_refused(tmp_path):
    path = _saved(tmp_path / "rows", validation=_pngs(4), test=_pngs(4))
    with pytest.raises(ValueError, match="a split called train, got validation, test"):
        HuggingFace(str(path))


def test_a_run_is_measured_on_splits_without_train(tmp_path):
    path = _saved(tmp_path / "rows", validation=_pngs(4), test=_pngs(6))
    with measured(Trained({"class_names": CLASSES}, None, "test")):
        data = _open(path, "test")
    assert len(data.splits["test"]) == 6


def test_without_the_library_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs datasets: pip install 'vitlab\[huggingface\]'"):
        HuggingFace(str(tmp_path))


def test_a_label_that_is_no_number_is_no_class(tmp_path):
    labels = [1.0, float("nan"), 2.0, 1.0]
    rows = {"image": [{"bytes": _png(i), "path": None} for i in range(4)], "label": labels}
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("float32")})
    datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(str(tmp_path / "rows"))
    with pytest.raises(ValueError, match="row 1: nan is no label"):
        _open(tmp_path / "rows")
