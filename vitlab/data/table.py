"""Images named in a table, with classes, labels or numbers to predict."""

from pathlib import Path
from typing import Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from vitlab.data.arguments import TableArgs
from vitlab.data.files.arrays import is_array, read_array
from vitlab.data.files.rows import Kind, Rows, read_table
from vitlab.data.files.scan import Folder, Store, sizes_of
from vitlab.data.files.sets import FileImages, Images, TensorImages
from vitlab.data.files.splits import Indices
from vitlab.data.hugging_face import rows_of
from vitlab.data.listed import Listed

_MOST = 2**34  # bytes of arrays


class Table(Listed):
    """Images named in a CSV, TSV or Parquet file, or in a Hugging Face data set, with targets for each.

    Images are photos, or arrays of C x H x W numbers of one shape (.npy, TIFF of C pages), which stay floats and are
    held in memory. Rows of one group are never in two splits.

    Args:
        path: The table, or the folder of a Hugging Face data set, whose splits are then those of the rows.
        targets: Columns of what is to be predicted.
        target_type: class, number, or multilabel, where an image may have several labels; default: multilabel of
            lists and of several columns of 0 and 1, numbers of floats and of other columns, else class.
        label_separator: What stands between the labels of one column of text, if `target_type` is multilabel.
        path_column: Column of the paths, relative to the table's folder, or of a data set's images.
        split_column: Column that says train, val or test, if there is one.
        group_column: Column of what belongs together, such as a patient, if there is one.
        weight_column: Column of each row's weight in the training loss, if there is one; null leaves it aside.
        time_column: Column of numbers or dates for `split_by`.
        split_by: hash, or time: the latest rows are for test, those before them for validation; groups stay together.
        in_chans: 3 for RGB, 1 for gray; arrays have as many as they have.
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
        label_separator: str = ";",
        path_column: str = "path",
        split_column: str | None = "split",
        group_column: str | None = "group",
        weight_column: str | None = "weight",
        time_column: str | None = "time",
        split_by: Literal["hash", "time"] = "hash",
        in_chans: int | None = None,
        **photos: Unpack[TableArgs],
    ) -> None:
        self.folder = Path(path)
        self.store: Store = Folder(self.folder.parent)
        if self.folder.is_dir():
            table, self.store = rows_of(path, path_column)
        else:
            self.folder = self.folder.parent
            table = read_table(path)
        names = [targets] if isinstance(targets, str) else targets
        columns = {
            "path": path_column, "split": split_column, "group": group_column, "weight": weight_column,
            "time": time_column,
        }  # fmt: skip
        rows = Rows(path, table, names, columns, target_type, label_separator)
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
        """Return what decides to which split a row belongs: the path, or a hash of an image's bytes."""
        return self.store.identity(path)

    def images_of(self, rows: Indices, targets: Tensor) -> Images:
        """Return the images of some rows."""
        files = [self.table.paths[i] for i in rows]
        if not self.arrays:
            return FileImages(self.store, files, targets, self.decoding)
        return TensorImages(self._read_arrays(files), targets, [f.encode() for f in files])

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
