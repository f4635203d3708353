"""Data sets of the library `datasets`, on disk or from the Hugging Face hub."""

import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from vitlab.data.arguments import PhotoArgs
from vitlab.data.files.scan import sizes_of
from vitlab.data.files.sets import FileImages
from vitlab.data.files.store import Store
from vitlab.data.photos import Photos, parts_among
from vitlab.data.record import RUN
from vitlab.errors import one_line

if TYPE_CHECKING:
    import pandas as pd


class HuggingFace(Photos):
    """Photos of a data set of the library `datasets`, Lhoest et al. 2021 (arXiv:2109.02846).

    Its splits train, validation (or val, valid) and test work like the folders of :class:`ImageFolder`; a single split
    of any name is divided. The identity of an image is a digest of its encoded bytes.

    Args:
        path: Folder written by `save_to_disk` or readable by `load_dataset`; with `download` a name on the hub.
        name: Configuration of the data set, if it has several.
        revision: Branch, tag or commit on the hub.
        image_column: Column of the images.
        label_column: Column of the classes.
        download: Whether `path` is a name on the hub, to download unless it is cached.
        **photos: Passed to :class:`Photos`.

    Example:
        >>> HuggingFace("photos", img_size=32).class_names
        ['cat', 'dog']
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        revision: str | None = None,
        image_column: str = "image",
        label_column: str = "label",
        download: bool = False,
        **photos: Unpack[PhotoArgs],
    ) -> None:
        found = _load(path, name, revision, download)
        parts = parts_among(found) if len(found) > 1 else {"train": next(iter(found))}
        if not ("train" in parts or (RUN.get() and parts)):
            raise ValueError(f"`data.path` must have a split called train, got {', '.join(found)} in {path}")
        self.rows = {split: _checked(f"{path}, {split}", found[split], image_column, label_column)
                     for split in parts.values()}  # fmt: skip
        self.image_column, self.label_column = image_column, label_column
        first = parts.get("train") or parts["test"]  # a trained run may be measured where there is no train
        rows = self.rows[first]
        names = getattr(rows.features[label_column], "names", None)
        class_names = names or [
            str(value) for value in sorted({x for x in _column(rows, label_column) if x == x} - {None})
        ]
        self.store = _Rows(path, self.rows, image_column)
        sizes = sizes_of(self.store, [os.path.join(first, str(row)) for row in range(min(len(rows), 16))])
        super().__init__(place=path, parts=parts, class_names=class_names, sizes=sizes, **photos)
        self.notes += _left_out(found, self.rows)

    def list_files(self, parts: list[str]) -> FileImages:
        """Return the rows of some parts, undecoded."""
        files: list[str] = []
        classes: list[str] = []
        for split in (self.parts[part] for part in parts):
            names = getattr(self.rows[split].features[self.label_column], "names", None)
            for row, value in enumerate(_column(self.rows[split], self.label_column)):
                if value is None or value != value or (names and value == -1):
                    raise ValueError(
                        f"{self.place}, {split}, row {row}: {value} is no label; --data=Table leaves such rows out, "
                        f"with --data.path_column={self.image_column} --data.targets={self.label_column} "
                        "--data.missing=drop"
                    )
                files.append(os.path.join(split, str(row)))
                classes.append(str(value) if names is None else names[value])
        return self.labeled(self.store, files, classes)


class _Rows(Store):
    """The encoded images of a data set, each under the name SPLIT/ROW."""

    def __init__(self, place: str, rows: dict[str, Any], column: str) -> None:
        self.place, self.rows, self.column = f"datasets {os.path.abspath(place)}", rows, column
        self.seen: dict[str, tuple[int, bytes]] = {}  # size and digest

    def path(self, file: str) -> str:
        return file

    def read(self, file: str) -> bytes:
        split, row = os.path.split(file)
        image = self.rows[split][int(row)][self.column] or {}
        if image.get("bytes") is None and image.get("path"):
            return Path(image["path"]).read_bytes()
        return image.get("bytes") or b""

    def stamp(self, file: str) -> tuple[int, int]:
        size, digest = self._look(file)
        return size, int.from_bytes(digest[:8], signed=True)

    def identity(self, file: str) -> bytes:
        try:
            return self._look(file)[1]
        except OSError:  # the scan reports it as unreadable
            return os.fsencode(file)

    def _look(self, file: str) -> tuple[int, bytes]:
        if file not in self.seen:
            data = self.read(file)
            self.seen[file] = len(data), hashlib.blake2b(data, digest_size=16).digest()
        return self.seen[file]


def rows_of(path: str, image_column: str, split_column: str | None = None) -> tuple["pd.DataFrame", Store, list[str]]:
    """Return the rows of a data set in a folder as a table, the store of their images, and notes for the user.

    The image column becomes the name of the image in the store; a class of -1 or none, the mark of a row without a
    label, is an empty cell. A column split is added if there are several splits; if it is the ``split_column``, splits
    that are none of train, val and test are left out, as by :class:`HuggingFace`.
    """
    import pandas as pd
    from datasets import ClassLabel, Image

    found = _load(path, None, None, False)
    names = list(found)
    if split_column == "split" and not any("split" in rows.features for rows in found.values()):
        parts = parts_among(found)
        found = {name: found[name] for name in parts.values()} if "train" in parts else found
    tables, images = [], {}
    for split, rows in found.items():
        _check_column(path, rows, "path_column", image_column, Image)
        images[split] = rows.select_columns([image_column]).cast_column(image_column, Image(decode=False))
        table = rows.remove_columns([image_column]).to_pandas()
        for name, feature in rows.features.items():
            if isinstance(feature, ClassLabel):
                table[name] = [feature.names[int(value)] if value >= 0 else None for value in table[name]]
        table[image_column] = [os.path.join(split, str(row)) for row in range(len(rows))]
        tables.append(table if len(found) == 1 or "split" in table else table.assign(split=split))
    return pd.concat(tables, ignore_index=True), _Rows(path, images, image_column), _left_out(names, found)


def _left_out(names: Collection[str], kept: Collection[str]) -> list[str]:
    """Return a note on the splits that are left out, if there are any."""
    others = ", ".join(name for name in names if name not in kept)
    return [f"splits that are none of train, val and test are left out: {others}"] if others else []


def _load(path: str, name: str | None, revision: str | None, download: bool) -> dict[str, Any]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError("`data: HuggingFace` needs datasets: pip install 'vitlab[huggingface]'") from error
    folder = Path(path)
    if not folder.is_dir() and not download:
        raise ValueError(
            f"`data.path` must be a folder that `save_to_disk` has written or `load_dataset` reads, got {path}; "
            "with --data.download=true, path can be a name on the hub"
        )
    if not download:
        datasets.disable_progress_bars()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            found = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(path, name, revision=revision)
    except Exception as error:  # no connection, no such name, damaged files: many kinds
        why = "it seems to have no rows" if isinstance(error, IndexError) else one_line(error)
        raise ValueError(f"`data.path` {path} cannot be read: {why}") from error
    return dict(found) if isinstance(found, dict) else {str(found.split or "all"): found}


def _column(rows: Any, name: str) -> list[Any]:
    return rows.select_columns(name)[:][name]


def _checked(place: str, rows: Any, image_column: str, label_column: str) -> Any:
    from datasets import ClassLabel, Image, Value

    _check_column(place, rows, "image_column", image_column, Image)
    _check_column(place, rows, "label_column", label_column, ClassLabel | Value)
    return rows.select_columns([image_column, label_column]).cast_column(image_column, Image(decode=False))


def _check_column(place: str, rows: Any, option: str, column: str, kind: Any) -> None:
    """Refuse a column that is missing, or of another kind, and tell those that there are."""
    if not isinstance(rows.features.get(column), kind):
        what = "images" if option != "label_column" else "classes"
        known = ", ".join(f"{name} ({type(feature).__name__})" for name, feature in rows.features.items())
        raise ValueError(f"`data.{option}` must be a column of {what} in {place}, got {column}; there are {known}")
