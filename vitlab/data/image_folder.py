"""Photos in one folder a class, as they come."""

import os
from pathlib import Path
from typing import Unpack

import torch

from vitlab.data.arguments import ImageNetArgs, PhotoArgs
from vitlab.data.files.scan import Folder
from vitlab.data.files.sets import FileImages, Statistics
from vitlab.data.photos import Photos, parts_among

_LOOKS = "ROOT/CLASS/IMAGE, or ROOT/train/CLASS/IMAGE with a folder val, test or both beside train"


class ImageFolder(Photos):
    """Photos in ROOT/CLASS/ that are split, or in ROOT/train/CLASS/, ROOT/val/CLASS/ and ROOT/test/CLASS/.

    Where there is no test folder, `val` is the test split; where there is no val folder or it is the test split,
    validation is carved out of `train`. Every file counts, whatever its suffix, but hidden ones do not.

    Args:
        root: Folder of the photos.
        **photos: Passed to :class:`Photos`.
    """

    def __init__(self, root: str, **photos: Unpack[PhotoArgs]) -> None:
        self.root = Path(root)
        self.folders = _layout(self.root)
        class_names = [entry.name for entry in _visible(self.folders["train"]) if entry.is_dir()]
        if not class_names:
            raise ValueError(f"`data.root` has no class folders, got {root}; it should look like {_LOOKS}")
        parts = {part: folder.name for part, folder in self.folders.items()}
        super().__init__(place=str(root), parts=parts, class_names=class_names, **photos)

    def list_files(self, parts: list[str]) -> FileImages:
        """Return the files in the class folders of some parts, unopened."""
        number = {name: k for k, name in enumerate(self.class_names)}
        files: list[str] = []
        labels: list[int] = []
        for part in parts:
            for entry in _visible(self.folders[part]):
                if not entry.is_dir():
                    continue
                if entry.name not in number:
                    raise ValueError(f"{entry.path}: this class is not among those of {self.folders['train']}")
                found = sorted(_files(entry.path, set()))
                files += [os.path.relpath(file, self.root) for file in found]
                labels += [number[entry.name]] * len(found)
        return FileImages(Folder(self.root), files, torch.tensor(labels, dtype=torch.int64), self.mode)


class ImageNet(ImageFolder):
    """The 1,000 classes of ILSVRC 2012 in ROOT/train/n01440764/ and ROOT/val/n01440764/, Russakovsky et al. 2014
    (arXiv:1409.0575).

    The official validation images are the test split. Mean and standard deviation are the published ones.

    Args:
        val_share: Share of the training images that becomes the validation split.
        **folder: Passed to :class:`ImageFolder`.
    """

    statistics_from = "published"

    def __init__(self, val_share: float = 0.01, **folder: Unpack[ImageNetArgs]) -> None:
        super().__init__(val_share=val_share, **folder)

    def statistics(self) -> Statistics:
        """Return mean and standard deviation as every published recipe has them."""
        return (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _layout(root: Path) -> dict[str, Path]:
    if not root.is_dir():
        raise ValueError(f"`data.root` must be a folder, got {root}; it should look like {_LOOKS}")
    names = parts_among({entry.name for entry in _visible(root) if entry.is_dir()})
    found = {part: root / name for part, name in names.items()}
    if "train" not in found:
        if found:
            raise ValueError(f"`data.root` has no folder train, got {root}; it should look like {_LOOKS}")
        return {"train": root}
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
