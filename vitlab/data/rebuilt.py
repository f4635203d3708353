"""The data of a run where its files are not."""

from typing import Any

from vitlab.data.base import ImageData


class Rebuilt(ImageData):
    """What a run's data.json says of its data: enough to prepare other images and to say what outputs mean.

    Args:
        targets: What the targets are.
        arrays: Whether images are arrays of numbers.
        **data: Passed to :class:`ImageData`.
    """

    def __init__(self, targets: dict[str, Any], arrays: bool = False, **data: Any) -> None:
        super().__init__(**data)
        self.targets, self.arrays = targets, arrays
