"""The base of loaders, which Lightning can resume in the middle of an epoch."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from vitlab.data.files.splits import Indices
from vitlab.data.loading.order import EvalOrder, Step, TrainOrder

Batch = tuple[Any, Tensor, Step]  # uint8 images (B, C, H, W) or `PackedBatch`, classes (B,), samples


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

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of batches delivered."""
        return {"epoch": self.sampler.epoch, "batches": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after ``state["batches"]`` batches if the next iteration has the epoch of the state."""
        self._resume = dict(state)
