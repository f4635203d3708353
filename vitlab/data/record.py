"""A trained run that is evaluated: what data take from its record, and the images that it was trained on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitlab.data.files.sets import Images
from vitlab.data.files.splits import SplitName
from vitlab.data.loading.transforms import Size
from vitlab.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

TRAINED_ON = "trained_on.npy"  # in a run's directory: fingerprints of the training images, see `fingerprints`


def check_target_names(names: Sequence[str], trained: Sequence[str]) -> None:
    """Refuse targets of another number, or in another order, than those that a network was trained on.

    Others may have other names: the network answers by their place.

    >>> check_target_names(["height_cm", "weight"], ["height", "weight"])
    """
    moved = {*names} & {*trained} - {name for name, known in zip(names, trained, strict=False) if name == known}
    if moved or len(names) != len(trained):
        raise ValueError(
            f"`data.targets` is {', '.join(names)}, and the run was trained on {', '.join(trained)}: give them by "
            f"--data.targets='[{', '.join(trained)}]', or columns with other names in this order"
        )


class Trained:
    """A trained run that is evaluated: its classes, and the images that it was trained on.

    Args:
        facts: The run's data.json.
        images: ``(N,)`` fingerprints of its training images, see :func:`fingerprints`; None if unknown.
        split: The split to evaluate.
        allow: Whether a changed split may contain training images.
    """

    def __init__(
        self, facts: dict[str, Any], images: NDArray[np.uint64] | None, split: SplitName, allow: bool = False
    ) -> None:
        self.class_names: list[str] = facts["class_names"]
        self.targets: dict[str, Any] = facts.get("targets", {})
        self.img_size: list[int] | None = facts.get("img_size")
        self.knows_crop = "native_size" in facts
        self.native_size: Size | None = tuple(native) if (native := facts.get("native_size")) else None
        self.value_range: list[float] | None = facts.get("value_range")
        self.crop_pct: float | None = facts.get("crop_pct")
        # an earlier vitlab cut arrays larger than `img_size` as it cuts photos, and is measured that way
        self.arrays_were_cut = facts.get("arrays", False) and facts.get("native_size", ()) is None
        self.rule = facts.get("split_rule")
        self.even_folds = not self.rule or self.rule.get("fold") is None or "even_folds" in self.rule
        self.images, self.split, self.allow = images, split, allow
        self.met: NDArray[np.bool_] = np.zeros(0, bool)  # which images of the split the run was trained on
        self.changed = False

    def compare(self, name: SplitName, images: Images, rule: dict[str, Any]) -> None:
        """Find training images in a split; refuse them if its rule is not that of the training."""
        if self.images is None or name != self.split:
            return
        self.met = np.isin(fingerprints(images), self.images)
        self.changed = bool(self.met.any()) and self.rule != rule
        if self.changed and not self.allow:
            raise ValueError(
                f"the {name} split is not that of the run, and {self.met.sum():,} of its {len(images):,} images were "
                "trained on: keep the split as it was, or evaluate it anyway with --with_training_images"
            )

    def accuracy_of_others(self, table: "pd.DataFrame") -> dict[str, float]:
        """Return how many of the images were trained on, and the accuracy on the others.

        Args:
            table: A row for each image in the order of the split.
        """
        if not self.met.any() or len(self.met) != len(table):
            return {}
        seen: dict[str, float] = {"trained_on": int(self.met.sum())}
        if {"target", "prediction"} <= set(table) and not self.met.all():
            others = table[~self.met]
            seen["acc1_of_others"] = float((others["target"] == others["prediction"]).mean())
        return seen

    def sentences(self, seen: dict[str, float], n: int) -> list[str]:
        """Return a warning about training images in the split; ``seen`` is the result of :meth:`accuracy_of_others`."""
        if not seen:
            return []
        rest = f"; acc1 {seen['acc1_of_others']:.4f} on the others" if "acc1_of_others" in seen else ""
        what = "not a measure of new images: " if self.changed else ""
        return [f"{what}{seen['trained_on']:,} of the {n:,} images were trained on{rest}"]


RUN: ContextVar[Trained | None] = ContextVar("RUN", default=None)


def trained_targets() -> dict[str, Any] | None:
    """Return the facts about the targets of the run that is evaluated; None in training."""
    run = RUN.get()
    return None if run is None else run.targets


@contextmanager
def measured(run: Trained) -> Iterator[Trained]:
    """Inside this context, build and read data for the evaluation of ``run``."""
    token = RUN.set(run)
    try:
        yield run
    finally:
        RUN.reset(token)


def fingerprints(images: Images) -> NDArray[np.uint64]:
    """Return a 64-bit fingerprint of the content of each image."""
    return np.frombuffer(b"".join(digest[:8] for digest in images.digests), dtype=np.uint64)


def read_numbers(path: Path) -> NDArray[np.uint64] | None:
    """Return the fingerprints of a run's training images, or None if there is no file."""
    try:
        return np.load(path, allow_pickle=False) if path.is_file() else None
    except (ValueError, EOFError) as error:
        raise UsageError(
            f"{path} is damaged: {error}; remove it to go on without checking for training images"
        ) from error
