"""Photos that are named by the folders that they lie in: those of classes, and below them those of videos."""

import os
import re
from typing import Literal, get_args

import numpy as np

from vitlab.data.files.sets import FileImages
from vitlab.data.photos import Photos
from vitlab.ranges import check_word

Videos = Literal["frames", "middle"]


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


def check_videos(videos: Videos | None) -> Videos | None:
    """Return `data.videos`, or refuse it."""
    if videos is not None:
        check_word("data.videos", videos, get_args(Videos))
    return videos


def _numbers_of(file: str) -> list[tuple[int, str]]:
    """Return the parts of a name, numbers by their size.

    >>> sorted(["f10.jpg", "f9.jpg"], key=_numbers_of)
    ['f9.jpg', 'f10.jpg']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", file)]
