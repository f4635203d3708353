"""Photos in one folder per class, and photos without classes."""

import os
import re
from pathlib import Path
from typing import Literal, NamedTuple, Unpack, get_args

import numpy as np

from vitlab.data.arguments import PhotoArgs
from vitlab.data.files.scan import sizes_of
from vitlab.data.files.sets import FileImages
from vitlab.data.files.store import Folder
from vitlab.data.files.walk import classes_in, deeper, files_below, is_flat, is_folder, sample_files, visible
from vitlab.data.photos import Photos, is_like_a_split, parts_among
from vitlab.data.record import RUN
from vitlab.errors import preview
from vitlab.ranges import check_word

Videos = Literal["frames", "middle"]
DEVKIT = "ILSVRC2012_devkit_t12"  # with the classes of ImageNet's validation images
_LOOKS = "ROOT/CLASS/IMAGE, or ROOT/train/CLASS/IMAGE with a folder val, test or both beside train"


class ClassFolders(Photos):
    """Photos named CLASS/FILE or PART/CLASS/FILE, whose folders below a class may be videos.

    Example:
        >>> from vitlab.data import ImageFolder, Packed
        >>> issubclass(ImageFolder, ClassFolders) and issubclass(Packed, ClassFolders)
        True
    """

    videos: Videos | None = None  # what folders below those of the classes are

    def groups_of(self, files: list[str]) -> list[str] | None:
        """Return the video of each file, unless each is divided by itself."""
        return None if self.videos is None else self.videos_of(files)

    def videos_of(self, files: list[str]) -> list[str]:
        """Return the folder below a class in which each file lies, or the file itself if there is none."""
        above = ("", *(f"{folder}{os.sep}" for folder in self.parts.values()))
        classes = {f"{part}{name}" for part in above for name in self.class_numbers()}
        folders = map(os.path.dirname, files)
        return [file if folder in classes else folder for file, folder in zip(files, folders, strict=True)]

    def of_videos(self, images: FileImages) -> FileImages:
        """Return the images as `videos` says: all, or the middle one of each folder; note videos of one name."""
        if self.videos is not None:
            self._note_namesakes(images.files)
        if self.videos != "middle":
            return images
        videos: dict[str, list[int]] = {}
        for i, video in enumerate(self.videos_of(images.files)):
            videos.setdefault(video, []).append(i)
        in_time = [sorted(frames, key=lambda i: _numbers_of(images.files[i])) for frames in videos.values()]
        return images.take(np.array([frames[len(frames) // 2] for frames in in_time], dtype=np.int64))

    def _note_namesakes(self, files: list[str]) -> None:
        """Say that folders of one name below several classes or parts are different videos, if there are any."""
        videos = {video for video, file in zip(self.videos_of(files), files, strict=True) if video != file}
        places: dict[str, str] = {}  # of a folder, by its name below its class
        for video in sorted(videos):
            first, *rest = video.split(os.sep)
            name = os.sep.join(rest[first in self.parts.values() :])
            if (other := places.setdefault(name, video)) != video:
                self.note(
                    f"{other} and {video} count as different videos, as other folders of one name do, and may be in "
                    "different splits: if they are one, give its frames one name in the column `group` of a Table"
                )
                return


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
        first = next(iter(self.folders.values()))  # train, if there is one
        class_names, empty = classes_in(first)
        if not RUN.get():
            _check_depth(self.root, first, class_names)
            if self.videos is None:
                _check_level(self.root, first, class_names)
        parts = {part: folder.name for part, folder in self.folders.items()}
        notes = [f"folders that are no split are left out: {', '.join(left_out)}"] if left_out else []
        notes += [f"folders without images are no classes: {', '.join(empty)}"] if empty else []
        return Survey(parts, class_names, sizes_of(Folder(Path()), sample_files(first)), notes)

    def layout(self) -> tuple[dict[str, Path], list[str]]:
        """Return the folder of each part, and the names of other folders."""
        folders, left_out = folders_of_parts(self.root)
        test = folders.get("test", self.root)
        if "test" in folders and not test.name.lower().startswith("test") and is_flat(test):
            raise ValueError(_unsorted(test))  # a folder named test may have no classes
        return folders, left_out

    def list_files(self, parts: list[str]) -> FileImages:
        """Return the files in the class folders of some parts, unopened."""
        files: list[str] = []
        names: list[str] = []
        for part in parts:
            if is_flat(self.folders[part]):
                raise ValueError(_unsorted(self.folders[part]))
            for entry in [entry for entry in visible(self.folders[part]) if is_folder(entry)]:
                found = sorted(files_below(entry.path))
                files += [os.path.relpath(file, self.root) for file in found]
                names += [entry.name] * len(found)
        images = self.labeled(Folder(self.root), files, names)
        self._note_videos(files)
        return self.of_videos(images)

    def _note_videos(self, files: list[str]) -> None:
        """Say that folders of files below a class are divided, if they are."""
        divided = self.videos is None and not {"val", "test"} <= self.parts.keys()
        if divided and self.videos_of(files) != files:
            self.note(
                "files in one folder below a class may be in different splits: if it is a video, --data.videos=frames "
                "keeps them together, middle takes one frame"
            )


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
        self.files = [os.path.relpath(file, self.root) for file in sorted(files_below(str(self.root)))]
        if not self.files and not RUN.get():
            raise ValueError(f"`data.root` has no files, got {self.root}")
        sizes = sizes_of(Folder(self.root), self.files[:: max(1, len(self.files) // 16)])
        return Survey({"train": self.root.name}, ["unlabeled"], sizes, [])

    def list_files(self, parts: list[str]) -> FileImages:
        """Return all files, unopened."""
        return self.labeled(Folder(self.root), self.files, ["unlabeled"] * len(self.files))


def folders_of_parts(root: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the folder of each part of a folder of photos, itself if it has none, and the names of other folders."""
    if not root.is_dir():
        raise ValueError(f"`data.root` must be a folder, got {root}; it should look like {_LOOKS}")
    folders = [entry.name for entry in visible(root) if is_folder(entry)]
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


def check_videos(videos: Videos | None) -> Videos | None:
    """Return `data.videos`, or refuse it."""
    if videos is not None:
        check_word("data.videos", videos, get_args(Videos))
    return videos


def _unsorted(folder: Path) -> str:
    is_imagenet = visible(folder)[0].name.startswith("ILSVRC2012_val")
    way_out = f", or take --data=ImageNet and put {DEVKIT}.tar.gz beside it" if is_imagenet else ""
    return f"{folder} holds files and no class folders: sort them into {folder.name}/CLASS/{way_out}"


def _check_level(root: Path, train: Path, class_names: list[str]) -> None:
    """Refuse folders named like splits, such as ``training_set``, that have the same folders each, and no files."""
    if len(class_names) < 2 or not any(map(is_like_a_split, class_names)):
        return
    inside = [visible(train / name) for name in class_names]
    if not all(is_folder(entry) for entries in inside for entry in entries):
        return
    below = [[entry.name for entry in entries if next(files_below(entry.path), None)] for entries in inside]
    if len(below[0]) > 1 and all(names == below[0] for names in below):
        raise ValueError(
            f"the class folders {preview(class_names)} in {root} hold no images themselves, and each has the same "
            f"folders, {preview(below[0])}: if these are the classes, rename the former to train and test, or give one "
            "of the former as --data.root; if they are videos, give --data.videos=frames"
        )


def _check_depth(root: Path, train: Path, class_names: list[str]) -> None:
    if not class_names:
        raise ValueError(
            f"`data.root` has no class folders with images in {train}; it should look like {_LOOKS}; photos without "
            "classes are for --model=MAE and DINO, with --data=Unlabeled"
        )
    if len(class_names) == 1 and (inside := deeper(train)):
        raise ValueError(f"`data.root` has one class folder, {class_names[0]}, got {root}; did you mean {inside}?")


def _numbers_of(file: str) -> list[tuple[int, str]]:
    """Return the parts of a name, numbers by their size.

    >>> sorted(["f10.jpg", "f9.jpg"], key=_numbers_of)
    ['f9.jpg', 'f10.jpg']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", file)]
