"""Networks without a run: files of ours, official ones by name, timm's."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from small_nets import SMALL, small_net

from vitlab.analysis.attribution.maps import analyze_attribution
from vitlab.analysis.features import analyze_knn
from vitlab.analysis.outcomes.outcome import outcome_of
from vitlab.analysis.pictures import PreparedPictures
from vitlab.cli.main import main
from vitlab.data.loading.pipeline import Pipeline
from vitlab.errors import UsageError
from vitlab.jobs.load import load_trained
from vitlab.jobs.subject_without_run import named_subject
from vitlab.jobs.view import View
from vitlab.models.sizes import SIZES
from vitlab.models.timm_networks import timm_model
from vitlab.models.walk import probabilities


@pytest.fixture
def few_maps(monkeypatch, hasty):
    """Let pages have the maps of one class beside the predicted one, and those of gradients take few steps."""
    monkeypatch.setattr("vitlab.look.viewer.MOST_CLASSES", 1)
    monkeypatch.setattr("vitlab.analysis.attribution.maps.STEPS", 4)


@pytest.fixture
def photos(tmp_path):
    for i in range(3):
        pixels = np.random.default_rng(i).integers(256, size=(30, 20 + i, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    (tmp_path / "3.png").write_bytes(b"no picture")
    return tmp_path


def test_a_picture_that_cannot_be_read_is_named_once(photos, monkeypatch):
    said = []
    monkeypatch.setattr("vitlab.jobs.view.say", said.append)
    data = PreparedPictures(lambda image: torch.zeros(3, 8, 8), (8, 8), 3)
    assert View(images=str(photos)).pictures(data).shape == (3, 3, 8, 8)
    assert [line.count(f"{photos}/3.png") for line in said if "left out" in line] == [1]


@pytest.mark.slow
@pytest.mark.rare
def test_an_exported_file_is_analyzed_without_a_run(photos, tmp_path, monkeypatch, capsys):
    arguments = {**SMALL, "in_chans": 3}
    net = small_net(in_chans=3)
    save_file(net.state_dict(), tmp_path / "mine.safetensors", {"hyper_parameters": json.dumps(arguments)})
    monkeypatch.chdir(tmp_path)
    names = "attention,distance,displacement,pca,scramble,fewshot,confusion"
    assert main(["analyze", names, "mine.safetensors", "--images", str(photos), "--quick"]) == 0
    said = capsys.readouterr().out
    assert "does not define a normalization: using ImageNet" in said and f"left out {photos}/3.png" in said
    assert "scramble         scramble.csv" in said and "so predictions are compared and no accuracy is measured" in said
    assert "fewshot needs class labels" in said
    assert "confusion        not done: the images for mine have no classes" in said
    table = pd.read_csv(tmp_path / "analysis" / "mine" / "attention.csv")
    assert table["image"].nunique() == 3
    subject = named_subject("mine.safetensors", View(images=str(photos)))
    white = subject.data.eval_transform(Image.new("RGB", (8, 8), "white"))[:, 0, 0]
    assert white.tolist() == pytest.approx([(1 - m) / s for m, s in ((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))])


def described(file, images, outputs, targets, answers=None, **more):
    """A small network exported to ``file`` with its card; it gives ``answers`` for every image."""
    net = small_net(in_chans=len(images["mean"]), num_classes=3)
    if answers:
        net.head.weight.data.zero_()
        net.head.bias.data = torch.tensor(answers)
    arguments = {**SMALL, "in_chans": net.in_chans, "num_classes": 3}
    save_file(net.state_dict(), file, {"hyper_parameters": json.dumps(arguments)})
    card = {"format": "safetensors", "images": images, "outputs": outputs, "targets": targets, **more}
    Path(f"{file}.json").write_text(json.dumps(card))
    return str(file)


CARD = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "native_size": None, "crop_pct": 0.6, "crop_mode": "squash"}
CARD |= {"interpolation": "bilinear", "color_profile": "ignore", "value_range": None}


@pytest.mark.parametrize("native", [None, [8, 8]])
def test_given_data_are_prepared_as_the_card_of_an_export_says(native, photos, tmp_path):
    (tmp_path / "3.png").unlink()
    for i in range(3):
        (tmp_path / "data" / str(i)).mkdir(parents=True)
        (tmp_path / f"{i}.png").rename(tmp_path / "data" / str(i) / "0.png")
    file = described(tmp_path / "mine.safetensors", CARD | {"native_size": native}, ["a", "b", "c"], {"kind": "class"})
    words = ["--data=ImageFolder", f"--data.root={tmp_path / 'data'}"]
    with Image.open(tmp_path / "data" / "0" / "0.png") as image:
        expected = load_trained(file).transform(image)
        found = named_subject(file, View(), words).data.eval_transform(image)
        other = named_subject(file, View(), [*words, "--data.crop_mode=border"]).data.eval_transform(image)
    torch.testing.assert_close(found, expected)
    assert (other - expected).abs().max() > 0.1  # what is given counts


def test_arrays_are_prepared_as_the_card_of_an_export_says(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.random.default_rng(0).normal(size=(20, 2, 8, 8)), targets=np.arange(20) % 3)
    card = CARD | {"mean": [5.0, 6.0], "std": [2.0, 3.0], "native_size": [8, 8], "arrays": True}
    file = described(tmp_path / "mine.safetensors", card, ["0", "1", "2"], {"kind": "class"})
    words = ["--data=Arrays", f"--data.path={tmp_path / 'a.npz'}"]
    subject = named_subject(file, View(), words)
    assert subject.data.statistics() == ((5.0, 6.0), (2.0, 3.0)) and not subject.is_elsewhere
    file = described(tmp_path / "b.safetensors", card, ["0", "1", "x"], {"kind": "class"})  # as many, but others
    other = named_subject(file, View(), words)
    with pytest.raises(UsageError, match="these images have other classes than b, so accuracy cannot be measured"):
        outcome_of(other)
    file = described(
        tmp_path / "c.safetensors", card, ["2", "1", "0"], {"kind": "class"}
    )  # the same, numbered otherwise
    again = named_subject(file, View(), words)
    assert torch.equal(outcome_of(again).targets, 2 - outcome_of(subject).targets)


def test_the_card_of_an_export_says_what_outputs_are(photos, tmp_path):
    names, file, view = ["cat", "dog", "elk"], tmp_path / "mine.safetensors", View(images=str(photos / "0.png"))
    subject = named_subject(described(file, CARD, names, {"kind": "class"}), view)
    assert subject.class_names == names and not subject.classifies and not subject.net.predicts_labels
    with pytest.raises(UsageError, match="needs class labels"):
        analyze_knn(subject)
    subject = named_subject(described(file, CARD, names, {"kind": "multilabel"}), view)
    assert subject.class_names == names and subject.net.predicts_labels
    subject = named_subject(described(file, CARD, "numbers", {"kind": "number", "names": names}), view)
    with pytest.raises(UsageError, match="attribution needs class scores, and mine predicts cat, dog, elk"):
        analyze_attribution(subject)


@pytest.mark.parametrize(
    ("kind", "scores", "answers", "expected"),
    [
        ("multilabel", "probabilities", [0.1, 0.5, 1.0], [0.1, 0.5, 1.0]),
        ("multilabel", "logits", [0.0, 20.0, -20.0], [0.5, 1.0, 0.0]),
        ("number", None, [600.0, 5.0, -2.0], [600.0, 5.0, -2.0]),
    ],
)
def test_outputs_of_an_export_are_read_as_its_card_says(kind, scores, answers, expected, photos, tmp_path):
    row = "{0}.png,{1},{2},1" if kind == "multilabel" else "{0}.png,7{1}0.5,2{2}.5,{0}"
    lines = [row.format(i % 3, i % 2, int(i % 5 == 0)) for i in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["path,cat,dog,elk", *lines]))
    names, given = ["cat", "dog", "elk"], [f"--data.path={tmp_path / 't.csv'}", "--data.targets=[cat, dog, elk]"]
    outputs, more = names if kind == "multilabel" else "numbers", {"scores": scores} if scores else {}
    file = described(
        tmp_path / "net.safetensors", CARD, outputs, {"kind": kind, "names": names}, answers=answers, **more
    )
    subject = named_subject(file, View(), ["--data=Table", *given])
    found = outcome_of(subject)
    assert found.kind == kind and not subject.classifies
    torch.testing.assert_close(found.outputs[0], torch.tensor(expected), atol=1e-4, rtol=0)
    if kind == "number":
        with pytest.raises(UsageError, match="is dog, cat, elk, and the run was trained on cat, dog, elk"):
            named_subject(file, View(), ["--data=Table", given[0], "--data.targets=[dog, cat, elk]"])
    if kind == "multilabel":
        torch.testing.assert_close(probabilities(subject.net, subject.outputs())[0], torch.tensor(expected))


def test_a_network_by_name_takes_a_file_of_weights_and_another_size(photos, tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "vit_ti16", {**SMALL, "in_chans": 3})
    net = small_net(in_chans=3)
    torch.save({"state_dict_ema": net.state_dict()}, tmp_path / "official.pth")
    subject = named_subject("vit_ti16", View(images=str(photos), weights=str(tmp_path / "official.pth"), img_size=12))
    assert subject.net.grid_size == (6, 6) and subject.shown().shape == (3, 3, 12, 12)
    assert torch.equal(subject.net.head.weight, net.head.weight) and subject.name == "vit_ti16"
    with pytest.raises(UsageError, match="vit_ti16 has no weights: give them with --weights FILE"):
        named_subject("vit_ti16", View(images=str(photos)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data=ImageFolder"], "`--data=ImageFolder` needs `--data.root`$"),
        (["--data=Table"], "`--data=Table` needs `--data.path`$"),
        (["--data=loading"], 'no data set called "loading"'),
        (["--data=ImageFolder", "--data.root=x", "--data.path=x"], "`--data=ImageFolder` takes no `--data.path`"),
        (["--data.root=x"], "`--data.root` needs --data=NAME"),
        (["--model.depth=3"], "`--model.depth` changes the configuration of a run, and .* is not a run"),
    ],
)
def test_data_that_lack_something_are_refused_as_typed(words, message, tmp_path, capsys):
    file = str(tmp_path / "mine.safetensors")
    save_file(small_net(in_chans=3).state_dict(), file, {"hyper_parameters": json.dumps({**SMALL, "in_chans": 3})})
    with pytest.raises(UsageError, match=message):
        named_subject(file, View(), words)
    assert main(["analyze", "knn", file, "--root", "x"]) == 2
    assert "`--root` needs --data=NAME" in capsys.readouterr().err


@pytest.mark.slow
def test_a_network_of_timm_sees_pictures_as_timm_prepares_them(photos, tmp_path):
    from timm.data import create_transform, resolve_model_data_config

    torch.manual_seed(0)
    theirs = timm_model("timm:vit_tiny_patch16_224", pretrained=False)
    torch.save(theirs.state_dict(), tmp_path / "timm.pt")
    view = View(images=str(photos / "0.png"), weights=str(tmp_path / "timm.pt"))
    subject = named_subject("timm:vit_tiny_patch16_224", view)
    transform = create_transform(**resolve_model_data_config(theirs), is_training=False)
    with Image.open(photos / "0.png") as image:
        expected = transform(image)
    torch.testing.assert_close(subject.shown()[0], expected, atol=1e-5, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(subject.net(expected[None]), theirs(expected[None]), atol=1e-4, rtol=1e-3)


def last_attention_of(net, image):
    """Return where the class token looks in the last block, (A, N), from its own queries and keys."""
    heads, kept = net.blocks[-1].attn.num_heads, {}
    with torch.no_grad():
        hook = net.blocks[-1].attn.qkv.register_forward_hook(lambda module, inputs, output: kept.update(qkv=output))
        net(image)
        hook.remove()
    q, k, _ = kept["qkv"].unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).softmax(dim=3)[0, :, 0, 1:]


@pytest.mark.slow
@pytest.mark.parametrize("of_timm", ["false", pytest.param("true", marks=pytest.mark.rare)])
def test_the_net_of_a_custom_module_is_analyzed(of_timm, photos, tmp_path, monkeypatch, capsys, few_maps):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    from userpkg.vit import Wrapped

    trust = "--trust_imports=userpkg"
    words = [
        "--model=userpkg.vit.Wrapped",
        f"--model.of_timm={of_timm}",
        "--data=userpkg.Bars",
        "--trainer.max_epochs=1",
    ]
    assert main(["fit", *words, trust, "--trainer.accelerator=cpu", "--name=own", "--quiet"]) == 0
    assert main(["analyze", "attention,pca,scramble", "own", trust, "--images", str(photos)]) == 0
    assert "so predictions are compared and no accuracy is measured" in capsys.readouterr().out
    (place,) = Path("runs/own/analysis").glob("images=*")
    found = pd.read_csv(place / "attention.csv").query("image == 0 and map == 'head 1'")["weight"]
    task = Wrapped(of_timm == "true").eval()
    task.load_state_dict(torch.load("runs/own/checkpoints/best.ckpt", weights_only=True)["state_dict"])
    with Image.open(photos / "0.png") as picture:
        image = Pipeline(None, (8, 8), "none", None, None, "bicubic").eval_image(
            picture.convert("L"), ((0.485,), (0.229,))
        )
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(found.to_numpy()).float(), last_attention_of(task.net, image[None])[1])
    for name in ("a", "b"):
        (tmp_path / "other" / name).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (30, 20), (30 * i, 99, 50)).save(tmp_path / "other" / name / f"{i}.png")
    other = [
        "--data",
        "ImageFolder",
        "--root",
        str(tmp_path / "other"),
        "--data.num_workers=0",
        "--quick",
        "-o",
        "other/out",
    ]
    assert main(["analyze", "knn,confusion", "own", trust, *other]) == 0
    said = capsys.readouterr().out
    assert "classes that the network was not trained on" in said and "accuracy cannot be measured" in said
    assert main(["look", "own", trust, "--pictures", "2"]) == 0  # those of its own data
    page = Path("runs/own/look.html").read_text()
    assert ' class="vl"' in page and '"occlusion' in page and "left out" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_plain_custom_module_gets_the_analyses_that_it_supports(tmp_path, monkeypatch, capsys, few_maps):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    trust, few = "--trust_imports=userpkg", ["--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
    few += ["--trainer.logger=false", "--data.subset=0.15"]
    assert main(["fit", "--model=userpkg.Net", "--data=Digits", *few, trust, "--name=own", "--quiet"]) == 0
    few_images = ["--num_images=32", "-o", "runs/own/analysis"]
    assert main(["analyze", "errors,knn,cka,attribution,attention", "own", trust, *few_images]) == 0
    said = capsys.readouterr().out
    assert "own (Net) has none" in said and said.count("not done") == 1
    table = pd.read_csv("runs/own/analysis/cka.csv")
    assert len(table) == 4  # before and after its first layer
    assert main(["look", "own", trust, "--pictures", "2"]) == 0
    page = Path("runs/own/look.html").read_text()
    assert ' class="vl"' in page and '"occlusion' in page
