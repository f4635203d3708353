"""Pack whole photos into shards, for training as from the original files."""

import contextlib
import glob
import hashlib
import io
import json
import os
import shutil
import threading
import time
import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Generator
from torch.utils.data import DataLoader
from tqdm import tqdm

from vitlab.data.files import archive
from vitlab.data.files.decode import ColorProfile, Decoding, ImageError, decode_bytes
from vitlab.data.files.scan import inspect_image, sizes_of
from vitlab.data.files.splits import SPLIT_NAMES
from vitlab.data.files.store import EachFile, Store
from vitlab.data.image_folder import ImageFolder
from vitlab.data.imagenet import kind_of
from vitlab.data.loading.transforms import CenterCrop
from vitlab.data.pack.shards import INDEX, ROUNDED, ROW, VERSION, shard_name
from vitlab.data.photos import refuse_unreadable
from vitlab.runs import guard
from vitlab.runs.lock import held

_SHARD = 2**30  # bytes
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


def pack(
    source: str,
    target: str,
    size: int | None = 256,
    max_unreadable: int = 0,
    num_workers: int = 2,
    value_range: list[float] | None = None,
    max_pixels: int = 50_000_000,
    color_profile: ColorProfile = "srgb",
    shard_bytes: int = _SHARD,
) -> dict[str, Any]:
    """Write all photos of a folder into shards with an index, uncropped.

    A photo is decoded, shrunk to ``size`` pixels on its shorter side if that is longer, and written as raw pixels;
    without ``size`` the files are copied. Work is done in a hidden folder next to the target, and renamed once it is
    complete; repeating the call continues interrupted work.

    Args:
        source: Folder that :class:`ImageFolder` can read, or the tar files of :class:`ImageNet`.
        target: Folder to create; must not exist.
        size: Largest shorter side of a photo, in pixels; None copies the files.
        max_unreadable: Number of unreadable files that may be left out.
        num_workers: Number of processes that decode.
        value_range: Values mapped to black and white in files of over 8 bits; default: the range of each file.
        max_pixels: Largest number of pixels of a file.
        color_profile: srgb converts photos with an embedded ICC profile; ignore takes their values as they are.
        shard_bytes: Size in bytes at which a shard is complete.
    """
    if size is not None and size < 1:
        raise ValueError(f"`size` must be at least 1, got {size}")
    place = Path(target)
    if place.exists():
        raise ValueError(f"{target} exists; remove it or choose another name")
    how: dict[str, Any] = {"value_range": value_range, "max_pixels": max_pixels, "color_profile": color_profile}
    lock, unfinished = place.parent / f".{place.name}.lock", f".{glob.escape(place.name)}-*/*"
    guard.enter("pack", f"the process that packs {target}")
    with held(lock, f"packs {target}", sign=lambda: sum(map(_size, place.parent.glob(unfinished)))) as waited:
        guard.enter("pack", f"{source} to be listed")
        if waited and place.exists():
            return _packed_by_another(place, size, how)
        data = kind_of(source)(source, crop_scale=1.0, crop_pct=1.0, **how)
        what = _listed(data, size)
        plan = f"{VERSION} {size} {ROUNDED} {shard_bytes} {how} {what.store.place}"
        work = place.parent / f".{place.name}-{hashlib.blake2b(os.fsencode(plan), digest_size=6).hexdigest()}"
        work.mkdir(parents=True, exist_ok=True)
        try:
            continued, unreadable = _write(work, what, num_workers, shard_bytes, max_unreadable)
        finally:
            if not any(work.glob("images-*.npz")):  # there is nothing to continue
                shutil.rmtree(work, ignore_errors=True)
        _write_index(work, data, what, how)
        _finish(work, place)
        kept, total = int(what.rows["facts"]["readable"].sum()), int(what.rows["length"].sum())
        counts = {"n": kept, "bytes": total, "classes": data.num_classes}
        return {**counts, "continued": continued, "unreadable": unreadable}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it was renamed meanwhile
        return 0


def _packed_by_another(place: Path, size: int | None, how: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a set that another process has finished while this one waited; refuse other settings."""
    facts, rows = archive.read_rows(place / INDEX)
    ours = json.loads(json.dumps({"size": size, **how}))
    if differences := [name for name, value in ours.items() if facts.get(name, "ignore") != value]:
        raise ValueError(f"{place} was packed meanwhile with another {differences[0]}; choose another name")
    known = {"n": len(rows), "bytes": int(rows["length"].sum()), "classes": len(facts["class_names"])}
    return {**known, "continued": len(rows), "unreadable": {}}


def _write_index(work: Path, data: ImageFolder, what: PhotosToPack, how: dict[str, Any]) -> None:
    readable = what.rows["facts"]["readable"]
    lost = np.flatnonzero(~readable).tolist()
    header = {
        "version": VERSION,
        "size": what.size,
        "rounded": ROUNDED,
        "class_names": data.class_names,
        "parts": data.parts,
        "file_sizes": sorted(set(sizes_of(what.store, _sample(what)))),
        "left_out": [(i, what.files[i], *what.rows[["label", "part"]][i].tolist()) for i in lost],
        **how,
        "files": [file for file, kept in zip(what.files, readable.tolist(), strict=True) if kept],
    }
    archive.write_rows(work / INDEX, header, what.rows[readable])


def _finish(work: Path, place: Path) -> None:
    for done in work.glob("images-*.npz"):
        done.unlink()
    os.replace(work, place)
    with contextlib.suppress(OSError):  # the set is complete
        for other in place.parent.glob(f".{glob.escape(place.name)}-{'[0-9a-f]' * 12}"):  # work with other settings
            shutil.rmtree(other, ignore_errors=True)


def _listed(data: ImageFolder, size: int | None) -> PhotosToPack:
    files: list[str] = []
    rows = []
    for number, name in enumerate(SPLIT_NAMES):
        if name in data.parts:
            images = data.list_files([name])
            some = np.zeros(len(images), dtype=ROW)
            some["label"], some["part"] = images.labels.numpy(), number
            for row, file in zip(some, images.files, strict=True):
                with contextlib.suppress(OSError):  # a file that has vanished is unreadable
                    row["facts"]["bytes"], row["facts"]["modified"] = images.store.stamp(file)
            files += images.files
            rows.append(some)
    return PhotosToPack(images.store, files, np.concatenate(rows), data.decoding, size)


def _sample(what: PhotosToPack) -> list[str]:
    """Return some files of the training part, from which sizes are known, as :class:`ImageFolder` looks at some."""
    train = np.flatnonzero(what.rows["part"] == SPLIT_NAMES.index("train"))
    return [what.files[i] for i in train[:: max(1, len(train) // 16)]]


def _write(
    folder: Path, what: PhotosToPack, num_workers: int, shard_bytes: int, max_unreadable: int
) -> tuple[int, dict[str, str]]:
    """Write the shards and fill in the rows; return the number of images written earlier, and unreadable files."""
    start, shard, unreadable = _continued(folder, what)
    free, expected = shutil.disk_usage(folder).free, _expected(what, start)
    if expected > free:
        raise ValueError(f"{folder.parent} has {_amount(free)} left, and the packed images take {_amount(expected)}")
    guard.enter("pack", f"the next photos of {what.store.place}")
    photos = DataLoader(
        EachFile(what.store, what.files[start:], partial(encoded, what)), batch_size=16, num_workers=num_workers,
        collate_fn=list, generator=Generator(), worker_init_fn=partial(_end_with, os.getpid()),
    )  # fmt: skip
    packed = (photo for batch in photos for photo in batch)
    i, total = start, len(what.files)
    with tqdm(total=total, initial=start, desc="packing", unit=" images", disable=None) as bar:
        while i < total:
            first, reasons = i, {}
            with (folder / shard_name(shard)).open("wb") as file:
                while i < total and file.tell() < shard_bytes:
                    photo = next(packed)
                    if photo.reason:
                        reasons[what.store.path(what.files[i])] = photo.reason
                    _fill(what.rows[i], photo, shard, file.tell())
                    file.write(photo.data)
                    bar.update()
                    guard.goes_on()
                    i += 1
                file.flush()
                os.fsync(file.fileno())
            unreadable |= reasons
            if i == total:
                refuse_unreadable(unreadable, max_unreadable, "max_unreadable")
            archive.write_rows(folder / f"{shard_name(shard)}.npz", [what.files[first:i], reasons], what.rows[first:i])
            shard += 1
    refuse_unreadable(unreadable, max_unreadable, "max_unreadable")
    return start, unreadable


def _end_with(parent: int, worker: int) -> None:
    """End this process with its parent: it would wait for ever to hand on a photo that no pipe can hold."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _continued(folder: Path, what: PhotosToPack) -> tuple[int, int, dict[str, str]]:
    """Fill in the rows of complete shards of unchanged files; return their images, number and unreadable files."""
    start, shard, unreadable = 0, 0, dict[str, str]()
    with contextlib.suppress(FileNotFoundError, KeyError, ValueError, zipfile.BadZipFile):
        while True:
            (files, reasons), known = archive.read_rows(folder / f"{shard_name(shard)}.npz")
            now = what.rows[start : start + len(known)]
            same = files == what.files[start : start + len(files)] and known.dtype == ROW
            if not same or any((known[x] != now[x]).any() for x in ("label", "part")) or any(
                (known["facts"][x] != now["facts"][x]).any() for x in ("bytes", "modified")
            ):  # fmt: skip
                break
            broken = start + np.flatnonzero(~known["facts"]["readable"])
            if not all(encoded(what, what.files[i]).reason for i in broken.tolist()):  # its reason has passed
                break
            now[:] = known
            start, shard, unreadable = start + len(known), shard + 1, {**unreadable, **reasons}
    return start, shard, unreadable


def _amount(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count > 5e7 else f"{count / 1e3:.0f} kB"


def _expected(what: PhotosToPack, start: int) -> int:
    """Estimate the bytes of the images from number ``start`` on."""
    n = len(what.files) - start
    if what.size is None:
        return int(what.rows["facts"]["bytes"][start:].sum())
    sizes = sizes_of(what.store, what.files[start :: max(1, n // 200)])
    sides = np.array(sizes, dtype=np.float64).reshape(-1, 2)
    scale = np.minimum(1.0, what.size / sides.min(axis=1, initial=np.inf))
    return int((sides.prod(axis=1) * scale**2 * 3).sum() * n / max(len(sizes), 1))


def _fill(row: Any, photo: Photo, shard: int, offset: int) -> None:
    row["shard"], row["offset"], row["length"], row["crc"] = shard, offset, len(photo.data), photo.crc
    for name in ("readable", "digest", "kind", "look", "moments"):
        row["facts"][name] = photo.facts[name]
    row["facts"]["size"] = photo.shape


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
