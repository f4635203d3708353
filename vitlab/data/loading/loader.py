"""The base of loaders, which Lightning can resume in the middle of an epoch, and copies to a GPU ahead of its work."""

import copy
import os
import random
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from vitlab.data.files.splits import Indices
from vitlab.data.loading.order import EvalOrder, Step, TrainOrder
from vitlab.data.loading.streams import ORDER, stream
from vitlab.packed_batch import PackedBatch

Batch = tuple[Any, Tensor, Step]  # uint8 images (B, C, H, W) or `PackedBatch`, classes (B,), samples
_AHEAD = 2  # batches
_T = TypeVar("_T", Tensor, PackedBatch)


class Loader:
    """Iterate over batches in the given order; the state is (epoch, batches consumed).

    Iteration starts with the first ``next``, because Lightning creates the iterator before it sets the epoch.

    Args:
        order: Which samples this process takes at each step.
    """

    def __init__(self, order: TrainOrder | EvalOrder) -> None:
        self.sampler = order  # Lightning calls `sampler.set_epoch`
        self.batch_sampler = None  # Lightning reads it, as in a torch DataLoader
        self._done = 0
        self._resume: dict[str, int] | None = None
        self.workers: DataLoader[Any] | None = None  # what reads the samples, in processes that it keeps between epochs
        self.handed: list[Indices] = []  # samples of each batch in the last evaluation, without unreadable ones

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        start = 0
        if self._resume is not None and self._resume["epoch"] == self.sampler.epoch:
            start = self._resume["batches"]
        self._resume = None
        self._done, self.handed = start, []
        for batch in self.read(start):
            self._done += 1
            if isinstance(self.sampler, EvalOrder):
                self.handed.append(batch[2].indices)
            yield batch

    def read(self, start: int) -> Iterator[Batch]:
        """Yield the batches from number ``start`` on."""
        raise NotImplementedError

    @property
    def _iterator(self) -> Any:  # Lightning ends its processes when a training or an evaluation is over
        return None if self.workers is None else self.workers._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        if self.workers is not None:
            self.workers._iterator = iterator

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of batches delivered, of a resumed epoch also before its next one."""
        if self._resume is not None and self._resume["epoch"] == self.sampler.epoch:
            return dict(self._resume)
        return {"epoch": self.sampler.epoch, "batches": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after ``state["batches"]`` batches if the next iteration has the epoch of the state."""
        self._resume = dict(state)


def send(x: _T, device: torch.device) -> _T:
    """Copy a tensor from the host to a device; to a GPU asynchronously, from pinned memory."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class Prefetch(Loader):
    """Copy the batches of a loader to a CUDA device from pinned memory, on a separate stream, two batches ahead.

    Args:
        loader: Yields batches on the CPU.
        device: Target device.
    """

    def __init__(self, loader: Loader, device: torch.device) -> None:
        super().__init__(loader.sampler)
        self.loader, self.device, self.workers = loader, device, loader.workers

    def read(self, start: int) -> Iterator[Batch]:
        """Yield the batches from number ``start`` on."""
        stream = torch.cuda.Stream(self.device)
        waiting: deque[tuple[Batch, torch.cuda.Event]] = deque()
        for batch in self.loader.read(start):
            waiting.append(self._send(batch, stream))
            if len(waiting) > _AHEAD:
                yield self._receive(*waiting.popleft())
        while waiting:
            yield self._receive(*waiting.popleft())

    def _send(self, batch: Batch, stream: torch.cuda.Stream) -> tuple[Batch, torch.cuda.Event]:
        images, targets, step = batch
        with torch.cuda.stream(stream):
            images, targets = send(images, self.device), send(targets, self.device)
            return (images, targets, step), stream.record_event()

    def _receive(self, batch: Batch, sent: torch.cuda.Event) -> Batch:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(sent)
        for x in batch[:2]:
            x.record_stream(current)  # keep its memory until this stream has used it
        return batch


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
        with isolate_rng(include_cuda=False):
            for seed in (random.seed, np.random.seed, torch.default_generator.manual_seed):  # not those of GPUs
                seed(drawn)
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

    def __init__(self, loader: DataLoader[Any], num_replicas: int, rank: int, shuffle: bool = False) -> None:
        self.sampler: Any = loader.sampler
        if isinstance(self.sampler, RandomSampler | SequentialSampler):
            self.sampler = DistributedSampler(loader.dataset, num_replicas=1, rank=0, shuffle=shuffle)
        self.n = len(self.sampler)
        self.order = EvalOrder(self.n, (loader.batch_size or 1) * num_replicas, rank, num_replicas)

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
    if divides and not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        loader, sampler = copy.copy(loader), SameDraws(loader.sampler)
        vars(loader)["sampler"] = sampler  # torch refuses to set it
    is_usual = divides and type(loader.batch_sampler) is BatchSampler and not loader.drop_last
    if is_usual and mode.evaluating and loader.batch_size != 1:
        batches, shared = SharedBatches(loader, **place, shuffle=shuffle), copy.copy(loader)
        if batches.n >= place["num_replicas"]:
            vars(shared).update(batch_sampler=batches, sampler=batches.order, _iterator=None)  # torch refuses to set
            return shared
    return type(connector)._prepare_dataloader(connector, loader, shuffle=shuffle, mode=mode)
