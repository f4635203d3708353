"""The training batches of every shipped recipe, traced through loader and mixing, beside those of timm."""

from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.plugins import Precision
from scipy.stats import ks_2samp
from timm.data import Mixup
from timm.data.distributed_sampler import RepeatAugSampler
from timm.data.random_erasing import RandomErasing
from torch.utils.data import DataLoader, DistributedSampler

from vitlab.data.base import ImageData
from vitlab.data.files.sets import TensorImages
from vitlab.data.loading.order import TrainOrder

ROOT = Path(__file__).parents[2]
FILES = [path for folder in ("configs", "experiments") for path in sorted((ROOT / folder).rglob("*.yaml"))]
CONTENTS = {path: yaml.load(path.read_text(), yaml.CSafeLoader) for path in FILES}  # ten times as fast
RECIPES = [path for path, content in CONTENTS.items() if "class_path" in content.get("data", {})]
EXPERIMENTS = [path for path, content in CONTENTS.items() if "base" in content]
SETTINGS = ("batch_size", "repeats", "sampling", "random_erasing", "mixup", "cutmix")
SIDE, STEPS = 8, 3
IMAGENET = 1_268_355  # training images, with 1 % kept for validation


class Numbered(ImageData):
    """Images of one gray level each, image i of class i: a mixed target names an image and its partner."""

    def __init__(self, n, side=SIDE, one_by_one=False, **settings):
        native = None if one_by_one else (side, side)  # photos are read one by one, images of one size in chunks
        super().__init__(native, 3, [str(i) for i in range(n + 1)], img_size=side, num_workers=0, **settings)
        self.n, self.side = n, side

    def read(self, part):
        gray = (torch.arange(self.n + 1) % 251).to(torch.uint8)
        images = gray[:, None, None, None].expand(-1, 3, self.side, self.side).contiguous()
        return TensorImages(images, torch.arange(self.n + 1))

    def indices(self, images):
        return {"train": np.arange(self.n), "val": np.array([self.n]), "test": np.array([], dtype=np.int64)}

    def in_process(self, rank, world):
        """Yield the training batches of a process, as a task receives them, and their sample indices."""
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        place = {"global_rank": rank, "world_size": world, "strategy": strategy}
        self.trainer = SimpleNamespace(**place, precision_plugin=Precision())
        for images, targets in self.iterate_batches(self.train_dataloader()):
            yield images, targets, self.step.indices


def ident(path):
    return str(path.relative_to(ROOT).with_suffix(""))


def settings_of(path):
    given = CONTENTS[path]["data"].get("init_args", {})
    return {name: given[name] for name in SETTINGS if name in given}


def processes_of(path):
    trainer = CONTENTS[path].get("trainer", {})
    return trainer.get("devices", 1) * trainer.get("num_nodes", 1)


def is_own_partner(targets):
    """Whether each image of a batch is mixed with itself; nothing where the whole batch was not mixed."""
    if targets.ndim == 1:
        return []
    alone = (targets > 0).sum(dim=1) == 1
    return [] if alone.all() else alone.tolist()


def count(ranks):
    """Count different images in batches of processes and in global batches, and images that are their own partner."""
    own, local, whole = [], [], []
    for parts in zip(*ranks, strict=True):
        own += [alone for _, targets, _ in parts for alone in is_own_partner(targets)]
        local += [len(set(indices.tolist())) for *_, indices in parts]
        whole.append(len(np.unique(np.concatenate([indices for *_, indices in parts]))))
    return {"own": np.mean(own) if own else 0.0, "mixed": len(own), "local": np.mean(local), "whole": np.mean(whole)}


@lru_cache
def of_ours(one_by_one, world, **settings):
    n = STEPS * settings["batch_size"] + 7
    return count([list(Numbered(n, one_by_one=one_by_one, **settings).in_process(r, world)) for r in range(world)])


def of_timm(n, rank, world, batch_size, repeats=1, mixup=0.0, cutmix=0.0, **_):
    """The batches of timm's sampler and mixing in one process."""
    if repeats > 1:
        sampler = RepeatAugSampler(range(n), world, rank, True, repeats)
    else:
        sampler = DistributedSampler(range(n), world, rank, shuffle=True)
    mix = Mixup(mixup, cutmix, label_smoothing=0.0, num_classes=n) if mixup or cutmix else lambda *pair: pair
    for indices in DataLoader(range(n), batch_size // world, sampler=sampler, drop_last=True):
        yield *mix(torch.zeros(len(indices), 3, SIDE, SIDE), indices), indices.numpy()


@lru_cache
def of_the_source(world, **settings):
    n = STEPS * settings["batch_size"] + 7
    return count([list(of_timm(n, rank, world, **settings)) for rank in range(world)])


def test_every_recipe_is_found_and_experiments_keep_the_batches_of_their_recipes():
    assert len(RECIPES) >= 40 and sum("mixup" in settings_of(path) for path in RECIPES) >= 20
    bases = {path.resolve() for path in RECIPES}
    for path in EXPERIMENTS:
        base = CONTENTS[path]["base"]
        first, *more = base if isinstance(base, list) else [base]
        assert (ROOT / first).resolve() in bases or not first.endswith(".yaml")
        changed = set().union(*(CONTENTS[ROOT / later].get("data", {}).get("init_args", {}) for later in more))
        assert not changed or (changed == {"batch_size"} and not settings_of(ROOT / first).keys() - {"batch_size"})
        assert not any(f"data.{name}" in path.read_text() for name in SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize("world", ["one process", pytest.param("its processes", marks=pytest.mark.rare)])
@pytest.mark.parametrize("path", RECIPES, ids=ident)
def test_no_image_is_mixed_with_itself_and_batches_differ_as_much_as_timms(path, world):
    np.random.seed(0)
    world, settings = 1 if world == "one process" else processes_of(path), settings_of(path)
    small = CONTENTS[path]["data"]["class_path"] in ("CIFAR10", "CIFAR100", "FashionMNIST", "Digits", "PositionProbe")
    ours, source = of_ours(not small, world, **settings), of_the_source(world, **settings)
    assert ours["own"] <= 0.002
    assert ours["local"] >= source["local"] and ours["whole"] >= source["whole"]
    if settings.get("mixup") or settings.get("cutmix"):
        assert ours["mixed"] >= settings["batch_size"]
    if settings.get("repeats", 1) <= world:
        assert ours["local"] == settings["batch_size"] / world


@pytest.mark.parametrize("path", [path for path in RECIPES if "repeats" in settings_of(path)], ids=ident)
def test_an_epoch_has_as_many_steps_as_by_timms_sampler(path):
    world, batch_size = processes_of(path), settings_of(path)["batch_size"]
    sampler = RepeatAugSampler(range(IMAGENET), world, 0, True, settings_of(path)["repeats"])
    assert len(TrainOrder(IMAGENET, batch_size, 0, 0, world, 3)) == len(sampler) // (batch_size // world)


MIXING = {tuple(settings_of(path).get(name, 0.0) for name in ("mixup", "cutmix")) for path in RECIPES} - {(0.0, 0.0)}


def mixture(images, targets):
    """Whether a pair was pasted, its weight, and the height, width and place of the rectangle."""
    share = float(targets[0].max()) if (targets[0] > 0).sum() > 1 else 1.0
    gray = images[0, 0]
    if (gray == gray[0, 0]).all():  # by a weight, or by a rectangle without area
        return [0.0, share, 0, 0, 0, 0]
    pasted = gray == images[1, 0].flatten().mode().values if share > 0.5 else gray != gray.flatten().mode().values
    rows, columns = (np.flatnonzero(pasted.any(dim=dim).numpy()) for dim in (1, 0))
    return [1.0, share, len(rows), len(columns), *(int(x[0]) if len(x) else 0 for x in (rows, columns))]


@pytest.mark.rare
@pytest.mark.parametrize(("mixup", "cutmix"), sorted(MIXING))
def test_weights_and_rectangles_of_mixtures_are_distributed_as_timms(mixup, cutmix):
    n, side = 12_000, 16
    data = Numbered(n, side, batch_size=2, mixup=mixup, cutmix=cutmix)
    ours = np.array([mixture(images, targets) for images, targets, _ in data.in_process(0, 1)])
    np.random.seed(0)
    mix, theirs = Mixup(mixup, cutmix, label_smoothing=0.0, num_classes=2), []
    for _ in range(n):
        images = torch.tensor([1.0, 3.0])[:, None, None, None].expand(2, 3, side, side).clone()
        theirs.append(mixture(*mix(images, torch.arange(2))))
    theirs = np.array(theirs)
    assert abs(ours[:, 0].mean() - theirs[:, 0].mean()) < 0.025  # three standard errors
    assert abs(ours[:, 0].mean() - (cutmix > 0) / ((mixup > 0) + (cutmix > 0))) < 0.02
    for kind, columns in enumerate(([1] if mixup else [], [1, 2, 3, 4, 5] if cutmix else [])):
        a, b = (found[found[:, 0] == kind] for found in (ours, theirs))
        for column in columns:
            assert ks_2samp(a[:, column], b[:, column]).pvalue > 1e-3, (kind, column)


def rectangle(image):
    """Height, width and place of the part of a gray image that was filled with noise."""
    filled = (image != image.flatten().mode().values).any(dim=0)
    rows, columns = (np.flatnonzero(filled.any(dim=dim).numpy()) for dim in (1, 0))
    return [len(rows), len(columns), rows[0], columns[0]] if len(rows) else None


@pytest.mark.rare
@pytest.mark.parametrize("share", sorted({settings_of(path).get("random_erasing", 0.0) for path in RECIPES} - {0.0}))
def test_erased_rectangles_are_distributed_as_timms_and_filled_alike(share):
    n, side = 12_000, 24
    data = Numbered(n, side, batch_size=100, random_erasing=share)
    ours = torch.cat([images.clone() for images, *_ in data.in_process(0, 1)])
    theirs = torch.full((n, 3, side, side), 9.0)
    RandomErasing(share, mode="pixel", max_count=1, device="cpu")(theirs)
    found = [[where for image in images if (where := rectangle(image))] for images in (ours, theirs)]
    shares = [len(places) / n for places in found]
    assert abs(shares[0] - shares[1]) < 0.02 and abs(shares[0] - share) < 0.015
    a, b = (np.array(places) for places in found)
    for of in (lambda r: r[:, 0] * r[:, 1], lambda r: r[:, 0] / r[:, 1], *(lambda r, k=k: r[:, k] for k in range(4))):
        assert ks_2samp(of(a), of(b)).pvalue > 1e-3
    noise = torch.cat([image[(image != image.flatten().mode().values)] for image in ours if rectangle(image)])
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1) < 0.01


def test_the_comparison_detects_a_distorted_distribution():
    rng = np.random.default_rng(0)
    assert ks_2samp(rng.beta(0.8, 0.8, 6000), rng.beta(1.0, 1.0, 6000)).pvalue < 1e-3
