"""Copy batches to a GPU while it works on earlier ones."""

from collections import deque
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from vitlab.data.loading.loader import Batch, Loader
from vitlab.packed_batch import PackedBatch

_AHEAD = 2  # batches


_T = TypeVar("_T", Tensor, PackedBatch)


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
        self.loader, self.device = loader, device

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
