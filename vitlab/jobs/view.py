"""Which part of a network an analysis examines; alone, as networks with a run and without one are found by it."""

from dataclasses import dataclass
from typing import Any

from vitlab.analysis.subject import CkaTokens
from vitlab.data.files.splits import SplitName


@dataclass(frozen=True)
class View:
    """Which part of a network an analysis examines, and on which images.

    Args:
        images: Folder or file of images to draw maps for; None takes validation images.
        layer: The block, from 0; None leaves the choice to the analysis.
        head: The head, from 0; None for all.
        query: Row and column of the patch whose attention is shown; None for the class token.
        num_images: Largest number of images to measure with.
        split: Split that errors, confusion and calibration use.
        weights: Weights file for a named network, instead of downloaded weights.
        img_size: Side of the images of a named network, in pixels.
        shown: Largest number of images to show.
        tokens: By which tokens cka compares images: mean of the patches, class, or flattened.
        init_grid: Rows and columns of the token grid of ``weights``, where the file lacks them.
        masks: Folder of masks for segmentation, with the names of the images.
    """

    images: str | None = None
    layer: int | None = None
    head: int | None = None
    query: tuple[int, int] | None = None
    num_images: int = 512
    split: SplitName = "val"
    weights: str | None = None
    img_size: int | None = None
    shown: int = 8
    tokens: CkaTokens = "mean"
    init_grid: tuple[int, int] | None = None
    masks: str | None = None

    def of_subject(self) -> dict[str, Any]:
        """Return what a :class:`vitlab.analysis.Subject` takes as it is."""
        names = ("num_images", "layer", "head", "query", "split", "tokens", "masks")
        return {name: getattr(self, name) for name in names}
