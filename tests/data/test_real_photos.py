"""``vitlab data`` on 1,808 real photos, alone and with Pillow's awkward images among them."""

import csv
import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from vitlab.cli.data import main as data_command

SHARED = Path(os.environ.get("VITLAB_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
OTHER_FORMATS = {"PSD", "ICO", "TGA"}  # Pillow reads them, vitlab does not

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    if not (SHARED / "caltech101-20").is_dir() or not (SHARED / "weird" / "MANIFEST.tsv").is_file():
        pytest.skip("the photos are not here")
    place = tmp_path_factory.mktemp("photos")
    shutil.copytree(SHARED / "caltech101-20", place / "photos")
    return place


def _report(place, capsys):
    assert data_command([str(place / "photos"), "-o", str(place / "samples.png"), "--json", str(place / "x.json")]) == 0
    return json.loads((place / "x.json").read_text()), capsys.readouterr().out


@pytest.mark.rare
def test_the_report_on_the_photos_is_right(place, capsys):
    found, text = _report(place, capsys)
    counts = {part: [len(os.listdir(place / "photos" / part / name)) for name in found["class_names"]]
              for part in ("train", "val")}  # fmt: skip
    assert found["images"]["train"] + found["images"]["val"] == 1451 == sum(counts["train"])
    assert found["images"]["test"] == 357 and found["class_counts"]["test"] == counts["val"]
    pairs = zip(found["class_counts"]["train"], found["class_counts"]["val"], strict=True)
    assert [a + b for a, b in pairs] == counts["train"] and len(counts["train"]) == 20
    assert found["kinds"] == {"JPEG RGB": 1770, "JPEG L": 38}
    assert [found[side][end] for side in ("width", "height") for end in ("min", "max")] == [163, 432, 160, 300]
    assert found["unreadable"] == {} and found["problems"] == []
    assert found["duplicates_across_splits"] == [] and found["duplicates_within_splits"] == 0
    assert "1,808 readable images" in text and re.search(r"trilobite +\d+ +\d+ +\d+", text)


@pytest.mark.rare
def test_the_report_on_photos_with_awkward_files_among_them_is_what_the_manifest_says(place, capsys):
    before, _ = _report(place, capsys)
    with (SHARED / "weird" / "MANIFEST.tsv").open() as lines:
        rows = list(csv.DictReader(lines, delimiter="\t"))
    for i, row in enumerate(rows):
        part = ("train", "val")[i % 2]
        shutil.copy(SHARED / "weird" / row["file"], place / "photos" / part / "watch" / row["file"])
    twin = os.listdir(place / "photos" / "val" / "ibis")[0]
    shutil.copy(place / "photos" / "val" / "ibis" / twin, place / "photos" / "train" / "ibis" / "twin.jpg")
    found, text = _report(place, capsys)
    good = [
        row for row in rows
        if row["PIL_13_open+load+convert(RGB)"].startswith("ok") and row["format"] not in OTHER_FORMATS
    ]  # fmt: skip
    bad = {row["file"] for row in rows} - {row["file"] for row in good}
    assert {os.path.basename(path) for path in found["unreadable"]} == bad and len(bad) == len(found["unreadable"])
    assert all(name in text for name in bad) and f"unreadable  {len(bad)}" in text
    new = Counter(found["kinds"]) - Counter(before["kinds"])
    assert new == Counter(f"{row['format']} {row['mode']}" for row in good) + Counter({"JPEG RGB": 1})
    assert sum(found["images"].values()) == 1808 + len(good) + 1
    ((first, second),) = found["duplicates_across_splits"]
    assert {first.split("/")[-1], second.split("/")[-1]} == {"twin.jpg", twin}
