"""Decode each photo once, to collect its facts and to encode it for a shard."""

import io
import zlib
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

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


class Encoded(Dataset[Photo]):
    """Read, decode, inspect and encode the images of a source, each once.

    Args:
        what: The source.
        start: Number of the first image.
    """

    def __init__(self, what: PhotosToPack, start: int) -> None:
        self.what, self.start = what, start

    def __len__(self) -> int:
        return len(self.what.files) - self.start

    def __getitem__(self, index: int) -> Photo:
        what, file = self.what, self.what.files[self.start + index]
        try:
            data = what.store.read(file)
            if what.size is None:
                facts = inspect_image(data, what.decoding)
                return Photo(facts, "", data, zlib.crc32(data), tuple(facts["size"].tolist()))
            image = decode_bytes(data, "", what.decoding, shrink=2 * what.size)
            facts = inspect_image(data, what.decoding, image, 2 * what.size)
        except OSError as error:
            return Photo(np.zeros((), ROW)["facts"], error.strerror or str(error))
        except ImageError as error:
            return Photo(np.zeros((), ROW)["facts"], error.reason)
        image = resized(image, what.size)
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
