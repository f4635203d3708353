"""A loader for images in memory, one tensor, augmented in chunks."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitlab.data.files.splits import Indices
from vitlab.data.loading.loader import Batch, Loader, send
from vitlab.data.loading.order import EvalOrder, Step, TrainOrder
from vitlab.data.loading.streams import uniforms

_CHUNK = 4096  # images augmented at once: enough to copy all images of one shift together,
_CHUNK_BYTES = 2**26  # but few enough to save memory
_LARGE = 2**14  # bytes of an image from which copying single images is faster


class TensorLoader(Loader):
    """Cut windows out of images in memory; in training at a random place, mirrored with probability 1/2.

    Args:
        images: ``(N, C, H, W)`` uint8, or float32 in any unit, on the device of the batches.
        labels: ``(N,)`` classes.
        order: Which samples this process takes at each step.
        window: Height and width of the window.
        pad: Pixels added on every side before cutting.
        augment: Whether to draw place and mirroring from each sample's seed; otherwise the center is cut out.
        fill: Value of each channel in added pixels; None for black.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        order: TrainOrder | EvalOrder,
        window: tuple[int, int],
        pad: int = 0,
        augment: bool = False,
        fill: Sequence[float] | None = None,
    ) -> None:
        super().__init__(order)
        self.images = _padded(images, pad, fill) if pad else images
        self.labels = labels
        self.window = window
        self.chunk = min(_CHUNK, _CHUNK_BYTES // (images.element_size() * images.shape[1] * window[0] * window[1]))
        self.augment = augment
        self.room = (self.images.shape[2] - window[0], self.images.shape[3] - window[1])

    def read(self, start: int) -> Iterator[Batch]:
        """Yield the batches from number ``start`` on."""
        steps = self.sampler.steps(start)
        while first := next(steps, None):
            group = [first, *islice(steps, max(self.chunk // len(first.indices) - 1, 0))]
            yield from self._batches(group)

    def _batches(self, group: list[Step]) -> Iterator[Batch]:
        sizes = [len(step.indices) for step in group]
        indices = np.concatenate([step.indices for step in group])
        labels = self.labels[self._index(indices)]
        if self.augment:
            images = self._cut_at_random(indices, uniforms(np.concatenate([step.seeds for step in group]), 3))
        else:
            images = self._cut_center(indices)
        for step, x, y in zip(group, images.split(sizes), labels.split(sizes), strict=True):
            yield x, y, step

    def _cut_center(self, indices: Indices) -> Tensor:
        return self._view(self.room[0] // 2, self.room[1] // 2)[self._index(indices)]

    def _cut_at_random(self, indices: Indices, draws: NDArray[np.float64]) -> Tensor:
        tops, lefts = ((draws[:, i] * (self.room[i] + 1)).astype(int) for i in (0, 1))
        mirrored = draws[:, 2] < 0.5
        if self.images.device.type != "cpu":
            return self._gather(indices, tops, lefts, mirrored)
        if self.images[0].nbytes > _LARGE:
            return self._cut_one_by_one(indices, tops, lefts, mirrored)
        shifts = tops * (self.room[1] + 1) + lefts
        order = np.argsort(shifts, kind="stable")  # all images of one shift are copied by one operation
        groups = np.split(order, np.flatnonzero(np.diff(shifts[order])) + 1)
        parts = [self._view(tops[rows[0]], lefts[rows[0]])[self._index(indices[rows])] for rows in groups]
        images = torch.cat(parts)[self._index(np.argsort(order))]
        return torch.where(self._index(mirrored)[:, None, None, None], images.flip(3), images)

    def _gather(self, indices: Indices, tops: Indices, lefts: Indices, mirrored: NDArray[np.bool_]) -> Tensor:
        """Cut all windows in one operation, without waiting for the device."""
        chans, *sides = self.images.shape[1], *self.window
        i, top, left, flip = self._index(np.stack([indices, tops, lefts, mirrored]).astype(np.int64))[:, :, None]
        chan, y, x = (torch.arange(side, device=self.images.device) for side in (chans, *sides))
        y, x = top + y, left + torch.where(flip > 0, sides[1] - 1 - x, x)
        return self.images[i[:, :, None, None], chan[:, None, None], y[:, None, :, None], x[:, None, None, :]]

    def _cut_one_by_one(self, indices: Indices, tops: Indices, lefts: Indices, mirrored: NDArray[np.bool_]) -> Tensor:
        images = torch.empty(len(indices), self.images.shape[1], *self.window, dtype=self.images.dtype)
        source, target = self.images.numpy(), images.numpy()  # numpy copies rows faster
        for j, (i, top, left) in enumerate(zip(indices, tops, lefts, strict=True)):
            target[j] = source[i, :, top : top + self.window[0], left : left + self.window[1]]
        for j in np.flatnonzero(mirrored).tolist():
            images[j] = images[j].flip(2)
        return images

    def _view(self, top: int, left: int) -> Tensor:
        return self.images[:, :, top : top + self.window[0], left : left + self.window[1]]

    def _index(self, values: NDArray[Any]) -> Tensor:
        return send(torch.from_numpy(values), self.images.device)


def _padded(images: Tensor, pad: int, fill: Sequence[float] | None) -> Tensor:
    padded = F.pad(images, (pad, pad, pad, pad))
    for channel, value in enumerate(fill or ()):
        padded[:, channel, :pad] = padded[:, channel, -pad:] = value
        padded[:, channel, :, :pad] = padded[:, channel, :, -pad:] = value
    return padded
