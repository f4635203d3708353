"""Every shipped config is parsed and built as a user would, without data and without memory for the weights."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from vitlab.cli.main import main
from vitlab.config.parser import VitlabCLI
from vitlab.models.cost import count_parameters
from vitlab.models.vit import VisionTransformer

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
RECIPES = [path for path in FILES if "cluster" not in path.parts]
KIN = (
    "t2t_vit_19",
    "t2t_vit_24",
    "t2t_vit_t_",
    "t2t_vit_10",
    "t2t_vit_12",
    "deit_b16",
    "deit_s16",
)  # others of their families are built
MILLIONS = {
    "imagenet/deit_ti16": 5.72,
    "imagenet/deit_s16": 22.05,
    "imagenet/deit3_l16": 304.32,
    "imagenet/t2t_vit_7": 4.26,
    "imagenet/t2t_vit_14": 21.47,
    "imagenet/t2t_vit_19": 39.09,
    "imagenet/t2t_vit_24": 64.00,
    "imagenet/t2t_vit_t_14": 21.47,
    "imagenet/vit_s16": 21.97,
    "finetune/deit_s16_384": 22.20,
    "finetune/t2t_vit_14_384": 21.47,
    "cifar10_vit": 2.70,
    "cifar10_t2t": 2.92,
}
SMALL = ["--trainer.devices=1", "--trainer.accelerator=cpu", "--trainer.strategy=auto", "--trainer.logger=false"]


def ident(path):
    return str(path.relative_to(CONFIGS).with_suffix(""))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder in which every data set finds a file of each kind that its constructor looks for."""
    tmp_path = tmp_path_factory.mktemp("data")
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for kind in ("images-idx3", "labels-idx1"):
        (raw / f"train-{kind}-ubyte").write_bytes(b"")
    for i in range(1000):
        for part in ("train", "val"):
            (tmp_path / part / f"n{i:08}").mkdir(parents=True)
    Image.fromarray(np.zeros((200, 200, 3), np.uint8)).save(tmp_path / "0.png")
    for i in range(1000):
        os.link(tmp_path / "0.png", tmp_path / "train" / f"n{i:08}" / "0.png")
    for part in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / "few" / part / name).mkdir(parents=True)
            for i in range(64 if part == "train" else 1):
                os.link(tmp_path / "0.png", tmp_path / "few" / part / name / f"{i}.png")
    assert main(["pack", str(tmp_path / "few"), str(tmp_path / "packed"), "--size", "96"]) == 0
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.rare) if path.stem.startswith(KIN) else path for path in RECIPES],
    ids=ident,
)
def test_the_config_builds_with_outputs_of_the_right_shape(path, root, monkeypatch):
    # a thousand pictures have one header
    monkeypatch.setattr("vitlab.data.files.scan.image_header", lambda data: (None, (200, 200)))
    arguments = ["--config", str(path), *SMALL]
    data = yaml.safe_load(path.read_text())["data"]
    if "root" in data.get("init_args", {}):
        arguments += ["--data.root", str(root / "packed" if data["class_path"] == "Packed" else root)]
    with torch.device("meta"):
        cli = VitlabCLI(arguments)
        net, data = cli.model.net, cli.datamodule
        assert isinstance(net, VisionTransformer)
        outputs = net(torch.empty(2, data.in_chans, *data.img_size))
    assert outputs.shape == (2, net.num_features if "pretrain" in path.parts else data.num_classes)
    if ident(path) in MILLIONS:
        assert count_parameters(net) / 1e6 == pytest.approx(MILLIONS[ident(path)], abs=0.01)


@pytest.mark.parametrize("path", RECIPES, ids=ident)
def test_the_config_opens_with_paper_expectation_and_command(path):
    head = path.read_text().split("seed_everything")[0]
    assert all(word in head for word in ("paper", "expected", "command"))
    assert f"--config configs/{ident(path)}.yaml" in head
