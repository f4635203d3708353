"""Byte ranges of remote files, kept on this disk for all processes and data sets together."""

import contextlib
import fcntl
import hashlib
import math
import os
import shutil
import time
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from vitlab.data.files import archive

_UNUSED = 3600.0  # seconds after which another data set's file may be evicted
_ROOM = 0.9  # share of the budget that is left after an eviction
_CRC = 4  # bytes of the checksum before each range


class DiskCache:
    """Byte ranges of some remote files, each in a local file of its own, written atomically and with a checksum.

    Together they have at most ``budget`` bytes, for all processes and data sets. Where there is no more room, ranges of
    other files are evicted, those first whose file has not been used for longest. Ranges of one's own files stay: as
    each is read once an epoch, keeping a share of them serves that share of all reads, and replacing the oldest far
    less (a sixth of the reads for half the data, by calculation).

    Args:
        budget: Size of the cache, in bytes.
        keys: A key for each remote file, which changes with its content.

    Example:
        >>> cache = DiskCache(1000, ["s3://bucket/0.tar 1"])
        >>> cache.put({(0, 512, 3): b"abc"})
        >>> cache.get((0, 512, 3)), cache.get((0, 1024, 3))
        (b'abc', None)
    """

    def __init__(self, budget: int, keys: Sequence[str]) -> None:
        self.budget, self.root = budget, archive.cache() / "ranges"
        self.folders = [self.root / hashlib.blake2b(key.encode(), digest_size=12).hexdigest() for key in keys]
        self.touched: dict[Path, float] = {}
        self.again = 0.0  # when ranges are kept again, after there was no room

    def get(self, place: tuple[int, ...]) -> bytes | None:
        """Return the bytes of a range, or None; ``place`` is the number of its file, offset and length."""
        try:
            content = self._path(place).read_bytes()
        except OSError:
            return None
        data = content[_CRC:]
        if len(data) != place[2] or zlib.crc32(data) != int.from_bytes(content[:_CRC]):
            self.forget(place)  # as after a power failure: fetched and written again
            return None
        self._touch(self.folders[place[0]])
        return data

    def forget(self, place: tuple[int, ...]) -> None:
        """Delete a range whose bytes are wrong, so that the next ones are kept in its place."""
        with contextlib.suppress(OSError):
            self._path(place).unlink()

    def _path(self, place: tuple[int, ...]) -> Path:
        number, offset, length = place
        return self.folders[number] / f"{offset}-{length}"

    def put(self, ranges: Mapping[tuple[int, ...], bytes]) -> None:
        """Keep ranges, as far as there is room; a disk that cannot be written to is told once."""
        if time.monotonic() < self.again:
            return
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with (self.root / "bytes").open("a+") as file:  # all processes' total; who holds its lock may change it
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                text = file.read()
                total, admitted = self._admitted(ranges, int(text) if text.isdecimal() else self._evict(0))
                file.truncate(0)
                file.write(str(total))
                file.flush()  # before the ranges are: after a kill, the total is at most too large
                for path, data in admitted:
                    path.parent.mkdir(exist_ok=True)
                    beside = path.with_suffix(f".{os.getpid()}")
                    beside.write_bytes(zlib.crc32(data).to_bytes(_CRC) + data)
                    beside.replace(path)
        except OSError as error:
            self.again = math.inf
            warnings.warn(f"{self.root} takes no more images, which are fetched anew: {error}", stacklevel=2)

    def _admitted(self, ranges: Mapping[tuple[int, ...], bytes], total: int) -> tuple[int, list[tuple[Path, bytes]]]:
        """Return the total with the new ranges for which there is room, and these, each with its path."""
        admitted, added = [], 0
        for place, data in ranges.items():
            path, size = self._path(place), _CRC + len(data)
            if path.exists():
                continue
            if total + added + size > self.budget:
                total = self._evict(added + size)
            if total + added + size > self.budget:
                self.again = time.monotonic() + _UNUSED / 10
                break
            admitted.append((path, data))
            added += size
        return total + added, admitted

    def _evict(self, needed: int) -> int:
        """Evict ranges of other files until there is room; return the number of bytes that are left."""
        now, left, folders = time.time(), 0, []
        for folder in [entry for entry in self.root.iterdir() if entry.is_dir()]:
            used, size = folder.stat().st_mtime, 0
            for file in folder.iterdir():
                if file.suffix:  # of a process that was killed: none other writes now
                    file.unlink()
                else:
                    size += file.stat().st_size
            left += size
            if folder not in self.folders:
                folders.append((used, folder, size))
        for used, folder, size in sorted(folders):
            if left + needed <= _ROOM * self.budget or now - used < _UNUSED:
                break
            shutil.rmtree(folder)
            left -= size
        return left

    def _touch(self, folder: Path) -> None:
        """Note the use of a file, at most once in a tenth of the time after which it counts as unused."""
        if time.monotonic() - self.touched.get(folder, -_UNUSED) > _UNUSED / 10:
            self.touched[folder] = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(folder)
