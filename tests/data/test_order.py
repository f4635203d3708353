"""Which samples each process takes at each step."""

from contextlib import nullcontext
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods
from lightning.pytorch.trainer.states import RunningStage
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
)

from tests.training import QUIET
from vitlab.data import Digits
from vitlab.data.loading.order import Draw, EvalOrder, TrainOrder, spread_copies
from vitlab.data.loading.own_loaders import SameDraws, evaluate_samples_once
from vitlab.data.loading.streams import stream, uniforms


def _epoch(order, epoch=0, start=0):
    order.set_epoch(epoch)
    return list(order.steps(start))


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("samples", [250, Draw(torch.arange(250) // 200, "balanced")], ids=["all", "drawn"])
@pytest.mark.parametrize("start", [0, 4])
def test_every_step_has_the_same_samples_on_any_number_of_processes_and_from_any_step(samples, repeats, start):
    alone, other = (_epoch(TrainOrder(samples, 24, seed=3, repeats=repeats), epoch) for epoch in (2, 3))
    assert len(alone) == 10 and any((a.indices != b.indices).any() for a, b in zip(alone, other, strict=True))
    for world in (1, 2, 3, 4, 6):
        ranks = [_epoch(TrainOrder(samples, 24, 3, rank, world, repeats), 2, start) for rank in range(world)]
        for step, parts in zip(alone[start:], zip(*ranks, strict=True), strict=True):
            assert (np.concatenate([part.indices for part in parts]) == step.indices).all()
            assert (np.concatenate([part.seeds for part in parts]) == step.seeds).all()
            assert {part.mix_seed for part in parts} == {step.mix_seed}


def test_an_epoch_shows_no_sample_twice_and_the_next_one_is_different():
    order = TrainOrder(50, 8, seed=0)
    first, second = (np.concatenate([s.indices for s in _epoch(order, epoch)]) for epoch in (0, 1))
    assert len(set(first)) == 48 and (first != second).any()
    assert len({step.mix_seed for step in _epoch(order)}) == 6


class Seen(L.LightningModule):
    """Notes the samples of each batch, of a training and of its validations."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.checked = torch.nn.Linear(64, 1), [], []

    def training_step(self, batch, batch_idx):
        self.seen.append(self.trainer.datamodule.step)
        return self.layer(batch[0].flatten(1)).square().mean()

    def validation_step(self, batch, batch_idx):
        self.checked.append(self.trainer.datamodule.step.indices.tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("sampling", ["natural", "balanced"])
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled")
def test_batches_to_overfit_are_the_same_in_each_epoch_and_augmented_anew(sampling):
    trainer = L.Trainer(overfit_batches=2, max_epochs=3, **QUIET)
    model = Seen()
    trainer.fit(model, datamodule=Digits(batch_size=8, sampling=sampling))
    first, second, third = ([s.indices.tolist() for s in model.seen[i : i + 2]] for i in (0, 2, 4))
    assert first == second == third and first[0] != first[1]
    assert len({step.seeds[0] for step in model.seen}) == len({step.mix_seed for step in model.seen}) == 6
    assert model.checked[-2:] == model.checked[-4:-2] == [[*range(8)], [*range(8, 16)]]


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


def test_repeated_samples_stand_in_one_batch_with_seeds_of_their_own():
    steps = _epoch(TrainOrder(48, 12, seed=0, repeats=3))
    indices, seeds = np.concatenate([s.indices for s in steps]), np.concatenate([s.seeds for s in steps])
    assert len(indices) == 48 and len(set(indices)) == 16 and len(set(seeds)) == 48
    assert all((np.unique(s.indices, return_counts=True)[1] == 3).all() for s in steps)


@pytest.mark.parametrize("repeats", [2, 3, 4, 5])
def test_copies_of_a_sample_are_never_neighbors_wherever_a_batch_begins(repeats):
    for batch_size in range(2 * repeats, 60):
        for step in _epoch(TrainOrder(batch_size * 5 + 1, batch_size, seed=batch_size, repeats=repeats)):
            pairs = step.indices[: batch_size // 2 * 2].reshape(-1, 2)
            assert (pairs[:, 0] != pairs[:, 1]).all()


def _source(n, batch_size, rank, world, repeats):
    """The batches of timm's sampler in one process, for samples in an order of its own."""
    share, own = batch_size // world, list(RepeatAugSampler(range(n), world, rank, True, repeats, selected_round=0))
    return [own[i : i + share] for i in range(0, len(own) // share * share, share)]


@pytest.mark.parametrize("repeats", [2, 3, 4])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_a_process_sees_as_many_different_samples_as_by_timms_sampler(repeats, world):
    for batch_size in range(8 * world, 20 * world, 4 * world):
        n = 5 * batch_size + 3
        ours = [_epoch(TrainOrder(n, batch_size, 0, rank, world, repeats)) for rank in range(world)]
        theirs = [_source(n, batch_size, rank, world, repeats) for rank in range(world)]
        for step, batches in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
            assert sum(len(set(s.indices)) for s in step) >= sum(len(set(b)) for b in batches)


@pytest.mark.parametrize("copies", [2, 3, 4, 5])
def test_copies_go_to_as_many_processes_but_for_one_sample_in_shares_that_are_no_multiple_of_four(copies):
    """As the documentation says; another order would not continue the runs that were trained in this one."""
    twice = {}
    for share in (2, 3, 4, 6, 8, 13):
        ranks = [_epoch(TrainOrder(9 * copies * share, copies * share, 0, r, copies, copies)) for r in range(copies)]
        twice[share] = max(share - len(set(s.indices)) for steps in ranks for s in steps)
    assert max(twice.values()) <= 1 and twice[4] == twice[8] == 0


def test_three_copies_have_as_many_different_partners_as_with_timm():
    for step in _epoch(TrainOrder(6 * 768, 768, seed=0, repeats=3)):
        partners = {}
        for a, b in step.indices.reshape(-1, 2):
            partners.setdefault(a, set()).add(b)
            partners.setdefault(b, set()).add(a)
        assert np.mean([len(different) for different in partners.values()]) >= 2  # timm: 1 in one process, 1.75 in 8


def spread_slowly(samples):
    """The order of `spread_copies`, one sample after another."""
    kinds, n = list(dict.fromkeys(samples)), len(samples)  # in the order of their first copies
    if len(kinds) == n:
        return list(range(n))
    copies = [samples[:i].count(sample) for i, sample in enumerate(samples)]
    places = [
        (copy * len(kinds) + kinds.index(sample)) / (samples.count(sample) * len(kinds))
        for copy, sample in zip(copies, samples, strict=True)
    ]
    order = sorted(range(n), key=places.__getitem__)
    for i in range(0, n - 3, 4):
        a, b, c, d = order[i : i + 4]
        order[i : i + 4] = [(a, b, c, d), (a, c, b, d), (a, d, b, c)][copies[a] % 3]
    for i in range(0, n - 1, 2):
        own, other = (samples[j] for j in order[i : i + 2])
        others = [j for j in range(0, n - 1, 2) if own not in (samples[order[j]], samples[order[j + 1]])]
        if own == other and others:
            nearest = min(others, key=lambda j: abs(j - i))
            order[i + 1], order[nearest + 1] = order[nearest + 1], order[i + 1]
    return order


def test_copies_stand_as_in_a_slow_version_of_the_order_that_resumed_runs_rely_on():
    rng = np.random.default_rng(0)
    for _ in range(200):
        samples = rng.integers(0, rng.integers(1, 9), rng.integers(1, 26))
        assert spread_copies(samples).tolist() == spread_slowly(samples.tolist())


@pytest.mark.slow
def test_any_samples_that_fill_no_more_than_half_of_a_batch_are_neighbors_of_others():
    rng = np.random.default_rng(0)
    for _ in range(3000):
        samples = rng.integers(0, rng.integers(1, 8), 2 * rng.integers(1, 12))
        order = spread_copies(samples)
        assert sorted(order) == list(range(len(samples)))
        left, right = samples[order].reshape(-1, 2).T
        assert (left == right).sum() == max(0, np.bincount(samples).max() - len(samples) // 2)


def test_a_small_class_drawn_often_is_not_its_own_neighbor():
    order = TrainOrder(Draw(torch.tensor([0] * 60 + [1] * 2), "balanced"), 20, seed=0)
    for epoch in range(20):
        for step in _epoch(order, epoch):
            most = np.unique(step.indices, return_counts=True)[1].max()
            assert (step.indices[::2] == step.indices[1::2]).sum() == max(0, most - 10)


def test_a_batch_of_different_samples_keeps_its_order():
    assert (
        spread_copies(np.array([5, 3, 9, 1])).tolist() == [0, 1, 2, 3]
        and len(spread_copies(np.array([], dtype=np.int64))) == 0
    )


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 4, 8, 64])
def test_evaluation_shows_every_sample_once_in_equally_many_batches(world, batch_size):
    for n in (1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 129):
        orders = [EvalOrder(n, batch_size, rank, world) for rank in range(world)]
        steps = [list(order.steps()) for order in orders]
        seen = np.concatenate([step.indices for rank in steps for step in rank])
        assert sorted(seen) == list(range(n))
        assert [len(rank) for rank in steps] == [len(order) for order in orders]
        assert all(0 < len(step.indices) <= max(batch_size // world, min(world, 2)) for rank in steps for step in rank)
        assert n < world or len({len(order) for order in orders}) == 1


@pytest.mark.parametrize("n", [2, 7, 9, 17])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("given", ["size", "sampler"])
def test_processes_evaluate_each_sample_of_a_users_loader_once_in_equally_many_batches(n, shuffle, given):
    world, seen, lengths = 2, [], set()
    loader = DataLoader(list(range(n)), batch_size=4, shuffle=shuffle)
    if given == "sampler":
        loader = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)
    for rank in range(world):
        shared = _shared(loader, rank, shuffle)
        seen += [number for batch in shared for number in batch.tolist()]
        lengths.add(len(shared))
    assert lengths == {-(-n // 8)} and sorted(seen) == list(range(n))
    assert shuffle or seen == [*range(0, n, 2), *range(1, n, 2)]
    assert not shuffle or n < 9 or seen != [*range(0, n, 2), *range(1, n, 2)]
    assert len(loader) == -(-n // 4)  # it is not changed itself


def test_samples_that_processes_cannot_share_evenly_are_lightnings():
    alone = [[batch.tolist() for batch in _shared(DataLoader([5], batch_size=4), rank)] for rank in range(2)]
    assert alone == [[[5]], [[5]]]  # else the second would wait for ever


@pytest.mark.parametrize("saved", [False, True], ids=["made", "made in a hook"])
@pytest.mark.parametrize("mode", [RunningStage.TRAINING, RunningStage.VALIDATING])
def test_processes_share_the_batches_of_a_sampler_of_batches_that_was_given(mode, saved):
    """Lightning took all samples in place of the ten, one by one."""
    batches = BatchSampler(SubsetRandomSampler(range(10, 20)), 3, drop_last=mode is RunningStage.TRAINING)
    with _replace_dunder_methods(DataLoader, "dataset") if saved else nullcontext():
        given = DataLoader(list(range(30)), batch_sampler=batches)
    shares = [[batch.tolist() for batch in _shared(given, rank, mode=mode)] for rank in range(2)]
    seen = [number for share in shares for batch in share for number in batch]
    assert [[len(batch) for batch in share] for share in shares] == [
        [3] if mode is RunningStage.TRAINING else [3, 2]
    ] * 2
    assert len({*seen}) == len(seen) and {*seen} <= {*range(10, 20)}


def _shared(loader, rank, shuffle=False, mode=RunningStage.VALIDATING):
    """The loader of one of two processes."""
    trainer = L.Trainer(accelerator="cpu", barebones=True)
    connector = trainer._data_connector
    facts = {"overfit_batches": 0, "state": SimpleNamespace(fn=None)}
    connector.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": rank}, **facts)
    connector._requires_distributed_sampler = lambda loader: True
    evaluate_samples_once(trainer)
    return connector._prepare_dataloader(loader, shuffle=shuffle, mode=mode)


@pytest.mark.parametrize("mode", [RunningStage.TRAINING, RunningStage.VALIDATING])
def test_a_sampler_of_a_users_own_draws_each_sample_once_where_processes_have_other_random_numbers(mode):
    world, epochs = 2, []
    for epoch in range(2):
        seen = []
        for rank in range(world):
            connector = L.Trainer(accelerator="cpu", barebones=True)._data_connector
            facts = {"overfit_batches": 0, "state": SimpleNamespace(fn=None)}
            facts["distributed_sampler_kwargs"] = {"num_replicas": world, "rank": rank}
            connector._requires_distributed_sampler = lambda loader: True
            evaluate_samples_once(SimpleNamespace(_data_connector=connector))
            connector.trainer = SimpleNamespace(**facts)
            given = DataLoader(list(range(10)), batch_size=4, sampler=SubsetRandomSampler(range(10)))
            shared = connector._prepare_dataloader(given, shuffle=False, mode=mode)
            for sampler in (shared.sampler, shared.batch_sampler.sampler):  # as Lightning does
                getattr(sampler, "set_epoch", lambda epoch: None)(epoch)
            torch.manual_seed(100 + rank)
            seen += [number for batch in shared for number in batch.tolist()]
            assert type(given.sampler) is SubsetRandomSampler
        assert sorted(seen) == list(range(10))
        epochs.append(seen)
    assert epochs[0] != epochs[1]


class Backwards(RandomSampler):
    def __iter__(self):
        return iter(range(9, -1, -1))


@pytest.mark.parametrize("mode", [RunningStage.TRAINING, RunningStage.VALIDATING])
@pytest.mark.parametrize("part", ["six of ten", "with replacement", "backwards"])
def test_a_sampler_that_does_not_take_each_sample_once_is_kept_in_several_processes(part, mode):
    """Lightning's took its place, with every sample once, in an order of its own."""
    kinds = {"six of ten": {"num_samples": 6}, "with replacement": {"replacement": True}, "backwards": {}}
    sampler = (Backwards if part == "backwards" else RandomSampler)(range(10), **kinds[part])
    shares = []
    for rank in range(2):
        connector = L.Trainer(accelerator="cpu", barebones=True)._data_connector
        place = {"num_replicas": 2, "rank": rank}
        facts = {"overfit_batches": 0, "state": SimpleNamespace(fn=None), "distributed_sampler_kwargs": place}
        connector._requires_distributed_sampler = lambda loader: True
        evaluate_samples_once(SimpleNamespace(_data_connector=connector))
        connector.trainer = SimpleNamespace(**facts)
        given = DataLoader(list(range(10)), batch_size=2, sampler=sampler)
        shared = connector._prepare_dataloader(given, shuffle=True, mode=mode)  # as Lightning says of a RandomSampler
        shares.append([number for batch in shared for number in batch.tolist()])
    drawn = [number for pair in zip(*shares, strict=True) for number in pair]
    assert drawn == [*SameDraws(sampler)] and len(drawn) == len(sampler)


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(4)


def test_samples_without_numbers_are_told_to_be_read_by_each_process():
    connector = L.Trainer(accelerator="cpu", barebones=True)._data_connector
    evaluate_samples_once(SimpleNamespace(_data_connector=connector))
    given = DataLoader(Stream(), batch_size=2)
    assert connector._prepare_dataloader(given, shuffle=False, mode=RunningStage.VALIDATING) is given
    place = {"num_replicas": 2, "rank": 0}
    connector.trainer = SimpleNamespace(distributed_sampler_kwargs=place)
    connector._requires_distributed_sampler = lambda loader: False  # as Lightning has it
    with pytest.warns(UserWarning, match="Stream is an IterableDataset, which each of 2 processes reads whole"):
        assert connector._prepare_dataloader(given, shuffle=False, mode=RunningStage.VALIDATING) is given


def test_a_sampler_of_a_users_own_leaves_all_random_numbers_as_they_were(monkeypatch):
    seeded = []
    monkeypatch.setattr("torch.cuda.manual_seed_all", seeded.append)  # what torch.manual_seed also calls
    before = torch.get_rng_state()
    draws, orders = SameDraws(SubsetRandomSampler(range(10))), []
    for seed, epoch in (("1", 0), ("1", 1), ("2", 1)):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        draws.set_epoch(epoch)
        orders.append([*draws])
        assert sorted(orders[-1]) == list(range(10)) and orders[-1] == [*draws]
    assert orders[0] != orders[1] != orders[2]
    assert not seeded
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sampler_of_a_users_own_is_told_the_epoch():
    draws = SameDraws(DistributedSampler(range(10), num_replicas=1, rank=0))
    draws.set_epoch(3)
    assert draws.sampler.epoch == draws.epoch == 3


@pytest.mark.parametrize(
    ("batch_size", "world", "told"), [(9, 2, "batch_size=9 and 2 processes"), (64, 1, "batch_size=64 and 50 images")]
)
def test_a_batch_that_processes_cannot_share_or_images_cannot_fill_is_refused(batch_size, world, told):
    with pytest.raises(ValueError, match=told):
        TrainOrder(50, batch_size, seed=0, world=world)


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


def test_classes_that_divide_no_epoch_evenly_are_drawn_equally_often_on_average():
    labels, rng = torch.tensor([0] * 6 + [1] * 3 + [2]), torch.Generator().manual_seed(0)
    draw = Draw(labels, "balanced")
    counts = np.array([np.bincount(labels[draw(rng)[0]], minlength=3) for _ in range(300)])
    assert set(counts.ravel()) == {3, 4}
    np.testing.assert_allclose(counts.mean(axis=0), [10 / 3] * 3, atol=0.1)
