"""Read images stored as arrays, with any number of channels and any range."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def is_array(path: Path) -> bool:
    """Return whether a file is an array: .npy, or a TIFF file of several pages."""
    if path.suffix.lower() == ".npy":
        return True
    if path.suffix.lower() not in (".tif", ".tiff"):
        return False
    try:
        with Image.open(path) as image:
            return getattr(image, "n_frames", 1) > 1
    except OSError:
        return False


def read_array(path: Path) -> NDArray[np.float32]:
    """Return a file as ``(C, H, W)`` float32; a page of a TIFF file is a channel, ``(H, W)`` is one channel.

    Raises:
        ValueError: The file is no such array, or has a value that is not finite.
    """
    try:
        if path.suffix.lower() == ".npy":
            values = np.load(path, allow_pickle=False)
        else:
            with Image.open(path) as image:
                values = np.stack([np.asarray(_page(image, i)) for i in range(image.n_frames)])  # type: ignore[attr-defined]
        values = values.astype(np.float32)
    except Exception as error:  # readers can raise anything for a broken file
        raise ValueError(f"{path}: {error}") from None
    values = values[None] if values.ndim == 2 else values
    if values.ndim != 3 or not values.size:
        raise ValueError(f"{path} must hold an array of channels x height x width, got {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"{path} has values that are not finite")
    return values


def _page(image: Image.Image, number: int) -> Image.Image:
    image.seek(number)
    return image
