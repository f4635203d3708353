"""The report on a folder, and its command."""

import errno
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.cli.data import main as data_command
from vitlab.data.image_folder import ImageFolder
from vitlab.data.imagenet import ImageNet
from vitlab.data.report import report, report_as_text
from vitlab.errors import UsageError


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    for part, n in (("train", 10), ("val", 4), ("test", 3)):
        for name in ("cat", "dog"):
            place = tmp_path / "photos" / part / name
            place.mkdir(parents=True)
            for i in range(n):
                pixels = rng.integers(0, 256, (24, 16 + i, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.png")
    return tmp_path / "photos"


def test_the_report_counts_formats_sizes_and_classes(photos):
    (photos / "train" / "cat" / "bad\n\x1b[31m.jpg").write_bytes(b"")
    (photos / "test" / "dog" / "twin.png").write_bytes((photos / "train" / "cat" / "0.png").read_bytes())
    (photos / "train" / "empty").mkdir()
    found = report(ImageFolder(str(photos), num_workers=0))
    assert found["images"] == {"train": 20, "val": 8, "test": 7}
    assert found["class_counts"] == {"train": [10, 10], "val": [4, 4], "test": [3, 4]}
    assert found["kinds"] == {"PNG RGB": 35} and found["width"] == {"min": 16, "median": 18, "max": 25}
    assert list(found["unreadable"].values()) == ["the file is empty"]
    assert found["duplicates_across_splits"] == [["train: train/cat/0.png", "test: test/dog/twin.png"]]
    assert found["same_image_under_two_labels"] == found["duplicates_across_splits"]
    assert found["problems"] == ["folders without images are no classes: empty"]
    assert "\x1b" not in report_as_text(found) and "\ndog      10       4       4" in report_as_text(found)


def test_a_class_that_training_lacks_is_a_problem_in_the_report(photos):
    (photos / "test" / "gnu").mkdir()
    (photos / "test" / "gnu" / "0.png").write_bytes((photos / "train" / "cat" / "0.png").read_bytes())
    found = report(ImageFolder(str(photos), num_workers=0))
    assert any("test/gnu/0.png: the class gnu is not among those" in problem for problem in found["problems"])
    assert found["images"] == {"train": 20, "val": 8}


def test_a_folder_without_a_readable_image_is_reported_with_the_reason(photos):
    for file in photos.glob("*/*/*"):
        file.write_bytes(b"no image")
    found = report(ImageFolder(str(photos), img_size=16, num_workers=0))
    assert len(found["unreadable"]) == 34 and not sum(found["images"].values())
    assert found["problems"] == [
        "the train split has no image: none of its 20 files can be read",
        "the val split has no image: none of its 8 files can be read",
        "the test split has no image: none of its 6 files can be read",
    ]
    assert "unreadable  34" in report_as_text(found)


def test_the_report_says_one_thing_once_and_where_mean_and_std_are_from(photos):
    shutil.rmtree(photos / "val")
    for file in photos.glob("train/*/[1-9].png"):
        file.unlink()
    found = report(ImageNet(str(photos), num_workers=0))
    assert len([problem for problem in found["problems"] if "the val split has no image" in problem]) == 1
    assert "mean        0.4850 0.4560 0.4060 (published, of ImageNet)" in report_as_text(found)


def test_small_images_of_another_size_are_a_problem_and_not_the_end_of_the_report(photos):
    for file in (photos / "train").glob("*/*"):
        Image.open(file).resize((32, 24)).save(file)
    train, other = photos / "train" / "cat" / "0.png", photos / "test" / "cat" / "0.png"
    Image.open(train).resize((16, 24)).save(other)
    found = report(ImageFolder(str(photos), num_workers=0))
    assert found["images"] == {"train": 20, "val": 8, "test": 6}  # the last two were missing before
    assert len(found["problems"]) == 1 and "has 24x16 pixels, other images 24x32" in found["problems"][0]
    with pytest.raises(ValueError, match="has 24x16 pixels, other images 24x32"):
        ImageFolder(str(photos), num_workers=0).build("test")


def test_what_the_report_lifts_holds_again_after_it(photos, monkeypatch):
    (photos / "train" / "cat" / "bad.jpg").write_bytes(b"")
    data = ImageFolder(str(photos), num_workers=0)
    assert report(data)["unreadable"]
    with pytest.raises(ValueError, match=r"`data\.max_unreadable` allows 0"):
        data.check_readable()
    data, size = ImageFolder(str(photos), num_workers=0), (8, 8)
    data.one_size = size
    monkeypatch.setattr(data, "build", lambda name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        report(data)
    assert (data.one_size, data.max_unreadable) == (size, 0)


@pytest.mark.parametrize("augment", ["crop-flip", "rand-m9-mstd0.5-inc1"])
def test_the_data_command_prints_and_draws(photos, tmp_path, capsys, augment):
    drawn, written = tmp_path / "out" / "samples.png", tmp_path / "report.json"
    assert data_command([str(photos), "--augment", augment, "--img_size", "20", "-o", str(drawn), "--json",
                         str(written), "--num_workers", "0"]) == 0  # fmt: skip
    assert "34 readable images" in capsys.readouterr().out
    with Image.open(drawn) as sheet:
        assert sheet.size == (8 * 22, 8 * 22)
    assert json.loads(written.read_text())["images"]["train"] == 20


def test_the_picture_of_another_folder_is_kept_and_one_that_is_replaced_is_named(photos, here, capsys):
    shutil.copytree(photos, "others")
    for folder, line in (("photos", "wrote samples-photos.png"), ("./others/", "wrote samples-others.png"),
                         ("photos", "replaced samples-photos.png")):  # fmt: skip
        assert data_command([folder, "--img_size", "16", "--num_workers", "0"]) == 0
        assert f"\n{line}: " in capsys.readouterr().out


@pytest.mark.slow
def test_the_data_command_prints_for_programs(photos, tmp_path, capsys):
    words = [str(photos), "-o", str(tmp_path / "samples.png"), "--img_size", "16", "--num_workers", "0"]
    assert data_command([*words, "--json"]) == 0
    (report_,) = json.loads(capsys.readouterr().out)
    assert report_["images"]["train"] == 20
    assert data_command([*words, "--csv"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("class,train") and sum(int(row.split(",")[1]) for row in rows) == 20


def test_the_picture_shows_what_a_configuration_does_at_its_size(photos, tmp_path, capsys):
    config, sheets = tmp_path / "mine.yaml", []
    for scale in (0.05, 1.0):
        data = {
            "img_size": [12, 20],
            "augment": ["crop-flip", "RandomVerticalFlip"],
            "crop_scale": scale,
            "batch_size": 4,
        }
        config.write_text(json.dumps({"data": {"class_path": "Digits", "init_args": data}}))  # JSON is YAML
        drawn = tmp_path / f"{scale}.png"
        assert data_command([str(photos), "-c", str(config), "-o", str(drawn), "--num_workers", "0"]) == 0
        assert "then ['crop-flip', 'RandomVerticalFlip']" in capsys.readouterr().out
        with Image.open(drawn) as sheet:
            assert sheet.size == (8 * 22, 8 * 14)
            sheets.append(np.asarray(sheet))
    assert np.array_equal(sheets[0][:, :22], sheets[1][:, :22])  # the column of evaluation
    assert not np.array_equal(sheets[0], sheets[1])
    config.write_text("data: ImageFolder")  # the short form, as `vitlab fit` takes it
    words = ["-o", str(tmp_path / "short.png"), "--img_size", "16", "--num_workers", "0"]
    assert data_command([str(photos), "-c", str(config), *words]) == 0
    assert "then crop-flip" in capsys.readouterr().out


def test_the_picture_shows_several_crops_and_photos_at_their_aspect_ratio(photos, tmp_path, capsys):
    for file in photos.glob("*/*/*"):
        Image.new("RGB", (40, 20), "black").save(file)
    drawn = tmp_path / "samples.png"
    crops = {"class_path": "MultiCrop", "init_args": {"local_crops": 2, "local_size": 6, "colors": 0.0}}
    for settings, black in (
        ({"augment": [crops], "mixup": 0.2}, [16 * 16, *[16 * 16, 16 * 16, 36, 36] * 2][:8]),
        ({"native_patch": 4}, [10 * 16] * 8),  # 3 x 5 patches, made narrower
    ):
        config = {"data": {"class_path": "ImageFolder", "init_args": {"img_size": 16, **settings}}}
        (tmp_path / "mine.yaml").write_text(json.dumps(config))
        words = [str(photos), "-c", str(tmp_path / "mine.yaml"), "-o", str(drawn), "--num_workers", "0"]
        assert data_command(words) == 0
        assert ("; not drawn: mixup" in capsys.readouterr().out) == ("mixup" in settings)
        with Image.open(drawn) as sheet:
            first = np.asarray(sheet.convert("L"))[:18]
        assert [int((first[:, 18 * k : 18 * k + 18] == 0).sum()) for k in range(8)] == black


def test_a_picture_on_a_full_disk_is_named_and_none_is_left(photos, tmp_path, monkeypatch):
    def full(self, fp, format=None, **params):
        Path(fp).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    drawn = tmp_path / "drawn" / "data.png"
    with pytest.raises(UsageError, match=rf"No space left on device: '{drawn}'"):
        data_command([str(photos), "-o", str(drawn), "--num_workers", "0"])
    assert not [*drawn.parent.iterdir()]


@pytest.mark.parametrize("argv", [["no such folder", "x"], ["x", "--siz", "3"], []])
def test_a_mistake_in_the_command_data_is_one_line(here, argv):
    with pytest.raises(UsageError) as error:
        data_command(argv)
    assert re.match(r"[^\n]+$", str(error.value))
