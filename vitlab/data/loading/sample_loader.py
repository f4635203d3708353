"""A loader for images that are decoded or augmented one by one, in worker processes."""

import os
import signal
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from vitlab.data.files.decode import ImageError
from vitlab.data.files.sets import Images
from vitlab.data.files.splits import Indices
from vitlab.data.loading.crops import MultiCrop
from vitlab.data.loading.loader import Batch, Loader
from vitlab.data.loading.order import EvalOrder, TrainOrder
from vitlab.data.loading.own_ratio import OwnRatioCropFlip
from vitlab.data.loading.transforms import RandomCropFlip, Transform, to_tensor
from vitlab.packed_batch import PackedBatch

OnUnreadable = Callable[[ImageError], None]  # counts an unreadable sample, or raises
_Key = tuple[int, int, int]  # index and seed of a sample, and the sample that it is mixed with
# images, classes, their rows in the batch, numbers of their samples, errors
_Read = tuple[Tensor | PackedBatch, Tensor, Indices, Indices, list[ImageError]]


class _Sample(NamedTuple):
    """An image with its class and number, which are those of another sample if that of the key was unreadable."""

    image: Tensor | None  # None: nothing could be read
    label: Any
    number: int
    errors: list[ImageError]


class SampleLoader(Loader):
    """Read and transform samples in worker processes; a sample's seed travels with its index.

    An unreadable sample is reported. In training another one replaces it, drawn from its seed, so that batches keep
    their size and are the same for any number of processes; in evaluation it is left out.

    Args:
        images: The images.
        order: Which samples this process takes at each step.
        transform: Transform from a stored image to an image of the final size; None leaves it unchanged.
        num_workers: Number of worker processes; 0 for none.
        on_unreadable: Function called with the error of each unreadable sample.
        patch: Side of the patches, in pixels, that images of any sizes are packed by; None for images of one size.
    """

    workers: DataLoader[Any]

    def __init__(
        self,
        images: Images,
        order: TrainOrder | EvalOrder,
        transform: Transform | MultiCrop | None,
        num_workers: int,
        on_unreadable: OnUnreadable,
        patch: int | None = None,
    ) -> None:
        super().__init__(order)
        self.on_unreadable = on_unreadable
        self.keys = _Keys(order)
        self.workers = DataLoader(
            _Samples(images, transform, order),
            batch_sampler=self.keys,
            collate_fn=partial(_stack, patch=patch),
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=num_workers > 0,
            prefetch_factor=4 if num_workers else None,
            timeout=120 if num_workers else 0,  # raise an error if a worker hangs
            generator=torch.Generator(),  # keeps the loader off the global generator
            worker_init_fn=_leave_signals_to_the_trainer if num_workers else None,
        )
        weakref.finalize(self, _end_processes, self.workers).atexit = False

    def read(self, start: int) -> Iterator[Batch]:
        """Yield the batches from number ``start`` on."""
        self.keys.start = start
        for step, (images, targets, rows, samples, errors) in zip(self.sampler.steps(start), self._load(), strict=True):
            for error in errors:
                self.on_unreadable(error)
            if isinstance(self.sampler, TrainOrder) and len(rows) < len(step.indices):
                raise ImageError(errors[-1].path, f"{errors[-1].reason}; nor can others be read that could replace it")
            if errors:
                step = step._replace(indices=samples, seeds=step.seeds[rows])
            if len(rows):
                yield images, targets, step

    def _load(self) -> Iterator[_Read]:
        try:
            yield from self.workers
        except (EOFError, ConnectionError) as error:  # torch may see the broken connection before it misses the worker
            raise RuntimeError("DataLoader worker died while it sent a batch") from error


class _Keys:
    def __init__(self, order: TrainOrder | EvalOrder) -> None:
        self.order, self.start = order, 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[list[_Key]]:
        for step in self.order.steps(self.start):
            partners = step.indices if step.partners is None else step.partners
            yield list(zip(step.indices.tolist(), step.seeds.tolist(), partners.tolist(), strict=True))


class _Samples(Dataset[_Sample]):
    def __init__(self, images: Images, transform: Transform | MultiCrop | None, order: TrainOrder | EvalOrder) -> None:
        self.images, self.transform, self.order = images, transform, order
        self.labels = images.labels.tolist()

    def __getitems__(self, keys: list[_Key]) -> list[_Sample]:
        self.images.expect([index for index, *_ in keys])
        samples: list[_Sample] = []
        for key in keys:
            samples.append(self[key])
            if samples[-1].image is None and isinstance(self.order, TrainOrder):
                break  # a batch that cannot be complete ends the training
        return samples

    def __getitem__(self, key: _Key) -> _Sample:
        index, seed, partner = key
        try:
            return _Sample(self._read(index, seed), self.labels[index], index, [])
        except ImageError as error:
            errors = [error]
        for other in self.order.stand_ins(index, seed, partner) if isinstance(self.order, TrainOrder) else []:
            try:
                return _Sample(self._read(other, seed), self.labels[other], other, errors)
            except ImageError as error:
                errors.append(error)
        return _Sample(None, self.labels[index], index, errors)

    def _read(self, index: int, seed: int) -> Tensor:
        if isinstance(self.transform, RandomCropFlip | OwnRatioCropFlip | MultiCrop):
            return self.transform.cut(self.images.pixels(index), seed)
        image = self.images.image(index)
        return to_tensor(image if self.transform is None else self.transform(image, seed))


def _end_processes(workers: DataLoader[_Read]) -> None:
    """End them before the garbage collector closes their queues, after which torch waits 5 s for each process."""
    if isinstance(workers._iterator, _MultiProcessingDataLoaderIter):
        workers._iterator._shutdown_workers()


def _leave_signals_to_the_trainer(worker: int) -> None:
    # Clusters and terminals signal the whole process group. A worker that died would fail the current batch, which must
    # finish before the run saves. SIGTERM still ends a worker: its owner sends that at exit.
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _stack(samples: list[_Sample], patch: int | None = None) -> _Read:
    rows = [row for row, sample in enumerate(samples) if sample.image is not None]
    found = [sample.image for sample in samples if sample.image is not None]
    images: Tensor | PackedBatch
    if not found:
        images = torch.empty(0)
    elif patch is None:
        images = default_collate(found)  # in shared memory
    else:
        images = PackedBatch.of(found, patch)
    labels = torch.tensor([samples[row].label for row in rows])
    numbers = np.array([samples[row].number for row in rows], dtype=np.int64)
    errors = [error for sample in samples for error in sample.errors]
    return images, labels, np.array(rows, dtype=np.int64), numbers, errors
