"""What happens to one image before it joins a batch."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import v2

from vitlab.data.loading.pipeline import Pipeline
from vitlab.data.loading.streams import uniforms
from vitlab.data.loading.transforms import Augmented, CenterCrop, RandomCropFlip, step_of, to_image, to_tensor


def _ramp(width=60, height=40):
    x, y = np.meshgrid(np.arange(width) * 4, np.arange(height) * 4)
    return Image.fromarray(np.stack([x, y, 0 * x], axis=2).astype(np.uint8))


@pytest.mark.parametrize("size", [(20, 20), (30, 20), (10, 40)])
@pytest.mark.parametrize("mode", ["center", "box"])
def test_the_center_crop_keeps_center_and_proportions(size, mode):
    image = CenterCrop(size, 0.8, "bilinear", mode)(_ramp())
    pixels = np.asarray(image).astype(float)
    scale = min(40 / size[0], 60 / size[1]) * 0.8
    assert pixels.shape == (*size, 3)
    off = 1.5 + (2 * scale if mode == "center" else 0)  # it cuts whole pixels, and so half a pixel off the center
    assert abs(pixels[..., 0].mean() - 118) < off and abs(pixels[..., 1].mean() - 78) < off
    assert np.diff(pixels[size[0] // 2, :, 0]).mean() == pytest.approx(4 * scale, rel=0.1)
    assert np.diff(pixels[:, size[1] // 2, 1]).mean() == pytest.approx(4 * scale, rel=0.1)


def test_the_box_crop_equals_cutting_and_resizing():
    cut = _ramp().crop((10, 0, 50, 40)).resize((16, 16), Image.Resampling.BICUBIC)
    assert CenterCrop((16, 16), 1.0, "bicubic", "box")(_ramp()) == cut


def test_a_border_has_the_mean_color_of_the_data():
    mean = (0.485, 0.456, 0.406)
    for image, color, wanted in (
        (_ramp(), mean, (124, 116, 104)),
        (_ramp(), mean[:1], (124, 124, 124)),
        (_ramp().convert("L"), mean, 124),
        (_ramp().convert("L"), mean[1:2], 116),
    ):
        framed = CenterCrop((30, 30), 1.0, "bilinear", "border", color)(image)
        assert framed.size == (30, 30) and framed.getpixel((7, 0)) == framed.getpixel((22, 29)) == wanted
        assert framed.crop((0, 5, 30, 25)) == image.resize((30, 20), Image.Resampling.BILINEAR)


def test_resized_pictures_stay_in_their_range_and_arrays_overshoot():
    pipeline, facts = Pipeline((3, 5), (8, 12), "none", None, None, "bicubic"), ((0.5,), (0.25,))
    pictures = torch.randint(0, 2, (2, 1, 3, 5), dtype=torch.uint8) * 255
    resized = F.interpolate(pictures.float(), (8, 12), mode="bicubic", antialias=True)
    assert resized.max() > 256 and resized.min() < -1
    torch.testing.assert_close(pipeline.normalize(pictures, facts), (resized.clamp(0, 255) / 255 - 0.5) / 0.25)
    torch.testing.assert_close(pipeline.normalize(pictures.float(), facts), (resized - 0.5) / 0.25)


@pytest.mark.parametrize("mode", ["center", "border", "box"])
@pytest.mark.parametrize("size", [(40, 60), (20, 30), (30, 30), (60, 20)])
def test_where_images_have_one_size_others_are_seen_whole_as_the_record_says(mode, size):
    pipeline = Pipeline(size, size, "none", None, None, "bicubic", crop_mode=mode)
    seen = pipeline.eval_image(_ramp(), ((0.0,) * 3, (1.0,) * 3))
    assert pipeline.protocol()["crop"] == "none"
    assert torch.allclose(255 * seen, to_tensor(_ramp().resize(size[::-1], Image.Resampling.BICUBIC)).float())
    if size[0] / size[1] == 40 / 60:  # as before
        assert CenterCrop(size, 1.0, "bicubic", mode)(_ramp()) == pipeline.center()(_ramp())


@pytest.mark.parametrize("size", [(16, 16), (8, 24)])
def test_random_crops_keep_between_the_smallest_share_and_all_of_the_area(size):
    crop = RandomCropFlip(size, 0.3, "bilinear")
    shares, mirrored, lefts = [], 0, []
    for seed in range(300):
        pixels = np.asarray(crop(_ramp(), seed)).astype(float)
        width = abs(pixels[:, -1, 0] - pixels[:, 0, 0]).mean() / 4 * size[1] / (size[1] - 1)
        height = (pixels[-1, :, 1] - pixels[0, :, 1]).mean() / 4 * size[0] / (size[0] - 1)
        shares.append(width * height / 2400)
        mirrored += pixels[0, 0, 0] > pixels[0, -1, 0]
        lefts.append(pixels[0, :, 0].min())
    assert min(shares) > 0.2 and max(shares) < 1.1
    assert max(shares) - min(shares) > 0.15 and 110 < mirrored < 190 and np.std(lefts) > 10


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_random_crop_equals_cutting_and_resizing_with_pillow(mode, interpolation):
    crop = RandomCropFlip((16, 24), 0.1, interpolation)
    pixels = np.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).convert(mode)
    for seed in range(20):
        draws = uniforms(np.array([seed], dtype=np.uint64), 23)[0]
        top, left, height, width = crop.box((50, 40), draws)
        part = image.crop((left, top, left + width, top + height))
        expected = part.resize((24, 16), getattr(Image.Resampling, interpolation.upper()))
        expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draws[22] < 0.5 else expected
        found = crop(image, seed)
        assert found.mode == mode and 0 <= top <= 50 - height and 0 <= left <= 40 - width
        assert np.abs(np.asarray(found).astype(int) - np.asarray(expected)).max() <= 1


def test_a_seed_gives_one_image_and_another_seed_another():
    for transform in (RandomCropFlip((8, 8), 0.1, "bicubic"), _policy("rand-m9-mstd0.5-inc1"), _policy("3-augment")):
        first, again, other = (np.asarray(transform(_ramp(), seed)) for seed in (2**63 + 5, 2**63 + 5, 6))
        assert (first == again).all() and (first != other).any()


def _policy(name):
    return Augmented(RandomCropFlip((8, 8), 0.1, "bicubic"), [name], (0.5, 0.5, 0.5))


@pytest.mark.parametrize("name", ["rand-m10-mstd0.5-inc1", "3-augment"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_policies_keep_size_and_mode_at_every_strength(name, mode):
    transform = Augmented(lambda image, seed: image, [name], (0.5,) if mode == "L" else (0.5, 0.4, 0.3))
    for seed in range(100):
        image = transform(_ramp(12, 10).convert(mode), seed)
        assert image.mode == mode and image.size == (12, 10)


@pytest.mark.parametrize("name", ["rand-m10-inc1", "original-mstd0.5", "v0", "augmix-m3-mstd1"])
def test_posterize_never_leaves_a_black_image(name):
    policy, ops = step_of(name, (0.5,)), []
    for op in getattr(policy, "ops", None) or [op for pair in policy.policy for op in pair]:
        if op.name.startswith("Posterize"):
            op.prob, op.magnitude_std = 1.0, 0
            ops.append(op)
    assert ops
    for op in ops:
        for op.magnitude in range(11):
            assert np.asarray(op(_ramp())).max() >= 128


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_tensor_and_image_are_the_same(mode):
    image = _ramp().convert(mode)
    assert to_tensor(image).shape == (len(mode), 40, 60)
    assert to_image(to_tensor(image)) == image


class Inverted(torch.nn.Module):
    def forward(self, image):
        return 255 - v2.functional.pil_to_tensor(image)


LISTS = [
    ["TrivialAugmentWide"], ["AutoAugment"], ["original"], ["v0-mstd0.5"], ["AugMix"], ["augmix-m5-w2"],
    ["RandomVerticalFlip"], ["rotate90"], [{"class_path": "ColorJitter", "init_args": {"hue": 0.5, "brightness": 0.5}}],
]  # fmt: skip


@pytest.mark.parametrize("steps", LISTS, ids=str)
def test_augmentation_lists_depend_only_on_the_seed_and_disturb_no_other_random_numbers(steps):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    transform = Augmented(None, steps, (0.5, 0.5, 0.5))
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    made = [np.asarray(transform(image, seed)) for seed in range(12)]
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    for seed in (11, 3):
        assert (np.asarray(Augmented(None, steps, (0.5, 0.5, 0.5))(image, seed)) == made[seed]).all()
    assert len({x.tobytes() for x in made}) > 1


def test_augmentation_lists_decide_about_shifts_and_take_custom_classes():
    own = f"{__name__}.Inverted"
    still = Pipeline(None, (12, 10), [own], None, None, "bilinear").transform(True, (0.5,))
    plain = Pipeline(None, (12, 10), "none", None, None, "bilinear").transform(True, (0.5,))
    assert (np.asarray(still(_ramp(), 3)) == 255 - np.asarray(plain(_ramp(), 3))).all()
    moved = Pipeline(None, (12, 10), ["crop-flip", own], None, None, "bilinear")
    crop = Pipeline(None, (12, 10), "crop-flip", None, None, "bilinear").transform(True, (0.5,))
    assert (np.asarray(moved.transform(True, (0.5,))(_ramp(), 3)) == 255 - np.asarray(crop(_ramp(), 3))).all()
    assert (np.asarray(moved.transform(False, (0.5,))(_ramp(), 3)) == np.asarray(plain(_ramp(), 3))).all()
    assert f"of the area, {own}, evaluated" in str(moved)


def test_shifts_go_by_the_longer_side_of_stored_images_and_timms_by_the_shorter():
    whole = Pipeline((32, 64), (32, 64), "crop-flip", None, None, "bilinear")
    assert whole.pad == 8 and "shifted by up to 8 pixels" in str(whole)
    (step,) = Pipeline(None, (32, 64), ["rand-m9"], None, None, "bilinear").transform(True, (0.5,)).steps
    assert {op.hparams["translate_const"] for op in step.ops} == {14}  # .45 of 32


@pytest.mark.parametrize(
    "augment, message",
    [
        (["rotate90"], r"rotate90 must return an image of \(12, 10\), got \(10, 12\)"),
        (["RandomVerticalFlip", "crop-flip"], "has crop-flip only first"),
        (["RandomVerticalFlop"], 'did you mean "RandomVerticalFlip"'),
        ([{"class_path": "ColorJitter", "init_args": {"brightnes": 1}}], "takes no argument `brightnes`"),
        ([{"class_path": "subprocess.Popen", "init_args": {"args": "true"}}], "must be a subclass of module.Module"),
        (["nowhere.Mine"], "is not imported"),
    ],
)
def test_steps_that_cannot_augment_are_refused_at_once(augment, message):
    with pytest.raises(ValueError, match=message):
        Pipeline(None, (12, 10), augment, None, None, "bilinear")
