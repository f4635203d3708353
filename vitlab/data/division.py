"""Divide the images of a data set into its splits."""

from typing import Literal, Protocol

from vitlab.data.files.sets import FileImages, Images
from vitlab.data.files.splits import Indices, SplitName, SplitRule
from vitlab.data.record import RUN

Part = Literal["train", "test", "all"]


class Source(Protocol):
    """A data set to divide."""

    rule: SplitRule
    has_test_split: bool
    splits: dict[SplitName, Images]
    held_back: dict[SplitName, Images]  # the test split during training, only for its checksums
    notes: list[str]
    unreadable: dict[str, str]
    num_workers: int

    def read(self, part: Part) -> Images:
        """Return block 1 (train), block 2 (test), or all."""

    def indices(self, images: Images) -> dict[SplitName, Indices]:
        """Divide block 1 or all."""

    def filter_readable(self, images: Images) -> Images:
        """Return the readable images of a split, and note the others in ``unreadable``."""

    def check_readable(self) -> None:
        """Refuse more unreadable files than are allowed."""


def read_block(data: Source, wanted: SplitName) -> None:
    """Read the block that a split belongs to, unless it has been read; refuse a split without images."""
    if wanted in data.splits:
        return
    names: tuple[SplitName, ...] = ("test",) if wanted == "test" else ("train", "val")
    readable = {name: data.filter_readable(images) for name, images in _divided(data, names).items()}
    data.check_readable()
    for name, images in readable.items():
        if not len(images) and (name == wanted or wanted == "train"):
            raise ValueError(f"the {name} split has no image{data.rule.why_empty(name, data.has_test_split)}")
        data.splits[name] = images
        if run := RUN.get():
            run.compare(name, images, data.rule)


def compare_with_test(data: Source) -> None:
    """Read the checksums of the test split, and nothing else, to report duplicates of training images, and damage."""
    if "test" in data.splits or data.held_back:
        return
    try:
        (images,) = _divided(data, ("test",)).values()
        if isinstance(images, FileImages):
            images, reasons = images.scanned(data.num_workers)
            data.unreadable |= {images.store.path(file): reason for file, reason in reasons.items()}
    except (ValueError, OSError) as error:
        note = f"the test split cannot be read: {error}"
    else:
        data.held_back["test"] = images
        note = "" if len(images) else "the test split has no image"
    if note and note not in data.notes:
        data.notes.append(note)


def _divided(data: Source, names: tuple[SplitName, ...]) -> dict[SplitName, Images]:
    if names == ("test",) and data.has_test_split:
        return {"test": data.read("test")}
    images = data.read("train" if data.has_test_split else "all")
    indices = data.indices(images)
    return {name: images.take(indices[name]) for name in names}
