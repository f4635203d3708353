"""Images that are the same, or nearly."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from vitlab.data.files.decode import Decoding
from vitlab.data.files.scan import FACTS, look_of
from vitlab.data.files.sets import FileImages, TensorImages
from vitlab.data.files.twins import near, near_duplicates, twins


def _photo(rng, size=160):
    coarse = Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8))
    return coarse.resize((size, size), Image.Resampling.BICUBIC)


def _encoded(image, **settings):
    file = io.BytesIO()
    image.save(file, **settings)
    return Image.open(file).convert("RGB")


CHANGES = {
    "encoded anew": lambda image: _encoded(image, format="JPEG", quality=60),
    "smaller": lambda image: image.resize((90, 90)),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.1),
    "gray": lambda image: image.convert("L").convert("RGB"),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_near_duplicates_are_found_after_small_changes_without_false_pairs(change):
    rng = np.random.default_rng(0)
    photos = [_photo(rng) for _ in range(300)]
    changed = [CHANGES[change](photo) for photo in photos[:40]]
    first, second = (np.array([look_of(image) for image in images]) for images in (photos, changed))
    assert near(first, second) == [(i, i) for i in range(40)]


def _set(photos):
    facts = np.zeros(len(photos), FACTS)
    facts["digest"] = [[id(photo), 0] for photo in photos]
    facts["look"], facts["size"] = [look_of(x) for x in photos], [(x.height, x.width) for x in photos]
    files = [str(i) for i in range(len(photos))]
    return FileImages(None, files, torch.zeros(len(photos), dtype=torch.int64), Decoding(), facts)


def test_images_too_small_for_a_hash_are_no_near_duplicates_and_others_keep_their_names():
    rng = np.random.default_rng(0)
    tiny = [Image.fromarray(rng.integers(0, 2, (2, 2), dtype=np.uint8) * 255).resize((8, 8), 0) for _ in range(20)]
    photo = _photo(rng)
    pairs = near_duplicates({"train": _set([*tiny, photo]), "test": _set([*tiny[10:], photo.resize((90, 90))])})
    assert pairs == [["train: 20", "test: 10"]]


def test_images_without_structure_are_not_taken_for_each_other():
    looks = np.array([look_of(Image.new("RGB", (50, 50), (i, i, i))) for i in range(20)])
    assert near(looks, looks) == []


def test_near_duplicates_are_those_of_comparing_all_pairs():
    rng = np.random.default_rng(1)
    first = rng.integers(0, 2**63, (200, 4)).astype(np.uint64)
    second = first[:50].copy()
    for row in second:
        for bit in rng.choice(256, rng.integers(0, 20), replace=False):
            row[bit // 64] ^= np.uint64(1) << np.uint64(bit % 64)
    bits = np.bitwise_count(first[:, None] ^ second[None]).sum(2)
    assert near(first, second) == sorted(zip(*(x.tolist() for x in np.nonzero(bits <= 12)), strict=True))


def test_a_training_image_in_the_test_split_is_listed_before_many_in_the_validation_split():
    images = torch.arange(40, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)
    labels = torch.zeros(40, dtype=torch.int64)
    train, val, test = (TensorImages(images[a:b], labels[a:b]) for a, b in ((0, 31), (0, 30), (30, 40)))
    found = twins({"train": train, "val": val, "test": test})
    assert found["duplicates"] == 31 and len(found["first_duplicates"]) == 20
    assert found["first_duplicates"][0] == ["train: number 30", "test: number 0"]
    assert found["first_duplicates"][1:3] == [[f"train: number {i}", f"val: number {i}"] for i in (0, 1)]
