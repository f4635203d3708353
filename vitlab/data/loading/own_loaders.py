"""Loaders of a user's own, whose samples the processes of a trainer share."""

import copy
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from vitlab.data.loading.order import EvalOrder
from vitlab.data.loading.streams import ORDER, seeded, stream


class SameDraws:
    """A sampler of the user's own that draws the same in all processes, whose random numbers differ in training.

    Else each would take its share of another order, and samples of an epoch would come twice or never.

    Args:
        sampler: The sampler.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.epoch = sampler, 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        drawn = int(stream(int(os.environ.get("PL_GLOBAL_SEED") or 0), ORDER, self.epoch)[0]) % 2**32
        with seeded(drawn):
            return iter(list(self.sampler))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; Lightning calls this."""
        self.epoch = epoch
        if callable(own := getattr(self.sampler, "set_epoch", None)):
            own(epoch)


class SharedBatches:
    """Batches of one process in an evaluation with a loader of the user's own, see :class:`EvalOrder`.

    Args:
        loader: The loader, with the batch size of a process.
        num_replicas: Number of processes.
        rank: Rank of this process.
        shuffle: Whether the loader shuffles; all processes then draw the same order.
    """

    def __init__(self, loader: Any, num_replicas: int, rank: int, shuffle: bool = False) -> None:
        self.sampler: Any = loader.sampler
        if isinstance(self.sampler, RandomSampler | SequentialSampler):
            self.sampler = DistributedSampler(loader.dataset, num_replicas=1, rank=0, shuffle=shuffle)
        self.n = len(self.sampler)
        self.order = EvalOrder(self.n, loader.batch_size * num_replicas, rank, num_replicas)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[list[Any]]:
        samples = list(self.sampler)
        for step in self.order.steps():
            yield [samples[i] for i in step.indices]


def evaluate_samples_once(trainer: Any) -> None:
    """Let the processes of a trainer evaluate each sample of a user's loader once; Lightning repeats some of them.

    Where that would give some processes fewer batches than others, as with batches of single samples, Lightning's way
    remains: a process may wait for the others in each batch.
    """
    trainer._data_connector._prepare_dataloader = partial(_prepared, trainer._data_connector)


def _prepared(connector: Any, loader: Any, shuffle: bool, mode: Any) -> Any:
    """Return a loader with the share of this process, in place of the method of Lightning's data connector."""
    place = connector.trainer.distributed_sampler_kwargs or {}
    if isinstance(getattr(loader, "dataset", None), IterableDataset) and place.get("num_replicas", 1) > 1:
        whole = f"is an IterableDataset, which each of {place['num_replicas']} processes reads whole"
        way_out = "unless it divides its samples itself: then set `deals_samples = True` in the data"
        rank_zero_warn(f"{type(loader.dataset).__name__} {whole}, in training and evaluation, {way_out}")
    divides = isinstance(loader, DataLoader) and connector._requires_distributed_sampler(loader)
    is_usual = divides and type(loader.batch_sampler) is BatchSampler
    loader = _with_sizes(loader) if is_usual and loader.batch_size is None else loader
    if divides and not _takes_all(loader.sampler):
        loader, shuffle = _with(loader, sampler=SameDraws(loader.sampler)), False  # it has its own order
    if is_usual and mode.evaluating and not loader.drop_last and loader.batch_size != 1:
        batches = SharedBatches(loader, **place, shuffle=shuffle)
        if batches.n >= place["num_replicas"]:
            return _with(loader, batch_sampler=batches, sampler=batches.order, _iterator=None)
    return type(connector)._prepare_dataloader(connector, loader, shuffle=shuffle, mode=mode)


def _with_sizes(loader: Any) -> Any:
    """Return a loader that was given a BatchSampler with its sampler and sizes as its own.

    Lightning reads them from the loader, and else takes all samples, in an order of its own, and no batches.
    """
    batches = loader.batch_sampler
    sizes = {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    saved = vars(loader).get("__pl_saved_kwargs")  # of one that was made in a hook
    more = {"__pl_saved_kwargs": saved | sizes} if saved else {}
    return _with(loader, sampler=batches.sampler, **sizes, **more)


def _with(loader: Any, **attributes: Any) -> Any:
    """Return a copy of a loader with other attributes, which torch refuses to set."""
    changed = copy.copy(loader)
    vars(changed).update(attributes)
    return changed


def _takes_all(sampler: Any) -> bool:
    """Return whether a sampler takes each sample once, in order or at random, as Lightning's does in its place."""
    is_of_torch = type(sampler) in (RandomSampler, SequentialSampler)
    return is_of_torch and len(sampler) == len(sampler.data_source) and not getattr(sampler, "replacement", False)
