"""Photos in shards written by `vitlab pack`, on disk or at any address that fsspec supports."""

import os
from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np

from vitlab.data.arguments import PhotoArgs
from vitlab.data.files.decode import Decoding
from vitlab.data.files.sets import FileImages, Images
from vitlab.data.files.splits import SPLIT_NAMES
from vitlab.data.image_folder import ClassFolders, Videos, check_videos
from vitlab.data.pack.shards import ROUNDED, ROW, PackedStore, read_index
from vitlab.data.photos import are_small

_DECODED = {"value_range": None, "max_pixels": Decoding.max_pixels, "color_profile": Decoding.color_profile}


class Packed(ClassFolders):
    """Photos packed by `vitlab pack`, with the splits of the original :class:`ImageFolder`.

    Args:
        root: Folder written by `vitlab pack`, or the address of a copy of it, at any address that fsspec supports.
        verify: Whether to check the checksum of each image before a split is used (1 GB/s); that of a remote image is
            checked whenever it is read.
        cache_gb: Size of the cache of remote images on this disk, in GB, for all data sets together; 0 stores none.
        videos: What folders below a class are, as for :class:`ImageFolder`.
        **photos: Passed to :class:`Photos`; `value_range` and `max_pixels` are those of `vitlab pack`.

    Example:
        >>> Packed("packed", img_size=32).class_names
        ['cat', 'dog']
    """

    def __init__(
        self,
        root: str,
        verify: bool = True,
        cache_gb: float = 0.0,
        videos: Videos | None = None,
        **photos: Unpack[PhotoArgs],
    ) -> None:
        self.root = root = os.fspath(root)
        self.verify, self.videos = verify, check_videos(videos)
        header, self.rows = read_index(root)
        self.files: list[str] = header["files"]
        self.packed_names: list[str] = header["class_names"]
        self.store = PackedStore(root, self.files, self.rows, cache_gb)
        self.left_out: list[tuple[int, str, int, int]] = header.get("left_out", [])  # unknown to earlier versions
        asked = photos.get("color_profile", "srgb")
        self._take_decoding(header, photos)
        packed = np.unique(self.rows["facts"]["size"][self.rows["part"] == 0], axis=0).tolist()
        files = [(h, w) for h, w in header.get("file_sizes", [])]  # unknown to earlier versions
        small = not files or are_small(files)  # large photos stay photos, however small they were packed
        super().__init__(
            place=root, parts=header["parts"], class_names=self.packed_names,
            sizes=[(h, w) for h, w in packed] if small else files, **photos,
        )  # fmt: skip
        if photos["color_profile"] == "ignore" != asked:
            self.notes.append("photos were packed without their ICC profiles: to convert them to sRGB, pack again")
        shrunk = header["size"] is not None and bool((self.rows["facts"]["size"].min(axis=1) == header["size"]).any())
        if shrunk and (way := self._way_to_the_files(header["size"] if header.get("rounded") == ROUNDED else None)):
            self.notes.append(
                f"photos were shrunk to {header['size']} pixels on the shorter side, and evaluation resizes again: "
                f"its pixels are not those of the files; for that, pack with {way}"
            )

    def _take_decoding(self, header: Mapping[str, Any], photos: PhotoArgs) -> None:
        """Read photos as they were packed; refuse what was given otherwise."""
        for name, default in _DECODED.items():
            packed = header.get(name, "ignore")  # earlier versions, which ignored profiles, do not say so
            if (given := photos.get(name, default)) not in (default, packed):
                raise ValueError(
                    f"{self.root} was packed with {name} {packed}, got `data.{name}` {given}; leave out `data.{name}`, "
                    "or pack again"
                )
            photos[name] = packed  # type: ignore[literal-required]

    def _way_to_the_files(self, size: int | None) -> str:
        """Return how to pack so that evaluation sees the pixels of the files; empty if it does at ``size``."""
        pipeline = self.pipeline
        if pipeline.native_size or pipeline.own_ratio:
            return ""
        whole = pipeline.center().whole
        if whole[0] != whole[1] or (pipeline.crop_mode, pipeline.interpolation) != ("center", "bicubic"):
            return "--keep"
        return "" if whole[0] == size else f"--size={whole[0]} or --keep"

    def list_files(self, parts: list[str]) -> FileImages:
        """Return the images of some parts, with the facts stored when they were packed.

        Files that could not be read are among them, so that all are divided as in the folder.
        """
        files = [*self.files]
        before = [i - k for k, (i, *_) in enumerate(self.left_out)]  # among the others, by ascending numbers
        rows = np.insert(self.rows, before, np.zeros(len(before), ROW))
        for i, file, label, part in self.left_out:
            files.insert(i, file)
            rows["label"][i], rows["part"][i] = label, part
        chosen = np.flatnonzero(np.isin(rows["part"], [SPLIT_NAMES.index(part) for part in parts]))
        names = [self.packed_names[number] for number in rows["label"][chosen].tolist()]
        facts = rows["facts"][chosen]  # of the source files
        return self.of_videos(self.labeled(self.store, [files[i] for i in chosen], names, facts))

    def check_images(self, images: Images) -> None:
        """Refuse images that differ from their checksums."""
        super().check_images(images)
        for file in images.names if self.verify else []:
            if self.store.damaged(file):
                raise ValueError(
                    f"{self.root} is damaged: {os.fsdecode(file)} differs from what was packed; pack it again"
                )
