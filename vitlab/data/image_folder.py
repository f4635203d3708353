"""Photos in one folder a class, as they come."""

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from vitlab.data.base import ImageData, Part
from vitlab.data.images import ImageError, Mode
from vitlab.data.sets import FileImages, Images, Statistics
from vitlab.data.splits import Indices, SplitName

_NAMES = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
_LOOKS = "ROOT/CLASS/IMAGE, or ROOT/train/CLASS/IMAGE with a folder val, test or both beside train"


class ImageFolder(ImageData):
    """Photos in ROOT/CLASS/ that are split, or in ROOT/train/CLASS/, ROOT/val/CLASS/ and ROOT/test/CLASS/.

    Where there is no test folder, `val` is the test split; where there is no val folder or it is the test split,
    validation is carved out of `train`. Every file counts, whatever its suffix, but hidden ones do not.

    Args:
        root: Folder of the photos.
        img_size: Side, or height and width, of the images the network gets, in pixels.
        in_chans: 3 for RGB, 1 for grey.
        max_unreadable: Number of files that may be left out because they cannot be read.
        **data: Passed to :class:`ImageData`.
    """

    def __init__(
        self,
        root: str,
        img_size: int | list[int] = 224,
        in_chans: Literal[1, 3] = 3,
        max_unreadable: int = 0,
        **data: Any,
    ) -> None:
        if max_unreadable < 0:
            raise ValueError(f"`data.max_unreadable` must not be negative, got {max_unreadable}")
        self.root = Path(root)
        self.folders = _layout(self.root)
        self.has_test_split = "test" in self.folders
        self.max_unreadable = max_unreadable
        class_names = [entry.name for entry in _visible(self.folders["train"]) if entry.is_dir()]
        if not class_names:
            raise ValueError(f"`data.root` has no class folders, got {root}; it should look like {_LOOKS}")
        super().__init__(native_size=None, in_chans=in_chans, class_names=class_names, img_size=img_size, **data)

    def prepare_data(self) -> None:
        """Look at all files in one process; the others then find in the cache what it saw."""
        if self.trainer is not None and self.trainer.world_size > 1:
            self.setup(self.trainer.state.fn or "fit")

    def read(self, part: Part) -> FileImages:
        """Return the files of a part, unopened; `val` belongs to block 1."""
        if part == "test":
            return self.list_files([self.folders["test"]])
        return self.list_files([self.folders[name] for name in ("train", "val") if name in self.folders])

    def indices(self, images: Images) -> dict[SplitName, Indices]:
        """Divide block 1; a val folder stays what it is unless folds are asked for."""
        given = None
        if "val" in self.folders:
            folder = os.fsencode(self.folders["val"].name + os.sep)
            given = np.array([identity.startswith(folder) for identity in images.ids], dtype=bool)
        return self.rule.indices(images.ids, images.labels.numpy(), given)

    def admit(self, images: Images) -> Images:
        """Return the files that can be read; more unreadable ones than allowed are an error that lists them."""
        assert isinstance(images, FileImages)
        readable, reasons = images.scanned(self.num_workers)
        self.unreadable |= {os.fspath(self.root / file): reason for file, reason in reasons.items()}
        if len(self.unreadable) > self.max_unreadable:
            shown = [str(ImageError(*item)) for item in sorted(self.unreadable.items())[:10]]
            more = [f"... and {len(self.unreadable) - 10} more"] if len(self.unreadable) > 10 else []
            raise ValueError(
                f"{len(self.unreadable)} files cannot be read, `data.max_unreadable` allows {self.max_unreadable}; "
                f"repair or remove them, or leave them out by --data.max_unreadable={len(self.unreadable)}: "
                + "; ".join(shown + more)
            )
        return readable

    def complain(self, error: ImageError) -> None:
        """Count a file that has become unreadable since it was scanned."""
        self.unreadable[error.path] = error.reason
        if len(self.unreadable) > self.max_unreadable:
            raise ValueError(f"a file has become unreadable: {error}")

    def adopt_classes(self, class_names: list[str]) -> None:
        """Number the classes as a trained run does, which may know more of them."""
        unknown = sorted(set(self.class_names) - set(class_names))
        if unknown:
            raise ValueError(f"the checkpoint does not know the classes {', '.join(unknown)} of {self.root}")
        self.class_names = class_names
        built = list(self.splits)
        self.splits.clear()
        for name in built:
            self.build(name)

    def list_files(self, folders: list[Path]) -> FileImages:
        """Return the files in the class folders of some folders, unopened."""
        mode: Mode = "L" if self.in_chans == 1 else "RGB"
        number = {name: k for k, name in enumerate(self.class_names)}
        files: list[str] = []
        labels: list[int] = []
        for folder in folders:
            for entry in _visible(folder):
                if not entry.is_dir():
                    continue
                if entry.name not in number:
                    raise ValueError(f"{entry.path}: this class is not among those of {self.folders['train']}")
                found = sorted(_files(entry.path, set()))
                files += [os.path.relpath(file, self.root) for file in found]
                labels += [number[entry.name]] * len(found)
        return FileImages(self.root, files, torch.tensor(labels, dtype=torch.int64), mode)


class ImageNet(ImageFolder):
    """The 1,000 classes of ILSVRC 2012 in ROOT/train/n01440764/ and ROOT/val/n01440764/, Russakovsky et al. 2014
    (arXiv:1409.0575).

    The official validation images are the test split. Mean and standard deviation are the published ones.

    Args:
        val_share: Share of the training images that becomes the validation split.
        **folder: Passed to :class:`ImageFolder`.
    """

    statistics_from = "published"

    def __init__(self, val_share: float = 0.01, **folder: Any) -> None:
        super().__init__(val_share=val_share, **folder)

    def statistics(self) -> Statistics:
        """Return mean and standard deviation as every published recipe has them."""
        return (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _layout(root: Path) -> dict[str, Path]:
    if not root.is_dir():
        raise ValueError(f"`data.root` must be a folder, got {root}; it should look like {_LOOKS}")
    found = {part: root / name for part, names in _NAMES.items() for name in names if (root / name).is_dir()}
    if "train" not in found:
        if found:
            raise ValueError(f"`data.root` has no folder train, got {root}; it should look like {_LOOKS}")
        return {"train": root}
    if "test" not in found and "val" in found:
        found["test"] = found.pop("val")
    return found


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)


def _files(folder: str, above: set[str]) -> list[str]:
    place = os.path.realpath(folder)
    if place in above:  # a link that leads back
        return []
    files: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name.lower() in ("thumbs.db", "desktop.ini"):
                continue
            files += _files(entry.path, above | {place}) if entry.is_dir() else [entry.path]
    return files
