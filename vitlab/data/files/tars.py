"""Images in tar files, on disk or at any address that fsspec supports, found by a cached index."""

import contextlib
import hashlib
import json
import os
import sys
import tarfile
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import IO, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from vitlab.data.files import archive

_GAP = 2**16  # largest gap in bytes between images fetched by one request
_WAITS = (0.5, 2.0, 8.0)  # seconds before each further attempt at ranges that a store did not deliver
_FINAL = (FileNotFoundError, PermissionError)  # which no further attempt will change
_NOTE = 2**20  # largest size in bytes of a member with a label


class Member(NamedTuple):
    """A file in a tar file: name, offset and length in bytes, and its text if requested."""

    name: str
    offset: int
    length: int
    text: str | None = None


class Tars:
    """Images in tar files, each under a name; remote ones are fetched as byte ranges, many at once.

    Args:
        addresses: The tar files.
        files: Name of each image.
        rows: ``(N, 3)`` number of the tar file, offset and length of each image, in bytes.
        stamps: A number for each tar file that changes with it.
    """

    def __init__(self, addresses: list[str], files: list[str], rows: np.ndarray, stamps: list[int]) -> None:
        self.addresses, self.files, self.rows, self.stamps = addresses, files, rows, stamps
        self.place = "tars " + " ".join(x if is_remote(x) else os.path.abspath(x) for x in addresses)
        self.number = {file: i for i, file in enumerate(files)}
        self.fetched: dict[str, bytes | Exception] = {}

    def path(self, file: str) -> str:
        """Return the tar file and the name."""
        return f"{self.addresses[self.rows[self.number[file], 0]]}: {file}"

    def read(self, file: str) -> bytes:
        """Return the bytes of an image, or raise an OSError."""
        shard, offset, length = self.rows[self.number[file]].tolist()
        if not is_remote(self.addresses[shard]):
            with open(self.addresses[shard], "rb", buffering=0) as tar:
                found: bytes | Exception = os.pread(tar.fileno(), length, offset)
        else:
            if file not in self.fetched:
                self._fetch([file])
            found = self.fetched.pop(file)
        if isinstance(found, Exception):
            raise OSError(f"{type(found).__name__}: {found}") from found
        if len(found) != length:
            raise OSError(f"{len(found)} of {length} bytes")
        return found

    def expect(self, files: list[str]) -> None:
        """Prefetch the remote files that are read next, all at once."""
        self.fetched = {}
        self._fetch([file for file in files if is_remote(self.addresses[self.rows[self.number[file], 0]])])

    def _fetch(self, files: list[str]) -> None:
        runs: list[list[Any]] = []  # tar file, start, end, images
        for shard, offset, length, file in sorted((*self.rows[self.number[file]].tolist(), file) for file in files):
            if runs and runs[-1][0] == shard and offset <= runs[-1][2] + _GAP:
                runs[-1][2] = max(runs[-1][2], offset + length)
                runs[-1][3].append((file, offset, length))
            else:
                runs.append([shard, offset, offset + length, [(file, offset, length)]])
        for (fs, *_), some in groupby(((*opened(self.addresses[run[0]]), run) for run in runs), lambda x: x[0:1]):
            places = [(path, run) for _, path, run in some]
            parts = _ranges(fs, [(path, run[1], run[2]) for path, run in places])
            for (_, run), part in zip(places, parts, strict=True):
                for file, offset, length in run[3]:
                    start = offset - run[1]
                    self.fetched[file] = part if isinstance(part, Exception) else bytes(part[start : start + length])

    def stamp(self, file: str) -> tuple[int, int]:
        """Return size in bytes and a number that changes with the tar file."""
        shard, offset, length = self.rows[self.number[file]].tolist()
        return length, (self.stamps[shard] + offset) % 2**63

    def identity(self, file: str) -> bytes:
        """Return the name."""
        return os.fsencode(file)


def _ranges(fs: Any, ranges: list[tuple[str, int, int]]) -> list[bytes | Exception]:
    """Return the bytes from start to end of each file, or why there are none after every attempt."""
    found: list[bytes | Exception] = [b""] * len(ranges)
    left = list(range(len(ranges)))
    for attempt, wait in enumerate((*_WAITS, None), start=1):
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
        reason = f"{type(failed[left[0]]).__name__}: {failed[left[0]]}".splitlines()[0]
        again = f"{len(left)} of {len(ranges)} ranges failed, attempt {attempt + 1} of {len(_WAITS) + 1} in {wait:g} s"
        warnings.warn(f"{ranges[left[0]][0]}: {again} ({reason})", stacklevel=2)
        time.sleep(wait)
    return found


def is_remote(address: str) -> bool:
    """Return whether an address is more than a path.

    >>> is_remote("s3://bucket/train-000.tar"), is_remote("shards/train-000.tar")
    (True, False)
    """
    return "://" in address or "::" in address


def members_of(addresses: Sequence[str], text: str | None = None) -> tuple[list[list[Member]], list[int]]:
    """Return the files in each tar file, including nested tar files, and a number that changes with the tar file.

    Args:
        addresses: The tar files, uncompressed.
        text: Suffix of the members to read: ``cls``, or ``json.FIELD`` for a field of a JSON object.

    Raises:
        ValueError: A tar file cannot be read.
    """
    bar = tqdm(desc="reading shards", unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty())
    with bar:
        found = [_indexed(address, text, bar) for address in addresses]
    return [members for members, _ in found], [stamp for _, stamp in found]


def _indexed(address: str, text: str | None, bar: Any) -> tuple[list[Member], int]:
    try:
        fs, path = opened(address)
        facts = sorted((key, str(value)) for key, value in fs.info(path).items())
        stamp = int.from_bytes(_digest(repr(facts))[:7])
        cache = archive.cache() / f"tar-{_digest(f'{fs.unstrip_protocol(path)} {text}').hex()}.npz"
        with contextlib.suppress(Exception):  # absent, outdated or incomplete: read the tar file
            (known, names, texts), places = archive.read_rows(cache)
            if known == stamp:
                return [Member(*x) for x in zip(names, *places.T.tolist(), texts, strict=True)], stamp
        members = []
        with fs.open(path, "rb") as file:
            start = bar.n
            for member in _walk(file, text):
                members.append(member)
                bar.update(start + member.offset + member.length - bar.n)
    except FileNotFoundError as error:  # fsspec also says so where a server refuses, or cannot be reached
        status = getattr(cause := error.__cause__, "status", None)
        if cause is None or status in (404, 410):
            raise ValueError(f"there is no {address}") from None
        said = f"the server answers {status} {getattr(cause, 'message', '')}" if status else f"{cause}".splitlines()[0]
        raise ValueError(f"{address} cannot be read: {said.strip()}") from None
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{address} is not a complete, uncompressed tar file: {error}") from None
    except _Unusable as error:
        raise ValueError(f"{address}: {error}") from None
    except Exception as error:  # networks and protocols fail in many ways
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{address} cannot be read: {reason}") from None
    with contextlib.suppress(OSError):
        places = np.array([member[1:3] for member in members], dtype=np.int64).reshape(-1, 2)
        archive.write_rows(
            cache, [stamp, [member.name for member in members], [member.text for member in members]], places
        )
    return members, stamp


class _Unusable(ValueError):
    """The content of a tar file cannot be used."""


def _walk(file: IO[bytes], text: str | None, above: str = "") -> Iterator[Member]:
    suffix, _, field = (text or "").partition(".")
    places: dict[str, tuple[int, int]] = {}
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for entry in tar:
            name = above + os.path.normpath(entry.name)
            places[entry.name] = place = places.get(entry.linkname, (0, 0)) if entry.islnk() else (
                entry.offset_data, entry.size
            )  # fmt: skip
            if not (entry.isreg() or entry.islnk()) or os.path.basename(name).startswith("."):
                continue
            if entry.issparse():
                raise _Unusable(f"{name} is a sparse file; repack it without --sparse")
            if name.endswith(".tar"):
                file.seek(place[0])
                yield from _walk(file, text, name.removesuffix(".tar") + "/")
            elif suffix and name.lower().endswith(f".{suffix}"):
                file.seek(place[0])
                yield Member(name, *place, _text(name, file.read(min(place[1], _NOTE)), field))
            else:
                yield Member(name, *place)


def _text(name: str, content: bytes, field: str) -> str:
    try:
        if not field:
            return content.decode().strip()
        value = json.loads(content)[field]
    except (ValueError, KeyError, TypeError) as error:
        what = f"an object with {field}" if field else "text"
        raise _Unusable(f"{name} must be {what}, got {content[:40]!r} ({type(error).__name__})") from None
    return str(value)


def opened(address: str) -> tuple[Any, str]:
    """Return the file system of an address and the path there."""
    from fsspec.core import url_to_fs

    if "reference:" in address.replace("::", ":"):
        raise ValueError(f"{address}: references are not supported, because their templates can run code")
    return url_to_fs(address)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(os.fsencode(text), digest_size=12).digest()
