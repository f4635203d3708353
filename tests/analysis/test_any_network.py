"""Networks without a run: files of ours, official ones by name, timm's."""

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from small_nets import SMALL, small_net

from vitlab.cli.main import main
from vitlab.errors import UsageError
from vitlab.jobs.subject import View, named_subject
from vitlab.models.create import timm_model
from vitlab.models.sizes import SIZES


@pytest.fixture
def photos(tmp_path):
    for i in range(3):
        pixels = np.random.default_rng(i).integers(256, size=(30, 20 + i, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    (tmp_path / "3.png").write_bytes(b"no picture")
    return tmp_path


def test_a_file_of_ours_is_looked_at_without_a_run(photos, tmp_path, monkeypatch, capsys):
    import json

    arguments = {**SMALL, "in_chans": 3}
    net = small_net(in_chans=3)
    save_file(net.state_dict(), tmp_path / "mine.safetensors", {"hyper_parameters": json.dumps(arguments)})
    monkeypatch.chdir(tmp_path)
    names = "attention,distance,displacement,pca,scramble,fewshot"
    assert main(["analyze", names, "mine.safetensors", "--images", str(photos), "--quick"]) == 0
    said = capsys.readouterr().out
    assert "does not say how they are normalised: as those of ImageNet" in said and f"left out {photos}/3.png" in said
    assert "scramble counts right classes, and the pictures of mine have none" in said
    assert "fewshot sorts images into classes" in said
    table = pd.read_csv(tmp_path / "analysis" / "mine" / "attention.csv")
    assert table["image"].nunique() == 3
    subject = named_subject("mine.safetensors", View(images=str(photos)))
    white = subject.data.eval_transform(Image.new("RGB", (8, 8), "white"))[:, 0, 0]
    assert white.tolist() == pytest.approx([(1 - m) / s for m, s in ((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))])


def test_a_network_by_name_takes_a_file_of_weights_and_another_size(photos, tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "vit_ti16", {**SMALL, "in_chans": 3})
    net = small_net(in_chans=3)
    torch.save({"state_dict_ema": net.state_dict()}, tmp_path / "official.pth")
    subject = named_subject("vit_ti16", View(images=str(photos), weights=str(tmp_path / "official.pth"), img_size=12))
    assert subject.net.grid_size == (6, 6) and subject.shown().shape == (3, 3, 12, 12)
    assert torch.equal(subject.net.head.weight, net.head.weight) and subject.name == "vit_ti16"
    with pytest.raises(UsageError, match="vit_ti16 is a network without weights: give them with --weights FILE"):
        named_subject("vit_ti16", View(images=str(photos)))


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
    assert (subject.shown()[0] - expected).abs().mean() < 0.02  # they round the size before the crop
    with torch.no_grad():
        torch.testing.assert_close(subject.net(expected[None]), theirs(expected[None]), atol=1e-4, rtol=1e-3)
