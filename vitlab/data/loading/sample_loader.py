"""A loader for images that are decoded or augmented one by one, in worker processes."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from vitlab.data.files.decode import ImageError
from vitlab.data.files.sets import FileImages, Images
from vitlab.data.loading.crops import MultiCrop
from vitlab.data.loading.loader import Batch, Loader
from vitlab.data.loading.native import NativeCropFlip
from vitlab.data.loading.order import EvalOrder, Step, TrainOrder, spread_copies
from vitlab.data.loading.transforms import RandomCropFlip, Transform, to_tensor
from vitlab.packed_batch import Packed

OnUnreadable = Callable[[ImageError], None]  # counts an unreadable sample, or raises
_Key = tuple[int, int]  # index and seed of a sample
_Sample = tuple[Tensor, int] | ImageError  # image and class, or the error


class SampleLoader(Loader):
    """Read and transform samples in worker processes; a sample's seed travels with its index.

    An unreadable sample is reported. In training another sample of the batch replaces it, so that every process keeps
    its batch size; in evaluation it is left out.

    Args:
        images: The images.
        order: Which samples this process takes at each step.
        transform: Transform from a stored image to an image of the final size; None leaves it unchanged.
        num_workers: Number of worker processes; 0 for none.
        on_unreadable: Function called with the error of each unreadable sample.
        patch: Side of the patches, in pixels, that images of any sizes are packed by; None for images of one size.
    """

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
        self.loader = DataLoader(
            _Samples(images, transform),
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

    def read(self, start: int) -> Iterator[Batch]:
        """Yield the batches from number ``start`` on."""
        self.keys.start = start
        for step, (images, targets, rows, errors) in zip(self.sampler.steps(start), self._load(), strict=True):
            for error in errors:
                self.on_unreadable(error)
            if not errors:
                yield images, targets, step
            elif rows:
                yield self._replace_unreadable(images, targets, step, rows)

    def _load(self) -> Iterator[tuple[Tensor | Packed, Tensor, list[int], list[ImageError]]]:
        try:
            yield from self.loader
        except (EOFError, ConnectionError) as error:  # torch may see the broken connection before it misses the worker
            raise RuntimeError("DataLoader worker died while it sent a batch") from error

    def _replace_unreadable(self, images: Tensor | Packed, targets: Tensor, step: Step, rows: list[int]) -> Batch:
        chosen = list(range(len(rows)))
        if isinstance(self.sampler, TrainOrder):
            again = np.arange(len(step.indices)) % len(rows)
            chosen = again[spread_copies(step.indices[rows][again])].tolist()
        samples = [rows[i] for i in chosen]
        step = step._replace(indices=step.indices[samples], seeds=step.seeds[samples])
        return images[chosen], targets[chosen], step


class _Keys:
    def __init__(self, order: TrainOrder | EvalOrder) -> None:
        self.order, self.start = order, 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[list[_Key]]:
        for step in self.order.steps(self.start):
            yield list(zip(step.indices.tolist(), step.seeds.tolist(), strict=True))


class _Samples(Dataset[_Sample]):
    def __init__(self, images: Images, transform: Transform | MultiCrop | None) -> None:
        self.images, self.transform = images, transform
        self.labels = images.labels.tolist()

    def __getitems__(self, keys: list[_Key]) -> list[_Sample]:
        if isinstance(self.images, FileImages):
            self.images.expect([index for index, _ in keys])
        return [self[key] for key in keys]

    def __getitem__(self, key: _Key) -> _Sample:
        try:
            if isinstance(self.transform, RandomCropFlip | NativeCropFlip | MultiCrop):
                return self.transform.cut(self.images.pixels(key[0]), key[1]), self.labels[key[0]]
            image = self.images.image(key[0])
        except ImageError as error:
            return error
        if self.transform is not None:
            image = self.transform(image, key[1])
        return to_tensor(image), self.labels[key[0]]


def _leave_signals_to_the_trainer(worker: int) -> None:
    # Clusters and terminals signal the whole process group. A worker that died would fail the current batch, which must
    # finish before the run saves. SIGTERM still ends a worker: its owner sends that at exit.
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _stack(
    samples: list[_Sample], patch: int | None = None
) -> tuple[Tensor | Packed, Tensor, list[int], list[ImageError]]:
    rows = [i for i, sample in enumerate(samples) if not isinstance(sample, ImageError)]
    readable = [sample for sample in samples if not isinstance(sample, ImageError)]
    collate = default_collate if patch is None else partial(Packed.of, patch=patch)  # the former uses shared memory
    images = collate([image for image, _ in readable]) if readable else torch.empty(0)
    labels = torch.tensor([label for _, label in readable])
    return images, labels, rows, [sample for sample in samples if isinstance(sample, ImageError)]
