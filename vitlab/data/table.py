"""Images listed in a table, with classes, labels or numbers to predict."""

from pathlib import Path
from typing import Literal, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.data.arguments import TableArgs
from vitlab.data.files.array_images import is_array, read_array
from vitlab.data.files.decode import Decoding, decode
from vitlab.data.files.rows import Declared, Missing, Rows
from vitlab.data.files.scan import sizes_of
from vitlab.data.files.sets import FileImages, Images, TensorImages
from vitlab.data.files.splits import Indices
from vitlab.data.files.store import Folder, Store
from vitlab.data.files.table_file import read_table
from vitlab.data.hugging_face import rows_of
from vitlab.data.listed import Listed
from vitlab.data.record import trained_targets

_MOST = 2**34  # bytes of arrays


class Table(Listed):
    """Images listed in a CSV, TSV, Parquet or Arrow file, or in a Hugging Face data set, with targets.

    Images are photos, or C x H x W arrays of one shape (.npy, or TIFF with C pages), which are kept as floats in
    memory. So are those of several columns, such as before and after, stacked on channels; a photo has three, of 0 to
    255. Rows of one group are never in two splits.

    Args:
        path: The table, or the folder of a Hugging Face data set, whose splits are then used.
        targets: Columns to predict.
        target_type: class, number, or multilabel (an image can have several labels), or a list with class or number for
            each column; default: multilabel for lists and for several columns of 0 and 1, number for floats and for
            other columns of numbers among several, class otherwise.
        label_separator: Separator of the labels in a column of text, for `target_type` multilabel.
        path_column: Column of the paths, relative to the folder of the table, or of the images of a data set; or
            several columns of paths, whose images are stacked on channels.
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
        path_column: str | list[str] = "path",
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
        first, *others = paths = self.path_columns = [path_column] if isinstance(path_column, str) else [*path_column]
        columns = {
            "split": split_column, "fold": fold_column, "group": group_column, "weight": weight_column,
            "time": time_column,
        }  # fmt: skip
        self.folder = Path(path)
        self.store: Store = Folder(self.folder.parent)
        notes: list[str] = []
        if self.folder.is_dir():
            if others:
                raise ValueError(f"`data.path_column` of {path}, a data set, must be one column, got {path_column}")
            table, self.store, notes = rows_of(path, first, split_column)
        else:
            self.folder = self.folder.parent
            required = [*paths, *names]
            asis = [*paths, *filter(None, (split_column, fold_column))]
            columns_read = [*required, *filter(None, columns.values())]
            groups = [group_column] if group_column else []
            table = read_table(path, columns_read, required, text=asis, classes=names, groups=groups)
        rows = self.table = Rows(
            path, table, names, columns, target_type, label_separator, missing, trained_targets(), paths
        )
        arrays = bool(others) or (isinstance(self.store, Folder) and is_array(self.folder / rows.paths[0]))
        if arrays:
            shape = self._array(0, Decoding()).shape
            if in_chans not in (None, shape[0]):
                raise ValueError(f"`data.in_chans` is {in_chans}, the arrays of {path} have {shape[0]} channels")
            sizes, in_chans = [shape[1:]], shape[0]
        else:
            sizes = list(sizes_of(self.store, rows.paths[:16]))
        super().__init__(
            rows=rows, place=path, sizes=sizes, in_chans=3 if in_chans is None else in_chans, arrays=arrays,
            split_by=split_by, **photos,
        )  # fmt: skip
        self.notes += notes

    def identity(self, path: str) -> bytes:
        """Return the identity that assigns a row to a split: the path, or a hash of the image's bytes."""
        return self.store.identity(path)

    def images_of(self, rows: Indices, targets: Tensor) -> Images:
        """Return the images of some rows."""
        if not self.arrays:
            return FileImages(self.store, [self.table.paths[i] for i in rows], targets, self.decoding)
        return TensorImages(self._read_arrays(rows), targets, [" + ".join(self._paths(i)).encode() for i in rows])

    def scanned(self, images: Images) -> Images:
        """Return the readable images among those of a split, and note the others with their rows."""
        readable, reasons = images.scanned(self.num_workers)
        if reasons and isinstance(self.store, Folder):
            first_row = {self.store.path(path): i for i, path in reversed([*enumerate(self.table.paths)])}
            for path in reasons:
                reasons[path] += f" ({self.table.row(first_row[path])}, column {self.table.columns['path']})"
        self.unreadable |= reasons
        return readable

    def _paths(self, row: int) -> list[str]:
        """Return the path of a row's image, or those of its images."""
        return [str(self.table.frame[column].iloc[row]) for column in self.path_columns]

    def _array(self, row: int, how: Decoding) -> NDArray[np.float32]:
        """Return the image of a row as ``(C, H, W)``; images of several columns are stacked on channels."""
        found: list[NDArray[np.float32]] = []
        for column, path in zip(self.path_columns, self._paths(row), strict=True):
            file = self.folder / path
            try:
                found.append(read_array(file) if is_array(file) or not self.path_columns[1:] else _photo(file, how))
            except ValueError as error:
                raise ValueError(f"{self.table.row(row)}, column {column}: {error}") from None
            if found[-1].shape[1:] != (size := found[0].shape[1:]):
                other = f"{found[-1].shape[1]} x {found[-1].shape[2]} pixels, and that of {self.path_columns[0]} "
                raise ValueError(f"{self.table.row(row)}, column {column}: {file} has {other}{size[0]} x {size[1]}")
        return np.concatenate(found)

    def _read_arrays(self, rows: Indices) -> Tensor:
        shape = (self.in_chans, *(self.pipeline.native_size or ()))
        size = 4 * len(rows) * int(np.prod(shape))
        if size > _MOST:
            raise ValueError(f"{self.place}: arrays of {size / 1e9:.1f} GB do not fit, {_MOST / 1e9:.1f} GB do")
        images = torch.empty(len(rows), *shape)
        for i, row in enumerate(rows.tolist()):
            array = self._array(row, self.decoding)
            if array.shape != shape:
                place = f"{self.table.row(row)}, column {self.path_columns[0]}: {self.folder / self._paths(row)[0]}"
                raise ValueError(f"{place} has the shape {array.shape}, others have {shape}")
            images[i] = torch.from_numpy(array)
        return images


def _photo(file: Path, how: Decoding) -> NDArray[np.float32]:
    return np.asarray(decode(file, how), dtype=np.float32).transpose(2, 0, 1)
