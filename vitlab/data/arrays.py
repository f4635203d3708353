"""Images given as arrays: in memory, or in a numpy file."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.data.arguments import TableArgs
from vitlab.data.files.array_images import is_channels_last
from vitlab.data.files.rows import Declared, Rows
from vitlab.data.files.sets import Images, TensorImages
from vitlab.data.files.splits import Indices
from vitlab.data.listed import Listed
from vitlab.data.record import trained_targets
from vitlab.tables import shape_text

if TYPE_CHECKING:
    import pandas as pd

_PARTS = ("split", "fold", "group", "weight", "time")  # optional columns of a row


class Arrays(Listed):
    """Images of one shape with any number of channels, with targets, in memory.

    A `.npz` file has `images`, N x H x W or N x C x H x W numbers, and `targets`, N or N x T; optionally `names` of the
    T targets, and N each of `split`, `fold`, `group`, `weight` and `time`, with the meaning of the columns of a
    :class:`Table`.

    Args:
        path: A `.npz` file, a `.npy` file of images, or an array of images.
        targets: A `.npy` file or an array, if `path` has no targets.
        target_type: class, number, or multilabel; the default is that of a :class:`Table`.
        split_by: hash of the pixels, or time: the latest images are for test, those before for validation.
        **photos: Passed to :class:`Photos`.

    >>> data = Arrays(np.random.rand(20, 6, 10), np.linspace(0, 1, 20), batch_size=4)
    >>> data.img_size, data.in_chans, data.targets["kind"]
    ((6, 10), 1, 'number')
    """

    def __init__(
        self,
        path: Any,
        targets: Any = None,
        target_type: Declared = None,
        split_by: Literal["hash", "time"] = "hash",
        **photos: Unpack[TableArgs],
    ) -> None:
        place = str(path) if isinstance(path, str | Path) else "the data"
        found = _read(path)
        found |= {} if targets is None else {"targets": next(iter(_read(targets).values()))}
        missing = [name for name in ("images", "targets") if name not in found]
        if missing:
            raise ValueError(
                f"{place} has no {missing[0]}: save them together, np.savez(FILE, images=..., targets=...)"
            )
        self.images = _images(found["images"], place)
        table, names = _table(found, len(self.images), place)
        rows = Rows(place, table, names, {part: part for part in _PARTS}, target_type, trained=trained_targets())
        shape = self.images.shape
        super().__init__(
            rows=rows, place=place, sizes=[shape[2:]], in_chans=shape[1], arrays=True, split_by=split_by, **photos
        )

    def identity(self, path: str) -> bytes:
        """Return the identity that assigns a row to a split: a hash of its pixels."""
        return hashlib.blake2b(self.images[int(path)].tobytes(), digest_size=16).digest()

    def images_of(self, rows: Indices, targets: Tensor) -> Images:
        """Return the images of some rows, named by row number."""
        return TensorImages(torch.from_numpy(self.images[rows]), targets, [str(i).encode() for i in rows])


def fold_column(path: str) -> "pd.Series | None":
    """Return the `fold` of a `.npz` file, or None; the images are not read."""
    import pandas as pd

    found = _read(path, ["fold"]).get("fold")
    return pd.Series(found) if found is not None and found.ndim == 1 else None  # others are refused by Arrays


def _table(found: Mapping[str, NDArray[Any]], n: int, place: str) -> tuple["pd.DataFrame", list[str]]:
    """Return what stands beside ``n`` images as a table, whose paths are row numbers, and the names of the targets."""
    import pandas as pd

    beside = {part: found[part] for part in _PARTS if part in found}
    for name, values in {"targets": found["targets"], **beside}.items():
        if values.shape[:1] != (n,) or (name in beside and values.ndim > 1):
            raise ValueError(f"{place}: `{name}` must have a value for each of {n} images, got an array {values.shape}")
    columns = found["targets"].reshape(n, -1)
    names = [*map(str, np.atleast_1d(found.get("names", [f"target_{i + 1}" for i in range(columns.shape[1])])))]
    if taken := [name for name in names if name in ("path", *beside)]:
        raise ValueError(f"{place}: no target can be called {taken[0]}, as the column beside it is: change `names`")
    if len(names) != columns.shape[1]:
        raise ValueError(f"{place} has {len(names)} `names` of {columns.shape[1]} targets")
    targets = dict(zip(names, columns.T, strict=True))
    return pd.DataFrame({"path": [str(i) for i in range(n)], **targets, **beside}), names


def _read(source: Any, names: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file by name, or those of ``names`` that it has; a single array is called images.

    Bytes, as other programs write words, become text.
    """
    is_file = isinstance(source, str | Path)
    try:
        found = np.load(source, allow_pickle=False) if is_file else np.asarray(source)
        if hasattr(found, "files"):
            found = {name: found[name] for name in found.files if names is None or name in names}
        else:
            found = {"images": found}
        return {name: np.char.decode(x, "utf-8") if x.dtype.kind == "S" else x for name, x in found.items()}
    except FileNotFoundError:
        raise ValueError(f"`data.path` must be a .npz or .npy file, and there is no {source}") from None
    except Exception as error:  # numpy can raise anything for a broken file
        place = f"{source} is not a .npz or .npy file of numbers and words" if is_file else "the data cannot be read"
        raise ValueError(f"{place}: {error}") from None


def _images(values: NDArray[Any], place: str) -> NDArray[np.float32]:
    if values.ndim not in (3, 4) or values.dtype.kind not in "biuf" or not values.size:
        found = f"{shape_text(values.shape)} {values.dtype}"
        raise ValueError(f"{place} must hold N x H x W or N x C x H x W numbers, and its images are {found}")
    images = np.asarray(values[:, None] if values.ndim == 3 else values, dtype=np.float32)
    if values.ndim == 4 and is_channels_last(values.shape[1:]):
        raise ValueError(f"{place}: images are N x C x H x W, channels before height; got {values.shape[1:]}")
    if len(wrong := np.flatnonzero(~np.isfinite(images).all((1, 2, 3)))):
        raise ValueError(f"{place}: image {wrong[0]} has values that are not finite")
    return images
