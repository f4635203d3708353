"""Packed photos, the report on a folder, and their commands."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.cli.data import main as data_command
from vitlab.cli.pack import main as pack_command
from vitlab.data.image_folder import ImageFolder
from vitlab.data.pack import Packed, pack
from vitlab.data.report import as_text, report
from vitlab.errors import UsageError


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for part, n in (("train", 10), ("val", 4), ("test", 3)):
        for name in ("cat", "dog"):
            place = tmp_path / "photos" / part / name
            place.mkdir(parents=True)
            for i in range(n):
                pixels = rng.integers(0, 256, (24, 16 + i, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.png")
    return tmp_path / "photos"


def _packed(photos, target, **settings):
    pack(str(photos), str(target), size=16, num_workers=0)
    data = Packed(str(target), **{"img_size": 16, "batch_size": 4, **settings})
    data.setup("fit")
    data.setup("test")
    return data


def test_packed_splits_are_those_of_the_folder(photos, tmp_path):
    packed = _packed(photos, tmp_path / "packed")
    folder = ImageFolder(str(photos), img_size=16, num_workers=0)
    for stage in ("fit", "test"):
        folder.setup(stage)
    facts, expected = packed.fingerprint(), folder.fingerprint()
    assert facts["splits"] == expected["splits"] and facts["class_names"] == expected["class_names"]


@pytest.mark.parametrize("settings", [{"fold": "2/3"}, {"subset": 0.5}, {"split_seed": 3}])
def test_one_packed_folder_is_split_as_the_folder_itself(photos, tmp_path, settings):
    packed = _packed(photos / "train", tmp_path / "packed", **settings)
    folder = ImageFolder(str(photos / "train"), img_size=16, num_workers=0, **settings)
    for stage in ("fit", "test"):
        folder.setup(stage)
    assert {name: x.split_hash for name, x in packed.splits.items()} == {
        name: x.split_hash for name, x in folder.splits.items()
    }


@pytest.mark.parametrize("img_size", [16, 10])
def test_packed_images_are_evaluated_as_the_folder_s(photos, tmp_path, img_size):
    packed = _packed(photos, tmp_path / "packed", img_size=img_size)
    images = torch.cat([x for x, *_ in packed.test_dataloader()])
    crop = ImageFolder(str(photos), img_size=16, crop_pct=1.0, num_workers=0)
    crop.setup("test")
    expected = torch.cat([x for x, *_ in crop.test_dataloader()])
    edge = (16 - img_size) // 2
    assert torch.equal(images, expected[:, :, edge : 16 - edge, edge : 16 - edge])
    mean = (images.double() / 255).mean() if img_size == 16 else None
    assert mean is None or abs(mean - 0.5) < 0.05


def test_the_statistics_are_those_of_the_packed_training_pixels(photos, tmp_path):
    packed = _packed(photos, tmp_path / "packed")
    train = packed.splits["train"]
    pixels = train.images[train.rows].double().div(255).transpose(0, 1).flatten(1)
    assert torch.allclose(torch.tensor(packed.mean).double(), pixels.mean(1), atol=1e-6)
    assert torch.allclose(torch.tensor(packed.std).double(), pixels.std(1, correction=0), atol=1e-5)


def test_the_record_of_a_run_tells_how_much_of_a_photo_is_seen(photos, tmp_path):
    assert _packed(photos, tmp_path / "packed", img_size=8).fingerprint()["crop_pct"] == 0.5


def test_training_cuts_random_windows(photos, tmp_path):
    packed = _packed(photos, tmp_path / "packed", img_size=8, augment="crop-flip")
    train = packed.splits["train"]
    for images, labels, step in packed.train_dataloader():
        for image, label, i in zip(images, labels, step.indices, strict=True):
            whole = train.images[train.rows[i]]
            windows = whole.unfold(1, 8, 1).unfold(2, 8, 1).permute(1, 2, 0, 3, 4).reshape(-1, 3, 8, 8)
            same = (windows == image).flatten(1).all(1) | (windows == image.flip(2)).flatten(1).all(1)
            assert same.sum() == 1 and label == train.labels[i]


def test_a_changed_byte_is_found_in_the_split_that_it_belongs_to(photos, tmp_path):
    pack(str(photos), str(tmp_path / "packed"), size=16, num_workers=0)
    path = tmp_path / "packed" / "images.u8"
    pixels = bytearray(path.read_bytes())
    pixels[-5] ^= 1  # of the last test image
    path.write_bytes(pixels)
    data = Packed(str(tmp_path / "packed"), img_size=16)
    data.setup("fit")
    with pytest.raises(ValueError, match=r"images\.u8 is damaged: test/dog/2\.png"):
        data.setup("test")
    Packed(str(tmp_path / "packed"), img_size=16, verify=False).setup("test")


@pytest.mark.parametrize("name", ["images.u8", "index.npz"])
def test_a_file_that_was_cut_off_is_refused(photos, tmp_path, name):
    pack(str(photos), str(tmp_path / "packed"), size=16, num_workers=0)
    path = tmp_path / "packed" / name
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"{name} .*; pack it again"):
        Packed(str(tmp_path / "packed"), img_size=16)


def test_packing_leaves_nothing_behind_when_it_fails(photos, tmp_path, monkeypatch):
    (photos / "train" / "cat" / "bad.jpg").write_bytes(b"x")
    with pytest.raises(ValueError, match="1 files cannot be read"):
        pack(str(photos), str(tmp_path / "packed"), num_workers=0)
    (photos / "train" / "cat" / "bad.jpg").unlink()
    monkeypatch.setattr("vitlab.data.pack.moments", lambda image: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pack(str(photos), str(tmp_path / "packed"), num_workers=0)
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "cache"}


def test_wrong_uses_are_refused(photos, tmp_path):
    pack(str(photos), str(tmp_path / "packed"), size=16, num_workers=0)
    with pytest.raises(ValueError, match="packed exists"):
        pack(str(photos), str(tmp_path / "packed"), num_workers=0)
    with pytest.raises(ValueError, match=r"`data\.img_size` must not exceed the packed size 16"):
        Packed(str(tmp_path / "packed"), img_size=17)
    with pytest.raises(ValueError, match="`vitlab pack` has written"):
        Packed(str(photos))


def test_the_report_tells_what_is_there(photos):
    (photos / "train" / "cat" / "bad\n\x1b[31m.jpg").write_bytes(b"")
    (photos / "test" / "dog" / "twin.png").write_bytes((photos / "train" / "cat" / "0.png").read_bytes())
    (photos / "train" / "empty").mkdir()
    found = report(ImageFolder(str(photos), num_workers=0))
    assert found["images"] == {"train": 20, "val": 8, "test": 7}
    assert found["class_counts"] == {"train": [10, 10, 0], "val": [4, 4, 0], "test": [3, 4, 0]}
    assert found["kinds"] == {"PNG RGB": 35} and found["width"] == {"min": 16, "median": 18, "max": 25}
    assert list(found["unreadable"].values()) == ["the file is empty"]
    assert found["duplicates_across_splits"] == [["train: train/cat/0.png", "test: test/dog/twin.png"]]
    assert found["problems"] == ["class empty has no image in train, val, test"]
    assert "\x1b" not in as_text(found) and "\ndog        10       4       4" in as_text(found)


def test_a_class_that_training_lacks_is_a_problem_in_the_report(photos):
    (photos / "test" / "gnu").mkdir()
    found = report(ImageFolder(str(photos), num_workers=0))
    assert any("test/gnu: this class is not among those" in problem for problem in found["problems"])
    assert found["images"] == {"train": 20, "val": 8}


@pytest.mark.parametrize("augment", ["crop-flip", "rand-m9-mstd0.5-inc1"])
def test_the_data_command_prints_and_draws(photos, tmp_path, capsys, augment):
    drawn, written = tmp_path / "out" / "samples.png", tmp_path / "report.json"
    assert data_command([str(photos), "--augment", augment, "--img_size", "20", "-o", str(drawn), "--json",
                         str(written), "--num_workers", "0"]) == 0  # fmt: skip
    assert "34 readable images" in capsys.readouterr().out
    with Image.open(drawn) as sheet:
        assert sheet.size == (8 * 22, 8 * 22)
    assert json.loads(written.read_text())["images"]["train"] == 20


def test_the_pack_command_says_what_it_made(photos, tmp_path, capsys):
    (photos / "train" / "cat" / "bad.jpg").write_bytes(b"")
    target = str(tmp_path / "packed")
    assert pack_command([str(photos), target, "--size", "16", "--max_unreadable", "1", "--num_workers", "0"]) == 0
    out = capsys.readouterr().out
    assert "left out" in out and "34 images of 2 classes, 0.0 MB" in out and f"--data.root {target}" in out


@pytest.mark.parametrize("command", [data_command, pack_command])
@pytest.mark.parametrize("argv", [["no such folder", "x"], ["x", "--siz", "3"], []])
def test_mistakes_are_one_line(tmp_path, monkeypatch, command, argv):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as error:
        command(argv)
    assert re.match(r"[^\n]+$", str(error.value))


def test_policies_work_on_packed_photos(photos, tmp_path):
    packed = _packed(photos, tmp_path / "packed", img_size=8, augment="3-augment", num_workers=0)
    batches = list(packed.finished(packed.train_dataloader()))
    assert len(batches) == 5 and batches[0][0].shape == (4, 3, 8, 8)
