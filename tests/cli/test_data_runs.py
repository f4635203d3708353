"""Runs on folders of images, by the command: what is trained on, what leaks, what is measured."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import timm
import torch
import yaml
from PIL import Image

import vitlab
from vitlab.cli import evaluate
from vitlab.cli.main import main
from vitlab.data.image_folder import ImageFolder
from vitlab.data.record import read_numbers
from vitlab.errors import UsageError
from vitlab.jobs.stored import former_ways, has_images_of
from vitlab.jobs.train.initial import images_behind
from vitlab.runs.directory import RunDir
from vitlab.runs.find import file_of_weights

REPOSITORY = Path(__file__).parents[2]
TINY = ["--trainer.logger=false", "--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--model.depth=1",
        "--model.embed_dim=24", "--model.num_heads=2", "--data.num_workers=0"]  # fmt: skip


@pytest.fixture(autouse=True)
def _place(here, monkeypatch):
    monkeypatch.setenv("VITLAB_CACHE", str(here / "cache"))


def _fill(root, counts, names=("ant", "bee", "cat"), size=32, seed=0):
    rng = np.random.default_rng(seed)
    for part, n in counts.items():
        for name in names:
            (root / part / name).mkdir(parents=True, exist_ok=True)
            for i in range(n):
                coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
                coarse.resize((size, size)).save(root / part / name / f"{i}.png")
    return root


def _fit(*arguments, config="cifar10_vit", name="run"):
    return main(["fit", "--config", str(REPOSITORY / "configs" / f"{config}.yaml"), "--name", name, *TINY, *arguments])


def test_the_cifar_recipe_is_that_recipe_on_folders_of_small_images(tmp_path, capsys):
    root = _fill(tmp_path / "cifar", {"train": 12, "test": 4})
    assert _fit("--data=ImageFolder", f"--data.root={root}", "--data.batch_size=8", config="cifar10_t2t") == 0
    out = capsys.readouterr().out
    assert "of 3x32x32, 3 classes, whole images, shifted by up to 4 pixels" in out
    facts = RunDir("runs/run").data
    assert facts["native_size"] == facts["img_size"] == [32, 32]
    config = yaml.safe_load(Path("runs/run/config.yaml").read_text())["data"]["init_args"]
    assert (config["mixup"], config["random_erasing"], config["img_size"]) == (0.8, 0.25, None)
    assert main(["test", "run"]) == 0
    assert main(["predict", "run", str(root / "test"), "-o", "out.csv"]) == 0


def test_the_header_and_the_test_report_training_images_in_the_test_split(tmp_path, capsys):
    root = _fill(tmp_path / "photos", {"train": 12, "val": 4, "test": 4})
    shutil.copy(root / "train" / "ant" / "0.png", root / "test" / "ant" / "copy.png")
    shutil.copy(root / "train" / "ant" / "1.png", root / "train" / "bee" / "other.png")
    with Image.open(root / "train" / "cat" / "2.png") as image:
        image.save(root / "test" / "cat" / "again.jpg", quality=90)
    assert _fit("--data=ImageFolder", f"--data.root={root}", "--data.batch_size=8") == 0
    out = capsys.readouterr().out
    assert "the same in two splits: 1, nearly the same in two splits: 1, the same under two labels: 1" in out
    assert "training images are in the test split: train: train/ant/0.png = test: test/ant/copy.png" in out
    facts = RunDir("runs/run").data
    assert facts["first_contradictions"] == [["train: train/ant/1.png", "train: train/bee/other.png"]]
    assert facts["first_near_duplicates"] == [["train: train/cat/2.png", "test: test/cat/again.jpg"]]
    assert "test" not in facts["splits"]
    assert main(["test", "run"]) == 0
    assert "1 of the 14 images were trained on; acc1 0." in capsys.readouterr().out
    assert RunDir("runs/run").results["test"]["trained_on"] == 1


def test_images_that_the_initial_weights_were_trained_on_count_as_such_in_every_later_run(tmp_path, capsys):
    """`vitlab cv --init_from RUN`, and other folds of a run's data, were measured on images that the weights know."""
    photos = ["--data=ImageFolder", f"--data.root={_fill(tmp_path / 'photos', {'': 20})}", "--data.batch_size=8"]
    assert _fit(*photos, name="first") == 0
    assert _fit(*photos, "--init_from=first", name="same") == 0
    assert "were trained on" not in capsys.readouterr().out
    for name, source, fold in ("second", "first", 2), ("third", "second", 3):
        assert _fit(*photos, f"--init_from={source}", f"--data.fold={fold}/5", name=name) == 0
        n = RunDir(f"runs/{name}").data["splits"]["val"]["n"]
        told = f"the weights of {source} were trained on {n} of the {n} validation images"
        assert told in " ".join(capsys.readouterr().out.split())
    known = np.load("runs/second/trained_on.npy")
    for name in ("checkpoints", "trained_on.npy"):  # as where its first attempt was ended before its first step
        shutil.move(f"runs/second/{name}", tmp_path)
    assert main(["fit", "--resume", "second"]) == 0
    assert np.array_equal(np.load("runs/second/trained_on.npy"), known)
    config = Path("runs/first/config.yaml").read_text()
    Path("runs/first/config.yaml").write_text(config.replace("class_path: vitlab.Classifier", "class_path: vitlab.MAE"))
    assert len(images_behind(file_of_weights("second")))
    assert not len(images_behind(file_of_weights("first")))  # which knows no labels
    for source, known in (("second", True), ("first", False), ("nowhere", False)):  # what it began with may know some
        RunDir("runs/first").update("run.json", init_from=source)
        assert bool(len(images_behind(file_of_weights("first")))) == known
    log = Path("runs/third/train.log").read_text()  # which lacked what was said before it and after the training
    assert "init   weights of second\n" in log and "best epoch 1: " in log and "next  vitlab test runs/third\n" in log
    assert main(["fit", "--resume", "third", "--trainer.max_epochs=2"]) == 0
    assert main(["validate", "third"]) == 0
    assert f"{n} of the {n} images were trained on" in capsys.readouterr().out
    assert _fit(*photos, "--init_from=third", "--overwrite", "--data.fold=3/5", name="third") == 0
    assert f"the weights of third were trained on {n} of the {n}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("content", [b"", b"numbers"])
def test_damaged_numbers_of_training_images_are_named(content, tmp_path):
    """Of an empty file, as a full disk leaves one, there was a traceback."""
    (file := tmp_path / "trained_on.npy").write_bytes(content)
    with pytest.raises(UsageError, match=r"trained_on\.npy is damaged: "):
        read_numbers(file)


def test_a_test_split_that_now_holds_training_images_is_refused(tmp_path, capsys):
    root = _fill(tmp_path / "photos", {"": 20})
    assert _fit("--data=ImageFolder", f"--data.root={root}", "--data.batch_size=8") == 0
    assert main(["test", "run"]) == 0
    assert main(["test", "run", "--data.test_share=0.5"]) == 2
    assert "of its 30 images were trained on: keep the split as it was" in capsys.readouterr().err
    assert main(["validate", "run", "--data.fold=2/4"]) == 2
    assert "the val split is not that of the run" in capsys.readouterr().err
    assert main(["test", "run", "--data.test_share=0.5", "--with_training_images"]) == 0
    out = capsys.readouterr().out
    assert "test with training images/acc1" in out and "\ntest/acc1" not in out
    assert "not a measure of new images: " in out
    results = json.loads(Path("runs/run/results.json").read_text())
    assert results["test"]["n"] == 12 and "trained_on" not in results["test"]
    assert [row["split"] for row in results["variations"]] == ["test with training images"]


def test_a_run_is_measured_on_another_folder_with_some_of_its_classes(tmp_path, capsys):
    root = _fill(tmp_path / "photos", {"train": 12, "test": 4})
    assert _fit("--data=ImageFolder", f"--data.root={root}", "--data.batch_size=8") == 0
    other = _fill(tmp_path / "other", {"test": 5}, ["cat", "ant"], size=50, seed=9)
    assert main(["test", "run", f"--data.root={other}"]) == 0
    assert "on 10 images" in capsys.readouterr().out
    undivided = _fill(tmp_path / "undivided", {"": 5}, ["n2", "ant"], seed=8)
    assert main(["test", "run", f"--data.root={undivided}", "--data.test_share=1"]) == 2
    assert "does not know the classes n2" in capsys.readouterr().err
    Path("names.json").write_text(json.dumps({"n2": "bee"}))
    assert main(["test", "run", f"--data.root={undivided}", "--data.test_share=1", "--data.class_map=names.json"]) == 0
    assert "on 10 images" in capsys.readouterr().out
    predictions = RunDir("runs/run").results["variations"]
    assert [row["n"] for row in predictions] == [10, 10]


def test_a_run_whose_data_have_moved_says_where_they_were_and_is_measured_where_they_are(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vitlab.analysis.subject.printed", lambda figure, *_: figure)  # seconds of typesetting
    root = _fill(tmp_path / "photos", {"train": 12, "test": 4})
    assert _fit("--data=ImageFolder", "--data.root=photos", "--data.batch_size=8") == 0
    there = shutil.move(root, tmp_path / "elsewhere")
    capsys.readouterr()
    for words in (["test", "run"], ["fit", "--resume", "run"], ["analyze", "attention", "run"]):
        assert main(words) == 2
        error = capsys.readouterr().err
        there_was = f"photos is where the data of runs/run were, looked for in {tmp_path}: if they are elsewhere now"
        assert f"{there_was}, give --data.root=NEW" in error
        assert error.count("\n") == 1
    for command in ("test", "validate"):
        assert main([command, "run", f"--data.root={there}"]) == 0
        assert "variation" not in capsys.readouterr().out
    assert RunDir("runs/run").results["test"]["n"] == 12
    assert main(["analyze", "errors", "run", f"--data.root={there}"]) == 0
    assert Path("runs/run/analysis/errors.csv").is_file()
    (there / "test" / "ant" / "0.png").unlink()
    assert main(["test", "run", f"--data.root={there}"]) == 0
    assert "variation with data.root=" in capsys.readouterr().out
    assert main(["analyze", "errors", "run", f"--data.root={there}", "--split=test"]) == 0
    assert [path.name[:10] for path in Path("runs/run/analysis").iterdir() if path.is_dir()] == ["data.root="]


def test_a_run_keeps_its_own_mean_and_std_on_data_of_another_class(tmp_path, monkeypatch):
    _fill(tmp_path / "photos", {"train": 12, "test": 4})
    assert _fit("--data=ImageFolder", "--data.root=photos", "--data.batch_size=8") == 0
    statistics, used = ImageFolder.statistics, set()
    monkeypatch.setattr(ImageFolder, "statistics", lambda data: used.add(found := statistics(data)) or found)
    assert main(["test", "run", "--data=ImageNet"]) == 0
    own = RunDir("runs/run").data
    assert used == {(tuple(own["mean"]), tuple(own["std"]))}


def test_the_test_split_of_an_older_run_is_known_by_its_training_split_unless_it_was_given(tmp_path):
    run = RunDir("run")
    (tmp_path / "elsewhere").mkdir()
    for name, parts, is_known in (("one", {"": 20}, True), ("two", {"train": 12, "test": 4}, False)):
        trained = ImageFolder(str(_fill(tmp_path / name, parts)), num_workers=0)
        trained.setup("fit")
        run.write("data.json", json.loads(json.dumps(trained.fingerprint())))
        moved = ImageFolder(str(shutil.move(tmp_path / name, tmp_path / "elsewhere" / name)), num_workers=0)
        moved.setup("test")
        assert has_images_of(moved, run, "test") == is_known
        moved.setup("fit")
        assert has_images_of(moved, run, "val")
    another = ImageFolder(str(tmp_path / "elsewhere" / "one"), num_workers=0)  # of other images
    another.setup("test")
    assert not has_images_of(another, run, "test")


@pytest.mark.rare
def test_names_that_yaml_could_take_for_numbers_stay_names(tmp_path):
    names = ["007", "1e3", "True", "null"]
    root = _fill(tmp_path / "run", {"train": 6, "test": 2}, names)  # a folder of the run's own name, too
    own = [f"--data.root={root}", "--data.batch_size=8", "--trainer.logger=CSVLogger", "--trainer.logger.name=1e3"]
    assert _fit("--data=ImageFolder", *own) == 0
    assert yaml.safe_load(Path("runs/run/config.yaml").read_text())["trainer"]["logger"]["init_args"]["name"] == "1e3"
    assert main(["fit", "--resume", "run", "--trainer.max_epochs=2", "--quiet"]) == 0
    assert main(["predict", "run", str(root / "test"), "-o", "out.csv"]) == 0
    table = pd.read_csv("out.csv", keep_default_na=False, dtype=str)
    assert sorted(table["target"].unique()) == names and set(table["class_1"]) <= set(names)
    assert main(["look", "run", "--pictures", "1", "--quiet"]) == 0
    assert Path("runs/run/look.html").is_file() and not (root / "look.html").exists()


def _mkfifo(root):
    os.mkfifo(root / "train" / "ant" / "pipe.png")


def _link_above(root):
    os.symlink("..", root / "train" / "ant" / "loop")


def _case(root):
    shutil.copytree(root / "train" / "cat", root / "train" / "Cat")


def _flat_test(root):
    for path in (root / "test").rglob("*.png"):
        os.rename(path, root / "test" / f"{path.parent.name}{path.name}")
    for path in (root / "test").iterdir():
        if path.is_dir():
            path.rmdir()


def _two_tests(root):
    shutil.copytree(root / "test", root / "tests")


def _no_val(root):
    shutil.rmtree(root / "test")
    shutil.rmtree(root / "train")
    for name in ("ant", "bee"):
        (root / "train" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32), (name == "ant" and "red") or "blue").save(root / "train" / name / "0.png")


@pytest.mark.parametrize(
    "change, message",
    [
        (_mkfifo, r"ant/pipe.png: neither a file nor a folder"),
        (_link_above, r"ant/loop leads to .*, above its class: remove the link"),
        (_case, "the classes Cat, cat in .* differ only in case"),
        (_two_tests, "test and tests would both be the test split"),
        (_no_val, "the val split has no image"),
    ],
)
def test_a_misleading_folder_structure_is_refused_before_training(tmp_path, capsys, change, message):
    root = _fill(tmp_path / "photos", {"train": 4, "test": 2})
    change(root)
    assert _fit("--data=ImageFolder", f"--data.root={root}", "--data.batch_size=2", "--dry_run") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_a_root_one_level_too_high_is_refused_with_the_right_one(tmp_path, capsys):
    root = _fill(tmp_path / "ILSVRC" / "Data" / "CLS-LOC", {"": 3})
    assert _fit("--data=ImageFolder", f"--data.root={tmp_path / 'ILSVRC'}", "--dry_run") == 2
    assert f"did you mean {root}?" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["Val", "tests", "valid"])
def test_split_folders_are_recognized_by_their_usual_names_in_any_case(tmp_path, capsys, folder):
    root = _fill(tmp_path / "photos", {"Train": 8, folder: 2, "extra": 1})
    assert _fit("--data=ImageFolder", f"--data.root={root}", "--data.batch_size=2", "--dry_run") == 0
    out = capsys.readouterr().out
    assert "22 training and 2 validation images" in out and "3 classes" in out
    assert "folders that are no split are left out: extra" in out


def test_a_flat_test_folder_is_reported_by_fit_and_refused_by_test(tmp_path, capsys):
    root = _fill(tmp_path / "photos", {"train": 8, "test": 2})
    _flat_test(root)
    assert _fit("--data=ImageFolder", f"--data.root={root}", "--data.batch_size=2") == 0
    told = f"{root / 'test'} holds files and no class folders: sort them into test/CLASS/"
    assert f"the test split cannot be read: {told}" in capsys.readouterr().out
    assert main(["test", "run"]) == 2
    assert told in capsys.readouterr().err


def test_a_dry_run_refuses_what_training_would_refuse(tmp_path, capsys):
    root = _fill(tmp_path / "photos", {"train": 8, "test": 2})
    assert _fit("--data=ImageFolder", f"--data.root={root}", "--data.batch_size=1000", "--dry_run") == 2
    assert "`data.batch_size` must not exceed the number of training images" in capsys.readouterr().err


def _odd_photos(root):
    rng = np.random.default_rng(3)
    for part, n in {"train": 6, "test": 4}.items():
        for name in ("ant", "bee"):
            (root / part / name).mkdir(parents=True)
            for i in range(n):
                coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
                coarse.resize(tuple(2 * rng.integers(16, 60, 2) + 1)).save(root / part / name / f"{i}.png")
    return root


def _as_of_old(run):
    """Take out of a run what runs did not state before there was `data.crop_mode`."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    for key in ("crop_mode", "mean", "std"):
        del config["data"]["init_args"][key]
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    facts = json.loads((run / "data.json").read_text())
    (run / "data.json").write_text(
        json.dumps({k: v for k, v in facts.items() if k not in ("crop_mode", "interpolation")})
    )


@pytest.mark.rare
def test_results_state_the_crop_and_an_older_run_keeps_its_own(tmp_path):
    root = _odd_photos(tmp_path / "photos")
    size = ("--data.img_size=20", "--data.crop_scale=0.3", "--data.crop_pct=0.8", "--data.batch_size=4")
    size += ("--data.augment=crop-flip",)
    photos = ("--data=ImageFolder", f"--data.root={root}", *size, "--model.patch_size=4")
    numbers, cards = {}, {}
    for name in ("center", "box"):
        way = () if name == "center" else ("--data.crop_mode=box",)
        assert _fit(*photos, *way, config="cifar10_vit", name=name) == 0
        run, other = RunDir(f"runs/{name}"), next(root.glob("test/bee/*"))
        assert run.data["crop_mode"] == name
        if name == "box":
            _as_of_old(run.path)
        assert main(["test", name]) == 0 and main(["predict", name, str(root / "test"), "-o", f"{name}.csv"]) == 0
        stated = {"img_size": [20, 20], "crop": name, "crop_pct": 0.8, "interpolation": "bicubic"}
        stated["color_profile"] = "srgb"
        assert run.measured("test")["images"] == run.measured("val")["images"] == stated
        numbers[name] = Path(f"{name}.csv").read_text(), run.measured("test")["loss"]
        assert main(["export", name, "--to", "safetensors", "-o", f"{name}.safetensors"]) == 0
        cards[name] = json.loads(Path(f"{name}.safetensors.json").read_text())["images"]
        pixels = [vitlab.load(source).transform(Image.open(other)) for source in (name, f"{name}.safetensors")]
        assert torch.equal(*pixels) and cards[name]["crop_mode"] == name
    assert numbers["center"] != numbers["box"]
    assert main(["test", "box", "--data.crop_mode=center"]) == 0
    run = RunDir("runs/box")
    (variation,) = run.results["variations"]
    assert variation["images"]["crop"] == "center" and run.measured("test")["loss"] == numbers["box"][1]
    for mode, loss in (("center", variation["loss"]), ("box", run.measured("test")["loss"])):
        how = {"img_size": 20, "crop_pct": 0.8, "crop_mode": mode, "num_workers": 0}
        net, data = vitlab.load("box").net, ImageFolder(str(root), **how, **{k: run.data[k] for k in ("mean", "std")})
        data.setup("test")
        x, y = (torch.cat(parts) for parts in zip(*data.iterate_batches(data.test_dataloader()), strict=True))
        assert torch.nn.functional.cross_entropy(net(x), y).item() == pytest.approx(loss, abs=1e-5)
    assert main(["fit", "--resume", "box", "--trainer.max_epochs=2"]) == 0
    assert yaml.safe_load((run.path / "config.yaml").read_text())["data"]["init_args"]["crop_mode"] == "box"
    assert run.data["crop_mode"] == "box" and run.measured("val")["images"]["crop"] == "box"
    old = json.loads(Path("box.safetensors.json").read_text())
    del old["images"]["crop_mode"]  # a card of old
    Path("box.safetensors.json").write_text(json.dumps(old))
    assert torch.equal(vitlab.load("box.safetensors").transform(Image.open(other)), pixels[1])


def test_only_an_older_run_has_the_former_crop(tmp_path):
    data = {"class_path": "vitlab.data.ImageFolder", "init_args": {"root": "photos", "crop_pct": None}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    run = RunDir(tmp_path)
    assert former_ways(run) == {}  # a recipe
    (tmp_path / "run.json").write_text("{}")
    assert former_ways(run) == {"crop_mode": "box"}
    stated = {**data["init_args"], "max_pixels": 10**6, "crop_mode": "center"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": {**data, "init_args": stated}}))
    assert former_ways(run) == {"color_profile": "ignore"}
    for changes in (
        {"crop_mode": "center"},
        {"class_path": "subprocess.Popen"},
        {"class_path": "vitlab.data.record.Trained"},
    ):
        path = changes.get("class_path", data["class_path"])
        other = {"class_path": path, "init_args": {**data["init_args"], **changes}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": other}))
        assert former_ways(run) == {}


@pytest.mark.rare
def test_a_network_with_weights_of_timm_sees_images_as_timm_prepared_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained, make=timm.create_model: make(name))
    net = vitlab.create_model("vit_ti16", weights="timm:vit_tiny_patch16_224", img_size=96)
    how = timm.data.resolve_model_data_config(net)
    assert (how["input_size"], how["crop_pct"], how["mean"]) == ((3, 96, 96), 0.9, (0.5, 0.5, 0.5))
    root, start = _odd_photos(tmp_path / "photos"), ["--init_from=timm:vit_tiny_patch16_224", "--data=ImageFolder"]
    size = [f"--data.root={root}", "--data.img_size=32", "--data.batch_size=4"]
    tiny = [*TINY[:3], "--data.num_workers=0", "--model.embed_dim=192", "--model.depth=12"]
    fit = ["fit", "--config", str(REPOSITORY / "configs" / "vit.yaml"), *tiny, "--model.num_heads=3", *start, *size]
    fit += ["--model.patch_size=16", "--model.mlp_ratio=4"]
    assert main([*fit, "--name", "theirs"]) == 0
    assert (
        "images as for the weights of timm:vit_tiny_patch16_224: mean [0.5, 0.5, 0.5], std" in capsys.readouterr().out
    )
    run = RunDir("runs/theirs")
    assert (run.data["mean"], run.data["statistics_from"], run.data["crop_pct"]) == ([0.5] * 3, "given", 0.9)
    config = yaml.safe_load(run.config.read_text())["data"]["init_args"]
    assert (config["mean"], config["crop_pct"], config["crop_mode"]) == ([0.5] * 3, 0.9, "center")
    assert main(["test", "theirs"]) == 0 and run.measured("test")["images"]["crop_pct"] == 0.9
    theirs = timm.data.create_transform(
        (3, 32, 32), **{k: how[k] for k in ("mean", "std", "crop_pct", "interpolation")}
    )
    image = Image.open(next(root.glob("test/*/*")))
    assert torch.allclose(vitlab.load("theirs").transform(image), theirs(image), atol=1e-5)
    capsys.readouterr()
    own = ["--data.crop_pct=0.7", "--data.mean=[0.1,0.2,0.3]", "--data.std=[1,1,1]"]
    assert main([*fit, "--name", "own", *own]) == 0
    assert "trained with mean [0.5, 0.5, 0.5] and not [0.1, 0.2, 0.3], std" in capsys.readouterr().out
    facts = RunDir("runs/own").data
    assert (facts["mean"], facts["crop_pct"]) == ([0.1, 0.2, 0.3], 0.7)


def test_a_class_with_a_line_break_does_not_break_the_line_of_recall():
    assert evaluate._recall({"a\nb": 0.5}) == "recall: a\N{REPLACEMENT CHARACTER}b 0.5000"
