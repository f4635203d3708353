"""Photos packed into shards, whole, so that training sees what it would see of the files."""

import glob
import hashlib
import io
import os
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from vitlab.data.files.sets import FileImages
from vitlab.data.image_folder import ImageFolder
from vitlab.data.pack.shards import PARTS, ROW, VERSION, shard_name, write_index

_SHARD = 2**30  # bytes
_GREY = (b"1", b"L", b"I", b"I;16", b"F")  # modes of Pillow without colours
_Packed = tuple[bytes, int, list[int]]  # the encoded image, its CRC-32, its height and width


def pack(
    source: str,
    target: str,
    size: int | None = 256,
    max_unreadable: int = 0,
    num_workers: int = 2,
    value_range: list[float] | None = None,
    max_pixels: int = 50_000_000,
    shard_bytes: int = _SHARD,
) -> dict[str, Any]:
    """Write all photos of a folder into shards, whole, with an index beside them.

    A photo is decoded, resized to ``size`` pixels on its shorter side if that is longer, and written as plain pixels;
    without ``size`` the files are written as they are. The work is done in a hidden folder beside the target, which
    appears when it is complete; the same call continues work that was interrupted.

    Args:
        source: Folder as :class:`ImageFolder` reads it.
        target: Folder to make; must not exist.
        size: Most pixels of a photo's shorter side; None to keep the files.
        max_unreadable: Number of files that may be left out because they cannot be read.
        num_workers: Number of processes that decode.
        value_range: Values of files of more than 8 bits that become black and white; default: each file's own range.
        max_pixels: Most pixels that a file may have.
        shard_bytes: Bytes after which a shard is complete.
    """
    if size is not None and size < 1:
        raise ValueError(f"`size` must be at least 1, got {size}")
    place = Path(target)
    if place.exists():
        raise ValueError(f"{target} exists; remove it or choose another name")
    settings: dict[str, Any] = {"value_range": value_range, "max_pixels": max_pixels}
    data = ImageFolder(
        source, max_unreadable=max_unreadable, num_workers=num_workers, crop_scale=1.0, crop_pct=1.0, **settings
    )
    images, rows = _listed(data)
    plan = hashlib.blake2b(
        f"{VERSION} {size} {shard_bytes} {settings} {images.files}".encode("utf-8", "surrogateescape")
    )
    plan.update(rows.tobytes())
    work = place.parent / f".{place.name}-{plan.hexdigest()[:12]}"
    work.mkdir(parents=True, exist_ok=True)
    try:
        continued = _write(work, images, rows, size, num_workers, shard_bytes)
    finally:
        if not any(work.glob("*.rows.npy")):  # nothing that could be continued
            shutil.rmtree(work, ignore_errors=True)
    facts = {"version": VERSION, "size": size, "class_names": data.class_names, "parts": data.parts, **settings}
    write_index(work, {**facts, "files": images.files}, rows)
    _finish(work, place)
    total = {"n": len(images), "bytes": int(rows["length"].sum()), "classes": data.num_classes}
    return {**total, "continued": continued, "unreadable": data.unreadable}


def _finish(work: Path, place: Path) -> None:
    for done in work.glob("*.rows.npy"):
        done.unlink()
    os.replace(work, place)
    for other in place.parent.glob(f".{glob.escape(place.name)}-{'[0-9a-f]' * 12}"):  # work on other plans
        shutil.rmtree(other, ignore_errors=True)


def _listed(data: ImageFolder) -> tuple[FileImages, np.ndarray]:
    parts = []
    for number, name in enumerate(PARTS):
        if name in data.folders:
            images = data.admit(data.list_files([name]))
            assert isinstance(images, FileImages)
            rows = np.zeros(len(images), dtype=ROW)
            rows["label"], rows["part"], rows["facts"] = images.labels, number, images.known
            parts.append((images, rows))
    files = [file for images, _ in parts for file in images.files]
    labels = torch.cat([images.labels for images, _ in parts])
    rows = np.concatenate([rows for _, rows in parts])
    return FileImages(parts[0][0].store, files, labels, data.decoding, np.ascontiguousarray(rows["facts"])), rows


def _write(
    folder: Path, images: FileImages, rows: np.ndarray, size: int | None, num_workers: int, shard_bytes: int
) -> int:
    """Write the shards and fill in where each image lies; return how many images earlier work had written."""
    start, shard = 0, 0
    while (done := folder / f"{shard_name(shard)}.rows.npy").is_file():  # written after its shard
        known = np.load(done, allow_pickle=False)
        rows[start : start + len(known)] = known
        start, shard = start + len(known), shard + 1
    free, expected = shutil.disk_usage(folder).free, _expected(rows[start:], size)
    if expected > free:
        raise ValueError(
            f"{folder.parent} has {free / 1e9:.1f} GB left, and the packed images take {expected / 1e9:.1f} GB"
        )
    photos = DataLoader(
        _Photos(images, size, start), batch_size=16, num_workers=num_workers, collate_fn=list,
        generator=torch.Generator(),
    )  # fmt: skip
    packed = (photo for batch in photos for photo in batch)
    bar = tqdm(total=len(rows), initial=start, desc="packing", unit=" images", disable=not sys.stderr.isatty())
    i = start
    with bar:
        while i < len(rows):
            i, first = _write_shard(folder, shard, packed, rows, i, shard_bytes, bar), i
            _save_rows(folder / f"{shard_name(shard)}.rows.npy", rows[first:i])
            shard += 1
    return start


def _write_shard(folder: Path, shard: int, packed: Any, rows: np.ndarray, i: int, shard_bytes: int, bar: Any) -> int:
    with (folder / shard_name(shard)).open("wb") as file:
        while i < len(rows) and file.tell() < shard_bytes:
            data, crc, shape = next(packed)
            row = rows[i]
            row["facts"]["size"] = shape
            row["shard"], row["offset"], row["length"], row["crc"] = shard, file.tell(), len(data), crc
            file.write(data)
            bar.update()
            i += 1
        file.flush()
        os.fsync(file.fileno())
    return i


def _save_rows(path: Path, rows: np.ndarray) -> None:
    beside = path.with_suffix(".tmp")
    with beside.open("wb") as file:
        np.save(file, rows, allow_pickle=False)
    os.replace(beside, path)


def _expected(rows: np.ndarray, size: int | None) -> int:
    if size is None:
        return int(rows["facts"]["bytes"].sum())
    sides = rows["facts"]["size"].astype(np.float64)
    scale = np.minimum(1.0, size / sides.min(axis=1, initial=np.inf))
    return int((sides.prod(axis=1) * scale**2 * 3).sum())


class _Photos(Dataset[_Packed]):
    def __init__(self, images: FileImages, size: int | None, start: int) -> None:
        self.images, self.size, self.start = images, size, start

    def __len__(self) -> int:
        return len(self.images) - self.start

    def __getitem__(self, index: int) -> _Packed:
        index += self.start
        facts = self.images.known[index]
        if self.size is None:
            data, shape = self.images.store.read(self.images.files[index]), facts["size"].tolist()
        else:
            image = resized(self.images.image(index, shrink=2 * self.size), self.size)
            grey = facts["kind"].split()[-1] in _GREY
            data, shape = pixels(image.convert("L") if grey else image), [image.height, image.width]
        return data, zlib.crc32(data), shape


def resized(image: Image.Image, size: int) -> Image.Image:
    """Return an image whose shorter side has at most ``size`` pixels, in its proportions.

    >>> resized(Image.new("RGB", (400, 300)), 150).size
    (200, 150)
    """
    scale = size / min(image.size)
    if scale >= 1:
        return image
    width, height = (max(size, round(side * scale)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def pixels(image: Image.Image) -> bytes:
    """Return an image as plain pixels with a header of a line (the format PPM), which need no decoding.

    >>> pixels(Image.new("L", (2, 1)))[:11]
    b'P5\\n2 1\\n255\\n'
    """
    content = io.BytesIO()
    image.save(content, "PPM")
    return content.getvalue()
