"""The in-memory loader against one image at a time."""

import numpy as np
import pytest
import torch

from vitlab.data.files.sets import TensorImages
from vitlab.data.loading.order import EvalOrder, TrainOrder
from vitlab.data.loading.sample_loader import SampleLoader
from vitlab.data.loading.tensor_loader import TensorLoader
from vitlab.data.loading.transforms import ShiftFlip


def _set(n=40, channels=3, size=(9, 7)):
    rng = torch.Generator().manual_seed(0)
    return TensorImages(torch.randint(256, (n, channels, *size), generator=rng, dtype=torch.uint8), torch.arange(n))


def _refuse(reason):
    raise AssertionError(reason)


def _loaders(order, channels=3, pad=2):
    data = _set(channels=channels)
    fast = TensorLoader(data.images, data.labels, order, (9, 7), pad=pad)
    return fast, SampleLoader(data, order, ShiftFlip(pad), num_workers=0, on_unreadable=_refuse)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("epoch", [0, 3])
def test_a_chunk_is_augmented_like_its_images_one_by_one(monkeypatch, channels, epoch):
    monkeypatch.setattr("vitlab.data.loading.tensor_loader._CHUNK", 13)
    fast, slow = _loaders(TrainOrder(40, 6, seed=1), channels)
    fast.sampler.set_epoch(epoch)
    pairs = list(zip(fast, slow, strict=True))
    assert len(pairs) == 6
    for (x, y, step), (x_slow, y_slow, step_slow) in pairs:
        assert torch.equal(x, x_slow) and torch.equal(y, y_slow) and step.mix_seed == step_slow.mix_seed


def test_cutting_all_windows_at_once_equals_cutting_one_by_one():  # the way of a GPU
    fast, _ = _loaders(TrainOrder(40, 6, seed=1))
    step = next(fast.sampler.steps(0))
    places = np.array([0, 1, 4, 2, 3, 0]), np.array([4, 0, 2, 1, 3, 3]), np.array([1, 0, 0, 1, 1, 0], dtype=bool)
    assert torch.equal(fast._gather(step.indices, *places), fast._cut_one_by_one(step.indices, *places))


def test_every_shift_and_both_sides_occur():
    data = TensorImages(torch.zeros(4000, 1, 3, 3, dtype=torch.uint8), torch.zeros(4000, dtype=torch.int64))
    data.images[:, 0, 1, 1], data.images[:, 0, 1, 2] = 200, 100  # a bright pixel and where right is
    loader = TensorLoader(data.images, data.labels, TrainOrder(4000, 4000, seed=0), (3, 3), pad=1)
    ((images, _, _),) = loader
    kinds, counts = images.flatten(1).unique(dim=0, return_counts=True)
    assert len(kinds) == 18  # 9 shifts, 2 sides
    assert counts.min() > 150 and counts.max() < 300  # 222 expected


def test_evaluation_cuts_out_the_center():
    data = _set()
    batches = list(TensorLoader(data.images, data.labels, EvalOrder(40, 16), (5, 3)))
    assert torch.equal(torch.cat([x for x, *_ in batches]), data.images[:, :, 2:7, 2:5])
    assert torch.cat([y for _, y, _ in batches]).tolist() == list(range(40))


@pytest.mark.parametrize("loader", [0, 1])
def test_a_loaded_state_applies_only_to_its_epoch(loader):
    whole = _loaders(TrainOrder(40, 6, seed=1))[loader]
    whole.sampler.set_epoch(2)
    expected = [x for x, *_ in whole]
    rest = _loaders(TrainOrder(40, 6, seed=1))[loader]
    rest.load_state_dict({"epoch": 2, "batches": 4})
    rest.sampler.set_epoch(2)
    got = [x for x, *_ in rest]
    assert len(got) == 2 and all(torch.equal(a, b) for a, b in zip(got, expected[4:], strict=True))
    assert rest.state_dict() == {"epoch": 2, "batches": 6}
    rest.load_state_dict({"epoch": 2, "batches": 4})
    iter(rest)
    assert rest.state_dict() == {"epoch": 2, "batches": 4}  # saved again before the first batch
    rest.sampler.set_epoch(3)
    assert len(list(rest)) == 6


def test_the_global_generator_is_left_alone():
    for loader in _loaders(TrainOrder(40, 6, seed=1)):
        before = torch.get_rng_state()
        list(loader)
        assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("loader", [0, 1])
def test_an_epoch_that_was_left_early_does_not_disturb_the_next(loader):
    unread, read = (_loaders(TrainOrder(40, 6, seed=1))[loader] for _ in range(2))
    next(iter(read))
    for data in (unread, read):
        data.sampler.set_epoch(1)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(unread, read, strict=True))


@pytest.mark.gpu
def test_batches_on_a_gpu_are_those_of_the_cpu():
    data = _set()
    on_cpu, on_gpu = (
        TensorLoader(data.images.to(device), data.labels.to(device), TrainOrder(40, 6, 1), (9, 7), 2)
        for device in ("cpu", "cuda")
    )
    for (x, y, _), (x_gpu, y_gpu, _) in zip(on_cpu, on_gpu, strict=True):
        assert x_gpu.is_cuda and torch.equal(x, x_gpu.cpu()) and torch.equal(y, y_gpu.cpu())
