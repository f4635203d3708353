"""The data settings of a run, for use without its files."""

from typing import Any

from vitlab.data.base import ImageData


class Rebuilt(ImageData):
    """Data rebuilt from a run's data.json: enough to preprocess other images and to interpret outputs.

    Args:
        targets: Kind, names and statistics of the targets.
        arrays: Whether images are arrays of floats.
        **data: Passed to :class:`ImageData`.
    """

    def __init__(self, targets: dict[str, Any], arrays: bool = False, **data: Any) -> None:
        super().__init__(**data)
        self.targets, self.arrays = targets, arrays
