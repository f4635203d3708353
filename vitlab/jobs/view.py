"""Which part of a network an analysis examines, and on which images, whether the network has a run or not."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitlab.analysis.subject import CkaTokens
from vitlab.config.images import find_images
from vitlab.data.files.decode import ImageError, decode
from vitlab.data.files.splits import SplitName
from vitlab.errors import UsageError
from vitlab.jobs.terminal import say


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

    def pictures(self, data: Any) -> Tensor | None:
        """Return the pictures to draw maps for, ``(B, C, H, W)`` as ``data`` prepare them; None without ``images``.

        Those that cannot be read are reported.

        Raises:
            UsageError: None can be read.
        """
        if not self.images:
            return None
        files, others = find_images([self.images])
        found = []
        for file in files:
            try:
                found.append(decode(file, data.decoding))
            except ImageError as error:
                others.append((file, error.reason))
            if len(found) == self.shown:
                break
        if not found:
            path, reason = others[0] if others else (self.images, "no file in it")
            reason = reason if path == self.images else f"{path}: {reason}"
            raise UsageError(f"`--images {self.images}`: no images found: {reason}")
        for path, reason in others:
            say(f"images           left out {path}: {reason}")
        resized = sum((image.height, image.width) != data.img_size for image in found)
        if resized:
            h, w = data.img_size
            say(f"images           {resized} of {len(found)} resized and cropped to {h} x {w} pixels, as in evaluation")
        return torch.stack([data.cut_transform(image) for image in found])
