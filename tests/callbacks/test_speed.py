from types import SimpleNamespace

import pytest
import torch

from vitlab.callbacks.steps import Speed, peak_flops
from vitlab.pretraining import DINO, MAE
from vitlab.tasks import Classifier, LinearProbe

NETWORK = {"img_size": 8, "in_chans": 1, "patch_size": 2, "embed_dim": 16, "depth": 1, "num_heads": 2}

NAMES = {
    "NVIDIA H200": 989,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A10G": None,
    "NVIDIA L40S": 362,
    "NVIDIA L4": 121,
    "Tesla V100-SXM2-16GB": 125,
    "Tesla T4": 65,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA A400": None,
    "Something else": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_the_peak_of_a_gpu_goes_by_its_name(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    expected = NAMES[name]
    assert peak_flops(torch.device("cuda")) == (expected and expected * 1e12)


def trainer(device, world_size, task=None):
    strategy = SimpleNamespace(root_device=torch.device(device))
    return SimpleNamespace(strategy=strategy, world_size=world_size, lightning_module=task)


def test_utilization_counts_three_forward_passes_against_the_peak_of_all_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    speed = Speed({"flops": 2 * 4.6e9}, trainer("cuda", 8))  # ViT-S/16 at 8 x 10,000 images a second
    assert speed.utilization(80_000)["mfu"] == pytest.approx(0.2791, abs=1e-4)
    assert Speed({"flops": 1e9}, trainer("cpu", 1)).utilization(100) == {}


@pytest.mark.parametrize(
    ("task", "own", "passes"),
    [
        (Classifier, {}, 3),
        (Classifier, {"freeze": ["blocks"]}, None),
        (Classifier, {"tokenizer": {"class_path": "patch", "init_args": {"flexi_patch": [2, 4]}}}, None),
        (LinearProbe, {}, 1),
        (MAE, {"decoder_depth": 1}, None),
        (DINO, {"prototypes": 8, "proj_hidden": 8, "proj_dim": 4}, None),
    ],
)
def test_utilization_is_left_out_where_a_step_does_not_train_the_network_on_the_whole_image(
    monkeypatch, task, own, passes
):
    task = task(**NETWORK, **own)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    found = Speed({"flops": 1e9}, trainer("cuda", 1, task)).utilization(1000)
    assert found == ({} if passes is None else {"mfu": pytest.approx(passes * 1e12 / 989e12)})
