"""What evaluation and training make of a photo, compared with timm's and torchvision's own transforms."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torchvision.models import ViT_B_16_Weights
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms._presets import ImageClassification

from vitlab.data.image_folder import ImageFolder
from vitlab.data.loading.pipeline import Pipeline
from vitlab.data.loading.transforms import CenterCrop, RandomCropFlip, to_tensor

REAL = (
    Path(os.environ.get("VITLAB_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data")) / "caltech101-20" / "val"
)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _made(i):
    """Return a photo-like image: smooth shapes, edges and noise, of an odd size, wide or tall, gray or RGB."""
    rng = np.random.default_rng(i)
    height, width = (2 * rng.integers(15, 240, 2) + 1).tolist()
    if i % 20 == 0:  # a panorama
        height, width = [(37, 701), (701, 37)][i // 20 % 2]
    coarse = Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
    noise = rng.normal(0, 12, (height, width, 1)) + 60 * (np.indices((height, width)).sum(0) // 7 % 2)[..., None]
    image = Image.fromarray((np.asarray(coarse) + noise).clip(0, 255).astype(np.uint8))
    return image.convert("L") if i % 10 == 3 else image


def _odd(image, i):
    """Return a real photo cut to an odd size."""
    rng = np.random.default_rng(i)
    width, height = (int(side - rng.integers(0, side // 3)) // 2 * 2 - 1 for side in image.size)
    return image.crop((3, 2, 3 + width, 2 + height))


@pytest.fixture(scope="module")
def photos():
    """200 photos of odd sizes: the first hundred are real where there are some."""
    files = sorted(REAL.rglob("*.jpg"))[::3][:100]
    real = [_odd(Image.open(file), i) for i, file in enumerate(files)]
    return [*real, *(_made(i) for i in range(200 - len(real)))]


def _distance(pairs):
    return max(int((a.int() - b.int()).abs().max()) for a, b in pairs)


CASES = [
    *((size, pct, "center", "bicubic") for size, pct in [(224, 0.875), (64, 0.888), (96, 1.0), (97, 0.95)]),
    pytest.param(224, 0.9, "center", "bicubic", marks=pytest.mark.rare),
    ((48, 80), 0.875, "center", "bicubic"), ((80, 48), 1.0, "center", "bilinear"), (64, 0.875, "center", "bilinear"),
    (64, 0.9, "squash", "bicubic"), ((48, 81), 1.0, "squash", "bilinear"),
    (64, 0.9, "border", "bicubic"), ((48, 81), 1.0, "border", "bicubic"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("size, pct, mode, how", CASES)
def test_evaluation_has_the_pixels_of_timm(photos, size, pct, mode, how):
    wanted = (size, size) if isinstance(size, int) else size
    ours = CenterCrop(wanted, pct, how, mode, MEAN)
    shared = {"interpolation": how, "crop_pct": pct, "crop_mode": mode, "mean": MEAN, "std": STD}
    theirs = create_transform((3, *wanted), is_training=False, normalize=False, **shared)
    images = [image.convert("RGB") for image in photos]
    pairs = [(to_tensor(ours(image)), theirs(image)) for image in images]
    assert len(pairs) == 200 and len({image.size for image in images}) > 150
    assert all(a.shape == b.shape == (3, *wanted) for a, b in pairs) and _distance(pairs) == 0
    whole, pipeline = create_transform((3, *wanted), is_training=False, **shared), _pipeline(wanted, pct, how, mode)
    for image in images[::40]:
        assert torch.allclose(pipeline.eval_image(image, (MEAN, STD)), whole(image), atol=1e-5)


def _pipeline(size, pct, how, mode="center"):
    return Pipeline(None, size, "none", None, pct, how, crop_mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["bilinear", "bicubic"])
def test_evaluation_has_the_pixels_of_torchvisions_weights(photos, how):
    preset = ViT_B_16_Weights.IMAGENET1K_V1.transforms
    theirs = preset(interpolation=InterpolationMode(how)) if how != "bilinear" else preset()
    assert isinstance(theirs, ImageClassification) and (theirs.resize_size, theirs.crop_size) == ([256], [224])
    pipeline, mean, std = _pipeline((224, 224), 0.875, how), *(torch.tensor(v)[:, None, None] for v in (MEAN, STD))
    pairs = []
    for image in (photo.convert("RGB") for photo in photos[::2]):
        pairs.append(
            [(255 * (x * std + mean)).round() for x in (pipeline.eval_image(image, (MEAN, STD)), theirs(image))]
        )
    assert _distance(pairs) == 0


@pytest.mark.slow
def test_gray_photos_have_the_pixels_of_timm(photos):
    theirs = create_transform((1, 64, 64), is_training=False, normalize=False, interpolation="bicubic", crop_pct=0.9)
    ours, images = CenterCrop((64, 64), 0.9, "bicubic"), [image.convert("L") for image in photos]
    assert _distance((to_tensor(ours(image)), theirs(image)) for image in images) == 0


@pytest.mark.slow
def test_the_former_crop_differs_by_gray_levels_and_is_kept_for_older_runs(photos):
    pairs = [[to_tensor(CenterCrop((224, 224), 0.9, "bicubic", mode)(photo)).float() for mode in ("center", "box")]
             for photo in photos[::4]]  # fmt: skip
    apart = np.mean([float((a - b).abs().mean()) for a, b in pairs])
    assert apart > 1  # gray levels
    image = photos[-1]
    scale = min(image.size) * 0.9
    box = [(side - scale) / 2 for side in image.size]
    expected = image.resize((224, 224), Image.BICUBIC, (*box, box[0] + scale, box[1] + scale))
    assert CenterCrop((224, 224), 0.9, "bicubic", "box")(image) == expected


@pytest.mark.parametrize("mode", ["center", "box"])
def test_batches_of_a_folder_and_pictures_go_through_one_function(tmp_path, photos, mode):
    for i, image in enumerate(photos[-12:]):
        place = tmp_path / "photos" / "ab"[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        image.save(place / f"{i:02}.png")
    data = ImageFolder(
        str(tmp_path / "photos"), img_size=32, crop_mode=mode, batch_size=4, num_workers=0, mean=MEAN, std=STD
    )
    data.setup("test")
    images = torch.cat([images for images, _ in data.iterate_batches(data.test_dataloader())])
    theirs = create_transform(
        (3, 32, 32), is_training=False, interpolation="bicubic", crop_pct=0.875, mean=MEAN, std=STD
    )
    files = [tmp_path / "photos" / name for name in data.splits["test"].files]
    for image, file in zip(images, files, strict=True):
        with Image.open(file) as opened:
            assert torch.equal(image, data.eval_transform(opened))
            assert torch.equal(image, data.eval_file(file))
            assert torch.allclose(image, theirs(opened.convert("RGB")), atol=1e-5) == (mode == "center")


SHAPES = [(400, 600), (375, 500), (64, 64), (1000, 100)]  # the last is narrow, as these are
SHAPES += [pytest.param(shape, marks=pytest.mark.rare) for shape in ((100, 1000), (31, 400))]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_crops_are_distributed_as_torchvisions(shape):
    ours, n = RandomCropFlip((224, 224), 0.08, "bicubic"), 3000
    draws = np.random.default_rng(1).random((n, 23))
    a = np.array([ours.box(shape, row) for row in draws], dtype=float)
    torch.manual_seed(1)
    image = torch.empty(1, *shape)
    b = np.array([RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(n)], dtype=float)
    for of in (_area, _aspect, lambda boxes: boxes[:, 0], lambda boxes: boxes[:, 1]):
        assert _kolmogorov(of(a), of(b)) < 1.95 * math.sqrt(2 / n)  # p = .001


def test_after_ten_failed_draws_the_crop_is_torchvisions():
    ours, failing = RandomCropFlip((224, 224), 0.9, "bicubic"), np.full(23, 0.999)
    torch.manual_seed(0)
    for shape in [(1000, 100), (100, 1000), (31, 400), (401, 33), (7, 3001)]:
        assert ours.box(shape, failing) == RandomResizedCrop.get_params(
            torch.empty(1, *shape), [30.0, 30.0], [3 / 4, 4 / 3]
        )


def _area(boxes):
    return boxes[:, 2] * boxes[:, 3]


def _aspect(boxes):
    return boxes[:, 3] / boxes[:, 2]


def _kolmogorov(a, b):
    """Return the largest distance between two empirical distributions."""
    values = np.unique(np.concatenate([a, b]))
    x, y = (np.searchsorted(np.sort(one), values, side="right") / len(one) for one in (a, b))
    return float(np.abs(x - y).max())
