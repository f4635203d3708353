"""`vitlab predict FILE` with what `vitlab export` wrote: no run, only the file and its card."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from vitlab.cli.main import main
from vitlab.jobs import predict as predictions
from vitlab.jobs.load import data_of_card
from vitlab.shipped import card_beside, find_weights

REPOSITORY = Path(__file__).parents[2]
TINY = ["--trainer.max_epochs=1", "--trainer.logger=false", "--model.depth=1", "--model.embed_dim=24", "--quiet"]
TINY += ["--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run, four images, two files that cannot be read, and what was exported."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "photos" / "3").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("a.png", "b.png", "3/c.png"):
        Image.fromarray(rng.integers(256, size=(9, 11, 3), dtype=np.uint8)).save(folder / "photos" / name)
    deep = rng.integers(1000, 3000, size=(8, 8), dtype=np.uint16)
    Image.fromarray(deep).save(folder / "photos" / "deep.png")
    (folder / "photos" / "broken.png").write_bytes(b"no image")
    (folder / "photos" / "e.txt").write_text("no image")
    words = ["--config", str(REPOSITORY / "configs" / "vit.yaml"), "--run_dir", str(folder / "run"), *TINY]
    assert main(["fit", *words, "--model.lr=0.01", "--data.value_range=[0, 4095]"]) == 0
    assert main(["export", str(folder / "run"), "--to", "safetensors", "-o", str(folder / "net.safetensors")]) == 0
    return folder


def table(*words, to):
    assert main(["predict", *map(str, words), "-o", str(to), "--topk", "3"]) == 1  # e.txt
    return pd.read_csv(to)


def same(found, expected):
    pd.testing.assert_frame_equal(found, expected, check_exact=False, atol=1e-5)


def test_a_file_and_its_card_predict_what_the_run_does(folder, tmp_path, capsys, monkeypatch):
    expected = table(folder / "run", folder / "photos", to=tmp_path / "run.csv")
    assert len(expected) == 4 and expected["probability_1"].nunique() == 4
    monkeypatch.setattr(predictions, "_FEW", 2)  # several batches
    assert expected["target"].notna().sum() == 1  # in the folder 3
    alone = tmp_path / "elsewhere"
    alone.mkdir()
    for name in ("net.safetensors", "net.safetensors.json"):
        shutil.copy(folder / name, alone)
    capsys.readouterr()
    same(table("--ckpt_path", alone / "net.safetensors", folder / "photos", to=tmp_path / "a.csv"), expected)
    told = capsys.readouterr().err
    assert "e.txt: not one of" in told and "broken.png: " in told and "2 of 6 could not be read" in told
    same(table(alone / "net.safetensors", folder / "photos", to=tmp_path / "b.csv"), expected)


def test_a_graph_in_onnxruntime_predicts_what_the_run_does(folder, tmp_path):
    pytest.importorskip("onnxruntime")
    assert main(["export", str(folder / "run"), "--to", "onnx", "-o", str(tmp_path / "net.onnx"), "--quiet"]) == 0
    expected = table(folder / "run", folder / "photos", to=tmp_path / "run.csv")
    same(table("--ckpt_path", tmp_path / "net.onnx", folder / "photos", to=tmp_path / "a.csv"), expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ckpt_path", "net.onnx", "a.png"], "net.onnx needs net.onnx.json beside it, which says how to prepare im"),
        (["net.onnx", "a.png"], "net.onnx needs net.onnx.json beside it"),
        (["--ckpt_path", "other.onnx", "a.png"], "there is no file other.onnx"),
        (["net.safetensors", "a.png", "--data.batch_size=2"], "leave out --data.batch_size=2"),
        (["net.safetensors"], "no images given: `vitlab predict net.safetensors IMAGE|DIR|GLOB ...`"),
        (["net.safetensors", "b.png"], "no images found: b.png: no such file"),
        (["old.safetensors", "a.png"], "old.safetensors was exported by an older vitlab and does not say what it pred"),
        (
            ["own.safetensors", "a.png"],
            "own.safetensors takes images as `eval_transform` of mydata.MyData returns them",
        ),
        (["bad.safetensors", "a.png"], "bad.safetensors.json is not what `vitlab export` writes beside a file"),
    ],
)
def test_wrong_input_is_refused_in_one_line(folder, words, message, here, capsys):
    shutil.copy(folder / "photos" / "a.png", here)
    (here / "net.onnx").write_bytes(b"")
    card = json.loads((folder / "net.safetensors.json").read_text())
    own = {**card, "images": {"values": "as `eval_transform` of mydata.MyData returns them"}}
    for name, facts in (("net", card), ("old", {**card, "targets": None}), ("own", own), ("bad", [])):
        shutil.copy(folder / "net.safetensors", f"{name}.safetensors")
        Path(f"{name}.safetensors.json").write_text(json.dumps(facts))
    assert main(["predict", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert main(["embed", "net.safetensors", "a.png"]) == 2
    assert "`vitlab embed` needs the run" in capsys.readouterr().err


def test_a_file_of_a_network_that_takes_arrays_reads_them_as_the_run_does(here):
    rng, lines = np.random.default_rng(0), ["path,level"]
    for i in range(40):
        level = rng.uniform(0, 10)
        pages = [Image.fromarray(page) for page in (rng.normal(level, 1, (3, 8, 8))).astype("float32")]
        pages[0].save(f"{i}.tif", save_all=True, append_images=pages[1:])
        lines.append(f"{i}.tif,{level:.3f}")
    Path("t.csv").write_text("\n".join(lines))
    words = ["--config", str(REPOSITORY / "configs" / "vit.yaml"), "--model=Regressor", *TINY, "--model.patch_size=4"]
    data = ["--data=Table", "--data.path=t.csv", "--data.targets=level", "--data.batch_size=8", "--data.num_workers=0"]
    assert main(["fit", *words, *data, "--name=levels"]) == 0
    assert main(["export", "levels", "--to", "safetensors", "-o", "net.safetensors"]) == 0
    card = json.loads(Path("net.safetensors.json").read_text())["images"]
    assert card["arrays"] and card["values"] == "(x - mean) / std of x as stored"
    for source, to in (("levels", "a.csv"), ("net.safetensors", "b.csv")):
        assert main(["predict", source, "0.tif", "1.tif", "-o", to]) == 0
    same(pd.read_csv("b.csv"), pd.read_csv("a.csv"))


def test_a_file_of_a_network_without_a_head_has_features(here):
    config = str(REPOSITORY / "configs" / "pretrain" / "mae_digits.yaml")
    assert main(["fit", "--config", config, *TINY, "--data.num_workers=0", "--name=mae"]) == 0
    assert main(["export", "mae", "--to", "safetensors", "-o", "net.safetensors"]) == 0
    card = json.loads(Path("net.safetensors.json").read_text())
    assert (card["outputs"], card["targets"]) == ("features", {"kind": "feature"})
    Image.new("L", (8, 8), 7).save("a.png")
    for source, to in (("mae", "a.csv"), ("net.safetensors", "b.csv")):
        assert main(["predict", source, "a.png", "-o", to]) == 0
    same(pd.read_csv("b.csv"), pd.read_csv("a.csv"))


@pytest.mark.parametrize(
    ("targets", "outputs", "columns"),
    [
        ({"kind": "number", "names": ["age", "size"]}, "numbers", {"age": 1.0, "size": -2.0}),
        ({"kind": "number", "names": ["path", "size"]}, "numbers", {"output/path": 1.0, "size": -2.0}),
        ({"kind": "multilabel"}, ["cat", "dog"], {"cat": 0.7311, "dog": 0.1192}),
        ({"kind": "multilabel", "scores": "probabilities"}, ["cat", "dog"], {"cat": 1.0, "dog": -2.0}),
        ({"kind": "feature"}, "features", {"feature_1": 1.0, "feature_2": -2.0}),
        (
            {"kind": "mixed", "names": ["age", "pet"], "classes": [[], ["cat"]]},
            ["age", "pet/cat"],
            {"age": 1.0, "pet": "cat", "probability/pet": 1.0},
        ),
    ],
    ids=lambda value: value.get("kind") if isinstance(value, dict) else None,
)
def test_the_card_says_what_outputs_are(targets, outputs, columns, folder, tmp_path, monkeypatch):
    class Fixed(torch.nn.Module):
        in_chans, img_size = 3, (8, 8)

        def forward(self, images):
            return torch.tensor([[1.0, -2.0]]).repeat(len(images), 1)

    how = json.loads((folder / "net.safetensors.json").read_text())["images"] | {"mean": [0.5] * 3, "std": [0.5] * 3}
    card = {"images": how, "outputs": outputs, "targets": targets, "scores": targets.get("scores", "logits")}
    monkeypatch.setattr(predictions, "load_exported", lambda path: (Fixed(), data_of_card(Fixed(), card), card))
    found, reasons = predictions.predict_exported(tmp_path / "net.onnx", [str(folder / "photos" / "a.png")], 5)
    assert not reasons and list(found.columns) == ["path", *columns]
    for name, value in columns.items():
        assert found[name][0] == (value if isinstance(value, str) else pytest.approx(value, abs=1e-4))


def test_shipped_weights_predict_photos_and_other_names_say_what_takes_them(folder, tmp_path, capsys):
    image, word = str(folder / "photos" / "a.png"), "vitlab:photos64_vit"
    for words, to in (([word], "a.csv"), (["--ckpt_path", word], "b.csv")):
        assert main(["predict", *words, image, "-o", str(tmp_path / to), "--quiet"]) == 0
    same(pd.read_csv(tmp_path / "b.csv"), found := pd.read_csv(tmp_path / "a.csv"))
    assert found["class_1"].isin(json.loads(card_beside(find_weights(word)).read_text())["outputs"]).all()
    capsys.readouterr()
    for argv, told in [
        (["timm:vit_tiny_patch16_224", image], "vitlab fit --init_from timm:vit_tiny_patch16_224"),
        (["--ckpt_path", "nosuch.safetensors", image], "there is no file nosuch.safetensors, and "),
        (["--ckpt_path", "vitlab:photos64", image], 'did you mean "photos64_vit"'),
    ]:
        assert main(["predict", *argv]) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1
