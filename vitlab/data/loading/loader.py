"""The base of loaders, which Lightning can resume in the middle of an epoch, and copies to a GPU ahead of its work."""

from collections import deque
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vitlab.data.files.splits import Indices
from vitlab.data.loading.order import EvalOrder, Step, TrainOrder
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
