"""Images listed in a table, with classes, labels or numbers to predict."""

from pathlib import Path
from typing import Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from vitlab.data.arguments import TableArgs
from vitlab.data.files.array_images import is_array, read_array
from vitlab.data.files.rows import Declared, Missing, Rows, read_table
from vitlab.data.files.scan import Folder, Store, sizes_of
from vitlab.data.files.sets import FileImages, Images, TensorImages
from vitlab.data.files.splits import Indices
from vitlab.data.hugging_face import rows_of
from vitlab.data.listed import Listed

_MOST = 2**34  # bytes of arrays


class Table(Listed):
    """Images listed in a CSV, TSV, Parquet or Arrow file, or in a Hugging Face data set, with targets.

    Images are photos, or C x H x W arrays of one shape (.npy, or TIFF with C pages), which are kept as floats in
    memory. Rows of one group are never in two splits.

    Args:
        path: The table, or the folder of a Hugging Face data set, whose splits are then used.
        targets: Columns to predict.
        target_type: class, number, or multilabel (an image can have several labels), or a list with class or number for
            each column; default: multilabel for lists and for several columns of 0 and 1, number for floats and for
            other columns of numbers among several, class otherwise.
        label_separator: Separator of the labels in a column of text, for `target_type` multilabel.
        path_column: Column of the paths, relative to the folder of the table, or of the images of a data set.
        split_column: Column with train, val or test; optional.
        fold_column: Column of folds; `fold` then names one of its values, whose rows are for validation.
        group_column: Column of groups that must stay together, such as patients; optional.
        weight_column: Column of weights in the training loss; optional; null ignores it.
        time_column: Column of numbers or dates for `split_by`.
        split_by: hash, or time: the latest rows are for test, those before for validation; groups stay together.
        missing: Empty targets are refused; drop leaves their rows out; mask leaves the cells out of loss and metrics,
            for several numbers or classes.
        in_chans: 3 for RGB, 1 for gray; for arrays it follows from the files.
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
        target_type: Declared = None,
        label_separator: str = ";",
        path_column: str = "path",
        split_column: str | None = "split",
        fold_column: str | None = "fold",
        group_column: str | None = "group",
        weight_column: str | None = "weight",
        time_column: str | None = "time",
        split_by: Literal["hash", "time"] = "hash",
        missing: Missing = "refuse",
        in_chans: int | None = None,
        **photos: Unpack[TableArgs],
    ) -> None:
        names = [targets] if isinstance(targets, str) else targets
        columns = {
            "path": path_column, "split": split_column, "fold": fold_column, "group": group_column,
            "weight": weight_column, "time": time_column,
        }  # fmt: skip
        self.folder = Path(path)
        self.store: Store = Folder(self.folder.parent)
        if self.folder.is_dir():
            table, self.store = rows_of(path, path_column)
        else:
            self.folder = self.folder.parent
            table = read_table(path, [*names, *filter(None, columns.values())], required=[path_column, *names])
        rows = Rows(path, table, names, columns, target_type, label_separator, missing)
        arrays = isinstance(self.store, Folder) and is_array(self.folder / rows.paths[0])
        if arrays:
            shape = read_array(self.folder / rows.paths[0]).shape
            if in_chans not in (None, shape[0]):
                raise ValueError(f"`data.in_chans` is {in_chans}, the arrays of {path} have {shape[0]} channels")
            sizes, in_chans = [shape[1:]], shape[0]
        else:
            sizes = list(sizes_of(self.store, rows.paths[:16]))
        super().__init__(
            rows=rows, place=path, sizes=sizes, in_chans=in_chans or 3, arrays=arrays, split_by=split_by, **photos
        )

    def identity(self, path: str) -> bytes:
        """Return the identity that assigns a row to a split: the path, or a hash of the image's bytes."""
        return self.store.identity(path)

    def images_of(self, rows: Indices, targets: Tensor) -> Images:
        """Return the images of some rows."""
        files = [self.table.paths[i] for i in rows]
        if not self.arrays:
            return FileImages(self.store, files, targets, self.decoding)
        return TensorImages(self._read_arrays(files), targets, [f.encode() for f in files])

    def filter_readable(self, images: Images) -> Images:
        """Return the readable images of a split, and note the others with their rows."""
        found = super().filter_readable(images)
        if isinstance(self.store, Folder) and self.unreadable:
            rows = {self.store.path(path): i for i, path in reversed([*enumerate(self.table.paths)])}
            for path, reason in self.unreadable.items():
                place = f" ({self.table.row(rows[path])}, column {self.table.columns['path']})"
                self.unreadable[path] = reason.removesuffix(place) + place
        return found

    def _read_arrays(self, files: list[str]) -> Tensor:
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
