"""What the first lines of a run say."""

from types import SimpleNamespace as Space

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.data import Digits, ImageFolder, Unlabeled
from vitlab.jobs.train.describe import _data_line, _peak, _sizes_beyond, _train_line, _warm_up
from vitlab.jobs.train.start import _plans, _steps
from vitlab.tasks import Classifier


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


@pytest.mark.parametrize(("steps", "line"), [(-1, "40 epochs, seed 0"), (5, "40 epochs, at most 5 steps, seed 0")])
def test_a_limit_on_steps_is_shown_beside_the_epochs(steps, line):
    device = Space(root_device=torch.device("cpu"))
    trainer = Space(max_epochs=40, max_steps=steps, accelerator=0, num_devices=1, num_nodes=1, strategy=device)
    trainer.precision = "32-true"
    job = Space(trainer=trainer, batch=None, task=None, data=None, config=Space(seed_everything=0))
    assert _train_line(job).startswith(line)


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
    task = Classifier(3, lr=2e-3, img_size=8, in_chans=1, patch_size=4, embed_dim=8, depth=1, num_heads=2, **recipe)
    monkeypatch.setattr(task, "peak_rate", lambda: 2e-3)
    assert _peak(task) == line


@pytest.mark.parametrize(("epochs", "says"), [(2, True), (5, True), (6, False), (-1, False)])
def test_a_training_no_longer_than_its_warm_up_says_so(epochs, says):
    task = Classifier(3, warmup_epochs=5, img_size=8, in_chans=1, patch_size=4, embed_dim=8, depth=1, num_heads=2)
    assert _warm_up(task, epochs) == ["all of it warm-up (model.warmup_epochs 5)"] * says


@pytest.mark.parametrize(("epochs", "says"), [(2, True), (10, True), (11, False), (-1, False), (None, False)])
def test_a_training_that_ends_before_the_size_of_evaluation_says_so(epochs, says):
    job = Space(trainer=Space(max_epochs=epochs), data=Digits(img_size_schedule=[[0, 4], [10, 8]]))
    assert _sizes_beyond(job) == ["no epoch at 8x8 (data.img_size_schedule)"] * says
    assert _sizes_beyond(Space(trainer=job.trainer, data=Digits())) == []


@pytest.mark.parametrize(("found", "steps"), [(12, 12), (0, 0), (-1, None), (float("inf"), None)])
def test_a_training_of_unknown_length_has_no_steps_in_its_record(found, steps):
    job = Space(trainer=Space(estimated_stepping_batches=found, ckpt_path=None), run=Space(record={}))
    assert _steps(job) == steps and _plans(job) == ([] if steps is None else [[0, steps]])
