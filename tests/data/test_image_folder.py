"""Folders of photos in every layout, with every fault."""

import itertools
import json
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.data import Packed
from vitlab.data.files.store import Folder
from vitlab.data.image_folder import ImageFolder
from vitlab.data.imagenet import ImageNet
from vitlab.data.pack.write import pack
from vitlab.data.record import Trained, measured


def _fill(folder, counts, seed=0):
    rng = np.random.default_rng([seed, len(str(folder))])
    for name, n in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            pixels = rng.integers(0, 256, (8, 10, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i:02}.png")
    return folder


def _open(root, *stages, **settings):
    data = ImageFolder(str(root), img_size=8, **{"num_workers": 0, "batch_size": 2, **settings})
    for stage in stages or ("fit", "test"):
        data.setup(stage)
    return data


def _files(data):
    return {name: set(images.files) for name, images in data.splits.items()}


def test_one_folder_is_split_three_ways(tmp_path):
    data = _open(_fill(tmp_path / "photos", {"cat": 10, "dog": 20}), test_share=0.2, val_share=0.25)
    assert data.class_names == ["cat", "dog"] and data.num_classes == 2
    counts = {name: summary["class_counts"] for name, summary in data.fingerprint()["splits"].items()}
    assert counts == {"train": [6, 12], "val": [2, 4], "test": [2, 4]}


def test_a_class_whose_name_is_not_utf_8_is_refused_before_training(tmp_path):
    root = _fill(tmp_path / "photos", {"cat": 2, os.fsdecode(b"caf\xe9"): 2})
    with pytest.raises(ValueError, match=r"^the class caf\\xe9 in .*photos has a name that is not UTF-8: rename it$"):
        ImageFolder(str(root))


def test_folders_without_images_are_refused_in_words(tmp_path):
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "dog").mkdir()
    for root in (tmp_path, tmp_path / "photos", tmp_path / "photos" / "cat"):
        with pytest.raises(ValueError, match=f"`data.root` has no class folders with images in {root}; it should look"):
            ImageFolder(str(root))
    (tmp_path / "photos" / "x.png").touch()
    with pytest.raises(
        ValueError, match=r"has no class folders .* are for --model=MAE and DINO, with --data=Unlabeled"
    ):
        ImageFolder(str(tmp_path / "photos"))


def test_classes_that_are_called_as_splits_are_named_in_the_refusal(tmp_path):
    for names, told in (
        ("car train", "class folders with images in .*car train/train; it"),
        ("car dev", "train beside dev, g"),
    ):
        for name in names.split():
            (folder := tmp_path / names / name).mkdir(parents=True)
            (folder / "x.png").touch()
        with pytest.raises(ValueError, match=f"`data.root` has no .*{told}"):
            ImageFolder(str(tmp_path / names))


def test_one_name_whose_accents_are_encoded_in_two_ways_is_no_name_of_two_classes(tmp_path):
    for name in ("caf\u00e9", "cafe\u0301", "tea", "\u00e9", "\u00c9"):  # the last two are letters
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").touch()
    with pytest.raises(ValueError, match=r"the classes cafe\\u0301, caf\\xe9 in .* differ only in case"):
        ImageFolder(str(tmp_path))


def test_three_folders_stay_as_they_are(tmp_path):
    for part, n in (("train", 9), ("valid", 4), ("test", 5)):
        _fill(tmp_path / "photos" / part, {"cat": n, "dog": n})
    files = _files(_open(tmp_path / "photos"))
    assert {name: {f.split(os.sep)[0] for f in chosen} for name, chosen in files.items()} == {
        "train": {"train"}, "val": {"valid"}, "test": {"test"},
    }  # fmt: skip
    assert {name: len(chosen) for name, chosen in files.items()} == {"train": 18, "val": 8, "test": 10}


def test_without_a_test_folder_val_is_the_test_split_and_validation_is_carved_from_train(tmp_path):
    for part, n in (("train", 10), ("val", 4)):
        _fill(tmp_path / "photos" / part, {"cat": n, "dog": n})
    files = _files(_open(tmp_path / "photos", val_share=0.2))
    assert {f.split(os.sep)[0] for f in files["train"] | files["val"]} == {"train"}
    assert {f.split(os.sep)[0] for f in files["test"]} == {"val"}
    assert {name: len(chosen) for name, chosen in files.items()} == {"train": 16, "val": 4, "test": 8}


def test_folds_of_three_folders_join_train_and_val(tmp_path):
    for part, n in (("train", 6), ("val", 4), ("test", 3)):
        _fill(tmp_path / "photos" / part, {"cat": n})
    folds = [_files(_open(tmp_path / "photos", fold=f"{k}/5")) for k in range(1, 6)]
    assert all(len(fold["val"]) == 2 for fold in folds)
    assert len(set.union(*(fold["val"] for fold in folds))) == 10
    assert len({frozenset(fold["test"]) for fold in folds}) == 1


def test_fit_and_validate_do_not_touch_the_test_split(tmp_path):
    _fill(tmp_path / "photos" / "train", {"cat": 10, "dog": 10})
    (tmp_path / "photos" / "test" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "test" / "cat" / "broken.png").write_bytes(b"broken")
    data = _open(tmp_path / "photos", "fit", "validate")
    data.fingerprint()
    assert set(data.splits) == {"train", "val"}
    with pytest.raises(ValueError, match=r"broken\.png"):
        data.setup("test")


def test_the_test_part_of_one_folder_is_never_opened_by_fit(tmp_path):
    root = _fill(tmp_path / "photos", {"cat": 10, "dog": 10})
    held_back = _files(_open(root, "test"))["test"]
    shutil.rmtree(tmp_path / ".cache")
    for file in held_back:
        (root / file).write_bytes(b"broken")
    _open(root, "fit", "validate").fingerprint()
    with pytest.raises(ValueError, match=r"4 files cannot be read"):
        _open(root, "test")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_unreadable_files_are_refused_with_the_list_or_left_out_and_listed(tmp_path, num_workers):
    root = _fill(tmp_path / "photos", {"cat": 20, "dog": 20})
    (root / "cat" / "03.png").write_bytes(b"")
    (root / "dog" / "04.png").write_bytes((root / "dog" / "05.png").read_bytes()[:60])
    files = [str(root / "cat" / "03.png"), str(root / "dog" / "04.png")]
    with pytest.raises(ValueError, match=r"allows 0; .*--data.max_unreadable=\d: .*0[34]\.png: "):
        _open(root, num_workers=num_workers)
    data = _open(root, max_unreadable=2, num_workers=num_workers)
    assert sorted(data.unreadable) == files and data.unreadable[files[0]] == "the file is empty"
    assert sum(len(images) for images in data.splits.values()) == 38
    again = _open(root, max_unreadable=2)  # from the cache
    assert again.unreadable == data.unreadable


def test_a_file_that_could_not_be_read_once_is_read_again(tmp_path, monkeypatch):
    root, read = _fill(tmp_path / "photos", {"cat": 20, "dog": 20}), Folder.read

    def fails(store, file):
        if file == "cat/03.png":
            raise OSError(5, "Input/output error")
        return read(store, file)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "read", fails)
        with pytest.raises(ValueError, match="Input/output error"):
            _open(root)
        with pytest.raises(ValueError, match="Input/output error"):
            pack(str(root), str(tmp_path / "packed"), num_workers=0, shard_bytes=500)
        done = pack(str(root), str(tmp_path / "allowed"), num_workers=0, shard_bytes=500, max_unreadable=1)
    assert done["unreadable"] and not _open(root).unreadable
    done = pack(str(root), str(tmp_path / "packed"), num_workers=0, shard_bytes=500)
    assert 0 < done["continued"] < 40 and done["n"] == 40


def test_many_unreadable_files_are_counted_and_ten_are_shown(tmp_path):
    root = _fill(tmp_path / "photos" / "train", {"cat": 2})
    for i in range(15):
        (root / "cat" / f"bad {i}.jpg").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"1\d files cannot be read.*and \d more"):
        _open(tmp_path / "photos", val_share=0.01, test_share=0.01)


def test_a_changed_file_is_scanned_again(tmp_path):
    root = _fill(tmp_path / "photos", {"cat": 10, "dog": 10})
    before = _open(root)
    Image.new("RGB", (9, 9), "red").save(root / before.splits["train"].files[0])
    after = _open(root)
    assert _files(before) == _files(after) and before.mean != after.mean
    hashes = [data.fingerprint()["splits"] for data in (before, after)]
    assert hashes[0]["train"]["hash"] != hashes[1]["train"]["hash"]
    assert hashes[0]["val"] == hashes[1]["val"]


def test_files_seen_before_are_not_decoded_again(tmp_path, monkeypatch):
    root = _fill(tmp_path / "photos", {"cat": 10, "dog": 10})
    first = _open(root)
    monkeypatch.setattr("vitlab.data.files.scan.decode_bytes", lambda *_, **__: pytest.fail("decoded again"))
    assert _open(root).fingerprint() == first.fingerprint()


def test_a_cache_that_cannot_be_read_or_written_costs_nothing_but_time(tmp_path, monkeypatch):
    root = _fill(tmp_path / "photos", {"cat": 10, "dog": 10})
    first = _open(root).fingerprint()
    (stored,) = (tmp_path / ".cache").iterdir()
    stored.write_bytes(stored.read_bytes()[:100])
    assert _open(root).fingerprint() == first
    (tmp_path / "no folder").write_text("")
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "no folder"))
    assert _open(root).fingerprint() == first


def test_equal_files_in_two_splits_are_reported(tmp_path):
    for part in ("train", "val", "test"):
        _fill(tmp_path / "photos" / part, {"cat": 3}, seed=len(part))
    root = tmp_path / "photos"
    shutil.copy(root / "train" / "cat" / "00.png", root / "test" / "cat" / "copy.png")
    shutil.copy(root / "train" / "cat" / "01.png", root / "train" / "cat" / "twin.png")
    facts = _open(root).fingerprint()
    assert facts["duplicates"] == 1 and facts["first_duplicates"] == [
        ["train: train/cat/00.png", "test: test/cat/copy.png"]
    ]


def test_suffixes_odd_names_links_and_hidden_files(tmp_path):
    root = _fill(tmp_path / "photos" / "train", {"cat \u00e9\u732b": 2, "dog": 3})
    os.rename(root / "dog" / "00.png", root / "dog" / "no suffix, but a 'quote'\n and a newline")
    os.rename(root / "dog" / "01.png", os.fsencode(root / "dog") + b"/latin-\xe9.jpg")
    (root / "dog" / ".hidden").write_text("x")
    (root / "dog" / "Thumbs.db").write_text("x")
    (root / ".git").mkdir()
    (root / "dog" / "deeper").mkdir()
    os.rename(root / "dog" / "02.png", root / "dog" / "deeper" / "x.png")
    os.symlink(root / "dog", root / "dog" / "deeper" / "loop")
    _fill(tmp_path / "photos" / "test", {"dog": 1})
    data = _open(tmp_path / "photos", val_share=0.2)
    assert data.class_names == ["cat \u00e9\u732b", "dog"]
    assert len(data.splits["train"]) == 4 and len(_files(data)["train"] | _files(data)["val"]) == 5
    assert len(list(data.iterate_batches(data.train_dataloader()))) == 2
    data.fingerprint()


def test_a_folder_without_images_is_not_a_class_and_a_split_may_lack_a_class(tmp_path):
    _fill(tmp_path / "photos" / "train", {"a": 3, "b": 0, "c": 3, "__MACOSX": 1})
    _fill(tmp_path / "photos" / "test", {"c": 2})
    data = _open(tmp_path / "photos", val_share=0.3)
    counts = {name: summary["class_counts"] for name, summary in data.fingerprint()["splits"].items()}
    assert data.class_names == ["a", "c"] and counts == {"train": [2, 2], "val": [1, 1], "test": [0, 2]}
    assert data.notes == ["folders without images are no classes: b"]


def test_a_class_that_training_lacks_is_refused(tmp_path):
    _fill(tmp_path / "photos" / "train", {"a": 3})
    _fill(tmp_path / "photos" / "test", {"a": 1, "b": 1})
    with pytest.raises(ValueError, match=r"test/b/.*: the class b is not among those of"):
        _open(tmp_path / "photos")
    data = ImageFolder(str(tmp_path / "photos"), num_workers=0)
    data.compare_with_test()
    assert len(data.notes) == 1 and "the class b is not among" in data.notes[0]


@pytest.mark.parametrize("layout", ["", "val/cat", "flat"])
def test_a_folder_of_the_wrong_layout_is_refused_with_the_right_one(tmp_path, layout):
    root = tmp_path / "photos"
    if layout == "flat":
        root.mkdir()
        Image.new("L", (2, 2)).save(root / "x.png")
    elif layout:
        _fill(root / "val", {"cat": 1})
    with pytest.raises(ValueError, match=r"`data\.root` .*photos.*ROOT/CLASS/IMAGE, or ROOT/train/CLASS/IMAGE"):
        ImageFolder(str(root))


@pytest.mark.parametrize("above", ["", "train/"])
def test_folders_of_splits_are_not_trained_as_classes(tmp_path, above):
    names = [f"{above}{part}/{name}" for part in ("training_set", "test_set") for name in ("cat", "dog", "owl")]
    root = _fill(tmp_path / "photos", dict.fromkeys(names, 4) | {f"{above}test_set/emu": 0})
    told = f"class folders test_set, training_set in {root} hold no images .* same folders, cat, dog, owl: if these "
    ways = "give one of the former as --data.root; if they are videos, give --data.videos=frames"
    with pytest.raises(ValueError, match=f"{told}.*{ways}"):
        ImageFolder(str(root))
    with pytest.raises(ValueError, match=told):
        pack(str(root), str(tmp_path / "packed"), num_workers=0)
    data = ImageFolder(str(root), videos="frames", num_workers=0)
    data.setup("fit")
    assert data.class_names == ["test_set", "training_set"]
    with measured(Trained(data.fingerprint(), None, "val")):  # an older run
        ImageFolder(str(root), num_workers=0).setup("validate")
    _open(root / above / "training_set")


@pytest.mark.parametrize("extra", ["cat/images", "cat/2018", "cat/2020", "dog/2021", "dog/x.png"])
def test_folders_below_a_class_may_have_any_names_that_differ_or_stand_alone(tmp_path, extra):
    years = [] if extra == "cat/images" else ["cat/2019", "dog/2019"]
    names = ["cat/images", "dog/images"] if extra == "cat/images" else [*years, "cat/2018", "dog/2018"]
    root = _fill(tmp_path / "photos", dict.fromkeys(names, 6))
    if extra == "dog/x.png":
        Image.new("RGB", (10, 8)).save(root / extra)
    else:
        _fill(root, {extra: 6})
    assert _open(root).class_names == ["cat", "dog"]


def test_the_class_map_of_a_trained_run_takes_precedence(tmp_path):
    trained = _open(_fill(tmp_path / "one", {"cat": 10, "dog": 10, "fox": 10}), "fit")
    state = trained.state_dict()
    other = _open(_fill(tmp_path / "two", {"cat": 10, "fox": 10}), "test", test_share=0.5)
    other.load_state_dict(state)
    assert other.class_names == ["cat", "dog", "fox"] and (other.mean, other.std) == (trained.mean, trained.std)
    assert set(other.splits["test"].labels.tolist()) == {0, 2}
    stranger = _open(_fill(tmp_path / "three", {"cat": 10, "gnu": 10}), "test")
    with pytest.raises(ValueError, match="does not know the classes gnu"):
        stranger.load_state_dict(state)


def test_data_that_was_used_before_it_takes_the_classes_of_a_run_has_their_numbers_everywhere(tmp_path):
    data = _open(_fill(tmp_path / "photos", {"cat": 10, "dog": 10}), "fit", mixup=1.0, batch_size=4)
    data.hold_test_back()
    before, state = [labels.clone() for _, labels, _ in data.val_dataloader()], data.state_dict()
    assert "val" in data._ready  # decoded, with labels
    data.load_state_dict({**state, "class_names": ["ape", "cat", "dog", "fox"]})
    for was, (_, labels, _) in zip(before, data.val_dataloader(), strict=True):
        assert labels.tolist() == (was + 1).tolist()
    assert set(data.held_back["test"].labels.tolist()) == {1, 2}
    assert next(data.iterate_batches(data.train_dataloader()))[1].shape == (4, 4)


def test_names_of_a_class_map_that_no_class_has_are_told(tmp_path):
    (names := tmp_path / "map.json").write_text(json.dumps({"cat": "pet", "Dog": "pet"}))
    root = _fill(tmp_path / "photos", {"cat": 1, "dog": 1})
    assert ImageFolder(str(root), class_map=str(names)).notes == [
        f"`data.class_map` {names} maps Dog: no class of {root} is called so"
    ]


def test_gray_images_have_one_channel(tmp_path):
    data = _open(_fill(tmp_path / "photos", {"cat": 10, "dog": 10}), in_chans=1)
    images, _ = next(data.iterate_batches(data.train_dataloader()))
    assert images.shape[1:] == (1, 8, 8) and len(data.mean) == 1


def _seen(data):
    return torch.cat([images for images, _ in data.iterate_batches(data.test_dataloader())])


@pytest.mark.slow
def test_a_run_sees_images_of_other_sizes_as_those_that_it_was_trained_on(tmp_path):
    small = _fill(tmp_path / "small", {"cat": 4, "dog": 4})
    for file in small.glob("*/*.png"):
        large = tmp_path / "large" / file.relative_to(small)
        large.parent.mkdir(parents=True, exist_ok=True)
        Image.open(file).resize((30, 24), Image.Resampling.NEAREST).save(large)
    shutil.copytree(tmp_path / "large", tmp_path / "mixed")
    shutil.copy(small / "cat" / "00.png", tmp_path / "mixed" / "cat")
    fixed = {"mean": [0.0] * 3, "std": [1.0] * 3, "num_workers": 0, "test_share": 1.0}
    trained = ImageFolder(str(small), augment="crop-flip", num_workers=0)
    cropped = ImageFolder(str(small), crop_pct=0.5, num_workers=0)
    for run, crop in ((trained, {"crop": "none"}), (cropped, {"crop": "center", "crop_pct": 0.5})):
        facts = {"class_names": run.class_names, **run.pipeline.facts()}
        for root in ("small", "large", "mixed"):
            with measured(Trained(facts, None, "test")):
                data = ImageFolder(str(tmp_path / root), **fixed)
                data.setup("test")
            assert crop.items() <= data.pipeline.protocol().items()
            run._statistics = (0.0,) * 3, (1.0,) * 3
            photos = data.splits["test"]
            torch.testing.assert_close(
                _seen(data), torch.stack([run.eval_transform(photos.image(i)) for i in range(len(photos))])
            )


@pytest.mark.slow
def test_imagenet_has_1000_classes_holds_its_val_folder_back_and_has_the_published_statistics(tmp_path):
    for part, n in (("train", 2), ("val", 1)):
        _fill(tmp_path / part, {"n01440764": n, "n01443537": n})
    with pytest.raises(ValueError, match=r"`data: ImageNet` has 1,000 classes, .* has 2: --data=ImageFolder"):
        ImageNet(root=str(tmp_path), num_workers=0).setup("fit")
    for part in ("train", "val"):
        for k in range(998):
            (tmp_path / part / f"n{k}").mkdir()
            os.link(tmp_path / part / "n01440764" / "00.png", tmp_path / part / f"n{k}" / "00.png")
    data = ImageNet(root=str(tmp_path), num_workers=0)
    data.setup("fit")
    data.setup("test")
    assert {name: len(images) for name, images in data.splits.items()} == {"train": 992, "val": 10, "test": 1000}
    assert data.mean == (0.485, 0.456, 0.406) and data.fingerprint()["statistics_from"] == "published"


def test_a_run_that_is_measured_on_imagenet_keeps_its_own_statistics(tmp_path):
    root = str(_fill(tmp_path, {"train/n01440764": 4, "train/n01443537": 4, "val/n01440764": 1, "val/n01443537": 1}))
    run = ImageFolder(root, num_workers=0, mean=[0.5] * 3, std=[0.25] * 3)
    data = ImageNet(root, num_workers=0)
    data.load_state_dict(run.state_dict())
    assert data.statistics() == ((0.5,) * 3, (0.25,) * 3)
    other = ImageFolder(root, num_workers=0)
    other.load_state_dict(ImageNet(root, num_workers=0).state_dict())
    assert other.mean == (0.485, 0.456, 0.406)


def test_photos_without_labels_are_one_class_flat_or_nested_and_packed(tmp_path):
    from vitlab.data import Packed, Unlabeled
    from vitlab.data.pack.write import pack
    from vitlab.tasks import Classifier

    rng = np.random.default_rng(0)
    places = [f"flat/{i}.png" for i in range(10)] + [f"nested/{'x/y/'[: i % 3 * 2]}{i}.png" for i in range(10)]
    for name in places:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(256, size=(8, 8, 3), dtype=np.uint8)).save(tmp_path / name)
    for folder in ("flat", "nested"):
        data = Unlabeled(str(tmp_path / folder), batch_size=1, num_workers=0, val_share=0.2, test_share=0.2)
        data.setup("fit")
        assert (len(data.splits["train"]), len(data.splits["val"]), data.num_classes) == (6, 2, 1)
    pack(str(tmp_path / "flat"), str(tmp_path / "packed"), 8, 0, 0)
    assert Packed(str(tmp_path / "packed"), img_size=8).class_names == ["unlabeled"]
    with pytest.raises(ValueError, match="the data has one; --model=MAE or DINO need none"):
        Classifier(num_classes=1)


def test_damage_in_any_split_stops_the_training_before_it_begins_and_is_listed_once(tmp_path):
    for part in ("train", "val", "test"):
        for k, name in enumerate(("cat", "dog")):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(3):
                pixels = np.random.default_rng(i + 3 * k).integers(0, 256, (150, 150, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{i}.jpg")
    cut, empty, page, gone = (
        tmp_path / x for x in ("train/cat/0.jpg", "val/dog/1.jpg", "test/cat/2.jpg", "test/dog/0")
    )
    cut.write_bytes(cut.read_bytes()[:5000])
    empty.write_bytes(b"")
    page.write_text("<html>404 Not Found</html>")
    gone.symlink_to(tmp_path / "nowhere")
    damaged = {cut: "truncated", empty: "the file is empty", page: "not one of JPEG", gone: "No such file"}
    how = {"img_size": 32, "num_workers": 0, "batch_size": 2}
    with pytest.raises(ValueError, match=r"4 files cannot be read, `data.max_unreadable` allows 1") as refused:
        ImageFolder(str(tmp_path), max_unreadable=1, **how).setup("fit")
    for file, reason in damaged.items():
        (told,) = [line for line in str(refused.value).split("; ") if str(file) in line]
        assert reason in told
    data = ImageFolder(str(tmp_path), max_unreadable=4, **how)
    data.setup("fit")
    data.compare_with_test()
    assert set(data.fingerprint()["unreadable"]) == set(map(str, damaged))
    for file in (cut, empty):
        file.unlink()
    data = ImageFolder(str(tmp_path), **how)
    data.setup("fit")
    with pytest.raises(ValueError, match="2 files cannot be read"):
        data.compare_with_test()
    data = ImageFolder(str(tmp_path), max_unreadable=2, **how)
    data.setup("fit")
    data.setup("test")
    assert [len(data.splits[name]) for name in ("train", "val", "test")] == [5, 5, 5]


def _videos(root, places=("cat", "dog")):
    for place in places:
        for video in range(10):
            folder = root / place / f"v{video}"
            folder.mkdir(parents=True)
            for frame in range(7, 12):
                color = (video * 20, frame * 20, 10 * len(place))
                Image.new("RGB", (9, 7), color).save(folder / f"f{frame}.png")
        Image.new("RGB", (9, 7), (1, 2, 3 * len(place))).save(root / place / "alone.png")


@pytest.mark.parametrize("packed", [False, True])
def test_frames_of_a_video_stay_in_one_split_or_the_middle_one_stands_for_them(tmp_path, packed):
    _videos(tmp_path / "films")
    make, place = (Packed, tmp_path / "packed") if packed else (ImageFolder, tmp_path / "films")
    if packed:
        pack(str(tmp_path / "films"), str(place), num_workers=0)
    found = {}
    for videos in (None, "frames", "middle"):
        data = make(str(place), videos=videos, num_workers=0)
        data.setup("fit"), data.setup("test")
        found[videos] = {name: images.files for name, images in data.splits.items()}
        assert packed or any("--data.videos=frames" in note for note in data.notes) == (videos is None)
        told = [note for note in data.notes if "cat/v0 and dog/v0 count as different videos" in note]
        assert len(told) == (videos is not None) and not any("alone" in note for note in data.notes)
        folders = [{file.rpartition("/")[0] for file in files if "/v" in file} for files in found[videos].values()]
        cut = sum(len(a & b) for a, b in itertools.combinations(folders, 2))
        assert (cut > 0) == (videos is None), cut
    assert sorted(itertools.chain(*found["frames"].values())) == sorted(itertools.chain(*found[None].values()))
    middle = list(itertools.chain(*found["middle"].values()))
    assert len(middle) == 22 and all(file.endswith(("f9.png", "alone.png")) for file in middle)  # 7, 8, 9, 10, 11
    folds = [make(str(place), videos="frames", fold=f"{k}/3", num_workers=0) for k in (1, 2, 3)]
    held = []
    for data in folds:
        data.setup("fit")
        held += data.splits["val"].files
        assert not {f.rpartition("/")[0] for f in data.splits["val"].files if "/v" in f} & {
            f.rpartition("/")[0] for f in data.splits["train"].files
        }
    assert len(held) == len(set(held))
    with pytest.raises(ValueError, match=r"`data\.videos` must be one of frames, middle, got 'clips'"):
        make(str(place), videos="clips")


def test_a_link_onto_itself_is_a_file_that_cannot_be_read(tmp_path):
    root = _fill(tmp_path / "photos", {"cat": 10, "dog": 10})
    for place in (root, root / "cat"):
        (place / "loop").symlink_to("loop")
    assert len(_open(root, max_unreadable=1).unreadable) == 1
    with pytest.raises(ValueError, match=r"1 file cannot be read.*cat/loop: Too many levels of symbolic links"):
        _open(root)
