"""Packed images on disk or at an address: shards of concatenated images, and an index."""

import mmap
import os
import re
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.data.files import archive
from vitlab.data.files.addresses import Unusable, is_remote, opened, told
from vitlab.data.files.ranges import Ranges
from vitlab.data.files.scan import FACTS
from vitlab.data.files.store import Store

INDEX, VERSION = "index.npz", 2
ROUNDED = "down"  # the longer side of a shrunk photo, as in evaluation; older packs do not say and rounded to nearest
ROW = np.dtype(
    [
        ("label", "i4"),
        ("part", "u1"),  # number of the name in `SPLIT_NAMES`: 0 train, 1 val, 2 test; 0 if there is only one folder
        ("shard", "i4"),
        ("offset", "i8"),  # in the shard, in bytes
        ("length", "i8"),  # of the encoded image, in bytes
        ("crc", "u4"),  # CRC-32 of the encoded image
        ("facts", FACTS),  # of the source file, as in `scan`, so that splits and statistics are those of the source
    ]
)
_PLAIN = re.compile(rb"P([56])\n(\d+) (\d+)\n255\n")  # the header that `write.pixels` writes


def shard_name(number: int) -> str:
    """Return the file name of a shard.

    >>> shard_name(3)
    'images-00003.bin'
    """
    return f"images-{number:05}.bin"


def read_index(root: str) -> tuple[dict[str, Any], np.ndarray]:
    """Return header and rows of a packed set in a folder or at an address, after checking the length of its shards."""
    index = f"{root.rstrip('/')}/{INDEX}" if is_remote(root) else os.path.join(root, INDEX)
    with told(index):
        fs, path = opened(index)
        folder = path.removesuffix(INDEX)
        try:
            content = fs.cat_file(path)
        except FileNotFoundError:
            if fs.exists(folder + shard_name(0)):
                way = "copy it there, too" if is_remote(root) else "give the same `vitlab pack` again"
                raise Unusable(f"{root} has shards and no {INDEX}: {way}") from None
            if is_remote(root):
                raise
            way = "; --data=ImageFolder reads photos as they are" if os.path.isdir(root) else ""
            raise Unusable(f"`data.root` must be a folder that `vitlab pack` has written, got {root}{way}") from None
    try:
        header, rows = archive.rows_in(content)
        version = header["version"]
    except Exception as error:  # a damaged archive fails in many ways
        raise ValueError(f"{index} cannot be read: {error}; pack it again") from None
    if version != VERSION or rows.dtype != ROW:
        raise ValueError(
            f"{root} was packed by another version of vitlab (format {version}, this is {VERSION}), whose images are "
            f"cut to squares: pack the photos again, `vitlab pack PHOTOS {root}-{VERSION}`"
        )
    for number in np.unique(rows["shard"]).tolist():
        mine = rows[rows["shard"] == number]
        expected, shard = int((mine["offset"] + mine["length"]).max()), index.removesuffix(INDEX) + shard_name(number)
        with told(shard):
            if not is_remote(root) and not os.path.isfile(shard):
                raise Unusable(f"{root} lacks {shard_name(number)}, which its {INDEX} lists: pack it again")
            found = fs.size(folder + shard_name(number))
        if found != expected:
            raise ValueError(f"{shard} has {found} bytes instead of {expected}; pack it again")
    return header, rows


class PackedStore(Store):
    """The images of a packed set, each under the path of its source file.

    Shards in a folder are mapped into memory, others are read as byte ranges and compared with their checksums.

    Args:
        root: Folder or address of the shards.
        files: Path of each source file.
        rows: Row of the index for each image.
        cache_gb: Size of the cache of remote images on this disk, in GB.
    """

    def __init__(self, root: str, files: list[str], rows: np.ndarray, cache_gb: float = 0.0) -> None:
        self.root, self.rows, self.remote = Path(root), rows, None
        self.place = root if is_remote(root) else os.path.realpath(root)
        self.number = {file: i for i, file in enumerate(files)}
        if is_remote(root):
            shards = [f"{root.rstrip('/')}/{shard_name(i)}" for i in range(int(rows["shard"].max(initial=-1)) + 1)]
            places = np.stack([rows[name].astype(np.int64) for name in ("shard", "offset", "length")], axis=1)
            stamps = [zlib.crc32(rows["crc"][rows["shard"] == i].tobytes()) for i in range(len(shards))]
            self.remote = Ranges(shards, files, places, stamps, cache_gb)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "shards"}

    @cached_property
    def shards(self) -> dict[int, mmap.mmap]:
        """The shards, as memory maps that all processes share."""
        shards = {}
        for number in np.unique(self.rows["shard"]).tolist():
            with (self.root / shard_name(number)).open("rb") as file:
                shards[number] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return shards

    def path(self, file: str) -> str:
        """Return the path of the source file."""
        return file

    def expect(self, files: list[str]) -> None:
        """Fetch the remote images that are read next, all at once."""
        if self.remote:
            self.remote.expect(files)

    def read(self, file: str) -> bytes:
        """Return the bytes of an image, or raise an OSError."""
        content, start, end = self._span(file)
        return content[start:end]

    def _span(self, file: str) -> tuple[bytes | mmap.mmap, int, int]:
        """Return what holds the bytes of an image, and where they start and end in it."""
        row = self.rows[self.number[file]]
        start, length = int(row["offset"]), int(row["length"])
        if not self.remote:
            return self.shards[int(row["shard"])], start, start + length
        data = self.remote.read(file)
        if zlib.crc32(data) != row["crc"]:
            self.remote.forget(file)
            raise OSError("differs from what was packed")
        return data, 0, length

    def pixels(self, file: str) -> np.ndarray | None:
        """Return an image as uint8 ``(H, W, 3)`` or ``(H, W)`` without a copy; None if it is encoded."""
        content, start, end = self._span(file)
        head = _PLAIN.match(content, start, end)
        if head is None:
            return None
        width, height, chans = int(head[2]), int(head[3]), 3 if head[1] == b"6" else 1
        if end - head.end() != width * height * chans:
            return None
        values = np.frombuffer(content, np.uint8, width * height * chans, head.end())
        return values.reshape((height, width, chans) if chans == 3 else (height, width))

    def stamp(self, file: str) -> tuple[int, int]:
        """Return length and checksum."""
        row = self.rows[self.number[file]]
        return int(row["length"]), int(row["crc"])

    def identity(self, file: str) -> bytes:
        """Return the path of the source file."""
        return os.fsencode(file)

    def damaged(self, file: str) -> bool:
        """Return whether an image differs from its checksum; remote ones are compared whenever they are read."""
        return not self.remote and zlib.crc32(self.read(file)) != self.rows[self.number[file]]["crc"]
