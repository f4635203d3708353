"""Synthetic images whose class depends on positions, or does not."""

from typing import Literal, Unpack, get_args

import torch
from torch import Tensor

from vitlab.data.arguments import FixedTestArgs
from vitlab.data.base import ImageData, Part
from vitlab.data.files.sets import TensorImages

ProbeTask = Literal["bag", "abs", "rel"]

_CLASSES = {
    "bag": ["marker 0", "marker 1", "marker 2", "marker 3"],
    "abs": ["top left", "top right", "bottom left", "bottom right"],
    "rel": ["right", "left", "below", "above"],
}
_GRID = 4  # cells in a row and in a column
_CELL = 4  # pixels in a row and in a column of a cell
_SEEDS = {"markers": 0, "train": 1, "test": 2}
_UNIT = 24  # gray levels per unit; noise has std 0.5, markers 1.5; black and white lie at 5.3 units


class PositionProbe(ImageData):
    """Noise of 16 x 16 pixels with a marker in one or two of 4 x 4 cells; four classes of equal size, chance is 25 %.

    bag: which of four markers is there, which needs no position. abs: in which quadrant the marker is. rel: on which
    side of marker A marker B is, in the same row or column. There are 2,000 test images, and 1,500 (rel: 3,000)
    training images for the default `val_share` of 0.2. The images do not depend on the seed of the run.

    Args:
        task: What to classify: bag, abs or rel.
        **data: Passed to :class:`ImageData`.

    Example:
        >>> PositionProbe(task="rel").class_names
        ['right', 'left', 'below', 'above']
    """

    has_test_split = True

    def __init__(self, task: ProbeTask = "rel", **data: Unpack[FixedTestArgs]) -> None:
        if task not in _CLASSES:
            raise ValueError(f"`data.task` must be one of {', '.join(get_args(ProbeTask))}, got {task!r}")
        side = _GRID * _CELL
        super().__init__(native_size=(side, side), in_chans=1, class_names=_CLASSES[task], test_share=0.5, **data)
        self.task = task

    def read(self, part: Part) -> TensorImages:
        """Draw the training or the test images; every call returns the same."""
        rng = torch.Generator().manual_seed(_SEEDS[part])
        n = 2000 if part == "test" else 3750 if self.task == "rel" else 1875
        labels = torch.randperm(n, generator=rng) % 4
        cells = 0.5 * torch.randn(n, _GRID, _GRID, _CELL, _CELL, generator=rng)
        markers = 1.5 * torch.randn(4, _CELL, _CELL, generator=torch.Generator().manual_seed(_SEEDS["markers"]))
        rows = torch.arange(n)
        for marker, y, x in _places(self.task, labels, rng):
            cells[rows, y, x] += markers[marker]
        images = cells.transpose(2, 3).reshape(n, 1, _GRID * _CELL, _GRID * _CELL)
        return TensorImages((128 + _UNIT * images).round().clamp(0, 255).to(torch.uint8), labels)


def _places(task: ProbeTask, labels: Tensor, rng: torch.Generator) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return marker, row and column, ``(n,)`` each, for every marker of the images with these labels."""

    def draw(stop: Tensor | int) -> Tensor:
        return (torch.rand(len(labels), generator=rng) * stop).long()  # in [0, stop)

    first = torch.zeros_like(labels)
    match task:
        case "bag":
            return [(labels, draw(_GRID), draw(_GRID))]
        case "abs":
            half = _GRID // 2
            return [(first, labels // 2 * half + draw(half), labels % 2 * half + draw(half))]
        case "rel":
            distance = 1 + draw(_GRID - 1)
            near, across = draw(_GRID - distance), draw(_GRID)  # on the common line, and the line itself
            b_is_far, in_row = labels % 2 == 0, labels < 2
            a = torch.where(b_is_far, near, near + distance)
            b = torch.where(b_is_far, near + distance, near)
            y = [torch.where(in_row, across, along) for along in (a, b)]
            x = [torch.where(in_row, along, across) for along in (a, b)]
            return [(first, y[0], x[0]), (first + 1, y[1], x[1])]
