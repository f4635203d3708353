"""Images as byte ranges of files, on disk or at any address that fsspec supports: fetched many at once, tried again."""

import os
import time
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from vitlab.data.files.addresses import is_remote, opened
from vitlab.data.files.disk_cache import DiskCache
from vitlab.data.files.store import Store
from vitlab.errors import named_line
from vitlab.ranges import check_ranges

_GAP = 2**16  # largest gap in bytes between images fetched by one request
_WAITS = (0.5, 2.0, 8.0)  # seconds before each further attempt at ranges that a store did not deliver
_FINAL = (FileNotFoundError, PermissionError)  # which no further attempt will change
_MISSES = 3  # fetches in a row that bring nothing, after which a store counts as lost until other images are expected


@dataclass
class _Run:
    """Images that lie close together in one file, and come by one request."""

    shard: int  # number of the file
    fs: Any
    path: str
    start: int
    end: int
    images: list[tuple[str, int, int]] = field(default_factory=list)  # name, offset and length


class Ranges(Store):
    """Images in files such as tar shards, each under a name; remote ones are fetched as byte ranges, many at once.

    Args:
        addresses: The files.
        files: Name of each image.
        rows: ``(N, 3)`` number of the file, offset and length of each image, in bytes.
        stamps: A number for each file that changes with it.
        cache_gb: Size of the cache of remote images on this disk, in GB.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("shard").write_bytes(b"onetwo")
        >>> Ranges(["shard"], ["1", "2"], np.array([[0, 0, 3], [0, 3, 3]]), [0]).read("2")
        b'two'
    """

    def __init__(
        self, addresses: list[str], files: list[str], rows: np.ndarray, stamps: list[int], cache_gb: float = 0.0
    ) -> None:
        check_ranges("data", {"cache_gb": cache_gb})
        self.addresses, self.files, self.rows, self.stamps = addresses, files, rows, stamps
        self.place = "tars " + " ".join(x if is_remote(x) else os.path.abspath(x) for x in addresses)
        self.number = {file: i for i, file in enumerate(files)}
        self.fetched: dict[str, bytes | Exception] = {}  # until other images are expected
        self.misses = 0  # fetches in a row that brought nothing, since then
        keys = [f"{address} {stamp}" for address, stamp in zip(addresses, stamps, strict=True)]
        self.cache = DiskCache(int(cache_gb * 1e9), keys) if cache_gb and any(map(is_remote, addresses)) else None

    def _place(self, file: str) -> tuple[int, int, int]:
        """Return the number of the file that an image is in, its offset and its length."""
        shard, offset, length = self.rows[self.number[file]].tolist()
        return shard, offset, length

    def path(self, file: str) -> str:
        """Return the file and the name."""
        return f"{self.addresses[self._place(file)[0]]}: {file}"

    def read(self, file: str) -> bytes:
        """Return the bytes of an image, or raise an OSError."""
        shard, offset, length = self._place(file)
        if not is_remote(self.addresses[shard]):
            with open(self.addresses[shard], "rb", buffering=0) as local:
                found: bytes | Exception = os.pread(local.fileno(), length, offset)
        else:
            if file not in self.fetched:
                if self.misses >= _MISSES:
                    raise OSError("not asked for, as the store has not answered several times")
                self._fetch([file])
            found = self.fetched[file]  # kept, as a batch may hold several copies
        if isinstance(found, Exception):
            del self.fetched[file]
            raise OSError(f"{type(found).__name__}: {found}") from found
        if len(found) != length:
            raise OSError(f"{len(found)} of {length} bytes")
        return found

    def forget(self, file: str) -> None:
        """Forget the bytes of a remote image, which are not those that were stored: the next read asks for them."""
        self.fetched.pop(file, None)
        if self.cache:
            self.cache.forget(self._place(file))

    def expect(self, files: list[str]) -> None:
        """Prefetch the remote files that are read next, all at once."""
        self.fetched, self.misses = {}, 0
        self._fetch([file for file in files if is_remote(self.addresses[self._place(file)[0]])])

    def _fetch(self, files: list[str]) -> None:
        if self.cache:
            self.fetched |= {file: known for file in files if (known := self.cache.get(self._place(file)))}
        new: dict[tuple[int, ...], bytes] = {}
        for fs, runs in groupby(self._runs({*files} - {*self.fetched}), lambda run: run.fs):
            asked = list(runs)
            ranges = [(run.path, run.start, run.end) for run in asked]
            parts = _ranges(fs, ranges, () if self.misses else _WAITS)
            is_lost = all(isinstance(part, Exception) and not isinstance(part, _FINAL) for part in parts)
            self.misses = self.misses + 1 if is_lost else 0
            for run, part in zip(asked, parts, strict=True):
                for file, offset, length in run.images:
                    if isinstance(part, Exception):
                        self.fetched[file] = part
                    else:
                        start = offset - run.start
                        self.fetched[file] = new[run.shard, offset, length] = bytes(part[start : start + length])
        if self.cache and new:
            self.cache.put(new)

    def _runs(self, files: Collection[str]) -> list[_Run]:
        """Return what to ask for to get some images."""
        runs: list[_Run] = []
        for shard, offset, length, file in sorted((*self._place(file), file) for file in files):
            if not runs or runs[-1].shard != shard or offset > runs[-1].end + _GAP:
                runs.append(_Run(shard, *opened(self.addresses[shard], once=True), offset, offset))
            runs[-1].end = max(runs[-1].end, offset + length)
            runs[-1].images.append((file, offset, length))
        return runs

    def stamp(self, file: str) -> tuple[int, int]:
        """Return size in bytes and a number that changes with the file."""
        shard, offset, length = self._place(file)
        return length, (self.stamps[shard] + offset) % 2**63

    def identity(self, file: str) -> bytes:
        """Return the name."""
        return os.fsencode(file)


def _ranges(fs: Any, ranges: list[tuple[str, int, int]], waits: Sequence[float]) -> list[bytes | Exception]:
    """Return the bytes from start to end of each file, or why there are none after every attempt."""
    found: list[bytes | Exception] = [b""] * len(ranges)
    left = list(range(len(ranges)))
    for attempt, wait in enumerate((*waits, None), start=1):
        try:
            parts = fs.cat_ranges(*map(list, zip(*(ranges[i] for i in left), strict=True)), on_error="return")
        except Exception as error:  # of file systems that do not return it
            parts = [error] * len(left)
        for i, part in zip(left, parts, strict=True):
            length = ranges[i][2] - ranges[i][1]
            short = not isinstance(part, Exception) and len(part) != length
            found[i] = OSError(f"{len(part)} of {length} bytes") if short else part
        failed = {i: x for i in left if isinstance(x := found[i], Exception) and not isinstance(x, _FINAL)}
        left = list(failed)
        if not left or wait is None:
            break
        reason = named_line(failed[left[0]])
        again = f"{len(left)} of {len(ranges)} ranges failed, attempt {attempt + 1} of {len(waits) + 1} in {wait:g} s"
        warnings.warn(f"{ranges[left[0]][0]}: {again} ({reason})", stacklevel=2)
        time.sleep(wait)
    return found
