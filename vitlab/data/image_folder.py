"""Photos in one folder a class, as they come."""

import os
from pathlib import Path
from typing import Unpack

import torch

from vitlab.data.arguments import ImageNetArgs, PhotoArgs
from vitlab.data.files.folders import class_folders, deeper, files_below, some_files, visible
from vitlab.data.files.scan import Folder, sizes_of
from vitlab.data.files.sets import FileImages, Statistics
from vitlab.data.photos import Photos, parts_among
from vitlab.data.record import RUN

_LOOKS = "ROOT/CLASS/IMAGE, or ROOT/train/CLASS/IMAGE with a folder val, test or both beside train"


class ImageFolder(Photos):
    """Photos in ROOT/CLASS/ that are split, or in ROOT/train/CLASS/, ROOT/val/CLASS/ and ROOT/test/CLASS/.

    Where there is no test folder, `val` is the test split; where there is no val folder or it is the test split,
    validation is carved out of `train`. Every file counts, whatever its suffix, but hidden ones do not.

    Args:
        root: Folder of the photos.
        **photos: Passed to :class:`Photos`.

    Example:
        >>> ImageFolder("photos", img_size=32).class_names  # of photos/cat/ and photos/dog/
        ['cat', 'dog']
    """

    def __init__(self, root: str, **photos: Unpack[PhotoArgs]) -> None:
        self.root = Path(root)
        self.folders, left_out = _layout(self.root)
        self.first = next(iter(self.folders.values()))  # train, if there is one
        class_names, empty = class_folders(self.first)
        if len(class_names) < 2 and not RUN.get():
            _check_depth(self.root, self.first, class_names)
        parts = {part: folder.name for part, folder in self.folders.items()}
        sizes = sizes_of(Folder(Path()), some_files(self.first))
        super().__init__(place=str(root), parts=parts, class_names=class_names, sizes=sizes, **photos)
        self.notes += [f"folders that are no split are left out: {', '.join(left_out)}"] if left_out else []
        self.notes += [f"folders without images are no classes: {', '.join(empty)}"] if empty else []

    def list_files(self, parts: list[str]) -> FileImages:
        """Return the files in the class folders of some parts, unopened."""
        number = self.class_numbers()
        files: list[str] = []
        labels: list[int] = []
        for part in parts:
            folders = [entry for entry in visible(self.folders[part]) if entry.is_dir()]
            if not folders and visible(self.folders[part]):
                raise ValueError(f"{self.folders[part]} holds files and no class folders: sort them into {part}/CLASS/")
            for entry in folders:
                found = files_below(entry.path)
                if found and entry.name not in number:
                    raise ValueError(f"{entry.path}: this class is not among those of {self.first}")
                files += [os.path.relpath(file, self.root) for file in found]
                labels += [number[entry.name]] * len(found) if found else []
        return FileImages(Folder(self.root), files, torch.tensor(labels, dtype=torch.int64), self.decoding)


class ImageNet(ImageFolder):
    """The 1,000 classes of ILSVRC 2012 in ROOT/train/n01440764/ and ROOT/val/n01440764/, Russakovsky et al. 2014
    (arXiv:1409.0575).

    The official validation images are the test split. Mean and standard deviation are the published ones.

    Args:
        val_share: Share of the training images that becomes the validation split.
        **folder: Passed to :class:`ImageFolder`.

    Example:
        >>> data = ImageNet(root="photos")  # with train/n01440764/ and so on
        >>> data.statistics()[0]
        (0.485, 0.456, 0.406)
    """

    statistics_from = "published"

    def __init__(self, val_share: float = 0.01, **folder: Unpack[ImageNetArgs]) -> None:
        super().__init__(val_share=val_share, **folder)

    def setup(self, stage: str) -> None:
        """Build what a stage needs; training needs all classes."""
        if stage == "fit" and self.num_classes != 1000:
            raise ValueError(
                f"`data: ImageNet` has 1,000 classes, {self.first} has {self.num_classes:,}: "
                "--data=ImageFolder takes any number"
            )
        super().setup(stage)

    def statistics(self) -> Statistics:
        """Return mean and standard deviation as every published recipe has them."""
        return (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _layout(root: Path) -> tuple[dict[str, Path], list[str]]:
    if not root.is_dir():
        raise ValueError(f"`data.root` must be a folder, got {root}; it should look like {_LOOKS}")
    folders = [entry.name for entry in visible(root) if entry.is_dir()]
    names = parts_among(folders)
    found = {part: root / name for part, name in names.items()}
    if "train" in found:
        return found, [name for name in folders if name not in names.values()]
    if found and RUN.get():
        return found, []
    if found:
        raise ValueError(f"`data.root` has no folder train, got {root}; it should look like {_LOOKS}")
    return {"train": root}, []


def _check_depth(root: Path, train: Path, class_names: list[str]) -> None:
    inside = deeper(train)
    if inside is not None:
        raise ValueError(f"`data.root` has one class folder, {class_names[0]}, got {root}; did you mean {inside}?")
    if not class_names:
        raise ValueError(f"`data.root` has no class folders, got {root}; it should look like {_LOOKS}")
