"""Tar shards: the promise of a folder, from a disk and from an address."""

import io
import json
import re
import shutil
import tarfile

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.cli.main import main
from vitlab.data import WebDataset
from vitlab.data.image_folder import ImageFolder
from vitlab.data.record import Trained, measured

NAMES = ("cat", "dog")

pytestmark = pytest.mark.usefixtures("here")


def _shard(number, n=9, label=lambda i: (".cls", str(i % 2))):
    """Return a shard of n photos, all different."""
    rng, content = np.random.default_rng(number), io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for i in range(n):
            Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(photo := io.BytesIO(), "PNG")
            suffix, text = label(i)
            for name, data in ((f"{i:04}.png", photo.getvalue()), (f"{i:04}{suffix}", text.encode())):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def _write(where, shards):
    for name, content in shards.items():
        with fsspec.open(f"{where}/{name}.tar", "wb", auto_mkdir=True) as file:
            file.write(content)


def _everywhere(tmp_path):
    shards = {f"train-{i:03}": _shard(i) for i in range(3)} | {"val-000": _shard(7, 5), "test-000": _shard(8, 7)}
    for where in (tmp_path / "shards", "memory://shards"):
        _write(where, shards)


def _open(where, num_workers=0, **settings):
    given = {"train": f"{where}/train-{{000..002}}.tar", "val": f"{where}/val-*.tar", "test": f"{where}/test-000.tar"}
    settings = {"batch_size": 4, "img_size": 16, "augment": "crop-flip", "repeats": 1, **settings}
    torch.manual_seed(1)
    data = WebDataset(**given, num_workers=num_workers, **settings)
    for stage in ("fit", "test"):
        data.setup(stage)
    return data


def _equal(first, second):
    return len(first) == len(second) and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True)
    )


@pytest.mark.slow  # starts processes
def test_order_and_crops_are_those_of_seed_and_epoch_wherever_the_shards_lie(tmp_path, monkeypatch):
    _everywhere(tmp_path)
    ranges, plain = [], fsspec.get_filesystem_class("memory").cat_ranges

    def counted(self, paths, *args, **kwargs):
        ranges.append(len(paths))
        return plain(self, paths, *args, **kwargs)

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "cat_ranges", counted)
    local, remote = _open("shards"), _open("memory://shards")
    loaders = [data.train_dataloader() for data in (local, remote, _open("memory://shards", num_workers=2))]
    loaders[2].sampler.set_epoch(0)
    ranges.clear()
    first, second, third = ([(*batch[:2], batch[2].indices) for batch in loader] for loader in loaders)
    assert _equal(first, second) and _equal(first, third) and len(first) == 6
    assert len(ranges) == 6 and max(ranges) <= 4  # of this process: one call a batch
    seen = np.concatenate([indices for *_, indices in first])
    assert len(set(seen.tolist())) == 24
    loaders[0].sampler.set_epoch(1)
    again = [batch[:2] for batch in loaders[0]]
    assert not _equal(first, again)
    resumed = remote.train_dataloader()
    resumed.sampler.set_epoch(1)
    resumed.load_state_dict({"epoch": 1, "batches": 4})
    assert _equal(again[4:], [batch[:2] for batch in resumed])
    assert len(list(remote.val_dataloader())) == 2 and local.statistics() == remote.statistics()


def test_copies_of_an_image_are_fetched_once(monkeypatch):
    _write("memory://shards", {"a": _shard(1)})
    data = WebDataset("memory://shards/a.tar", img_size=16, num_workers=0, batch_size=3, augment="crop-flip", repeats=3)
    data.setup("fit")
    calls, memory = [], fsspec.get_filesystem_class("memory")
    plain = memory.cat_ranges
    monkeypatch.setattr(memory, "cat_ranges", lambda self, *a, **kw: calls.append(1) or plain(self, *a, **kw))
    batches = list(data.train_dataloader())
    assert len(calls) == len(batches) > 0  # each copy after the first was a call of its own


def test_every_image_is_evaluated_once_by_any_number_of_processes(tmp_path, monkeypatch):
    _everywhere(tmp_path)
    data = _open("memory://shards")
    for world in (1, 2, 3):
        seen = []
        for rank in range(world):
            monkeypatch.setattr(data, "_place", lambda rank=rank, world=world: (rank, world))
            seen += [i for _, _, step in data.test_dataloader() for i in step.indices.tolist()]
        assert sorted(seen) == list(range(7))


def test_the_index_is_kept_until_a_shard_changes(monkeypatch):
    _write("shards", {"train-0": _shard(1), "val-0": _shard(2)})
    opened, plain = [], tarfile.open
    monkeypatch.setattr("tarfile.open", lambda *a, **kw: opened.append(a) or plain(*a, **kw))
    images = []
    for _ in range(2):
        data = WebDataset("shards/train-0.tar", "shards/val-0.tar", img_size=16, num_workers=0)
        data.setup("test")  # val stands for it
        images.append(data.splits["test"].image(0).tobytes())
    assert len(opened) == 2
    _write("shards", {"val-0": _shard(3, 4)})
    data = WebDataset("shards/train-0.tar", "shards/val-0.tar", img_size=16, num_workers=0)
    data.setup("test")
    assert data.splits["test"].image(0).tobytes() != images[0] == images[1] and len(data.splits["test"]) == 4


def test_classes_come_from_json_members_and_other_names_from_a_map(tmp_path):
    shard = _shard(1, 20, lambda i: (".json", json.dumps({"what": [3, 10][i % 2], "by": "me"})))
    _write("shards", {"a": shard})
    data = WebDataset("shards/a.tar", label="json.what", img_size=16, num_workers=0)
    data.setup("fit")
    assert data.class_names == ["3", "10"]
    assert {name: len(images) for name, images in data.splits.items()} == {"train": 13, "val": 3}
    labels = dict(zip(data.splits["train"].files, data.splits["train"].labels.tolist(), strict=True))
    assert labels["train/a/0001"] == 1
    (tmp_path / "names.json").write_text(json.dumps({"3": "cat", "10": "dog"}))
    named = WebDataset("shards/a.tar", label="json.what", class_map="names.json", img_size=16, num_workers=0)
    assert named.class_names == ["cat", "dog"]


def _members(*names):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = 1
            tar.addfile(entry, io.BytesIO(b"0"))
    return content.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    "train, message",
    [
        ("shards/no-{0..3}.tar", "there is no shards/no-0.tar"),
        ("shards/no-*.tar", r"there is no shards/no-\*.tar"),
        ("memory://no/*.tar", r"there is no memory://no/\*.tar"),
        ("s4://bucket/0.tar", "s4://bucket/0.tar cannot be read: Protocol not known: s4"),
        ("reference::memory://shards/good.tar", "references are not supported"),
        ("shards/{a..c}.tar", "must be two numbers"),
        ("shards", r"shards is a folder; name its tar files, as in shards/\*.tar"),
        ("shards/gz.tar", "not a complete, uncompressed tar file"),
        ("shards/cut.tar", "not a complete, uncompressed tar file: unexpected end of data"),
        ("shards/alone.tar", r"alone.tar: 1 has no .cls member with its class, only .png, .txt"),
        ("shards/blind.tar", r"blind.tar: 1 has no image, only .cls"),
        ("shards/twice.tar", "has 1.png twice: keys must differ within a shard"),
        ("shards/no-{5..2}.tar", r"\{5..2\} in shards/no-\{5..2\}.tar must ascend, as \{2..5\} does"),
        ("shards/nothing.tar", "`data.train` must name shards with images, got shards/nothing.tar"),
        ("shards/empty.tar", "empty.tar: 0000.cls is empty, and must hold the class of 0000"),
        ("shards/bad.tar", r"0000.cls must be text, got b'.xff"),
    ],
)
def test_bad_shards_are_one_line(capsys, train, message):
    good = _shard(1)
    _write("memory://shards", {"good": good})
    _write("shards", {
        "gz": b"\x1f\x8b" + good[2:], "cut": good[:-11_000], "alone": _members("1.png", "1.txt"),
        "blind": _members("1.cls"), "twice": _members("1.png", "1.cls", "1.png"),
        "nothing": _members(), "empty": _shard(1, 1, lambda i: (".cls", " ")),
        "bad": _shard(1, 1, lambda i: (".cls", "0")).replace(b"0" + bytes(511), b"\xff" + bytes(511)),
    })  # fmt: skip
    assert main(["fit", "--config", "photos_vit", "--data=WebDataset", f"--data.train={train}", "--dry_run"]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1, error


@pytest.mark.parametrize("value", ["null", "NaN", '{"a": 1}', "[1]"])
def test_what_is_no_class_in_a_member_is_refused_with_sample_and_file(value):
    _write("shards", {"a": _shard(1, 3, lambda i: (".json", '{"y": ' + ("1" if i else value) + "}"))})
    with pytest.raises(ValueError, match=r"shards/a.tar: 0000.json must have a class under y, got b'"):
        WebDataset("shards/a.tar", label="json.y")


def test_classes_of_one_number_have_one_order():
    _write("shards", {"a": _shard(1, 9, lambda i: (".cls", ("01", "1", "001", "2", "10")[i % 5]))})
    assert WebDataset("shards/a.tar").class_names == ["001", "01", "1", "2", "10"]


def test_a_run_of_shards_finds_its_classes_in_folders_by_name_and_the_other_way_round(tmp_path):
    names = ("1", "10", "2")
    _write("shards", {part: _shard(1, 9, lambda i: (".cls", names[i % 3])) for part in ("train", "test")})
    for i in range(9):
        place = tmp_path / "photos" / "test" / names[i % 3]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 24), (i, i, i)).save(place / f"{i}.png")
    shutil.copytree(tmp_path / "photos" / "test", tmp_path / "photos" / "train")
    given = {"img_size": 16, "num_workers": 0}
    shards = WebDataset("shards/train.tar", test="shards/test.tar", **given)
    folders = ImageFolder("photos", **given)
    assert (shards.class_names, folders.class_names) == (["1", "2", "10"], ["1", "10", "2"])
    for run, source in ((shards, ImageFolder), (folders, WebDataset)):
        with measured(Trained({"class_names": run.class_names}, None, "test")):
            where = ("photos",) if source is ImageFolder else ("shards/train.tar", None, "shards/test.tar")
            data = source(*where, **given)
            images = data.read("test")
        assert data.class_names == run.class_names
        found = [data.class_names[label] for label in images.labels]
        texts = data.texts[9:] if source is WebDataset else [file.split("/")[1] for file in images.files]
        assert found == texts and sorted(found) == sorted(3 * names)
