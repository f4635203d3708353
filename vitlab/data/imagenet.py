"""ImageNet as it is downloaded: folders or the official tar files, and the classes of its validation images."""

import io
import tarfile
from pathlib import Path
from typing import Unpack

import numpy as np

from vitlab.data.arguments import ImageNetArgs
from vitlab.data.files.ranges import Ranges
from vitlab.data.files.scan import sizes_of
from vitlab.data.files.sets import FileImages, Statistics
from vitlab.data.files.store import Folder
from vitlab.data.files.tars import members_of
from vitlab.data.files.walk import is_flat, visible
from vitlab.data.image_folder import DEVKIT, ImageFolder, Survey, Unlabeled, folders_of_parts
from vitlab.errors import named_line

PUBLISHED = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation of the training pixels
_TRAIN, _VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
_SOLUTION = "LOC_val_solution.csv"  # Kaggle's: name,wnid x y x y ...
_ANSWERS = ("ILSVRC2012_validation_ground_truth.txt", "meta.mat")


class ImageNet(ImageFolder):
    """The 1,000 classes of ILSVRC 2012 in ROOT/train/n01440764/ and ROOT/val/n01440764/, Russakovsky et al. 2014
    (arXiv:1409.0575).

    If ROOT/val/ has no class folders, classes come from the development kit or Kaggle's list beside it. The tar files
    ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar are read without unpacking. The official validation images are
    the test split. Mean and standard deviation of color are the published ones.

    Args:
        root: Folder of the photos, or of the tar files.
        val_share: Share of the training images that becomes the validation split.
        **folder: Passed to :class:`ImageFolder`.

    Example:
        >>> data = ImageNet(root="photos")  # with train/n01440764/ and so on
        >>> data.statistics()[0]
        (0.485, 0.456, 0.406)
    """

    statistics_from = "published"
    _statistics: Statistics | None = PUBLISHED

    def __init__(self, root: str, val_share: float = 0.01, **folder: Unpack[ImageNetArgs]) -> None:
        if folder.get("in_chans") == 1:  # of which no numbers are published
            self.statistics_from, self._statistics = ImageFolder.statistics_from, None
        super().__init__(root, None, val_share=val_share, **folder)  # its folders are classes, not videos

    def survey(self) -> Survey:
        """Find parts and classes before any image is decoded."""
        self.tars = _tarred(self.root)
        if self.tars is None:
            return super().survey()
        names = sorted({file.split("/")[1] for file in self.tars.files if file.startswith("train/")})
        return Survey({"train": "train", "test": "val"}, names, sizes_of(self.tars, self.tars.files[:16]), [])

    def layout(self) -> tuple[dict[str, Path], list[str]]:
        """Return the folder of each part; the official test images are left out, because they have no classes."""
        folders, left_out = folders_of_parts(self.root)
        if "val" in folders and is_flat(folders["test"]):
            left_out.append(folders["test"].name)
            folders = {"train": folders["train"], "test": folders["val"]}
        self.classes = _val_classes(self.root) if "test" in folders and is_flat(folders["test"]) else None
        return folders, left_out

    def list_files(self, parts: list[str]) -> FileImages:
        """Return the files of some parts, unopened."""
        if self.tars is not None:
            files = [file for part in parts for file in self.tars.files if file.startswith(f"{self.parts[part]}/")]
            return self.labeled(self.tars, files, [file.split("/")[1] for file in files])
        if parts == ["test"] and self.classes is not None:
            folder = self.folders["test"]
            files = [f"{folder.name}/{entry.name}" for entry in visible(folder)]
            return self.labeled(Folder(self.root), files, [_class_of(Path(file), self.classes) for file in files])
        return super().list_files(parts)

    def setup(self, stage: str) -> None:
        """Build what a stage needs; training needs all classes."""
        if stage == "fit" and self.num_classes != 1000:
            raise ValueError(
                f"`data: ImageNet` has 1,000 classes, {self.place} has {self.num_classes:,}: "
                "--data=ImageFolder takes any number"
            )
        super().setup(stage)


def kind_of(root: str) -> type[ImageFolder]:
    """Return the class that reads a folder: ImageNet as downloaded, class folders, or photos without classes."""
    place = Path(root)
    if (place / _TRAIN).is_file():
        return ImageNet
    if is_flat(place):
        return Unlabeled
    return ImageNet if is_flat(place / "val") else ImageFolder


def _tarred(root: Path) -> Ranges | None:
    """Return the images in the official tar files of a folder, named as if unpacked; None without such files.

    The names are train/WNID/IMAGE and val/WNID/IMAGE.
    """
    if not (root / _TRAIN).is_file():
        return None
    classes = _val_classes(root)
    addresses = [str(root / _TRAIN), str(root / _VAL)]
    (train, val), stamps = members_of(addresses)
    images = [(f"train/{x.name}", 0, x) for x in train]
    images += [(f"val/{_class_of(Path(x.name), classes)}/{x.name}", 1, x) for x in val]
    images.sort()  # as in folders
    rows = np.array([(shard, x.offset, x.length) for _, shard, x in images], dtype=np.int64)
    return Ranges(addresses, [file for file, *_ in images], rows, stamps)


def _class_of(image: Path, classes: dict[str, str]) -> str:
    """Return the class of a validation image."""
    try:
        return classes[image.stem]
    except KeyError:
        raise ValueError(f"{image} is not among the {len(classes):,} validation images of ImageNet") from None


def _val_classes(root: Path) -> dict[str, str]:
    """Return the class (WNID) of each validation image, by file name without suffix.

    Raises:
        ValueError: Neither the development kit nor Kaggle's list is in the folder or up to three levels above.
    """
    for place in [root, *root.resolve().parents[:3]]:
        if (place / _SOLUTION).is_file():
            lines = (place / _SOLUTION).read_text().splitlines()[1:]
            return {name: answer.split()[0] for name, _, answer in (line.partition(",") for line in lines) if answer}
        try:
            if (place / DEVKIT).is_dir():
                return _from_devkit(*((place / DEVKIT / "data" / name).read_bytes() for name in _ANSWERS))
            if (place / f"{DEVKIT}.tar.gz").is_file():
                with tarfile.open(place / f"{DEVKIT}.tar.gz") as tar:
                    found = {Path(entry.name).name: tar.extractfile(entry) for entry in tar if entry.isreg()}
                    return _from_devkit(*(found[name].read() for name in _ANSWERS))  # type: ignore[union-attr]
        except Exception as error:  # a damaged archive or MATLAB file fails in many ways
            raise ValueError(f"{place / DEVKIT} cannot be read: {named_line(error)}") from None
    raise ValueError(
        f"the classes of the validation images are unknown: put {DEVKIT}.tar.gz or {_SOLUTION} into {root}, "
        "or sort the images into val/WNID/"
    )


def _from_devkit(truth: bytes, meta: bytes) -> dict[str, str]:
    from scipy.io import loadmat

    synsets = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
    name = dict(zip(synsets["ILSVRC2012_ID"].tolist(), map(str, synsets["WNID"].tolist()), strict=True))
    return {f"ILSVRC2012_val_{i:08}": name[int(number)] for i, number in enumerate(truth.split(), start=1)}
