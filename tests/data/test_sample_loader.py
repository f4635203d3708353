"""Samples read in worker processes."""

import gc
import multiprocessing
import time

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import _utils

import vitlab
from vitlab.data.image_folder import ImageFolder
from vitlab.data.loading.order import EvalOrder


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for part, n in (("train", 9), ("val", 5)):
        for name in ("cat", "dog"):
            place = tmp_path / "photos" / part / name
            place.mkdir(parents=True)
            for i in range(n):
                pixels = rng.integers(0, 256, (20 + i, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.png")
    return tmp_path / "photos"


def _data(folder, **settings):
    data = ImageFolder(str(folder), img_size=16, **{"batch_size": 4, "num_workers": 0, **settings})
    data.setup("fit")
    return data


def _epochs(data, epochs=(0, 1)):
    loader = data.train_dataloader()
    batches = []
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        batches += list(data.iterate_batches(loader))
    return batches


def _equal(first, second):
    return len(first) == len(second) and all(
        torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True)
    )


LISTED = [
    "crop-flip", "TrivialAugmentWide", "augmix-m5-w2", "rotate90", "rand-m9-mstd0.5-inc1", "3-augment",
    {"class_path": "ColorJitter", "init_args": {"brightness": 0.4}},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("augment", ["crop-flip", LISTED])
def test_batches_do_not_depend_on_the_number_of_workers(folder, augment):
    settings = {"augment": augment, "random_erasing": 0.5, "mixup": 0.2, "cutmix": 1.0}
    alone, one, two = (_epochs(_data(folder, num_workers=n, **settings)) for n in (0, 1, 2))
    assert _equal(alone, one) and _equal(alone, two)
    assert not torch.equal(alone[0][0], alone[3][0])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_after_a_resume_are_those_that_were_left(folder, num_workers):
    whole = _epochs(_data(folder, augment="crop-flip"))
    data = _data(folder, augment="crop-flip", num_workers=num_workers)
    loader = data.train_dataloader()
    loader.load_state_dict({"epoch": 1, "batches": 1})
    loader.sampler.set_epoch(1)
    assert _equal(list(data.iterate_batches(loader)), whole[-2:])


def test_policies_leave_the_global_generators_alone(folder):
    import random

    data = _data(folder, augment="rand-m9-mstd0.5-inc1", mixup=0.2)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(99)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    _epochs(data)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_file_that_vanishes_after_the_scan_is_an_error_with_its_path(folder, num_workers):
    data = _data(folder, num_workers=num_workers)
    gone = folder / data.splits["train"].files[3]
    gone.unlink()
    with pytest.raises(ValueError, match=str(gone)):
        _epochs(data)


def test_a_file_that_vanishes_is_replaced_in_training_and_counted_where_that_is_allowed(folder):
    data = _data(folder, max_unreadable=1)
    gone = folder / data.splits["train"].files[3]
    gone.unlink()
    batches = _epochs(data, epochs=range(4))
    assert all(len(x) == 4 for x, _ in batches)
    assert list(data.unreadable) == [str(gone)] and data.fingerprint()["unreadable"] == data.unreadable


def test_the_stand_in_of_a_vanished_file_is_not_mixed_with_itself(folder):
    data = _data(folder, max_unreadable=1, batch_size=6, repeats=2, mixup=1.0)
    (folder / data.splits["train"].files[3]).unlink()
    for epoch in range(6):
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        for _ in data.iterate_batches(loader):
            assert len(data.step.indices) == 6 and (data.step.indices[::2] != data.step.indices[1::2]).all()
    assert data.unreadable


def _by_processes(data, world, epoch):
    """Return the images, classes and samples of an epoch's batches, joined over processes."""
    parts = []
    for rank in range(world):
        data._place = lambda rank=rank: (rank, world)
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        mixed = [(*data.on_after_batch_transfer(batch, 0), data.step.indices) for batch in loader]
        rows = np.r_[np.arange(0, len(mixed[0][2]), 2), np.arange(1, len(mixed[0][2]), 2)[::-1]].argsort()
        parts.append([(images[rows], targets[rows], indices) for images, targets, indices in mixed])
    return [
        [torch.cat([torch.as_tensor(part[k]) for part in step]) for k in range(3)] for step in zip(*parts, strict=True)
    ]


def test_batches_with_files_that_vanished_are_the_same_for_any_number_of_processes(folder):
    settings = {"batch_size": 8, "augment": "crop-flip", "mixup": 0.2, "max_unreadable": 4}
    whole = _by_processes(_data(folder, **settings), 1, 0)
    data = _data(folder, **settings)
    gone = whole[0][2][torch.tensor([1, 6])].tolist()
    for index in gone:
        (folder / data.splits["train"].files[index]).unlink()
    one, two, four = (_by_processes(data, world, 0) for world in (1, 2, 4))
    assert _equal(one, two) and _equal(one, four)
    others = [x for x in range(8) if x not in (0, 1, 6, 7)]  # neither replaced nor mixed with what was
    assert torch.equal(one[0][2][others], whole[0][2][others])
    assert not set(gone) & set(torch.cat([step[2] for step in one]).tolist())


def test_a_vanished_file_without_a_stand_in_stops_the_training(folder):
    data = _data(folder, max_unreadable=100)
    for file in data.splits["train"].files:
        (folder / file).unlink()
    with pytest.raises(ValueError, match="nor can others be read that could replace it"):
        _epochs(data)


def test_a_file_that_vanishes_is_left_out_of_evaluation(folder):
    data = _data(folder, max_unreadable=1)
    (folder / data.splits["val"].files[0]).unlink()
    n = len(data.splits["val"])
    assert sum(len(x) for x, _ in data.iterate_batches(data.val_dataloader())) == n - 1


@pytest.mark.parametrize("n", [4, 5])
def test_evaluation_on_three_processes_counts_every_sample_once(folder, n):
    data = _data(folder, num_workers=0, subset=1.0)
    data.build("test")
    assert len(data.splits["test"]) == 10
    labels = []
    for rank in range(3):
        order = EvalOrder(10, n, rank, 3)
        labels += [y for _, y, _ in data._loader("test", order)]
    assert sorted(torch.cat(labels).tolist()) == [0] * 5 + [1] * 5


def test_workers_survive_an_epoch_that_was_left_early(folder):
    whole = _epochs(_data(folder, augment="crop-flip"))
    data = _data(folder, augment="crop-flip", num_workers=2)
    loader = data.train_dataloader()
    next(iter(loader))
    loader.sampler.set_epoch(1)
    assert _equal(list(data.iterate_batches(loader)), whole[-len(loader) :])


@pytest.mark.slow
def test_workers_end_with_the_training_that_they_read_for(folder, here):
    data = ImageFolder(str(folder), img_size=16, batch_size=4, num_workers=1)
    task = vitlab.Classifier(patch_size=8, embed_dim=8, depth=1, num_heads=1)
    short = {"trainer.max_epochs": 1, "trainer.limit_train_batches": 1, "trainer.logger": False}
    vitlab.fit(None, short, model=task, data=data, quiet=True)
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_workers_of_a_loader_that_is_garbage_end_at_once(folder, monkeypatch):
    for module in (_utils, _utils.worker):  # how long torch waits for each, and how often a worker looks up: 5 s
        monkeypatch.setattr(module, "MP_STATUS_CHECK_INTERVAL", 60.0)

    def read():
        loader = _data(folder, num_workers=1).train_dataloader()
        next(iter(loader))
        iterator = loader.workers._iterator
        loader.itself, iterator.itself = loader, iterator  # in a circle, as with a trainer

    gc.collect()
    read()
    start = time.monotonic()
    gc.collect()
    assert time.monotonic() - start < 30
