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

_CHUNK = 4096  # images cut at once: enough that a GPU is seldom asked,
_CHUNK_BYTES = 2**26  # but few enough to save memory


class TensorLoader(Loader):
    """Cut windows out of images in memory; in training at a random place, mirrored with probability 1/2.

    Args:
        images: ``(N, C, H, W)`` uint8, or float32 in any unit, on the device of the batches.
        labels: ``(N,)`` classes.
        order: Which samples this process takes at each step.
        window: Height and width of the window.
        pad: Pixels added on every side before a window is cut out, whose place and mirroring are then drawn from each
            sample's seed; 0 cuts out the center.
        fill: Value of each channel in added pixels; None for black.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        order: TrainOrder | EvalOrder,
        window: tuple[int, int],
        pad: int = 0,
        fill: Sequence[float] | None = None,
    ) -> None:
        super().__init__(order)
        self.images = _padded(images, pad, fill) if pad else images
        self.labels, self.window, self.moves = labels, window, pad > 0
        self.chunk = min(_CHUNK, _CHUNK_BYTES // (images.element_size() * images.shape[1] * window[0] * window[1]))
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
        if self.moves:
            images = self._cut_at_random(indices, uniforms(np.concatenate([step.seeds for step in group]), 3))
        else:
            images = self._cut_center(indices)
        for step, x, y in zip(group, images.split(sizes), labels.split(sizes), strict=True):
            yield x, y, step

    def _cut_center(self, indices: Indices) -> Tensor:
        (top, left), (height, width) = (room // 2 for room in self.room), self.window
        return self.images[:, :, top : top + height, left : left + width][self._index(indices)]

    def _cut_at_random(self, indices: Indices, draws: NDArray[np.float64]) -> Tensor:
        tops, lefts = ((draws[:, i] * (self.room[i] + 1)).astype(int) for i in (0, 1))
        cut = self._cut_one_by_one if self.images.device.type == "cpu" else self._gather
        return cut(indices, tops, lefts, draws[:, 2] < 0.5)

    def _gather(self, indices: Indices, tops: Indices, lefts: Indices, mirrored: NDArray[np.bool_]) -> Tensor:
        """Cut all windows in one operation, without waiting for the device."""
        chans, *sides = self.images.shape[1], *self.window
        i, top, left, flip = self._index(np.stack([indices, tops, lefts, mirrored]).astype(np.int64))[:, :, None]
        chan, y, x = (torch.arange(side, device=self.images.device) for side in (chans, *sides))
        y, x = top + y, left + torch.where(flip > 0, sides[1] - 1 - x, x)
        return self.images[i[:, :, None, None], chan[:, None, None], y[:, None, :, None], x[:, None, None, :]]

    def _cut_one_by_one(self, indices: Indices, tops: Indices, lefts: Indices, mirrored: NDArray[np.bool_]) -> Tensor:
        images = torch.empty(len(indices), self.images.shape[1], *self.window, dtype=self.images.dtype)
        source, target, (height, width) = self.images.numpy(), images.numpy(), self.window  # numpy copies rows faster
        for j, (i, top, left, flip) in enumerate(zip(indices, tops, lefts, mirrored, strict=True)):
            part = source[i, :, top : top + height, left : left + width]
            target[j] = part[:, :, ::-1] if flip else part
        return images

    def _index(self, values: NDArray[Any]) -> Tensor:
        return send(torch.from_numpy(values), self.images.device)


def _padded(images: Tensor, pad: int, fill: Sequence[float] | None) -> Tensor:
    padded = F.pad(images, (pad, pad, pad, pad))
    for channel, value in enumerate(fill or ()):
        padded[:, channel, :pad] = padded[:, channel, -pad:] = value
        padded[:, channel, :, :pad] = padded[:, channel, :, -pad:] = value
    return padded
