"""Images named in a table, with classes or numbers to predict."""

from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch

from vitlab.data.arguments import TableArgs
from vitlab.data.division import Part
from vitlab.data.files.arrays import is_array, read_array
from vitlab.data.files.rows import Kind, Rows, split_by_group
from vitlab.data.files.scan import Folder, sizes_of
from vitlab.data.files.sets import FileImages, Images, TensorImages
from vitlab.data.files.splits import Indices, SplitName
from vitlab.data.photos import Photos, parts_among

_MOST = 2**34  # bytes of arrays


class Table(Photos):
    """Images named in a CSV, TSV or Parquet file, with a class or numbers for each.

    Images are photos, or arrays of C x H x W numbers of one shape (.npy, TIFF of C pages), which stay floats and are
    held in memory. Rows of one group are never in two splits.

    Args:
        path: The table.
        targets: Columns of what is to be predicted.
        target_type: class or number; default: numbers where there are several columns or floats.
        path_column: Column of the paths, relative to the table's folder.
        split_column: Column that says train, val or test, if there is one.
        group_column: Column of what belongs together, such as a patient, if there is one.
        in_chans: 3 for RGB, 1 for grey; arrays have as many as they have.
        **photos: Passed to :class:`Photos`.

    >>> Table("no-such-table.csv", targets="age")
    Traceback (most recent call last):
        ...
    ValueError: `data.path` must be a table, and there is no no-such-table.csv
    """

    def __init__(
        self,
        path: str,
        targets: list[str] | str = "target",
        target_type: Kind | None = None,
        path_column: str = "path",
        split_column: str = "split",
        group_column: str = "group",
        in_chans: int | None = None,
        **photos: Unpack[TableArgs],
    ) -> None:
        names = [targets] if isinstance(targets, str) else targets
        self.table = Rows(path, path_column, names, split_column, group_column, target_type)
        self.folder = Path(path).parent
        self.arrays = is_array(self.folder / self.table.paths[0])
        if self.arrays:
            shape = read_array(self.folder / self.table.paths[0]).shape
            self._check_arrays(shape[0], in_chans, photos)
            sizes, chans = [shape[1:]], shape[0]
        else:
            sizes, chans = sizes_of(Folder(self.folder), self.table.paths[:16]), in_chans or 3
        numbers = self.table.kind == "number"
        parts = _parts(self.table)
        stands_for = {name: part for part, name in parts.items()}
        self.part_of = np.array([stands_for[name] for name in self.table.splits or ["train"] * len(self.table.paths)])
        super().__init__(
            place=path, parts=parts, class_names=[] if numbers else sorted(set(self.table.names)), sizes=sizes,
            in_chans=chans, **photos,
        )  # fmt: skip
        self._check_groups()
        what = f"{len(names)} numbers ({', '.join(names)})" if numbers else f"classes ({names[0]})"
        self.notes.append(f"targets are {what}, {self.table.why}")
        if numbers:
            train = self._rows("train" if self.has_test_split else "all")
            chosen = self.table.values[train[self._divide(train)["train"]]].astype(np.float64)
            std = chosen.std(axis=0)
            self.targets = {
                "kind": "number", "names": names, "mean": chosen.mean(axis=0).tolist(),
                "std": np.where(std > 0, std, 1.0).tolist(),
            }  # fmt: skip

    def read(self, part: Part) -> Images:
        """Return the images of a part; `val` belongs to block 1."""
        rows = self._rows(part)
        files = [self.table.paths[i] for i in rows]
        if self.table.kind == "number":
            targets = torch.from_numpy(self.table.values[rows])
        else:
            numbers = self.class_numbers()
            targets = torch.tensor([numbers[self.table.names[i]] for i in rows], dtype=torch.int64)
        if not self.arrays:
            return FileImages(Folder(self.folder), files, targets, self.decoding)
        return TensorImages(self._read_arrays(files), targets, [f.encode() for f in files])

    def indices(self, images: Images) -> dict[SplitName, Indices]:
        """Divide block 1 or all rows; groups stay together, and given splits stay what they are."""
        return self._divide(self._rows("train" if self.has_test_split else "all"))

    def _divide(self, rows: Indices) -> dict[SplitName, Indices]:
        ids = [self.table.paths[i].encode() for i in rows]
        labels = np.zeros(len(rows), dtype=np.int64)
        if self.table.kind == "class":
            numbers = self.class_numbers()
            labels = np.array([numbers[self.table.names[i]] for i in rows], dtype=np.int64)
        given = self.part_of[rows] == "val" if "val" in self.parts else None
        whole = not self.has_test_split
        if self.table.groups is None or given is not None or self.rule.file is not None:
            return self.rule.indices(ids, labels, given, whole)
        names, labels, of = split_by_group([self.table.groups[i] for i in rows], labels)
        chosen = self.rule.indices(names, labels, None, whole)
        return {split: np.flatnonzero(np.isin(of, groups)) for split, groups in chosen.items()}

    def _rows(self, part: Part) -> Indices:
        if part == "all":
            return np.arange(len(self.table.paths))
        return np.flatnonzero((self.part_of == "test") == (part == "test"))

    def admit(self, images: Images) -> Images:
        """Return what can be used of a split."""
        return images if self.arrays else super().admit(images)

    def _read_arrays(self, files: list[str]) -> torch.Tensor:
        shape = (self.in_chans, *(self.pipeline.native_size or ()))
        size = 4 * len(files) * int(np.prod(shape))
        if size > _MOST:
            raise ValueError(f"{self.place}: arrays of {size / 1e9:.1f} GB do not fit, {_MOST / 1e9:.1f} GB do")
        images = torch.empty(len(files), *shape)
        for i, file in enumerate(files):
            array = read_array(self.folder / file)
            if array.shape != shape:
                raise ValueError(f"{self.folder / file} has the shape {array.shape}, others have {shape}")
            images[i] = torch.from_numpy(array)
        return images

    def _check_arrays(self, channels: int, in_chans: int | None, photos: Any) -> None:
        if in_chans not in (None, channels):
            raise ValueError(f"`data.in_chans` is {in_chans}, the arrays of {self.table.file} have {channels} channels")
        if photos.get("augment", "none") not in ("none", "crop-flip"):
            raise ValueError(f"`data.augment` must be none or crop-flip for arrays, got {photos['augment']}")
        if photos.get("crop_scale") is not None or photos.get("crop_pct") is not None:
            raise ValueError("`data.crop_scale` and `data.crop_pct` are for photos: arrays are shifted, not cropped")

    def _check_groups(self) -> None:
        of: dict[bytes, str] = {}
        for group, part in zip(self.table.groups or [], self.part_of.tolist(), strict=False):
            if of.setdefault(group, part) != part:
                raise ValueError(f"{self.table.file}: the group {group.decode()} is in {of[group]} and in {part}")


def _parts(table: Rows) -> dict[str, str]:
    if table.splits is None:
        return {"train": "train"}
    names = sorted(set(table.splits))
    parts = parts_among(names)
    unknown = sorted(set(names) - set(parts.values()))
    if unknown or "train" not in parts:
        what = f"{unknown[0]} in its split column" if unknown else "no row of the split train"
        raise ValueError(f"{table.file} has {what}: rows must be in train, val or test")
    return parts
