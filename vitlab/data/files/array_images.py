"""Read images stored as arrays, with any number of channels and any range."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin

from vitlab.errors import one_line

_TIFF = (".tif", ".tiff")


def is_array(path: Path) -> bool:
    """Return whether a file is an array: .npy, or a TIFF file of several pages, or one that Pillow does not read."""
    if path.suffix.lower() == ".npy":
        return True
    if path.suffix.lower() not in _TIFF:
        return False
    try:
        with Image.open(path) as image:
            return getattr(image, "n_frames", 1) > 1 or loses_channels(image)
    except Image.UnidentifiedImageError:  # as with five values a pixel
        return True
    except OSError:
        return False


def loses_channels(image: Image.Image) -> bool:
    """Return whether Pillow would read only the first of several planes of a TIFF file.

    >>> loses_channels(Image.new("RGB", (2, 2)))
    False
    """
    tags = getattr(image, "tag_v2", {})
    return len(image.getbands()) == 1 and tags.get(TiffImagePlugin.SAMPLESPERPIXEL, 1) > 1


def read_array(path: Path) -> NDArray[np.float32]:
    """Return a file as ``(C, H, W)`` float32; ``(H, W)`` is one channel.

    Channels of a TIFF file are its pages, or the values of its pixels.

    Raises:
        ValueError: The file is not such an array, or has a value that is not finite.
    """
    try:
        values = (np.load(path, allow_pickle=False) if path.suffix.lower() == ".npy" else _tiff(path)).astype(
            np.float32
        )
    except Exception as error:  # readers can raise anything for a broken file
        raise ValueError(f"{path}: {one_line(error)}") from None
    values = values[None] if values.ndim == 2 else values
    if values.ndim != 3 or not values.size:
        raise ValueError(f"{path} must hold an array of channels x height x width, got {values.shape}")
    if path.suffix.lower() == ".npy" and is_channels_last(values.shape):
        raise ValueError(f"{path}: channels stand before height and width, got {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"{path} has values that are not finite")
    return values


def is_channels_last(shape: tuple[int, ...]) -> bool:
    """Return whether the three sides of an image are rather height, width and channels than channels first.

    >>> is_channels_last((32, 48, 3)), is_channels_last((6, 32, 32)), is_channels_last((8, 3, 3))
    (True, False, False)
    """
    return shape[2] <= 4 < shape[0] and shape[1] != shape[2]


def _tiff(path: Path) -> NDArray[np.generic]:
    try:
        with Image.open(path) as image:
            if not loses_channels(image):
                return np.stack([np.asarray(_page(image, i)) for i in range(image.n_frames)])  # type: ignore[attr-defined]
    except Image.UnidentifiedImageError:
        pass
    try:
        import tifffile
    except ImportError:
        raise ValueError("a TIFF file that Pillow does not read: `pip install 'vitlab[tiff]'`") from None
    with tifffile.TiffFile(path) as file:
        values, axes = file.series[0].asarray(), file.series[0].axes
    return np.moveaxis(values, -1, 0) if axes.endswith(("S", "C")) else values


def _page(image: Image.Image, number: int) -> Image.Image:
    image.seek(number)
    return image
