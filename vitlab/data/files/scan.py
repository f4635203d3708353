"""Decode every file once, to find broken ones before training, and cache the facts about each."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from tqdm import tqdm

from vitlab.data.files import archive
from vitlab.data.files.decode import Decoding, ImageError, decode_bytes, draft_scale, image_header
from vitlab.data.files.store import EachFile, Store

Facts = np.ndarray  # one record of this type for each file
FACTS = np.dtype(
    [
        ("bytes", "i8"),
        ("modified", "i8"),  # in nanoseconds, or another number that changes with the content
        ("readable", "?"),
        ("digest", "u8", 2),  # of the file's bytes
        ("kind", "S16"),  # format and mode, such as JPEG RGB
        ("size", "i4", 2),  # height and width as stored, in pixels
        ("look", "u8", 4),  # 256-bit perceptual hash, see look_of
        ("moments", "f4", (2, 4)),  # mean and mean square of red, green, blue and luma, of values in [0, 1]
    ]
)
_CACHE = 3  # version of the caches; those of others are not read
_LEVELS = np.arange(256) / 255
LOOKED = 224  # smallest shorter side in pixels at which the scan decodes a JPEG image
_MANY = 1000  # files from which a progress bar is shown


def scan(
    store: Store,
    files: list[str],
    num_workers: int = 0,
    how: Decoding = Decoding(),  # noqa: B008
) -> tuple[Facts, dict[str, str]]:
    """Return a record for each file, in order, and the reason for each unreadable file.

    Records of readable files whose stamp is unchanged come from a cache in `VITLAB_CACHE`, by default ~/.cache/vitlab;
    if it cannot be written, files are scanned every time. Why a file was unreadable may have passed: it is read again.
    """
    cache = _cache_file(store, how)
    known = _load(cache)
    facts = np.zeros(len(files), dtype=FACTS)
    reasons: dict[str, str] = {}
    todo = []
    for i, file in enumerate(files):
        with contextlib.suppress(OSError):  # a file that has vanished is reported as unreadable below
            facts[i]["bytes"], facts[i]["modified"] = store.stamp(file)
        record = known.get(file)
        if record is not None and all(record[name] == facts[i][name] for name in ("bytes", "modified")):
            facts[i] = record
        else:
            todo.append(i)
    if todo:
        looks = _looks(store, [files[i] for i in todo], num_workers, how)
        for i, (look, reason) in zip(todo, looks, strict=True):
            for name in ("readable", "digest", "kind", "size", "look", "moments"):
                facts[i][name] = look[name]
            if reason:
                reasons[files[i]] = reason
    if facts["readable"][todo].any():
        _save(cache, known | {file: fact for file, fact in zip(files, facts, strict=True) if fact["readable"]})
    return facts, reasons


def _looks(store: Store, files: list[str], num_workers: int, how: Decoding) -> Iterator[tuple[np.ndarray, str]]:
    batches = DataLoader(
        EachFile(store, files, partial(_look, store, how)),
        batch_size=64,
        num_workers=num_workers if len(files) > 256 else 0,  # for fewer files, starting workers takes longer
        collate_fn=list,
        generator=torch.Generator(),
    )
    few = len(files) < _MANY or None  # None: a bar on a terminal alone
    yield from tqdm((look for batch in batches for look in batch), "reading files", len(files), False, disable=few)


def _look(store: Store, how: Decoding, file: str) -> tuple[np.ndarray, str]:
    """Return the record of a file, or an empty one and why it is unreadable."""
    try:
        return inspect_image(store.load(file), how), ""
    except ImageError as error:
        return np.zeros((), dtype=FACTS), error.reason


def sizes_of(store: Store, files: list[str]) -> list[tuple[int, int]]:
    """Return height and width of the readable files, from their headers."""
    sizes = []
    for file in files:
        with contextlib.suppress(Exception):  # the scan reports unreadable files
            sizes.append(image_header(store.read(file))[1])
    return sizes


def inspect_image(data: bytes, how: Decoding, image: Image.Image | None = None, shrunk: int = LOOKED) -> np.ndarray:
    """Return the record of an encoded image, or raise an ImageError.

    Args:
        data: The bytes of the file.
        how: How to decode it.
        image: The image decoded to RGB with sides of at least ``shrunk`` pixels; None decodes it here.
        shrunk: ``shrink`` of `decode_bytes` for ``image``.
    """
    record = np.zeros((), dtype=FACTS)
    kind, size = image_header(data) if image is not None else ("", (0, 0))
    if image is None or draft_scale(size, shrunk) != draft_scale(size, LOOKED):  # always the same scale
        image = decode_bytes(data, "", replace(how, mode="RGB"), LOOKED)
        kind, size = image_header(data)
    record["readable"], record["kind"], record["size"] = True, kind, size
    record["digest"] = np.frombuffer(hashlib.blake2b(data, digest_size=16).digest(), dtype="u8")
    record["look"], record["moments"] = look_of(image), moments(image)
    return record


def look_of(image: Image.Image) -> np.ndarray:
    """Return the 256-bit difference hash: where a 16 x 17 version of the image gets brighter from left to right.

    >>> look_of(Image.linear_gradient("L").rotate(90)).tolist() == [2**64 - 1] * 4
    True
    """
    gray = np.asarray(image.convert("L").resize((17, 16), Image.Resampling.BOX), dtype=np.int16)
    return np.packbits(gray[:, 1:] > gray[:, :-1] + 2).view(np.uint64)  # 2 of 255: more than an encoder's noise


def moments(image: Image.Image) -> np.ndarray:
    """Return mean and mean square of red, green, blue and luma of an RGB image, for values in [0, 1]."""
    counts = np.array([*image.histogram(), *image.convert("L").histogram()], dtype=np.float64).reshape(4, 256)
    counts /= image.width * image.height
    return np.stack([counts @ _LEVELS, counts @ _LEVELS**2])


def _cache_file(store: Store, how: Decoding) -> Path:
    place = "\n".join(map(str, (_CACHE, store.place, how.value_range, how.max_pixels, how.color_profile)))
    return archive.cache() / f"scan-{hashlib.blake2b(os.fsencode(place), digest_size=12).hexdigest()}.npz"


def _load(path: Path) -> dict[str, Any]:
    try:
        files, facts = archive.read_rows(path)
        return dict(zip(files, facts, strict=True)) if facts.dtype == FACTS else {}
    except Exception:  # absent or incomplete: scan again
        return {}


def _save(path: Path, known: dict[str, Any]) -> None:
    facts = np.array(list(known.values()), dtype=FACTS)
    with contextlib.suppress(OSError):
        archive.write_rows(path, list(known), facts)
