"""Packed photos: the same training as on the files."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.cli.pack import main as pack_command
from vitlab.data.image_folder import ImageFolder
from vitlab.data.pack import write
from vitlab.data.pack.write import pack
from vitlab.data.packed import Packed
from vitlab.data.record import Trained, measured
from vitlab.errors import UsageError
from vitlab.jobs.restore import _without_files
from vitlab.runs.directory import RunDir


def _photos(root, width=lambda i: 34 + i, suffix="jpg"):
    rng = np.random.default_rng(0)
    for part, n in (("train", 10), ("valid", 4), ("test", 3)):
        for k, name in enumerate(("cat", "dog")):
            (root / part / name).mkdir(parents=True)
            for i in range(n):
                pixels = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
                image = Image.fromarray(pixels).resize((width(i), width(i + k)))
                (image.convert("L") if i == 3 else image).save(root / part / name / f"{i}.{suffix}")
    return root


def _batches(data):
    torch.manual_seed(5)
    for stage in ("fit", "test"):
        data.setup(stage)
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    return [batch for loader in loaders for batch in data.iterate_batches(loader)]


def _same(first, second):
    pairs = list(zip(_batches(first), _batches(second), strict=True))
    return len(pairs) > 6 and all(torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))


_BOTH = ((Packed, "packed"), (ImageFolder, "photos"))
RECIPES = [
    {"augment": "crop-flip", "crop_scale": 0.3, "img_size": 24},
    {"augment": "crop-flip", "img_size": [16, 24], "mixup": 0.8, "random_erasing": 0.25},
    {"augment": "rand-m9-mstd0.5-inc1", "img_size": 16, "in_chans": 1},
    {"augment": "none", "img_size": 16, "crop_pct": 1.0, "fold": "2/3", "subset": 0.8},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", RECIPES)
@pytest.mark.parametrize("size", [None, 64], ids=["keep", "size"])
def test_training_on_packed_photos_is_training_on_the_photos(tmp_path, size, settings):
    # 64 pixels are more than any photo's shorter side: nothing is resized, and the pixels are those of the files
    root = _photos(tmp_path / "photos")
    pack(str(root), str(tmp_path / "packed"), size=size, num_workers=0, shard_bytes=9000)
    settings = {**settings, "batch_size": 4, "num_workers": 0}
    packed, folder = (cls(str(tmp_path / x), **settings) for cls, x in _BOTH)
    assert _same(packed, folder)
    facts, expected = packed.fingerprint(), folder.fingerprint()
    assert {**facts, "data": ""} == {**expected, "data": ""}
    assert len(list((tmp_path / "packed").glob("*.bin"))) > 1


@pytest.mark.parametrize("augment", ["crop-flip", "3-augment", "none"])
def test_packed_small_images_are_shifted_as_the_files_are(tmp_path, augment):
    root = _photos(tmp_path / "photos", width=lambda i: 32, suffix="png")
    pack(str(root), str(tmp_path / "packed"), num_workers=0)
    settings = {"batch_size": 4, "augment": augment, "num_workers": 0}
    packed, folder = Packed(str(tmp_path / "packed"), **settings), ImageFolder(str(root), **settings)
    assert _same(packed, folder) and packed.img_size == packed.pipeline.native_size == (32, 32)


@pytest.mark.parametrize("settings", [{}, {"img_size": 64}])
def test_square_photos_that_were_packed_small_are_photos_still(tmp_path, settings):
    root = _photos(tmp_path / "photos", width=lambda i: 150)
    for name in ("cat", "dog"):
        for file in root.glob(f"*/{name}/*.jpg"):
            Image.open(file).resize((150, 150)).save(file)
    pack(str(root), str(tmp_path / "packed"), size=64, num_workers=0)
    packed, folder = (cls(str(tmp_path / x), augment="crop-flip", num_workers=0, **settings) for cls, x in _BOTH)
    assert packed.pipeline.facts() == folder.pipeline.facts() and packed.img_size == folder.img_size
    assert str(packed.pipeline) == str(folder.pipeline) and "shrunk to 64 pixels" in packed.notes[0]


def test_one_packed_folder_is_split_as_the_folder_itself(tmp_path):
    root = _photos(tmp_path / "photos") / "train"
    pack(str(root), str(tmp_path / "packed"), num_workers=0)
    settings = {"batch_size": 2, "img_size": 8, "num_workers": 0, "split_seed": 3}
    assert _same(Packed(str(tmp_path / "packed"), **settings), ImageFolder(str(root), **settings))


def test_a_large_photo_is_packed_whole_with_its_shorter_side_at_the_size(tmp_path):
    root = _photos(tmp_path / "photos", width=lambda i: 300)
    Image.linear_gradient("L").resize((600, 450)).save(root / "train" / "cat" / "0.jpg")
    pack(str(root), str(tmp_path / "packed"), size=90, num_workers=0)
    data = Packed(str(tmp_path / "packed"), img_size=90, batch_size=4, crop_scale=1.0)
    data.setup("fit")
    sizes = {file: data.splits["train"].image(i).size for i, file in enumerate(data.splits["train"].files)}
    assert sizes.pop("train/cat/0.jpg") == (120, 90) and set(sizes.values()) == {(90, 90)}
    whole = np.asarray(data.splits["train"].image(data.splits["train"].files.index("train/cat/0.jpg")))
    assert whole[0].max() < 5 and whole[-1].min() > 250  # from edge to edge


def test_packing_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    root = _photos(tmp_path / "photos")
    target, settings = str(tmp_path / "packed"), {"num_workers": 0, "shard_bytes": 12_000}
    plain, calls = write.pixels, []

    def failing(image):
        calls.append(image)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return plain(image)

    monkeypatch.setattr(write, "pixels", failing)
    with pytest.raises(KeyboardInterrupt):
        pack(str(root), target, **settings)
    assert not (tmp_path / "packed").exists() and len(list(tmp_path.glob(".packed-*"))) == 1
    _photos(tmp_path / "other", width=lambda i: 40)
    last = sorted((root / "test" / "dog").iterdir())[-1]
    os.replace(tmp_path / "other" / "train" / "dog" / "9.jpg", last)  # of a part that was not reached
    shutil.rmtree(tmp_path / "other")
    done = pack(str(root), target, **settings)
    assert 0 < done["continued"] < 20 and len(calls) == 20 + 34 - done["continued"]
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "packed"}
    recipe = {"batch_size": 4, "img_size": 24, "num_workers": 0, "augment": "crop-flip"}
    assert _same(Packed(target, **recipe), ImageFolder(str(root), **recipe))


def test_packing_decodes_each_photo_once_and_sees_what_a_scan_sees(tmp_path, monkeypatch):
    root = _photos(tmp_path / "photos")
    Image.effect_noise((1000, 750), 99).resize((900, 700)).convert("RGB").save(root / "train" / "dog" / "0.jpg")
    decode, calls = write.decode_bytes, []
    for place in ("vitlab.data.pack.write", "vitlab.data.files.scan", "vitlab.data.files.sets"):
        monkeypatch.setattr(f"{place}.decode_bytes", lambda *a, **kw: calls.append(a) or decode(*a, **kw))
    pack(str(root), str(tmp_path / "packed"), num_workers=0)
    assert len(calls) == 34 + 1  # a scan decodes the large one at half its size
    packed, folder = (cls(str(tmp_path / x), img_size=16, num_workers=0) for cls, x in _BOTH)
    assert packed.statistics() == folder.statistics()
    facts, expected = (data.splits["train"].known for data in (packed, folder))
    assert all((facts[name] == expected[name]).all() for name in facts.dtype.names if name != "size")


def test_random_crops_of_packed_photos_decode_nothing(tmp_path, monkeypatch):
    pack(str(_photos(tmp_path / "photos")), str(tmp_path / "packed"), num_workers=0)
    data = Packed(str(tmp_path / "packed"), img_size=16, batch_size=4, num_workers=0, augment="crop-flip")
    monkeypatch.setattr("vitlab.data.files.sets.decode_bytes", lambda *args: 1 / 0)
    data.setup("fit")
    assert len(list(data.train_dataloader())) == 5 and len(list(data.val_dataloader())) == 2


def test_packing_that_fails_early_leaves_nothing_behind(tmp_path, monkeypatch):
    root = _photos(tmp_path / "photos")
    (root / "train" / "cat" / "bad.jpg").write_bytes(b"x")
    with pytest.raises(ValueError, match="1 file cannot be read"):
        pack(str(root), str(tmp_path / "packed"), num_workers=0)
    (root / "train" / "cat" / "bad.jpg").unlink()
    monkeypatch.setattr("vitlab.data.pack.write.pixels", lambda image: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pack(str(root), str(tmp_path / "packed"), num_workers=0)
    assert {path.name for path in tmp_path.iterdir()} == {"photos"}


def test_a_changed_byte_is_found_in_the_split_that_it_belongs_to(tmp_path):
    root = _photos(tmp_path / "photos")
    pack(str(root), str(tmp_path / "packed"), num_workers=0)
    path = tmp_path / "packed" / "images-00000.bin"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1  # of the last test image
    path.write_bytes(content)
    data = Packed(str(tmp_path / "packed"), img_size=16, batch_size=4)
    data.setup("fit")
    with pytest.raises(ValueError, match=r"packed is damaged: test/dog/2\.jpg"):
        data.setup("test")
    Packed(str(tmp_path / "packed"), img_size=16, verify=False).setup("test")


@pytest.mark.parametrize("name", ["images-00000.bin", "index.npz"])
def test_a_file_that_was_cut_off_or_is_missing_is_refused(tmp_path, name):
    pack(str(_photos(tmp_path / "photos")), str(tmp_path / "packed"), num_workers=0)
    path = tmp_path / "packed" / name
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"{name} .*; pack it again"):
        Packed(str(tmp_path / "packed"))
    path.unlink()
    with pytest.raises(ValueError, match=r"[;:] pack it again|has shards and no index.npz: give the same"):
        Packed(str(tmp_path / "packed"))


def test_a_pack_of_an_earlier_version_is_refused_with_the_command_that_renews_it(tmp_path):
    content = io.BytesIO()
    header = {"version": 1, "size": 32, "class_names": ["a", "b"], "parts": ["train"], "files": ["a/0.png"]}
    np.savez(content, rows=np.zeros(1), header=np.frombuffer(json.dumps(header).encode(), np.uint8))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "index.npz").write_bytes(content.getvalue())
    with pytest.raises(ValueError, match=r"cut to squares: pack the photos again, `vitlab pack PHOTOS \S+old-2`"):
        Packed(str(tmp_path / "old"))


def test_an_existing_pack_is_kept_and_a_folder_of_photos_is_not_taken_for_one(tmp_path):
    root = _photos(tmp_path / "photos")
    pack(str(root), str(tmp_path / "packed"), num_workers=0)
    with pytest.raises(ValueError, match="packed exists"):
        pack(str(root), str(tmp_path / "packed"), num_workers=0)
    with pytest.raises(ValueError, match=r"has written, .*; --data=ImageFolder reads photos as they are$"):
        Packed(str(root))
    with pytest.raises(ValueError, match=r"was packed with value_range None, got `data.value_range` \[0, 4095\]"):
        Packed(str(tmp_path / "packed"), value_range=[0, 4095])


def test_a_pack_states_how_its_files_were_read_and_a_run_of_it_knows(tmp_path):
    root, place = _photos(tmp_path / "photos"), str(tmp_path / "packed")
    pack(str(root), place, num_workers=0, value_range=[0, 4095], max_pixels=10**6)
    data = Packed(
        place, value_range=None, max_pixels=50_000_000, num_workers=0
    )  # the defaults, as a command gives them
    assert data.decoding.value_range == [0, 4095] and data.decoding.max_pixels == 10**6
    with pytest.raises(ValueError, match=r"was packed with max_pixels 1000000, .*; leave out `data.max_pixels`, or"):
        Packed(place, max_pixels=10**7)
    data.setup("fit")
    run = RunDir(tmp_path)
    facts = json.loads(json.dumps(data.fingerprint()))
    run.config.write_text(f"data: {{class_path: Packed, init_args: {{root: {place}, value_range: null}}}}")
    assert _without_files(run, facts)["data"]["init_args"]["value_range"] == [0, 4095]
    for given in ([0, 255], None):
        with measured(Trained(facts, None, "test")):
            assert ImageFolder(str(root), value_range=given).decoding.value_range == (given or [0, 4095])


@pytest.mark.parametrize("how", [["--size", "30"], ["--keep"]])
def test_the_pack_command_reports_what_it_wrote(tmp_path, capsys, how):
    root = _photos(tmp_path / "photos")
    (root / "train" / "cat" / "bad.jpg").write_bytes(b"")
    target = str(tmp_path / "packed")
    assert pack_command([str(root), target, *how, "--max_unreadable", "1", "--num_workers", "0"]) == 0
    out = capsys.readouterr().out
    assert "left out" in out and re.search(r"34 images of 2 classes, 0\.\d MB, \d\.\d s, [\d,]+ images/s", out)
    assert f"--data.root {target}" in out


@pytest.mark.parametrize("argv", [["no such folder", "x"], ["x", "--siz", "3"], ["x", "y", "--size=0"], []])
def test_a_mistake_in_the_command_pack_is_one_line(here, argv):
    with pytest.raises(UsageError) as error:
        pack_command(argv)
    assert re.match(r"[^\n]+$", str(error.value))


@pytest.mark.slow
def test_photos_packed_at_the_evaluation_size_are_evaluated_like_the_files(tmp_path):
    root = _photos(tmp_path / "photos", width=lambda i: 141 + 17 * i)
    for i, size in enumerate([(301, 149), (149, 303), (177, 201)]):
        Image.effect_noise(size, 60).convert("RGB").save(root / "test" / "cat" / f"odd{i}.png")
    settings = {"batch_size": 4, "num_workers": 0, "img_size": 56, "mean": [0.5] * 3, "std": [0.5] * 3}

    def tests(cls, name, **changes):
        data = cls(str(tmp_path / name), **{**settings, **changes})
        data.setup("test")
        return data, torch.cat([images for images, _ in data.iterate_batches(data.test_dataloader())])

    expected = tests(ImageFolder, "photos")[1]
    for size in (64, 60, None):
        pack(str(root), str(tmp_path / f"packed{size}"), size=size, num_workers=0)
    for size, same in ((64, True), (None, True), (60, False)):
        data, images = tests(Packed, f"packed{size}")
        assert torch.equal(images, expected) == same and bool(data.notes) != same
    assert "shrunk to 60 pixels" in data.notes[0] and "pack with --size=64 or --keep" in data.notes[0]
    other = tests(Packed, "packed64", crop_pct=0.9)[0], tests(Packed, "packed64", interpolation="bilinear")[0]
    assert "--size=62 or --keep" in other[0].notes[0] and other[1].notes[0].endswith("pack with --keep")


_PACK = """
import os, sys, time
import vitlab.data.pack.write
from vitlab.cli.main import main
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.001)
sys.exit(main(["pack", "photos", "packed", "--size", sys.argv[1], "--num_workers", "2"]))
"""


def _processes(folder, count, size=16):
    line = [sys.executable, "-c", _PACK, str(size)]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return [subprocess.Popen(line, cwd=folder, **how) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.rare
def test_of_three_simultaneous_commands_one_packs_and_the_others_wait(tmp_path):
    _photos(tmp_path / "photos")
    processes = _processes(tmp_path, 3)
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
    (tmp_path / "go").touch()
    said = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".cache") == ["go", "packed", "photos"]
    assert sorted(path.name for path in (tmp_path / "packed").iterdir()) == ["images-00000.bin", "index.npz"]
    assert all("34 images of 2 classes" in text for text in said)


@pytest.mark.rare
def test_a_killed_pack_leaves_no_process(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(300):  # of which a batch is larger than a pipe
        path = tmp_path / "photos" / "ab"[i % 2] / f"{i}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (200, 200, 3), dtype=np.uint8)).save(path)
    (tmp_path / "go").touch()
    (process,) = _processes(tmp_path, 1, size=200)
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    end = time.monotonic() + 60
    while len(_read(children).split()) < 2 and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    end = time.monotonic() + 12
    while (left := _session(process.pid)) and time.monotonic() < end:
        time.sleep(0.2)
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert not left


def _session(pid):
    line = ["ps", "-o", "pid=", "-s", str(pid)]
    return subprocess.run(line, capture_output=True, text=True, check=False).stdout.split()


def _read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def test_a_pack_that_another_process_wrote_with_other_settings_is_refused(tmp_path, monkeypatch):
    root = _photos(tmp_path / "photos")
    target = tmp_path / "packed"

    @contextlib.contextmanager
    def waited(path, what, sign):
        monkeypatch.undo()
        monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / ".cache"))
        pack(str(root), str(target), 16, num_workers=0)
        yield 1.0

    monkeypatch.setattr(write, "held", waited)
    with pytest.raises(ValueError, match="packed meanwhile with another size"):
        pack(str(root), str(target), 20, num_workers=0)


@pytest.mark.parametrize("settings", [{}, {"fold": "2/3"}, {"subset": 0.5}, {"videos": "middle"}])
def test_a_pack_of_a_folder_with_unreadable_files_is_split_as_the_folder(settings, tmp_path):
    root = _photos(tmp_path / "photos") / "train"
    for name, numbers in (("cat", (0, 4, 7)), ("dog", (9,))):
        for i in numbers:
            (root / name / f"{i}.jpg").write_bytes(b"broken")
    pack(str(root), str(tmp_path / "packed"), max_unreadable=4, num_workers=0)
    settings = {"img_size": 8, "batch_size": 2, "num_workers": 0, "max_unreadable": 4, "val_share": 0.3, **settings}
    packed, folder = Packed(str(tmp_path / "packed"), **settings), ImageFolder(str(root), **settings)
    for data in (packed, folder):
        data.setup("fit")
        data.hold_test_back()
        assert (len(data.held_back["test"]) > 0) and all(data.held_back["test"].known["readable"])
        data.setup("test")
    for name, images in folder.splits.items():
        assert packed.splits[name].files == images.files and packed.splits[name].split_hash == images.split_hash
    assert packed.statistics() == folder.statistics()
