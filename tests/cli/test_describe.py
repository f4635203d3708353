"""What the first lines of a run say."""

import json
import math
from types import SimpleNamespace as Space

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.data import Digits, ImageFolder, Unlabeled
from vitlab.jobs.train import describe
from vitlab.jobs.train.describe import (
    _at_one_end,
    _beside,
    _data_line,
    _emulated,
    _parameters,
    _peak,
    _sizes_beyond,
    _train_line,
)
from vitlab.jobs.train.facts import _groups, _plans, _steps
from vitlab.jobs.train.initial import since_the_weights, statistics_of_weights
from vitlab.jobs.train.job import ImagesBefore
from vitlab.models.weights_file import card_beside
from vitlab.pretraining import DINO, MAE
from vitlab.tasks import Classifier, LinearProbe

TINY = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}


def _photos(root):
    rng = np.random.default_rng(0)
    for part, n in (("train", 4), ("val", 2), ("test", 1)):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for i in range(n):
                pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    return root


def _line(root, monkeypatch, kind=ImageFolder, **settings):
    monkeypatch.setenv("VITLAB_CACHE", str(root.parent / "cache"))
    data = kind(str(root), img_size=8, num_workers=0, **settings)
    data.setup("fit")
    return _data_line(data)


def test_good_photos_are_counted(tmp_path, monkeypatch):
    line = _line(_photos(tmp_path / "photos"), monkeypatch)
    assert line == "ImageFolder: 8 training and 4 validation images of 3x8x8, 2 classes, whole images"


def test_images_of_another_scale_than_those_of_the_initial_weights_are_told(tmp_path, monkeypatch):
    """`--init_from RUN` measures mean and std of its own data, and nothing said that they are others."""
    data = ImageFolder(str(_photos(tmp_path / "photos")), img_size=8, num_workers=0)
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    data.setup("fit")
    file = tmp_path / "weights.safetensors"
    file.touch()

    def told(mean):
        card_beside(file).write_text(json.dumps({"images": {"mean": mean, "std": list(data.std)}}))
        return since_the_weights(Space(before=ImagesBefore("mine", *statistics_of_weights(file)), data=data))

    assert not told([data.mean[0] + 0.05 * data.std[0]] * 3)  # as of another split of the same images
    assert not told(0.1)  # in a card that somebody else wrote
    assert not since_the_weights(Space(before=ImagesBefore(), data=data))
    assert "those of the weights were by mean 0.100 0.100 0.100 and std" in told([0.1] * 3)[0]


def test_photos_without_labels_are_not_counted_as_a_class(tmp_path, monkeypatch):
    line = _line(_photos(tmp_path / "photos"), monkeypatch, Unlabeled, batch_size=1)
    assert "of 3x8x8, no labels, " in line


def test_faults_of_the_data_are_in_the_header(tmp_path, monkeypatch):
    root = _photos(tmp_path / "photos")
    (root / "train" / "cat" / "0.png").write_bytes(b"broken")
    (root / "val" / "cat" / "0.png").write_bytes((root / "train" / "dog" / "1.png").read_bytes())
    (root / "train" / "gnu").mkdir()
    assert _line(root, monkeypatch, max_unreadable=1).endswith(
        "2 classes, whole images (unreadable and left out: 1, the same in two splits: 1, "
        "the same under two labels: 1; see data.json)\n       folders without images are no classes: gnu"
    )


@pytest.mark.parametrize(
    ("limits", "line"),
    [
        ({"max_epochs": 40}, "40 epochs"),
        ({"max_epochs": 40, "max_steps": 5}, "40 epochs, at most 5 steps"),
        ({"max_epochs": 1, "max_time": {"minutes": 90}}, "1 epoch, at most 1:30:00 by the clock"),
        ({"max_steps": 1}, "1 step"),
        ({"max_time": "00:00:10:00"}, "0:10:00 by the clock"),
        ({"max_epochs": -1}, "until it is stopped"),
    ],
)
def test_the_length_of_a_training_is_told_by_its_limits(limits, line):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(**limits, **quiet, accelerator="cpu", enable_model_summary=False)
    job = Space(trainer=trainer, batch=None, task=None, data=None, config=Space(seed_everything=0))
    assert _train_line(job).startswith(f"{line}, seed 0, 1 x CPU, precision 32-true")


class BySgd(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


def test_of_an_optimizer_of_ones_own_no_recipe_rates_or_groups_are_told():
    trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu", barebones=True)
    for kind, told in ((BySgd, "1 epoch, optimized by configure_optimizers of BySgd, seed 0"), (Classifier, "adamw")):
        task = kind(3, **TINY)
        task.trainer = Space(estimated_stepping_batches=4, **vars(limited(1, 4, 4)), datamodule=None)
        job = Space(trainer=trainer, batch=None, task=task, data=None, config=Space(seed_everything=0))
        assert told in _train_line(job)
        assert bool(_groups(task)) == bool(task.sum_of_learning_rates()) == (kind is Classifier)


ONE_CYCLE = {"class_path": "OneCycleLR", "init_args": {"max_lr": 0.1}}


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        ({}, "lr 0.002"),
        ({"head_lr_mult": 10}, "lr 0.002 (head 0.02)"),
        ({"lr_scheduler": ONE_CYCLE}, "lr set by OneCycleLR"),
        (
            {"lr_scheduler": ONE_CYCLE, "layer_decay": 0.5, "head_lr_mult": 10},
            "lr set by OneCycleLR for all layers, in spite of layer_decay and head_lr_mult",
        ),
    ],
)
def test_the_learning_rate_is_that_of_the_training(monkeypatch, recipe, line):
    task = Classifier(3, lr=2e-3, **TINY, **recipe)
    monkeypatch.setattr(task, "peak_rate", lambda: 2e-3)
    assert _peak(task) == line


def limited(epochs, steps=-1, batches=math.inf, accumulate=1, loader=None):
    parts = {"num_training_batches": batches, "accumulate_grad_batches": accumulate, "train_dataloader": loader}
    return Space(max_epochs=epochs, max_steps=steps, **parts)


LIMITS = [  # of a training of at most 5 epochs
    (limited(2), True),
    (limited(5), True),
    (limited(6), False),
    (limited(-1), False),
    (limited(None), False),
    (limited(-1, 50, 10), True),
    (limited(-1, 51, 10), False),
    (limited(100, 50, 10), True),
    (limited(100, 25, 10, 2), True),
    (limited(100, 26, 10, 2), False),
    (limited(-1, 50), False),  # where the batches of an epoch are not known yet, as in a dry run of your own data
]


@pytest.mark.parametrize(("trainer", "says"), LIMITS)
def test_a_training_no_longer_than_its_warm_up_or_cool_down_says_so(trainer, says):
    kinds = {"warm-up": {"warmup_epochs": 5}, "cool-down": {"warmup_epochs": 0, "cooldown_epochs": 5}}
    for kind, recipe in kinds.items():
        key = [*recipe][-1]
        assert _at_one_end(Classifier(3, **TINY, **recipe), trainer) == [f"all of it {kind} (model.{key} 5)"] * says


def test_epochs_of_images_without_a_number_are_told_as_the_whole_training():
    trainer = limited(-1, 1000, loader="of the images")
    (line,) = _at_one_end(Classifier(3, **TINY), trainer)
    assert line == "all of it warm-up (model.warmup_epochs 5; images without a number are one epoch)"
    assert _at_one_end(Classifier(3, warmup_epochs=0.1, **TINY), trainer) == []


@pytest.mark.parametrize(("epochs", "says"), [(5, False), (7, True), (8, True), (9, False)])
def test_a_warm_up_and_a_cool_down_that_leave_nothing_between_them_say_so(epochs, says):
    task = Classifier(3, warmup_epochs=5, cooldown_epochs=3, **TINY)
    line = "nothing between warm-up and cool-down (model.warmup_epochs 5, model.cooldown_epochs 3)"
    assert (line in _at_one_end(task, limited(epochs))) == says


@pytest.mark.parametrize(("trainer", "says"), LIMITS)
def test_a_training_that_ends_before_the_size_of_evaluation_says_so(trainer, says):
    job = Space(trainer=trainer, data=Digits(img_size_schedule=[[0, 4], [5, 8]]))
    assert _sizes_beyond(job) == ["no epoch at 8x8 (data.img_size_schedule)"] * says
    assert _sizes_beyond(Space(trainer=trainer, data=Digits())) == []


@pytest.mark.parametrize(("found", "steps"), [(12, 12), (0, 0), (-1, None), (float("inf"), None)])
def test_a_training_of_unknown_length_has_no_steps_in_its_record(found, steps):
    job = Space(trainer=Space(estimated_stepping_batches=found, ckpt_path=None), run=Space(record={}))
    assert _steps(job) == steps and _plans(job) == ([] if steps is None else [[0, steps]])


def test_frozen_values_are_counted_in_the_size_of_a_network():
    assert _parameters({"parameters": 8050, "parameters_total": 8050}) == "0.00805 M parameters"
    assert _parameters({"parameters": 250, "parameters_total": 8050}) == "0.00805 M parameters (250 trained)"
    assert _parameters({"parameters": 0, "parameters_total": 0}) == "no parameters before its `setup`"


def test_values_that_are_trained_beside_the_network_are_told():
    """A decoder of 25 million stood nowhere beside a network of 60,000."""
    mae = MAE(decoder_dim=8, decoder_depth=1, decoder_heads=2, **TINY)
    dino = DINO(prototypes=4, proj_hidden=4, proj_dim=4, **TINY)
    n = sum(p.numel() for p in mae.decoder.parameters())
    assert _beside(mae) == f"; {n:,} more are trained outside the network"
    assert _beside(dino) == f"; {8 * 4 + 4 + 2 * (4 * 4 + 4) + 4 * 4} more are trained outside the network"
    probe = LinearProbe(num_classes=3, **TINY)
    probe.late = torch.nn.LazyLinear(2)  # has no size before its first call
    assert _beside(probe) == ""


@pytest.mark.parametrize(("precision", "device"), [("bf16-mixed", "cpu"), ("16-true", "cpu"), ("bf16-true", "cuda")])
def test_half_precision_that_the_cpu_emulates_is_named(precision, device, monkeypatch):
    monkeypatch.setattr(describe, "EMULATED", frozenset({torch.bfloat16}))
    trainer = Space(precision=precision, strategy=Space(root_device=torch.device(device)))
    told = "this CPU emulates precision bf16-mixed; use --trainer.precision=32-true"
    assert _emulated(trainer) == (told if (precision, device) == ("bf16-mixed", "cpu") else None)
