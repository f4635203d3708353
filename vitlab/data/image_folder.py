"""Photos in one folder per class, ImageNet as it is downloaded, and photos without classes."""

import io
import os
import tarfile
import unicodedata
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np
import torch

from vitlab.data.arguments import AnyPhotoArgs, PhotoArgs
from vitlab.data.class_folders import ClassFolders, Videos, check_videos
from vitlab.data.files.ranges import Ranges
from vitlab.data.files.scan import Folder, sizes_of
from vitlab.data.files.sets import FileImages, Statistics
from vitlab.data.files.tars import members_of
from vitlab.data.photos import parts_among
from vitlab.data.record import RUN
from vitlab.errors import named_line

_PUBLISHED = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation of ImageNet's pixels
_LOOKS = "ROOT/CLASS/IMAGE, or ROOT/train/CLASS/IMAGE with a folder val, test or both beside train"
_FEW = 4  # images per class in the sample
_NOT_PHOTOS = ("thumbs.db", "desktop.ini", "__macosx")
TRAIN, VAL, DEVKIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12"
_SOLUTION = "LOC_val_solution.csv"  # Kaggle's: name,wnid x y x y ...
_ANSWERS = ("ILSVRC2012_validation_ground_truth.txt", "meta.mat")


def visible(folder: Path) -> list[os.DirEntry[str]]:
    """Return the visible entries of a folder in sorted order."""
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if _is_visible(entry.name)), key=lambda entry: entry.name)


def is_flat(folder: Path) -> bool:
    """Return whether a folder has files but no folders."""
    entries = visible(folder) if folder.is_dir() else []
    return bool(entries) and not any(_is_folder(entry) for entry in entries)


def files_below(folder: str) -> Iterator[str]:
    """Yield all files below a folder, each folder in sorted order.

    Raises:
        ValueError: A link leads to a folder above.
    """
    return _walk(folder, frozenset([os.path.realpath(folder)]), os.path.realpath(folder))


def class_folders(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the folders with files, and of those without.

    Raises:
        ValueError: Two classes differ only in case, or in how accents are encoded, which some file systems change.
    """
    found = [(entry.name, next(files_below(entry.path), None)) for entry in visible(folder) if _is_folder(entry)]
    names = [name for name, file in found if file is not None]
    composed = {name: unicodedata.normalize("NFC", name) for name in names}
    spellings = {name: text.lower() if len(text) > 1 else text for name, text in composed.items()}  # a, A: letters
    counts = Counter(spellings.values())
    if twice := [name for name in names if counts[spellings[name]] > 1]:
        shown = ", ".join(twice).encode("ascii", "backslashreplace").decode()  # accents look the same
        raise ValueError(
            f"the classes {shown} in {folder} differ only in case, or in how accents are encoded: join or rename them"
        )
    return names, [name for name, file in found if file is None]


def sample_files(folder: Path) -> list[str]:
    """Return a sample of files of each class."""
    return [file for entry in visible(folder) if _is_folder(entry) for file in islice(files_below(entry.path), _FEW)]


def deeper(folder: Path) -> Path | None:
    """Return the folder of class folders below ``folder``, if the way there is one folder in another."""
    entries = visible(folder)
    while len(entries) == 1 and _is_folder(entries[0]):
        folder = Path(entries[0].path)
        entries = visible(folder)
        if len(entries) > 1 and all(_is_folder(entry) for entry in entries):
            return folder
    return None


def _walk(folder: str, above: frozenset[str], top: str) -> Iterator[str]:
    for entry in visible(Path(folder)):
        if not _is_folder(entry):
            yield entry.path
            continue
        place = os.path.realpath(entry.path)
        if place in above:  # a link to a folder that contains it
            continue
        if f"{top}{os.sep}".startswith(place.rstrip(os.sep) + os.sep):
            raise ValueError(f"{entry.path} leads to {place}, above its class: remove the link")
        yield from _walk(entry.path, above | {place}, top)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder; a link onto itself is a file that cannot be read, as a dead one is."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name.lower() not in _NOT_PHOTOS


class Survey(NamedTuple):
    """Layout of a folder: name of each part, classes, sizes of a sample of images, and notes for the user."""

    parts: dict[str, str]
    class_names: list[str]
    sizes: list[tuple[int, int]]
    notes: list[str]


class ImageFolder(ClassFolders):
    """Photos in ROOT/CLASS/, which are divided, or in ROOT/train/CLASS/, ROOT/val/CLASS/ and ROOT/test/CLASS/.

    Without a test folder, `val` is the test split; without a val folder, or if it is the test split, validation is cut
    off from `train`. All files count, whatever their suffix, except hidden ones.

    Args:
        root: Folder of the photos.
        videos: What folders below a class are: None, no videos, each file is divided by itself; frames, videos whose
            frames are all in one split; or middle, videos of which the middle frame stands for all.
        **photos: Passed to :class:`Photos`.

    Example:
        >>> ImageFolder("photos", img_size=32).class_names  # of photos/cat/ and photos/dog/
        ['cat', 'dog']
    """

    def __init__(self, root: str, videos: Videos | None = None, **photos: Unpack[PhotoArgs]) -> None:
        self.root, self.videos = Path(root), check_videos(videos)
        what = self.survey()
        super().__init__(place=root, parts=what.parts, class_names=what.class_names, sizes=what.sizes, **photos)
        self.notes += what.notes

    def survey(self) -> Survey:
        """Find parts and classes before any image is decoded."""
        self.folders, left_out = self.layout()
        self.first = next(iter(self.folders.values()))  # train, if there is one
        class_names, empty = class_folders(self.first)
        if len(class_names) < 2 and not RUN.get():
            _check_depth(self.root, self.first, class_names)
        parts = {part: folder.name for part, folder in self.folders.items()}
        notes = [f"folders that are no split are left out: {', '.join(left_out)}"] if left_out else []
        notes += [f"folders without images are no classes: {', '.join(empty)}"] if empty else []
        return Survey(parts, class_names, sizes_of(Folder(Path()), sample_files(self.first)), notes)

    def layout(self) -> tuple[dict[str, Path], list[str]]:
        """Return the folder of each part, and the names of other folders."""
        folders, left_out = _layout(self.root)
        test = folders.get("test", self.root)
        if "test" in folders and not test.name.lower().startswith("test") and is_flat(test):
            raise ValueError(_unsorted(test))  # a folder named test may have no classes
        return folders, left_out

    def list_files(self, parts: list[str]) -> FileImages:
        """Return the files in the class folders of some parts, unopened."""
        number = self.class_numbers()
        files: list[str] = []
        labels: list[int] = []
        for part in parts:
            if is_flat(self.folders[part]):
                raise ValueError(_unsorted(self.folders[part]))
            for entry in [entry for entry in visible(self.folders[part]) if _is_folder(entry)]:
                found = sorted(files_below(entry.path))
                if found and entry.name not in number:
                    raise ValueError(f"{entry.path}: this class is not among those of {self.first}")
                files += [os.path.relpath(file, self.root) for file in found]
                labels += [number[entry.name]] * len(found) if found else []
        self._note_videos(files)
        return self.of_videos(
            FileImages(Folder(self.root), files, torch.tensor(labels, dtype=torch.int64), self.decoding)
        )

    def _note_videos(self, files: list[str]) -> None:
        """Say that folders of files below a class are divided, if they are."""
        note = (
            "files in one folder below a class may be in different splits: if it is a video, --data.videos=frames "
            "keeps them together, middle takes one frame"
        )
        divided = self.videos is None and not {"val", "test"} <= self.parts.keys() and note not in self.notes
        if divided and self.videos_of(files) != files:
            self.notes.append(note)


def tarred(root: Path) -> Ranges | None:
    """Return the images in the official tar files of a folder, named as if unpacked; None without such files.

    The names are train/WNID/IMAGE and val/WNID/IMAGE.
    """
    if not (root / TRAIN).is_file():
        return None
    classes = val_classes(root)
    addresses = [str(root / TRAIN), str(root / VAL)]
    (train, val), stamps = members_of(addresses)
    images = [(f"train/{x.name}", 0, x) for x in train]
    images += [(f"val/{class_of(Path(x.name), classes)}/{x.name}", 1, x) for x in val]
    images.sort()  # as in folders
    rows = np.array([(shard, x.offset, x.length) for _, shard, x in images], dtype=np.int64)
    return Ranges(addresses, [file for file, *_ in images], rows, stamps)


def class_of(image: Path, classes: dict[str, str]) -> str:
    """Return the class of a validation image."""
    try:
        return classes[image.stem]
    except KeyError:
        raise ValueError(f"{image} is not among the {len(classes):,} validation images of ImageNet") from None


def val_classes(root: Path) -> dict[str, str]:
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


class ImageNet(ImageFolder):
    """The 1,000 classes of ILSVRC 2012 in ROOT/train/n01440764/ and ROOT/val/n01440764/, Russakovsky et al. 2014
    (arXiv:1409.0575).

    If ROOT/val/ has no class folders, classes come from the development kit or Kaggle's list beside it. The tar files
    ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar are read without unpacking. The official validation images are
    the test split. Mean and standard deviation are the published ones.

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

    def __init__(self, root: str, val_share: float = 0.01, **folder: Unpack[AnyPhotoArgs]) -> None:
        super().__init__(root, None, val_share=val_share, **folder)  # its folders are classes, not videos

    def survey(self) -> Survey:
        """Find parts and classes before any image is decoded."""
        self.tars = tarred(self.root)
        if self.tars is None:
            return super().survey()
        self.first = self.root / TRAIN
        names = sorted({_second(file) for file in self.tars.files if file.startswith("train/")})
        return Survey({"train": "train", "test": "val"}, names, sizes_of(self.tars, self.tars.files[:16]), [])

    def layout(self) -> tuple[dict[str, Path], list[str]]:
        """Return the folder of each part; the official test images are left out, because they have no classes."""
        folders, left_out = _layout(self.root)
        if "val" in folders and is_flat(folders["test"]):
            left_out.append(folders["test"].name)
            folders = {"train": folders["train"], "test": folders["val"]}
        self.classes = val_classes(self.root) if "test" in folders and is_flat(folders["test"]) else None
        return folders, left_out

    def list_files(self, parts: list[str]) -> FileImages:
        """Return the files of some parts, unopened."""
        if self.tars is None and (parts != ["test"] or self.classes is None):
            return super().list_files(parts)
        if self.tars is None:
            folder = self.folders["test"]
            files = [f"{folder.name}/{entry.name}" for entry in visible(folder)]
            names = [class_of(Path(file), self.classes or {}) for file in files]
        else:
            files = [file for part in parts for file in self.tars.files if file.startswith(f"{self.parts[part]}/")]
            names = [_second(file) for file in files]
        number = self.class_numbers()
        if unknown := sorted(set(names) - number.keys()):
            raise ValueError(f"{self.parts['test']}: the class {unknown[0]} is not among those of {self.first}")
        labels = torch.tensor([number[name] for name in names], dtype=torch.int64)
        return FileImages(self.tars or Folder(self.root), files, labels, self.decoding)

    def setup(self, stage: str) -> None:
        """Build what a stage needs; training needs all classes."""
        if stage == "fit" and self.num_classes != 1000:
            raise ValueError(
                f"`data: ImageNet` has 1,000 classes, {self.first} has {self.num_classes:,}: "
                "--data=ImageFolder takes any number"
            )
        super().setup(stage)

    def statistics(self) -> Statistics:
        """Return the mean and standard deviation of published recipes, unless others were given."""
        return super().statistics() if self.statistics_from == "given" else _PUBLISHED


class Unlabeled(ImageFolder):
    """All photos below a folder, flat or nested, for tasks that learn without labels: MAE and DINO.

    They form one class, whatever their folders; validation and test splits are shares of them.

    Args:
        root: Folder of the photos.
        **folder: Passed to :class:`ImageFolder`.

    Example:
        >>> Unlabeled("photos", img_size=32).class_names  # of photos/cat/ and photos/dog/
        ['unlabeled']
    """

    def __init__(self, root: str, **folder: Unpack[PhotoArgs]) -> None:
        super().__init__(root, None, **folder)

    def survey(self) -> Survey:
        """Find parts and classes before any image is decoded."""
        if not self.root.is_dir():
            raise ValueError(f"`data.root` must be a folder, got {self.root}")
        self.first, self.folders = self.root, {"train": self.root}
        self.files = [os.path.relpath(file, self.root) for file in sorted(files_below(str(self.root)))]
        if not self.files and not RUN.get():
            raise ValueError(f"`data.root` has no files, got {self.root}")
        sizes = sizes_of(Folder(self.root), self.files[:: max(1, len(self.files) // 16)])
        return Survey({"train": self.root.name}, ["unlabeled"], sizes, [])

    def list_files(self, parts: list[str]) -> FileImages:
        """Return all files, unopened."""
        labels = torch.zeros(len(self.files), dtype=torch.int64)
        return FileImages(Folder(self.root), self.files, labels, self.decoding)


def kind_of(root: str) -> type[ImageFolder]:
    """Return the class that reads a folder: ImageNet as downloaded, class folders, or photos without classes."""
    if is_flat(Path(root)) and not tarred(Path(root)):
        return Unlabeled
    is_download = (Path(root) / TRAIN).is_file() or is_flat(Path(root) / "val")
    return ImageNet if is_download else ImageFolder


def _second(file: str) -> str:
    return file.split("/", 2)[1]


def _unsorted(folder: Path) -> str:
    is_imagenet = visible(folder)[0].name.startswith("ILSVRC2012_val")
    way_out = f", or take --data=ImageNet and put {DEVKIT}.tar.gz beside it" if is_imagenet else ""
    return f"{folder} holds files and no class folders: sort them into {folder.name}/CLASS/{way_out}"


def _layout(root: Path) -> tuple[dict[str, Path], list[str]]:
    if not root.is_dir():
        raise ValueError(f"`data.root` must be a folder, got {root}; it should look like {_LOOKS}")
    folders = [entry.name for entry in visible(root) if _is_folder(entry)]
    names = parts_among(folders)
    found = {part: root / name for part, name in names.items()}
    if "train" in found:
        return found, [name for name in folders if name not in names.values()]
    if found and RUN.get():
        return found, []
    if found:
        taken = ", ".join(names.values())
        raise ValueError(f"`data.root` has no folder train beside {taken}, got {root}; it should look like {_LOOKS}")
    return {"train": root}, []


def _check_depth(root: Path, train: Path, class_names: list[str]) -> None:
    inside = deeper(train)
    if class_names and inside is not None:
        raise ValueError(f"`data.root` has one class folder, {class_names[0]}, got {root}; did you mean {inside}?")
    if class_names:
        return
    if all(_is_folder(entry) for entry in visible(train)):
        raise ValueError(f"`data.root` has no images, got {root}; it should look like {_LOOKS}")
    where = "" if train == root else f" in its folder {train.name}"
    raise ValueError(
        f"`data.root` has no class folders{where}, got {root}; it should look like {_LOOKS}; photos without "
        "classes are for --model=MAE and DINO, with --data=Unlabeled"
    )
