"""Read and decode a photo once, to collect its facts and to encode it for a shard."""

import io
import zlib
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vitlab.data.files.decode import Decoding, ImageError, decode_bytes
from vitlab.data.files.scan import inspect_image
from vitlab.data.files.store import Store
from vitlab.data.loading.transforms import CenterCrop
from vitlab.data.pack.shards import ROW

_GRAY = (b"1", b"L", b"I", b"I;16", b"F")  # gray modes of Pillow


class PhotosToPack(NamedTuple):
    """Images to pack: store, names, their rows of the index, and how to decode and resize them."""

    store: Store
    files: list[str]
    rows: np.ndarray
    decoding: Decoding
    size: int | None


class Photo(NamedTuple):
    """A packed photo: facts about its file, and its bytes with their checksum, or the reason why it is unreadable."""

    facts: Any
    reason: str
    data: bytes = b""
    crc: int = 0
    shape: tuple[int, int] = (0, 0)  # height, width


def encoded(what: PhotosToPack, file: str) -> Photo:
    """Read, decode, inspect and encode an image."""
    how, size = what.decoding, what.size
    try:
        data = what.store.load(file)
        if size is None:
            facts = inspect_image(data, how)
            return Photo(facts, "", data, zlib.crc32(data), tuple(facts["size"].tolist()))
        image = decode_bytes(data, "", how, shrink=2 * size)
        facts = inspect_image(data, how, image, 2 * size)
    except ImageError as error:
        return Photo(np.zeros((), ROW)["facts"], error.reason)
    image = resized(image, size)
    is_gray = bytes(facts["kind"]).split()[-1] in _GRAY
    data = pixels(image.convert("L") if is_gray else image)
    return Photo(facts, "", data, zlib.crc32(data), (image.height, image.width))


def resized(image: Image.Image, size: int) -> Image.Image:
    """Shrink an image so that its shorter side has at most ``size`` pixels, as evaluation does before it cuts.

    >>> resized(Image.new("RGB", (400, 300)), 150).size
    (200, 150)
    """
    if size >= min(image.size):
        return image
    height, width = CenterCrop((size, size), 1.0, "bicubic").resized((image.height, image.width))
    return image.resize((width, height), Image.Resampling.BICUBIC)


def pixels(image: Image.Image) -> bytes:
    """Return an image as raw pixels with a short header (format PPM), which need no decoding.

    >>> pixels(Image.new("L", (2, 1)))[:11]
    b'P5\\n2 1\\n255\\n'
    """
    content = io.BytesIO()
    image.save(content, "PPM")
    return content.getvalue()
