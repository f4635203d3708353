"""Which samples each process takes at each step."""

import numpy as np
import pytest
import torch

from vitlab.data.loading.order import Draw, EvalOrder, TrainOrder
from vitlab.data.loading.streams import stream, uniforms


def _epoch(order, epoch=0, start=0):
    order.set_epoch(epoch)
    return list(order.steps(start))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_step_has_the_same_samples_on_any_number_of_processes(world):
    alone = _epoch(TrainOrder(50, 8, seed=3), epoch=2)
    ranks = [_epoch(TrainOrder(50, 8, seed=3, rank=rank, world=world), epoch=2) for rank in range(world)]
    assert len(alone) == 6
    for step, parts in zip(alone, zip(*ranks, strict=True), strict=True):
        assert (np.concatenate([part.indices for part in parts]) == step.indices).all()
        assert (np.concatenate([part.seeds for part in parts]) == step.seeds).all()
        assert {part.mix_seed for part in parts} == {step.mix_seed}


def test_an_epoch_shows_no_sample_twice_and_the_next_one_is_different():
    order = TrainOrder(50, 8, seed=0)
    first, second = (np.concatenate([s.indices for s in _epoch(order, epoch)]) for epoch in (0, 1))
    assert len(set(first)) == 48 and (first != second).any()


def test_a_sample_has_another_seed_in_every_epoch():
    order = TrainOrder(50, 50, seed=0)
    seeds = [{i: s for step in _epoch(order, e) for i, s in zip(step.indices, step.seeds, strict=True)} for e in (0, 1)]
    assert all(seeds[0][i] != seeds[1][i] for i in range(50))


def test_the_order_depends_on_seed_and_epoch_alone():
    order = TrainOrder(50, 8, seed=0)
    _epoch(order, 5)
    again, fresh = _epoch(order, 1), _epoch(TrainOrder(50, 8, seed=0), 1)
    other = _epoch(TrainOrder(50, 8, seed=1), 1)
    assert all((a.indices == b.indices).all() and a.mix_seed == b.mix_seed for a, b in zip(again, fresh, strict=True))
    assert any((a.indices != b.indices).any() for a, b in zip(again, other, strict=True))


def test_starting_later_leaves_out_the_steps_before():
    order = TrainOrder(50, 8, seed=0)
    assert (_epoch(order, 1, start=4)[0].indices == _epoch(order, 1)[4].indices).all()


def test_repeated_samples_stand_in_a_row_with_seeds_of_their_own():
    steps = _epoch(TrainOrder(48, 8, seed=0, repeats=3))
    indices, seeds = np.concatenate([s.indices for s in steps]), np.concatenate([s.seeds for s in steps])
    assert len(indices) == 48 and len(set(indices)) == 16 and len(set(seeds)) == 48
    assert (indices.reshape(16, 3) == indices[::3, None]).all()


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 129])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 4, 8, 64])
def test_evaluation_shows_every_sample_once_in_equally_many_batches(n, world, batch_size):
    orders = [EvalOrder(n, batch_size, rank, world) for rank in range(world)]
    steps = [list(order.steps()) for order in orders]
    seen = np.concatenate([step.indices for rank in steps for step in rank])
    assert sorted(seen) == list(range(n))
    assert [len(rank) for rank in steps] == [len(order) for order in orders]
    assert all(0 < len(step.indices) <= max(batch_size // world, 1) for rank in steps for step in rank)
    if min(n // world, batch_size // world) > 1:
        assert len({len(order) for order in orders}) == 1


def test_a_batch_that_processes_cannot_share_is_refused():
    with pytest.raises(ValueError, match="batch_size=9 and 2 processes"):
        TrainOrder(50, 9, seed=0, world=2)


def test_a_batch_larger_than_the_set_is_refused():
    with pytest.raises(ValueError, match="batch_size=64 and 50 images"):
        TrainOrder(50, 64, seed=0)


def test_draws_are_uniform_and_independent_of_each_other():
    draws = uniforms(stream(0, np.arange(20000)), 3)
    assert draws.min() >= 0 and draws.max() < 1
    assert abs(draws.mean(0) - 0.5).max() < 0.01 and abs(draws.var(0) - 1 / 12).max() < 0.002
    assert abs(np.corrcoef(draws.T) - np.eye(3)).max() < 0.03
    assert abs(np.corrcoef(draws[1:, 0], draws[:-1, 0])[0, 1]) < 0.03


@pytest.mark.parametrize("sampling, power", [("balanced", 0.0), ("sqrt", 0.5)])
def test_classes_are_drawn_as_often_as_asked_and_their_samples_evenly(sampling, power):
    labels = torch.tensor([0] * 64 + [1] * 25 + [3] * 4)
    draw = Draw(labels, sampling)
    order = TrainOrder(draw, 1, seed=0, repeats=1)
    wanted = np.array([64, 25, 4]) ** power
    wanted = 93 * wanted / wanted.sum()
    counts = []
    for epoch in range(8):
        steps = _epoch(order, epoch)
        indices, seeds = (np.concatenate([s[i] for s in steps]) for i in (0, 1))
        counts.append(np.bincount(labels.numpy()[indices], minlength=4)[[0, 1, 3]])
        often = [np.bincount(indices, minlength=93)[labels.numpy() == k] for k in (0, 1, 3)]
        assert all(n.max() - n.min() <= 1 for n in often) and len(indices) == 93
        assert len(set(seeds)) == 93  # what is shown twice is augmented anew
    assert (np.abs(np.array(counts) - wanted) <= 1).all() and np.allclose(np.mean(counts, 0), wanted, atol=0.6)


def test_drawn_classes_keep_their_order_on_any_number_of_processes_and_from_any_step():
    draw = Draw(torch.arange(50) // 40, "balanced")
    alone = _epoch(TrainOrder(draw, 8, 3, repeats=2), 2)
    ranks = [_epoch(TrainOrder(draw, 8, 3, rank, 2, repeats=2), 2, start=4) for rank in range(2)]
    for step, parts in zip(alone[4:], zip(*ranks, strict=True), strict=True):
        assert (np.concatenate([part.indices for part in parts]) == step.indices).all()
        assert (np.concatenate([part.seeds for part in parts]) == step.seeds).all()
    other = _epoch(TrainOrder(draw, 8, 3, repeats=2), 3)
    assert any((a.indices != b.indices).any() for a, b in zip(alone, other, strict=True))
