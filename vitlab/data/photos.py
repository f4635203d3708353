"""Photos of any size, some of which may be unreadable."""

import os
from collections.abc import Collection
from typing import Literal, Unpack

import numpy as np

from vitlab.data.arguments import EncodedArgs
from vitlab.data.base import ImageData, Part
from vitlab.data.files.decode import ImageError
from vitlab.data.files.sets import FileImages, Images
from vitlab.data.files.splits import Indices, SplitName

_NAMES = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


class Photos(ImageData):
    """Encoded images, decoded when they are needed, in one part that is split or in parts train, val and test.

    Args:
        place: What holds them, as a person calls it.
        parts: Name of what holds each part that there is, train at least.
        class_names: Name of each class.
        img_size: Side, or height and width, of the images the network gets, in pixels.
        in_chans: 3 for RGB, 1 for grey.
        max_unreadable: Number of files that may be left out because they cannot be read.
        **data: Passed to :class:`ImageData`.
    """

    def __init__(
        self,
        place: str,
        parts: dict[str, str],
        class_names: list[str],
        img_size: int | list[int] = 224,
        in_chans: Literal[1, 3] = 3,
        max_unreadable: int = 0,
        **data: Unpack[EncodedArgs],
    ) -> None:
        if max_unreadable < 0:
            raise ValueError(f"`data.max_unreadable` must not be negative, got {max_unreadable}")
        self.place, self.parts, self.max_unreadable = place, parts, max_unreadable
        self.has_test_split = "test" in parts
        super().__init__(native_size=None, in_chans=in_chans, class_names=class_names, img_size=img_size, **data)

    def prepare_data(self) -> None:
        """Look at all files in one process; the others then find in the cache what it saw."""
        if self.trainer is not None and self.trainer.world_size > 1:
            self.setup(self.trainer.state.fn or "fit")

    def read(self, part: Part) -> FileImages:
        """Return the files of a part, unopened; `val` belongs to block 1."""
        names = ("test",) if part == "test" else ("train", "val")
        return self.list_files([name for name in names if name in self.parts])

    def list_files(self, parts: list[str]) -> FileImages:
        """Return the files of some parts, unopened."""
        raise NotImplementedError

    def indices(self, images: Images) -> dict[SplitName, Indices]:
        """Divide block 1; a val part stays what it is unless folds are asked for."""
        assert isinstance(images, FileImages)
        given = None
        if "val" in self.parts:
            folder = self.parts["val"] + os.sep
            given = np.array([file.startswith(folder) for file in images.files], dtype=bool)
        return self.rule.indices(images.ids, images.labels.numpy(), given)

    def admit(self, images: Images) -> Images:
        """Return the files that can be read; more unreadable ones than allowed are an error that lists them."""
        assert isinstance(images, FileImages)
        readable, reasons = images.scanned(self.num_workers)
        self.unreadable |= {images.store.path(file): reason for file, reason in reasons.items()}
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
            allowed = f"{len(self.unreadable)} unreadable, `data.max_unreadable` allows {self.max_unreadable}"
            raise ImageError(error.path, f"the file has become unreadable ({error.reason}; {allowed})")

    def adopt_classes(self, class_names: list[str]) -> None:
        """Number the classes as a trained run does, which may know more of them."""
        unknown = sorted(set(self.class_names) - set(class_names))
        if unknown:
            raise ValueError(f"the checkpoint does not know the classes {', '.join(unknown)} of {self.place}")
        self.class_names = class_names
        built = list(self.splits)
        self.splits.clear()
        for name in built:
            self.build(name)


def parts_among(names: Collection[str]) -> dict[str, str]:
    """Return which name stands for which part; where nothing is called test, what is called val is the test part."""
    found = {part: name for part, known in _NAMES.items() for name in known if name in names}
    if "test" not in found and "val" in found:
        found["test"] = found.pop("val")
    return found
