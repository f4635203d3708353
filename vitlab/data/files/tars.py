"""Index tar files, on disk or at any address that fsspec supports; the index is cached."""

import contextlib
import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from vitlab.data.files import archive
from vitlab.data.files.addresses import Unusable, opened, told

_NOTE = 2**20  # largest size in bytes of a member with a label


class Member(NamedTuple):
    """A file in a tar file: name, offset and length in bytes, and its text if requested."""

    name: str
    offset: int
    length: int
    text: str | None = None


def members_of(addresses: Sequence[str], text: str | None = None) -> tuple[list[list[Member]], list[int]]:
    """Return the files in each tar file, including nested tar files, and a number that changes with the tar file.

    Args:
        addresses: The tar files, uncompressed.
        text: Suffix of the members to read: ``cls``, or ``json.FIELD`` for a field of a JSON object.

    Raises:
        ValueError: A tar file cannot be read.
    """
    bar = tqdm(desc="reading shards", unit="B", unit_scale=True, leave=False, disable=None)
    with bar:
        found = [_indexed(address, text, bar) for address in addresses]
    return [members for members, _ in found], [stamp for _, stamp in found]


def _indexed(address: str, text: str | None, bar: Any) -> tuple[list[Member], int]:
    with told(address):
        fs, path = opened(address)
        facts = sorted((key, str(value)) for key, value in fs.info(path).items())
        stamp = int.from_bytes(_digest(repr(facts))[:7])
        cache = archive.cache() / f"tar-{_digest(f'2 {fs.unstrip_protocol(path)} {text}').hex()}.npz"
        with contextlib.suppress(Exception):  # absent, outdated or incomplete: read the tar file
            (known, names, texts), places = archive.read_rows(cache)
            if known == stamp:
                return [Member(*x) for x in zip(names, *places.T.tolist(), texts, strict=True)], stamp
        members = []
        try:
            with fs.open(path, "rb") as file:
                start = bar.n
                for member in _walk(file, text):
                    members.append(member)
                    bar.update(start + member.offset + member.length - bar.n)
        except (tarfile.TarError, EOFError) as error:
            raise Unusable(f"{address} is not a complete, uncompressed tar file: {error}") from None
        except Unusable as error:
            raise Unusable(f"{address}: {error}") from None
    with contextlib.suppress(OSError):
        places = np.array([member[1:3] for member in members], dtype=np.int64).reshape(-1, 2)
        archive.write_rows(
            cache, [stamp, [member.name for member in members], [member.text for member in members]], places
        )
    return members, stamp


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
                raise Unusable(f"{name} is a sparse file; repack it without --sparse")
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
        raise Unusable(f"{name} must be {what}, got {content[:40]!r} ({type(error).__name__})") from None
    if not isinstance(value, str | int | float) or value != value:
        raise Unusable(f"{name} must have a class under {field}, got {content[:40]!r}")
    return str(value)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(os.fsencode(text), digest_size=12).digest()
