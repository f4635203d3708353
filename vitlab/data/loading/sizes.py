"""Sizes of training images that grow with the epochs."""

from collections.abc import Sequence
from itertools import pairwise

from vitlab.data.loading.transforms import Size, as_size

_SCHEDULE = "data.img_size_schedule"


class Sizes:
    """The size of training images in each epoch (Howard 2018; analysis in Touvron et al. 2019, arXiv:1906.06423).

    Args:
        schedule: First epoch, counted from 0, and side, or height and width, of each size; None for one size.
        img_size: Height and width of the images in evaluation, in pixels.

    >>> sizes = Sizes([[0, 16], [10, 24], [15, 28]], (28, 28))
    >>> [sizes.at(epoch) for epoch in (0, 9, 10, 99)]
    [(16, 16), (16, 16), (24, 24), (28, 28)]
    >>> str(sizes)
    'trained at 16x16 for 10 epochs, at 24x24 for 5, then at 28x28'
    """

    def __init__(self, schedule: Sequence[Sequence[int]] | None, img_size: Size) -> None:
        self.img_size, entries = img_size, [[0, *img_size]] if schedule is None else [list(entry) for entry in schedule]
        if not entries or any(len(entry) not in (2, 3) for entry in entries):
            raise ValueError(f"`{_SCHEDULE}` must be a list of [epoch, side] or [epoch, height, width], got {schedule}")
        self.steps = [(epoch, as_size(side if len(side) == 2 else side[0], None)) for epoch, *side in entries]
        starts = [epoch for epoch, _ in self.steps]
        if starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise ValueError(f"`{_SCHEDULE}` must begin with epoch 0 and its epochs must increase, got {starts}")
        for (_, old), (epoch, new) in pairwise(self.steps):
            if new[0] < old[0] or new[1] < old[1]:
                sides = f"{size_text(old)} and then {size_text(new)} from epoch {epoch} on"
                raise ValueError(f"`{_SCHEDULE}` must not go down, got {sides}")

    def __str__(self) -> str:
        spans = [f"{size_text(size)} for {b - a}" for (a, size), (b, _) in pairwise(self.steps)]
        first = f"trained at {spans[0]} epoch{'s' * (self.steps[1][0] > 1)}"
        return ", at ".join([first, *spans[1:]]) + f", then at {size_text(self.steps[-1][1])}"

    def at(self, epoch: int) -> Size:
        """Return height and width of the training images of an epoch, counted from 0."""
        return [size for start, size in self.steps if start <= epoch][-1]

    def check_end(self) -> None:
        """Refuse a schedule that does not end with the size of evaluation."""
        if (last := self.steps[-1][1]) != self.img_size:
            raise ValueError(
                f"`{_SCHEDULE}` must end with `data.img_size`, {size_text(self.img_size)}, got {size_text(last)}"
            )


def size_text(size: Size) -> str:
    """Return a size as text.

    >>> size_text((16, 24))
    '16x24'
    """
    return f"{size[0]}x{size[1]}"
