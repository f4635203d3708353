"""Photos of any size, of which some may be unreadable."""

import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, Unpack

import numpy as np
import torch

from vitlab.data.arguments import EncodedArgs
from vitlab.data.base import ImageData, Part
from vitlab.data.files.decode import ImageError
from vitlab.data.files.scan import Facts
from vitlab.data.files.sets import FileImages, Images
from vitlab.data.files.splits import Indices, SplitName
from vitlab.data.files.store import Store
from vitlab.data.loading.transforms import Size, as_size
from vitlab.data.record import RUN
from vitlab.errors import escaped, preview
from vitlab.ranges import check_ranges
from vitlab.tables import counted

_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "tests", "testing"),
}
_SMALL = 128  # pixels per side, up to which images of one size count as small
_IN_MEMORY = 2**30  # bytes of decoded pixels, up to which a split of small images stays in memory


class Photos(ImageData):
    """Image files, decoded on demand, in one part that is divided, or in parts train, val and test.

    Images are small if all have one size of at most 128 pixels per side, and of at most `img_size`. Unless `crop_scale`
    or `crop_pct` is given, training shifts small images instead of cropping them, and evaluation uses the whole image.
    A trained run is measured as it was trained, whatever the sizes of the images at hand.

    Args:
        place: Name of the source, for messages.
        parts: Name of the folder or file of each part; train is required.
        class_names: Name of each class.
        sizes: Height and width of a sample of the images.
        img_size: Side, or height and width, of the network's input, in pixels; default: 224, or that of small images.
        in_chans: 3 for RGB, 1 for gray.
        max_unreadable: Number of unreadable files that may be left out, of all splits together.
        class_map: JSON file that maps other names of folders or labels to classes.
        crop_scale: Smallest share of the area of a random crop; default: .08, or shifts for small images.
        crop_pct: Share of the shorter side that evaluation uses; default: .875, or 1 for small images.
        **data: Passed to :class:`ImageData`.

    Example:
        >>> from vitlab.data import ImageFolder
        >>> issubclass(ImageFolder, Photos)
        True
    """

    def __init__(
        self,
        place: str,
        parts: dict[str, str],
        class_names: list[str],
        sizes: Collection[Size] = (),
        img_size: int | list[int] | None = None,
        in_chans: Literal[1, 3] = 3,
        max_unreadable: int = 0,
        class_map: str | None = None,
        crop_scale: float | None = None,
        crop_pct: float | None = None,
        **data: Unpack[EncodedArgs],
    ) -> None:
        check_ranges("data", {"max_unreadable": max_unreadable})
        if not self.arrays and in_chans not in (1, 3):
            raise ValueError(f"`data.in_chans` must be 3 (RGB) or 1 (gray) for photos, got {in_chans}")
        self.place, self.parts, self.max_unreadable = place, parts, max_unreadable
        self.has_test_split = "test" in parts
        self.stands_for = _read_map(class_map)
        strange = sorted({*self.stands_for} - {*class_names})
        class_names = list(dict.fromkeys(self.stands_for.get(name, name) for name in class_names))
        if wrong := [text for name in class_names if (text := escaped(name)) != name]:
            raise ValueError(f"the class {wrong[0]} in {place} has a name that is not UTF-8: rename it")
        run = RUN.get()
        if img_size is None:
            small = are_small(sizes) or self.arrays
            img_size = (run and run.img_size) or (list(next(iter(sizes))) if small else 224)
        whole = self._whole(sizes, as_size(img_size, None))
        own_ratio = data.get("native_patch") and not self.arrays
        native = None if own_ratio or (crop_scale, crop_pct) != (None, None) else whole
        if crop_pct is None and not own_ratio:
            crop_pct = 1.0 if whole else run.crop_pct if run else None
        self.one_size = None if run and run.knows_crop else native  # which every image must have
        super().__init__(
            native_size=native, in_chans=in_chans, class_names=class_names, img_size=img_size, crop_scale=crop_scale,
            crop_pct=crop_pct, **data,
        )  # fmt: skip
        if strange:
            where = "the training split" if parts.keys() > {"train"} else place
            self.notes.append(f"`data.class_map` {class_map} maps {preview(strange)}: no class of {where} is called so")

    def _whole(self, sizes: Collection[Size], img_size: Size) -> Size | None:
        """Return the size of images that are neither cropped in training nor in evaluation; None if they are."""
        run, first = RUN.get(), next(iter(sizes), (0, 0))
        if self.arrays:
            return None if run and run.arrays_were_cut else first
        if run and run.knows_crop:
            return run.native_size
        return first if are_small(sizes) and img_size[0] >= first[0] and img_size[1] >= first[1] else None

    def class_numbers(self) -> dict[str, int]:
        """Return the number of each class, by its name and by the other names in `class_map`."""
        number = {name: k for k, name in enumerate(self.class_names)}
        return number | {name: number[known] for name, known in self.stands_for.items() if known in number}

    def labeled(self, store: Store, files: list[str], names: Sequence[str], facts: Facts | None = None) -> FileImages:
        """Return files with the number of the class of each, given by its name.

        Args:
            store: The store of the files.
            files: Name of each image in the store.
            names: Name of the class of each image.
            facts: Facts about each file, if they are known.

        Raises:
            ValueError: The training images have no such class.
        """
        number = self.class_numbers()
        if unknown := {*names} - number.keys():
            i = next(i for i, name in enumerate(names) if name in unknown)
            raise ValueError(f"{store.path(files[i])}: the class {names[i]} is not among those of the training images")
        labels = torch.tensor([number[name] for name in names], dtype=torch.int64)
        return FileImages(store, files, labels, self.decoding, facts)

    def prepare_data(self) -> None:
        """Scan all files in one process; the others then use its cache."""
        if self.trainer is not None and self.trainer.world_size > 1:
            self.setup(stage := self.trainer.state.fn or "fit")
            if stage == "fit":
                self.compare_with_test()

    def read(self, part: Part) -> Images:
        """Return the files of a part, unopened; `val` belongs to block 1."""
        names = ("test",) if part == "test" else ("train", "val")
        return self.list_files([name for name in names if name in self.parts])

    def list_files(self, parts: list[str]) -> FileImages:
        """Return the files of some parts, unopened."""
        raise NotImplementedError

    def indices(self, images: Images) -> dict[SplitName, Indices]:
        """Divide block 1; a given val part is kept, unless `fold` is set."""
        given = None
        if "val" in self.parts:
            folder = self.parts["val"] + os.sep
            given = np.array([file.startswith(folder) for file in images.names], dtype=bool)
        groups = self.groups_of(images.names)
        return self.rule.indices(images.ids, images.labels.numpy(), given, not self.has_test_split, groups)

    def groups_of(self, files: list[str]) -> list[str] | None:
        """Return the group of each file, of which none is divided; None without groups."""
        return None

    def ready(self, images: Images) -> Images:
        """Return small images decoded, if they have the size of the run and fit in memory."""
        native, n = self.pipeline.native_size, len(images) * self.in_chans
        if not isinstance(images, FileImages) or native is None or n * native[0] * native[1] > _IN_MEMORY:
            return images
        if (images.known["size"] != native).any():
            return images
        return images.in_memory(self.num_workers)

    def check_images(self, images: Images) -> None:
        """Refuse files of another size, where all must have one; arrays in memory have been read."""
        if isinstance(images, FileImages) and (what := self.of_another_size(images)):
            raise ValueError(what)

    def of_another_size(self, images: FileImages) -> str:
        """Return which image lacks the size that all must have, and the way out; empty if all have it."""
        other = np.flatnonzero((images.known["size"] != (self.one_size or 0)).any(1))
        if self.one_size is None or not len(other):
            return ""
        height, width = images.known["size"][other[0]]
        return (
            f"{images.store.path(images.files[other[0]])} has {height}x{width} pixels, other images "
            f"{self.one_size[0]}x{self.one_size[1]}: give `data.crop_scale`, `data.crop_pct` and `data.img_size`, as "
            "for photos"
        )

    def check_readable(self) -> None:
        """Raise a ValueError that lists the unreadable files of all splits, if there are more than allowed."""
        if len(self.unreadable) > self.max_unreadable and "test" not in self.splits:
            self.hold_test_back()
        refuse_unreadable(self.unreadable, self.max_unreadable)

    def on_unreadable(self, error: ImageError) -> None:
        """Count a file that has become unreadable since the scan; raise an ImageError if there are too many."""
        self.unreadable[error.path] = error.reason
        if len(self.unreadable) > self.max_unreadable:
            allowed = f"{len(self.unreadable)} unreadable, `data.max_unreadable` allows {self.max_unreadable}"
            raise ImageError(error.path, f"the file has become unreadable ({error.reason}; {allowed})")

    def adopt_classes(self, class_names: list[str]) -> None:
        """Use the class numbers of a trained run, which may have more classes."""
        unknown = sorted(set(self.class_names) - set(class_names))
        if unknown:
            raise ValueError(
                f"the checkpoint does not know the classes {preview(unknown)} of {self.place}; "
                "map their names with --data.class_map=FILE.json"
            )
        self.class_names = list(class_names)
        self.read_again()


def are_small(sizes: Collection[Size]) -> bool:
    """Return whether images count as small: all of one size, of at most 128 pixels per side.

    >>> are_small([(32, 32), (32, 32)]), are_small([(200, 200)]), are_small([])
    (True, False, False)
    """
    return len(set(sizes)) == 1 and max(map(max, sizes)) <= _SMALL


def refuse_unreadable(reasons: dict[str, str], allowed: int, option: str = "data.max_unreadable") -> None:
    """Raise a ValueError that lists unreadable files, if there are more than allowed."""
    if len(reasons) <= allowed:
        return
    shown = [str(ImageError(*item)) for item in sorted(reasons.items())[:10]]
    more = [f"... and {len(reasons) - 10} more"] if len(reasons) > 10 else []
    raise ValueError(
        f"{counted(len(reasons), 'file')} cannot be read, `{option}` allows {allowed}; repair or remove them, or leave "
        f"them out by --{option}={len(reasons)}: " + "; ".join(shown + more)
    )


def is_like_a_split(name: str) -> bool:
    """Return whether a word in a name is that of a split.

    >>> is_like_a_split("training_set"), is_like_a_split("trains")
    (True, False)
    """
    words = {*re.split("[^a-z]+", name.lower())}
    return any(words & {*known} for known in _NAMES.values())


def parts_among(names: Collection[str]) -> dict[str, str]:
    """Return the name of each part among ``names``; without a test part, val is used as test.

    >>> parts_among(["Train", "Val", "notes"])
    {'train': 'Train', 'test': 'Val'}
    """
    found: dict[str, str] = {}
    for part, known in _NAMES.items():
        meant = sorted(name for name in names if name.lower() in known)
        if len(meant) > 1:
            raise ValueError(f"{' and '.join(meant)} would both be the {part} split: rename or remove one of them")
        found |= {part: meant[0]} if meant else {}
    if "test" not in found and "val" in found:
        found["test"] = found.pop("val")
    return found


def _read_map(path: str | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"`data.class_map` {path} cannot be read: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"`data.class_map` must be a JSON object of names and classes, got {path}")
    return found
