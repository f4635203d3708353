"""The digits that ship with scikit-learn."""

from importlib.util import find_spec
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from vitlab.data.arguments import DataArgs
from vitlab.data.base import ImageData, Part
from vitlab.data.files.sets import TensorImages


class Digits(ImageData):
    """1,797 handwritten digits of 8 x 8 pixels and 17 gray levels, Alpaydin and Kaynak 1998 (UCI 80).

    Args:
        **data: Passed to :class:`ImageData`.

    Example:
        >>> data = Digits(batch_size=64)
        >>> data.setup("fit")
        >>> images, labels = next(iter(data.train_dataloader()))[:2]
        >>> images.shape, images.dtype
        (torch.Size([64, 1, 8, 8]), torch.uint8)
    """

    def __init__(self, **data: Unpack[DataArgs]) -> None:
        super().__init__(native_size=(8, 8), in_chans=1, class_names=[str(digit) for digit in range(10)], **data)

    def read(self, part: Part) -> TensorImages:
        """Return all images."""
        table = torch.from_numpy(_table())
        pixels = table[:, :64].reshape(-1, 1, 8, 8).mul(255 / 16).round().to(torch.uint8)
        return TensorImages(pixels, table[:, 64].long())


def _table() -> NDArray[np.float64]:
    """Return the 64 gray levels and the class of each digit, without the slow import of scikit-learn."""
    home = find_spec("sklearn")
    file = Path((home.submodule_search_locations or ["."])[0] if home else ".") / "datasets/data/digits.csv.gz"
    if file.is_file():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    return np.column_stack(load_digits(return_X_y=True))
