"""Photos packed into one file of raw pixels, which is mapped into memory instead of being decoded."""

import io
import json
import os
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from vitlab.data.arguments import PackedArgs
from vitlab.data.base import ImageData, Part
from vitlab.data.files.scan import moments
from vitlab.data.files.sets import FileImages, Images, MappedImages
from vitlab.data.files.splits import Indices, SplitName
from vitlab.data.image_folder import ImageFolder
from vitlab.data.loading.transforms import CentreCrop, to_tensor

_PIXELS, _INDEX, _VERSION = "images.u8", "index.npz", 1
_ROW = np.dtype(
    [
        ("label", "i4"),
        ("part", "u1"),  # 0 train, 1 val, 2 test; 0 also where there is one folder only
        ("crc", "u4"),  # CRC-32 of the packed pixels
        ("digest", "u8", 2),  # of the source file's bytes
        ("moments", "f4", (2, 4)),  # of the packed pixels, as in `scan.py`
    ]
)
_PARTS = ("train", "val", "test")


def pack(source: str, target: str, size: int = 256, max_unreadable: int = 0, num_workers: int = 2) -> dict[str, Any]:
    """Write all photos of a folder as ``(N, 3, size, size)`` uint8 into one file, with an index beside it.

    Each photo is resized to ``size`` pixels on its shorter side and cut to its centre. The target appears when it is
    complete.

    Args:
        source: Folder as :class:`ImageFolder` reads it.
        target: Folder to make; must not exist.
        size: Side of the packed images, in pixels.
        max_unreadable: Number of files that may be left out because they cannot be read.
        num_workers: Number of processes that decode.
    """
    if size < 1:
        raise ValueError(f"`size` must be at least 1, got {size}")
    place = Path(target)
    if place.exists():
        raise ValueError(f"{target} exists; remove it or choose another name")
    data = ImageFolder(source, img_size=size, max_unreadable=max_unreadable, num_workers=num_workers)
    parts: dict[int, FileImages] = {}
    for number, name in enumerate(_PARTS):
        if name in data.folders:
            images = data.admit(data.list_files([name]))
            assert isinstance(images, FileImages)
            parts[number] = images
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        _write(unfinished, data, parts, size, num_workers)
        os.replace(unfinished, place)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    n = sum(len(images) for images in parts.values())
    return {"n": n, "bytes": n * 3 * size * size, "classes": data.num_classes, "unreadable": data.unreadable}


class Packed(ImageData):
    """Photos that `vitlab pack` has packed; training cuts a random window out of each.

    Args:
        root: Folder that `vitlab pack` has written.
        img_size: Side, or height and width, of the images the network gets, in pixels.
        verify: Compare each image of a split with its checksum before the split is used (1 GB/s).
        **data: Passed to :class:`ImageData`.
    """

    def __init__(
        self, root: str, img_size: int | list[int] = 224, verify: bool = True, **data: Unpack[PackedArgs]
    ) -> None:
        self.root, self.verify = Path(root), verify
        self.header, self.index, self.files = _read_index(self.root)
        self.has_test_split = "test" in self.header["parts"]
        side = self.header["size"]
        super().__init__(
            native_size=None, in_chans=3, class_names=self.header["class_names"], img_size=img_size,
            crop_pct=min(1.0, max(img_size if isinstance(img_size, list) else [img_size]) / side), **data,
        )  # fmt: skip
        if max(self.img_size) > side:
            raise ValueError(f"`data.img_size` must not exceed the packed size {side} of {root}, got {img_size}")

    def read(self, part: Part) -> MappedImages:
        """Return the images of a part; `val` belongs to block 1."""
        n, side = len(self.index), self.header["size"]
        pixels = torch.from_file(str(self.root / _PIXELS), shared=False, size=n * 3 * side * side, dtype=torch.uint8)
        chosen = np.ones(n, dtype=bool) if part == "all" else (self.index["part"] == 2) == (part == "test")
        rows = np.flatnonzero(chosen)
        labels = torch.from_numpy(self.index["label"][rows].astype(np.int64))
        return MappedImages(pixels.view(n, 3, side, side), labels, [self.files[i] for i in rows], rows, self.index)

    def indices(self, images: Images) -> dict[SplitName, Indices]:
        """Divide block 1; a val folder stays what it is unless folds are asked for."""
        assert isinstance(images, MappedImages)
        given = self.index["part"][images.rows] == 1 if "val" in self.header["parts"] else None
        return self.rule.indices(images.ids, images.labels.numpy(), given)

    def admit(self, images: Images) -> Images:
        """Return a split whose pixels are those that were packed."""
        assert isinstance(images, MappedImages)
        for row in images.rows if self.verify else []:
            if zlib.crc32(images.images[row].numpy().tobytes()) != self.index["crc"][row]:
                name = os.fsdecode(self.files[row])
                raise ValueError(f"{self.root / _PIXELS} is damaged: {name} is not as it was packed; pack it again")
        return images

    def fingerprint(self) -> dict[str, Any]:
        """Describe the data for the record of a run, and how much of a photo the packed images show."""
        return super().fingerprint() | {"crop_pct": self.pipeline.crop_pct}


def _write(folder: Path, data: ImageFolder, parts: dict[int, FileImages], size: int, num_workers: int) -> None:
    rows = np.zeros(sum(len(images) for images in parts.values()), dtype=_ROW)
    with (folder / _PIXELS).open("wb") as file:
        i = 0
        for part, images in parts.items():
            rows["digest"][i : i + len(images)] = images.known["digest"]
            rows["label"][i : i + len(images)] = images.labels
            rows["part"][i : i + len(images)] = part
            photos = DataLoader(
                _Photos(images, size), batch_size=16, num_workers=num_workers, collate_fn=list,
                generator=torch.Generator(),
            )  # fmt: skip
            for pixels, crc, values in (photo for batch in photos for photo in batch):
                file.write(pixels)
                rows["crc"][i], rows["moments"][i] = crc, values
                i += 1
        file.flush()
        os.fsync(file.fileno())
    header = {
        "version": _VERSION, "size": size, "class_names": data.class_names,
        "parts": [_PARTS[part] for part in parts], "files": [f for images in parts.values() for f in images.files],
    }  # fmt: skip
    np.savez_compressed(folder / _INDEX, rows=rows, header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8))


def _read_index(root: Path) -> tuple[dict[str, Any], np.ndarray, list[bytes]]:
    try:
        stored = np.load(io.BytesIO((root / _INDEX).read_bytes()), allow_pickle=False)  # zip keeps a CRC of each member
        header, rows = json.loads(stored["header"].tobytes()), stored["rows"]
        if header["version"] != _VERSION or rows.dtype != _ROW:
            raise ValueError(f"written as version {header['version']}, this is version {_VERSION}")
    except FileNotFoundError:
        raise ValueError(f"`data.root` must be a folder that `vitlab pack` has written, got {root}") from None
    except Exception as error:  # a damaged archive fails in many ways
        raise ValueError(f"{root / _INDEX} cannot be read: {error}; pack it again") from None
    expected, found = len(rows) * 3 * header["size"] ** 2, (root / _PIXELS).stat().st_size
    if found != expected:
        raise ValueError(f"{root / _PIXELS} has {found} bytes instead of {expected}; pack it again")
    return header, rows, [os.fsencode(file) for file in header.pop("files")]


class _Photos(Dataset[tuple[bytes, int, np.ndarray]]):
    def __init__(self, images: FileImages, size: int) -> None:
        self.images, self.crop = images, CentreCrop((size, size), 1.0, "bicubic")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[bytes, int, np.ndarray]:
        photo = self.images.image(index, shrink=2 * self.crop.size[0])
        image = self.crop(photo)
        pixels = to_tensor(image).numpy().tobytes()
        return pixels, zlib.crc32(pixels), moments(image)
