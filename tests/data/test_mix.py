"""Erasing, mixup and cutmix by the batch."""

import math

import numpy as np
import pytest
import torch

from vitlab.data.known import FakeData
from vitlab.data.loading.mix import Mix
from vitlab.data.loading.order import Step, TrainOrder
from vitlab.data.loading.streams import ERASE, stream, uniforms


def _batch(n=8, size=12):
    images = torch.arange(n).float().view(n, 1, 1, 1).expand(n, 3, size, size).clone()
    return images, torch.arange(n), Step(np.arange(n), np.arange(n, dtype=np.uint64) + 100, 7)


def test_mixup_mixes_neighbors_and_their_targets_by_the_same_weight():
    images, targets = Mix(1.0, 0.0, 0.0, 8)(*_batch())
    assert targets.shape == (8, 8) and torch.allclose(targets.sum(1), torch.ones(8))
    for image, target in zip(images, targets, strict=True):
        first, second = (target > 0).nonzero().flatten().tolist()
        assert first % 2 == 0 and second == first + 1
        assert torch.allclose(image, (target * torch.arange(8)).sum().expand_as(image), atol=1e-5)


def test_cutmix_pastes_the_share_that_the_target_says():
    for seed in range(5):
        images, labels, step = _batch()
        images, targets = Mix(0.0, 1.0, 0.0, 8)(images, labels, step._replace(mix_seed=seed))
        for image, target in zip(images, targets, strict=True):
            shares = torch.stack([(image == k).float().mean() for k in range(8)])
            assert torch.allclose(shares, target, atol=1e-5)


def test_the_mixture_depends_on_the_step_alone():
    images, labels, step = _batch()
    same = [Mix(0.8, 1.0, 0.0, 8)(images.clone(), labels, step)[1] for _ in range(2)]
    other = Mix(0.8, 1.0, 0.0, 8)(images.clone(), labels, step._replace(mix_seed=8))[1]
    assert torch.equal(*same) and not torch.equal(same[0], other)


def test_erasing_fills_one_rectangle_with_noise_in_about_the_share_asked_for():
    n, size = 400, 16
    step = Step(np.arange(n), np.arange(n, dtype=np.uint64), None)
    images, _ = Mix(0.0, 0.0, 0.25, 8)(torch.full((n, 3, size, size), 9.0), torch.zeros(n), step)
    erased = (images != 9).all(dim=1)
    share = erased.flatten(1).any(1).float().mean()
    assert 0.18 < share < 0.32
    for mask in erased[erased.flatten(1).any(1)]:
        rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
        assert mask.sum() == len(rows) * len(columns)  # a full rectangle ...
        assert rows[-1] - rows[0] + 1 == len(rows) and columns[-1] - columns[0] + 1 == len(columns)  # ... in one piece
        assert 0.01 < mask.float().mean() < 0.4
    noise = images.permute(0, 2, 3, 1)[erased]
    assert abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.05


def test_each_rectangle_is_the_first_of_ten_that_fits():
    """Zhong et al. 2017: 2 to 33 % of the area, sides in proportions from .3 to 1 / .3, and where they have room."""
    n, height, width = 60, 5, 17
    seeds = np.arange(n, dtype=np.uint64)
    step, mix = Step(seeds, seeds, None), Mix(0.0, 0.0, 0.7, 8)
    images, again = (mix(torch.full((n, 2, height, width), 9.0), torch.zeros(n), step)[0] for _ in range(2))
    assert torch.equal(images, again)  # noise is the sample's, too
    attempts = []
    for image, u in zip(images, uniforms(stream(seeds.astype(np.int64), ERASE), 23).tolist(), strict=True):
        expected = torch.zeros(height, width, dtype=torch.bool)
        for attempt in range(10):
            area = height * width * (0.02 + (1 / 3 - 0.02) * u[attempt])
            aspect = math.exp(math.log(0.3) + u[10 + attempt] * (math.log(1 / 0.3) - math.log(0.3)))
            h, w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
            if h < height and w < width:
                top, left = math.floor(u[20] * (height - h + 1)), math.floor(u[21] * (width - w + 1))
                expected[top : top + h, left : left + w] = u[22] < 0.7
                attempts.append(attempt)
                break
        assert ((image != 9) == expected).all()
    assert {0, 1, 2} <= {*attempts}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("options", [{"batch_size": 16, "random_erasing": 0.5}, {"batch_size": 32, "repeats": 3}])
def test_images_and_their_partners_are_the_same_on_any_number_of_processes(world, options):
    data = FakeData(n=200, native_size=8, augment="crop-flip", mixup=0.8, cutmix=1.0, **options)
    data.setup("fit")

    def steps(rank, world):
        order = TrainOrder(len(data.splits["train"]), data.batch_size, 0, rank, world, options.get("repeats", 1))
        return [(images.clone(), targets) for images, targets in data.iterate_batches(data._loader("train", order))]

    alone, ranks = steps(0, 1), [steps(rank, world) for rank in range(world)]
    assert len(alone) > 1
    for (images, targets), *parts in zip(alone, *ranks, strict=True):
        others, their_targets = (torch.cat(pair) for pair in zip(*parts, strict=True))
        keys, their_keys = (x.flatten(1).sum(1).argsort() for x in (images, others))
        assert torch.equal(images[keys], others[their_keys])
        assert torch.equal(targets[keys], their_targets[their_keys])


def test_an_odd_number_of_images_cannot_be_mixed():
    data = FakeData(batch_size=9, mixup=0.2)
    with pytest.raises(ValueError, match="must be even for each process, got batch_size=9 and 1 processes"):
        data.train_dataloader()


def test_more_copies_than_half_a_batch_cannot_be_mixed():
    FakeData(batch_size=4, repeats=2, cutmix=1.0).train_dataloader()
    FakeData(batch_size=4, repeats=3).train_dataloader()
    with pytest.raises(ValueError, match=r"`data.repeats` must be at most half .* got repeats=3 and batch_size=4"):
        FakeData(batch_size=4, repeats=3, cutmix=1.0).train_dataloader()


def test_evaluation_is_never_mixed():
    data = FakeData(batch_size=9, mixup=0.2, random_erasing=1.0)
    data.setup("test")
    plain = FakeData(batch_size=9)
    plain.setup("test")
    for (x, y), (x_plain, y_plain) in zip(
        data.iterate_batches(data.test_dataloader()), plain.iterate_batches(plain.test_dataloader()), strict=True
    ):
        assert torch.equal(x, x_plain) and torch.equal(y, y_plain)


@pytest.mark.parametrize("name, value", [("mixup", -1.0), ("cutmix", -0.1), ("random_erasing", 1.1)])
def test_a_wrong_option_of_mixing_is_refused_with_its_value(name, value):
    with pytest.raises(ValueError, match=rf"`data\.{name}` must .* got {value}"):
        FakeData(**{name: value})
