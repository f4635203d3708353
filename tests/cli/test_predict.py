import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import vitlab
from vitlab.cli.main import main
from vitlab.cli.predict import _told as told
from vitlab.errors import UsageError
from vitlab.jobs import predict as predictions
from vitlab.jobs.evaluate import Conditions, evaluate
from vitlab.jobs.quantize import answered_by
from vitlab.jobs.restore import restore
from vitlab.runs.directory import RunDir

REPOSITORY = Path(__file__).parents[2]
TINY = ["--trainer.max_epochs=1", "--trainer.logger=false", "--model.depth=1", "--model.embed_dim=24", "--quiet"]


def train(folder, config, *more):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        assert main(["fit", "--config", str(REPOSITORY / "configs" / config), "--name", "run", *TINY, *more]) == 0
    return folder / "runs" / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("classes"), "vit.yaml", "--trainer.max_epochs=5", "--model.lr=0.01")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Seven images in two folders, two files that are none."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "b").mkdir()
    rng = np.random.default_rng(0)
    for name in ("z.png", "b/1.png", "b/2.png", "b/10.png", "a.png", "=1+1.png", "c.png"):
        Image.fromarray(rng.integers(256, size=(8, 8), dtype=np.uint8)).save(folder / name)
    (folder / "d.png").write_bytes((folder / "a.png").read_bytes()[:60])
    (folder / "e.txt").write_text("no image")
    return folder


def predict(run, *arguments):
    return main(["predict", str(run), *map(str, arguments)])


def test_the_tables_of_a_run_are_printed_as_json_and_csv_too(run, photos, capsys):
    capsys.readouterr()
    assert predict(run, photos / "a.png", photos / "c.png", "--csv", "--topk", 2) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == "path,class_1,probability_1,class_2,probability_2" and len(rows) == 2
    assert main(["embed", str(run), str(photos / "a.png"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)[0]) == 1 + 24
    assert main(["test", str(run), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    kept = json.loads((run / "results.json").read_text())["test"]
    assert row["split"] == "test" and row["acc1"] == kept["acc1"] and len(row["recall"]) == 10
    assert main(["verify", str(run), "--json"]) == 0
    assert all(row["whole"] for row in json.loads(capsys.readouterr().out))
    assert main(["predict", str(run), str(photos / "a.png"), "--csv", "-o", "x.csv"]) == 2


def test_predictions_for_files_equal_the_network_on_the_data(run, tmp_path):
    cli = restore(RunDir(run), run / "checkpoints" / "best.ckpt")
    cli.datamodule.build("test")
    images = cli.datamodule.splits["test"]
    for i in range(20):
        images.image(i).save(tmp_path / f"{i:02}.png")
    assert predict(run, tmp_path, "-o", tmp_path / "out.csv", "--topk", "10") == 0
    table = pd.read_csv(tmp_path / "out.csv", dtype={f"class_{k}": str for k in range(1, 11)})
    batch = next(cli.datamodule.iterate_batches(cli.datamodule.test_dataloader()))[0][:20]
    with torch.no_grad():
        expected = cli.model(batch).softmax(dim=1)
    assert expected.argmax(dim=1).unique().numel() > 2  # it has learned enough to tell images apart
    for i in range(20):
        found = {table[f"class_{k}"][i]: table[f"probability_{k}"][i] for k in range(1, 11)}
        assert [found[str(k)] for k in range(10)] == pytest.approx(expected[i].tolist(), abs=1e-6)
        assert list(found.values()) == sorted(found.values(), reverse=True)


def test_the_best_checkpoint_is_used_unless_another_is_named(run, photos, tmp_path, capsys):
    other = shutil.copytree(run, tmp_path / "other")
    state = torch.load(other / "checkpoints" / "last.ckpt", weights_only=True)
    state["state_dict"]["net.head.bias"][3] += 100
    torch.save(state, other / "checkpoints" / "last.ckpt")
    (other / "checkpoints" / "manifest.json").unlink()  # it knows the file by its checksum
    for name, certain in (("best.ckpt", False), ("last.ckpt", True)):
        assert predict(other / "checkpoints" / name, photos / "a.png", "-o", tmp_path / "out.json") == 0
        row = json.loads((tmp_path / "out.json").read_text())[0]
        assert ((row["class_1"], row["probability_1"]) == ("3", 1.0)) is certain
    assert predict(other, photos / "a.png") == 0
    shown = capsys.readouterr().out
    assert "best.ckpt" in shown and "wrote 1 prediction to" in shown


def test_a_checkpoint_may_be_named_as_a_file_beside_its_run(run, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(run.parents[1])
    file = "runs/run/checkpoints/last.ckpt"
    assert main(["predict", "run", "--ckpt_path", file, str(photos / "a.png")]) == 0
    assert "run   runs/run (last.ckpt)" in capsys.readouterr().out
    shutil.copytree(run, tmp_path / "other")
    assert main(["predict", str(tmp_path / "other"), "--ckpt_path", file, str(photos / "a.png")]) == 2
    told = capsys.readouterr().err
    assert f"is a checkpoint of runs/run, not of {tmp_path / 'other'}: leave out" in told and told.count("\n") == 1
    (tmp_path / "last").mkdir()  # a folder of images
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "--ckpt_path", str(run / "checkpoints" / "last.ckpt"), "last"]) == 2
    assert "no images found: nothing in last" in capsys.readouterr().err


def test_python_names_the_images_that_cannot_be_read_and_counts_all(run, photos):
    trained, image = vitlab.Run(run), Image.new("L", (8, 8))
    for images, message in (
        ([photos / "a.png", "nope.png"], "1 of 2 images cannot be read, the first is nope.png: no such file or folder"),
        ([photos / "e.txt"] * 2, "2 of 2 images cannot be read"),
        (photos / "e.txt", f"1 of 1 image cannot be read, the first is {photos / 'e.txt'}: not one of JPEG"),
        ("nope.jpg", "no images found: nope.jpg: no such file or folder"),
        ([], "no images found: nothing was given"),
        (
            image,
            "files, folders and patterns, got a Image; for an image in memory: `net, transform = vitlab.load(run)`",
        ),
        ([[1.0, 2.0]], "files, folders and patterns, got a list; for an image in memory"),
    ):
        with pytest.raises(UsageError) as refused:
            trained.predict(images)
        assert message in str(refused.value) and "\n" not in str(refused.value)
    for topk in (0, -1, 2.5, True):
        with pytest.raises(UsageError, match=f"^`topk` must be a whole number, 1 or more, got {topk}$"):
            trained.predict(photos / "a.png", topk=topk)


def test_weights_as_safetensors_predict_too(run, photos, tmp_path):
    for weights in ("checkpoints/best.ckpt", "weights/best.safetensors"):
        assert predict(run / weights, photos / "a.png", "-o", tmp_path / f"{Path(weights).name}.csv") == 0
    assert (tmp_path / "best.ckpt.csv").read_text() == (tmp_path / "best.safetensors.csv").read_text()


def test_the_order_is_that_of_the_arguments_and_sorted_within_a_folder(run, photos, tmp_path):
    words = [photos / "z.png", photos / "b", photos / "[ac].png", photos / "z.png"]
    assert predict(run, *words, "-o", tmp_path / "out.csv", "--data.batch_size=2") == 0
    paths = pd.read_csv(tmp_path / "out.csv")["path"]
    expected = ["z.png", "b/1.png", "b/10.png", "b/2.png", "a.png", "c.png", "z.png"]
    assert [os.path.relpath(path, photos) for path in paths] == expected


def test_outputs_that_are_not_finite_are_no_prediction():
    collector = predictions._Collector(topk=2)
    collector.meaning = predictions._Meaning(classes=["a", "b", "c"])
    outputs = torch.tensor([[0.0, 1.0, 2.0], [torch.nan] * 3, [torch.inf, 0.0, 0.0]])
    collector.collect(outputs, [4, 5, 6], ["", "", "truncated"])
    assert collector.values[4][1] == [2, 1] and list(collector.values) == [4]
    assert collector.reasons == {5: "the outputs of the network are not finite", 6: "truncated"}


def test_an_image_without_finite_outputs_is_not_called_unreadable(run, photos, monkeypatch, capsys):
    code = told([("a.png", predictions.NOT_FINITE), ("b.png", "truncated")], 3)
    *lines, last = capsys.readouterr().err.splitlines()
    assert code == 1 and lines == [
        "no answer  a.png: the outputs of the network are not finite",
        "unreadable  b.png: truncated",
        "vitlab: 1 of 5 could not be read",
    ]
    assert last.startswith("vitlab: the outputs of 1 of 4 images are not finite, as of a network that has diverged")
    files = [str(photos / name) for name in ("a.png", "c.png")]
    monkeypatch.setattr(predictions, "predict", lambda *given, **how: (None, [(files[1], predictions.NOT_FINITE)]))
    with pytest.raises(UsageError, match=r"^the outputs of 1 of 2 images are not finite, as of a network"):
        vitlab.Run(run).predict(files)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_outputs_that_are_not_finite_are_not_measured(run):
    blind = partial(answered_by, outputs=lambda images: torch.full((len(images), 10), torch.nan))
    (checkpoint, *_), directory = sorted((run / "checkpoints").glob("*.ckpt")), RunDir(run)
    with pytest.raises(UsageError, match=r"the outputs of (\d+) of \1 images are not finite"):
        evaluate("validate", directory, checkpoint, Conditions(), quiet=True, keep=False, around=blind)


def test_unreadable_files_are_listed_with_reasons_and_the_rest_is_done(run, photos, tmp_path, capsys):
    twice = ["none.png", "a.png", "d.png"]  # what is named again counts again, as it has a row again
    assert predict(run, photos, *(photos / name for name in [*twice, "none.png"]), "-o", tmp_path / "out.csv") == 1
    output = capsys.readouterr()
    assert f"unreadable  {photos}/d.png: image file is truncated" in output.err
    assert f"unreadable  {photos}/e.txt: not one of JPEG" in output.err
    assert f"unreadable  {photos}/none.png: no such file or folder" in output.err
    assert "5 of 13 could not be read" in output.err and output.err.count("unreadable") == 5
    assert "8 predictions" in output.out
    assert len(pd.read_csv(tmp_path / "out.csv")) == 8


def test_worker_processes_change_nothing(run, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "_FEW", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    for workers in (0, 1):
        output = tmp_path / f"{workers}.csv"
        assert predict(run, photos, "-o", output, f"--data.num_workers={workers}", "--data.batch_size=2") == 1
    assert (tmp_path / "0.csv").read_text() == (tmp_path / "1.csv").read_text()


def test_csv_json_and_parquet_say_the_same(run, photos, tmp_path):
    for suffix in (".csv", ".json", ".parquet"):
        assert predict(run, photos / "b", "-o", tmp_path / "new" / f"out{suffix}", "--topk=2") == 0
    parquet = pd.read_parquet(tmp_path / "new" / "out.parquet")
    assert list(parquet) == ["path", "class_1", "probability_1", "class_2", "probability_2"]
    strings = {"class_1": str, "class_2": str}
    csv = pd.read_csv(tmp_path / "new" / "out.csv", dtype=strings)
    text = (tmp_path / "new" / "out.json").read_text()
    assert f"{photos}/b/1.png" in text  # slashes are not escaped
    for other in (csv, pd.DataFrame(json.loads(text))):
        pd.testing.assert_frame_equal(other, parquet, check_dtype=False, rtol=1e-6)
    assert sorted(os.listdir(tmp_path / "new")) == ["out.csv", "out.json", "out.parquet"]  # nothing half-written


def test_embed_writes_the_pooled_features_of_each_file(run, photos, tmp_path, capsys):
    assert main(["embed", str(run), str(photos / "b"), "-o", str(tmp_path / "features.parquet")]) == 0
    assert "wrote 3 feature vectors to" in capsys.readouterr().out
    table = pd.read_parquet(tmp_path / "features.parquet")
    assert list(table) == ["path", *[f"feature_{k + 1}" for k in range(24)]]
    cli = restore(RunDir(run), run / "checkpoints" / "best.ckpt")
    for path, *features in table.itertuples(index=False):
        image = cli.datamodule.eval_transform(Image.open(path))[None]
        with torch.no_grad():
            wanted = cli.model.net.pool(cli.model.net.forward_features(image))[0]
        np.testing.assert_allclose(features, wanted, atol=1e-5)
    assert main(["embed", str(run)]) == 2
    assert "no images given: `vitlab embed RUN" in capsys.readouterr().err


def test_an_earlier_table_among_the_images_is_skipped(run, photos, tmp_path):
    shutil.copytree(photos / "b", tmp_path / "b")
    for _ in range(2):
        assert predict(run, tmp_path / "b", "-o", tmp_path / "b" / "out.csv") == 0


def test_without_an_output_the_terminal_shows_a_table(run, photos, capsys):
    assert predict(run, photos / "b", "--topk", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["path", "class_1", "probability_1", "class_2", "probability_2"]
    assert [line.split()[0] for line in lines[1:4]] == [f"{photos}/b/{name}.png" for name in (1, 10, 2)]
    assert all(len(line.split()) == 5 for line in lines[1:4])


def test_topk_names_at_most_all_classes(run, photos, tmp_path):
    assert predict(run, photos / "a.png", "-o", tmp_path / "out.csv", "--topk=1000") == 0
    table = pd.read_csv(tmp_path / "out.csv")
    assert sorted(table[f"class_{k}"][0] for k in range(1, 11)) == list(range(10))
    assert list(table)[-1] == "probability_10"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{photos}/b/*.jpg"], "no images found: {photos}/b/*.jpg: matches no file"),
        (["{photos}/nowhere"], "no images found: {photos}/nowhere: no such file or folder"),
        (["{photos}/empty"], "no images found: nothing in {photos}/empty"),
        (["{photos}/a.png", "-o", "out.xlsx"], "`--output` must end with .csv, .parquet or .json, got out.xlsx"),
        (["{photos}/a.png", "-o", "{photos}/a.png/out.csv"], "cannot be written"),
        (["{photos}/a.png", "--topk=0"], "`topk` must be a whole number, 1 or more, got 0"),
        (["{photos}/a.png", "--config", "x.yaml"], "--config"),
        (["{photos}/a.png", "--data.batchsize=2"], 'did you mean "data.batch_size"?'),
        ([], "IMAGE|DIR|GLOB"),
    ],
)
def test_wrong_input_is_refused_in_one_line(run, photos, arguments, message, capsys):
    (photos / "empty").mkdir(exist_ok=True)
    assert predict(run, *(argument.format(photos=photos) for argument in arguments)) == 2
    error = capsys.readouterr().err
    assert message.format(photos=photos) in error
    assert error.startswith("vitlab: ") and error.count("\n") == 1


def test_damaged_weights_are_refused_in_one_line(run, photos, tmp_path, capsys):
    other = shutil.copytree(run, tmp_path / "other")
    whole = (other / "checkpoints" / "best.ckpt").read_bytes()
    (other / "checkpoints" / "best.ckpt").unlink()  # last.ckpt may be the same file
    (other / "checkpoints" / "best.ckpt").write_bytes(whole[: len(whole) // 2])
    assert predict(other / "checkpoints" / "best.ckpt", photos / "a.png") == 2
    error = capsys.readouterr().err
    assert "best.ckpt is damaged: it has" in error and error.count("\n") == 1


def test_weights_of_another_width_are_refused(run, photos, capsys):
    assert predict(run, photos / "a.png", "--model.embed_dim=48") == 2
    error = capsys.readouterr().err
    assert "does not fit" in error and "size mismatch" in error and error.count("\n") == 1


def test_several_numbers_have_a_column_each():
    table = predictions._table(["a", "b"], [([1.0, 2.0], []), ([3.0, 4.0], [])], predictions._Meaning())
    assert list(table) == ["path", "value_1", "value_2"]
    assert table["value_2"].tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"targets": {"kind": "multilabel", "names": ["sun", "sea"]}}, ([], ["sun", "sea"])),
        ({"targets": {"kind": "multilabel"}}, ([], [])),
        ({"targets": {"kind": "multilabel", "names": ["a"]}, "class_names": ("sun", "sea")}, ([], ["sun", "sea"])),
        ({"targets": None, "class_names": ["cat", "dog"]}, (["cat", "dog"], [])),
        ({"targets": {"kind": "number"}}, ([], [])),
        ({}, ([], [])),
    ],
)
def test_data_of_ones_own_may_leave_out_every_name(stated, expected):
    """Labels without `class_names` ended in an AttributeError; their names may stand in `targets`."""
    found = predictions._meaning(SimpleNamespace(**stated))
    assert (list(found.classes), list(found.names)) == expected


def folder_of_classes(root):
    rng = np.random.default_rng(0)
    for name, brightness in (("-dark", 40), ("light", 200)):
        (root / name).mkdir(parents=True)
        for i in range(16):
            pixels = (brightness + rng.integers(40, size=(12, 16, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2, 3)])
def test_outputs_of_any_shape_have_a_column_each(shape):
    outputs, collector = torch.randn(2, *shape), predictions._Collector(topk=5)
    collector.collect(outputs, [1, 0], ["", ""])
    table, _ = collector.answers(["a.png", "b.png"])
    count = outputs[0].numel()
    assert list(table) == ["path", *(["value"] if count == 1 else [f"value_{k + 1}" for k in range(count)])]
    assert torch.equal(torch.tensor(table.drop(columns="path").to_numpy()), outputs.flip(0).reshape(2, -1))


def test_predicting_needs_none_of_the_training_files(tmp_path):
    root = folder_of_classes(tmp_path / "data")
    data = [f"--data.root={root}", "--data.img_size=[8,10]", "--data.batch_size=8", "--data.num_workers=0"]
    run = train(tmp_path, "vit.yaml", "--data=ImageFolder", *data)
    before = restore(RunDir(run), run / "checkpoints" / "best.ckpt").datamodule
    Image.new("RGB", (31, 17), (255, 128, 0)).save(tmp_path / "photo.png")
    shutil.rmtree(root)
    moved = shutil.move(run, tmp_path / "elsewhere")
    assert predict(moved, tmp_path / "photo.png", "-o", tmp_path / "out.json") == 0
    assert {"-dark", "light"} == {json.loads((tmp_path / "out.json").read_text())[0][f"class_{k}"] for k in (1, 2)}
    after = restore(RunDir(moved), Path(moved) / "checkpoints" / "best.ckpt").datamodule
    facts = json.loads((Path(moved) / "data.json").read_text())
    assert (list(after.mean), list(after.std), after.img_size) == (facts["mean"], facts["std"], (8, 10))
    with Image.open(tmp_path / "photo.png") as image:
        assert torch.equal(after.eval_transform(image), before.eval_transform(image))


CLOTHES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]


@pytest.mark.parametrize(
    ("name", "place", "stated"),
    [
        ("FashionMNIST", {"root": "/nowhere", "crop_pct": 1.0}, {"class_names": CLOTHES, "crop_pct": 1.0}),
        ("Packed", {"root": "/nowhere", "in_chans": 1}, {}),
        ("HuggingFace", {"path": "/nowhere", "download": True, "in_chans": 1}, {}),
    ],
)
def test_predicting_needs_no_data_set(run, tmp_path, name, place, stated):
    other = shutil.copytree(run, tmp_path / "other")
    config = yaml.safe_load((other / "config.yaml").read_text())
    config["data"] = {"class_path": f"vitlab.data.{name}", "init_args": {**place, "img_size": 8}}
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    facts = json.loads((other / "data.json").read_text()) | {"crop_pct": 0.5} | stated
    (other / "data.json").write_text(json.dumps(facts))
    data = restore(RunDir(other), other / "checkpoints" / "best.ckpt").datamodule
    assert (
        data.class_names == facts["class_names"]
        and data.img_size == (8, 8)
        and data.pipeline.crop_pct == facts["crop_pct"]
    )


def test_a_run_trained_on_many_devices_predicts_on_one(run, photos, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    config = yaml.safe_load((other / "config.yaml").read_text())
    config["trainer"] |= {"devices": 64, "num_nodes": 2, "strategy": "ddp", "limit_predict_batches": 0}
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    assert predict(other, photos / "a.png", "-o", tmp_path / "out.csv") == 0


@pytest.mark.rare
def test_three_processes_share_the_images_and_the_table_is_the_same(run, photos, tmp_path):
    for name, images, code, n in (("all", photos, 1, 7), ("one", photos / "a.png", 0, 1)):  # seven images and one
        alone, shared = (tmp_path / f"{name}{devices}.csv" for devices in (1, 3))
        words = [images, "--data.batch_size=2"]
        assert predict(run, *words, "-o", alone) == code
        command = [sys.executable, "-m", "vitlab", "predict", run, *words, "-o", shared, "--trainer.devices=3"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == code, done.stderr
        assert done.stderr.count("unreadable") == 2 * code, done.stderr
        table = pd.read_csv(alone)
        assert len(table) == n
        pd.testing.assert_frame_equal(table, pd.read_csv(shared), rtol=1e-5)


@pytest.mark.parametrize("batch", [{"image": torch.zeros(2, 1, 8, 8)}, ["a.png"], []], ids=["dict", "names", "empty"])
def test_batches_without_images_need_a_predict_step(batch):
    """They ended in a KeyError."""
    with pytest.raises(UsageError, match=r"Identity has batches that do not begin with images, .*: give it a `pre"):
        predictions._ForwardOnly(torch.nn.Identity(), torch.nn.Identity()).predict_step(batch, 0)


class Doubling(L.LightningModule):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        assert not self.trainer.training
        return 2 * batch[0], batch[1]

    def predict_step(self, batch, batch_idx):
        return batch[0]


@pytest.mark.filterwarnings("ignore:You have overridden")
def test_hooks_of_a_module_change_the_batches_of_data_and_no_pictures(photos):
    """Those of data passed by the hooks of a module without a `predict_step`; pictures of others were a TypeError."""
    trainer, ones = L.Trainer(accelerator="cpu", barebones=True), torch.ones(1, 1, 2, 2)
    loader = DataLoader(TensorDataset(ones, torch.zeros(1)))
    assert torch.equal(trainer.predict(predictions._ForwardOnly(Doubling(), lambda x: x), loader)[0], 2 * ones)
    data = SimpleNamespace(eval_transform=lambda image: ones[0], in_chans=1)
    pictures = predictions._Pictures([str(photos / "a.png")], data)
    assert torch.equal(trainer.predict(Doubling(), datamodule=pictures)[0], ones)
