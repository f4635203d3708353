"""The augmentation of shipped recipes, compared with what timm's loader makes of the same words."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageOps
from timm.data import create_transform
from timm.data.auto_augment import AugmentOp

from vitlab.data.loading.pipeline import Pipeline
from vitlab.data.loading.streams import seeded
from vitlab.data.loading.transforms import parts_of

MEAN = (0.485, 0.456, 0.406)
CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = {"3-augment": "3a"}  # timm's


def _recipes():
    """Return augmentation, crop scale and interpolation of the recipes that use timm's policies; each pair once."""
    found = {}
    for path in sorted(CONFIGS.rglob("*.yaml")):
        data = yaml.load(path.read_text(), yaml.CSafeLoader).get("data") or {}
        data = data.get("init_args") or {}
        for step in parts_of(data.get("augment", "none"))[1]:
            if isinstance(step, str) and step.startswith(("rand", "augmix", "original", "v0", "3-")):
                key = step, data.get("interpolation", "bicubic"), data.get("crop_scale") or 0.08
                found.setdefault(key, f"{path.parent.name}/{path.stem}")
    return {name: key for key, name in found.items()}


RECIPES = _recipes()


def _both(name, side=64):
    step, how, scale = RECIPES[name]
    ours = Pipeline(None, (side, side), step, scale, None, how)
    jitter = 0.3 if step == "3-augment" else 0.0
    theirs = create_transform(
        (3, side, side), is_training=True, scale=(scale, 1.0), auto_augment=NAMES.get(step, step), interpolation=how,
        mean=MEAN, color_jitter=jitter, separate=True,
    )  # fmt: skip
    return ours.transform(True, MEAN), theirs


def _posterize(image, bits, posterize=ImageOps.posterize):
    if not bits:
        raise ValueError("as Pillow 13 says")  # earlier ones give black
    return posterize(image, bits)


def _photo(seed=0, size=(64, 64)):
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (7, 7, 3), dtype=np.uint8)).resize(size, Image.BICUBIC)


def test_recipes_with_policies_are_found():
    assert any(step.startswith("rand-m9") for step, _, _ in RECIPES.values()) and len(RECIPES) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_seed_gives_the_image_that_timm_makes(name, monkeypatch):
    monkeypatch.setattr(ImageOps, "posterize", _posterize)
    ours, (_, theirs, _) = _both(name)
    ours.first, refused, n, changed = None, 0, 300, 0
    for seed in range(n):
        image = _photo(seed)
        with seeded(seed):
            try:
                expected = theirs(image)
            except ValueError:  # timm's strongest Posterize keeps no bits
                refused += 1
                continue
        assert ours(image, seed) == expected
        changed += expected != image
    assert refused < 0.05 * n and changed > 0.5 * n


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (step, _, _) in RECIPES.items() if step.startswith("rand")])
def test_operations_strengths_and_interpolation_are_distributed_as_timms(name, monkeypatch):
    ours, (_, theirs, _) = _both(name)
    drawn, image, found = [], _photo(), []

    def noted(op, image):
        if op.prob < 1.0 and torch.rand(()) > op.prob:
            return image
        strength = op.magnitude + op.magnitude_std * float(torch.randn(()))
        strength = max(0.0, min(strength, op.magnitude_max or 10))
        drawn.append((op.name, strength, op.kwargs["resample"], op.kwargs["fillcolor"]))
        return image

    monkeypatch.setattr(AugmentOp, "__call__", noted)
    for make in (lambda seed: ours(image, seed), lambda seed: theirs(image)):
        drawn = []
        np.random.seed(1), torch.manual_seed(1)
        for seed in range(1500):
            make(seed)
        found.append(drawn)
    counts = [Counter(name for name, *_ in one) for one in found]
    assert len(counts[0]) >= 14 and counts[0].keys() == counts[1].keys()
    assert (
        sum((counts[0][k] - counts[1][k]) ** 2 / (counts[0][k] + counts[1][k]) for k in counts[0]) < 40
    )  # chi2, p .001
    strengths = [np.sort([s for _, s, *_ in one]) for one in found]
    grid = np.linspace(0, 10, 200)
    apart = [np.searchsorted(s, grid, side="right") / len(s) for s in strengths]
    assert np.abs(apart[0] - apart[1]).max() < 1.95 * math.sqrt(1 / len(strengths[0]) + 1 / len(strengths[1]))
    assert {x[2:] for x in found[0]} == {x[2:] for x in found[1]} and len({x[2] for x in found[0]}) == 1


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(375, 500), (500, 333), (900, 90)], ids=str)
def test_the_crops_of_a_recipe_are_distributed_as_timms(name, shape):
    ours, (first, _, _) = _both(name)
    crop, theirs, n = ours.first, first.transforms[0], 2000
    a = np.array([crop.box(shape, row) for row in np.random.default_rng(2).random((n, 23))], dtype=float)
    image = Image.new("L", shape[::-1])
    with seeded(2):
        b = np.array([theirs.get_params(image, theirs.scale, theirs.ratio) for _ in range(n)], dtype=float)
    for of in (lambda x: x[:, 2] * x[:, 3], lambda x: x[:, 3] / x[:, 2]):
        values = np.unique(np.concatenate([of(a), of(b)]))
        x, y = (np.searchsorted(np.sort(of(one)), values, side="right") / n for one in (a, b))
        assert np.abs(x - y).max() < 1.95 * math.sqrt(2 / n)  # Kolmogorov and Smirnov, p .001
