"""Images without classes, for networks whose training data is not available."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vitlab.data.base import ImageData
from vitlab.data.files.decode import decode
from vitlab.data.files.sets import Statistics
from vitlab.errors import UsageError
from vitlab.models.foreign import AnyNetwork
from vitlab.models.vit import VisionTransformer

Transform = Callable[[Image.Image], Tensor]
PROBE = (320, 256)  # width and height of a picture that shows what a transform makes


class PreparedPictures(ImageData):
    """Replaces a data set when there is only a function that prepares images.

    Args:
        transform: Maps a PIL image to a normalized ``(C, H, W)``.
        img_size: Height and width of what it makes.
        in_chans: Number of its channels.

    Example:
        >>> data = PreparedPictures(lambda image: torch.tensor([[[image.getpixel((0, 0)) / 255 - 0.5]]]), (1, 1), 1)
        >>> data.statistics()  # what black and white become tells how pixels are normalized
        ((0.5,), (1.0,))
    """

    def __init__(self, transform: Transform, img_size: tuple[int, int], in_chans: int) -> None:
        super().__init__(None, in_chans, [], img_size=list(img_size))
        self.transform, self.targets = transform, {"kind": "none"}

    @classmethod
    def of(cls, transform: Transform, net: nn.Module, pictures: Any, name: str) -> "PreparedPictures":
        """Return what a transform prepares for a network, or for given pictures; else one picture tells its size."""
        if not callable(transform):
            raise UsageError(f"{name} needs a data set or a function that prepares an image, got {transform!r:.80}")
        if isinstance(net, VisionTransformer | AnyNetwork):
            return cls(transform, net.img_size, net.in_chans)
        if isinstance(pictures, Tensor) and pictures.ndim == 4:
            return cls(transform, (pictures.shape[2], pictures.shape[3]), pictures.shape[1])
        in_chans = next((layer.in_channels for layer in net.modules() if isinstance(layer, nn.Conv2d)), 3)
        made = _of_picture(transform, Image.new("L" if in_chans == 1 else "RGB", PROBE))
        return cls(transform, (made.shape[1], made.shape[2]), made.shape[0])

    def eval_transform(self, image: Image.Image) -> Tensor:
        """Map one image to a normalized ``(C, H, W)``."""
        made, whole = _of_picture(self.transform, image.convert(self.decoding.mode)), (self.in_chans, *self.img_size)
        if made.shape != whole:
            raise UsageError(
                f"a picture of {image.height} x {image.width} pixels becomes {shape_text(made.shape)}, and must become "
                f"{shape_text(whole)}: end the transform with a resize and a crop to that size"
            )
        return made

    def statistics(self) -> Statistics:
        """Return the mean and standard deviation that the function takes from each channel's pixels in [0, 1]."""
        if self._statistics is None:
            h, w = self.img_size
            sizes = (max(w, 8), max(h, 8))
            low, high = (
                self.eval_transform(Image.new(self.decoding.mode, sizes, color)).flatten(1).mean(dim=1).double()
                for color in ("black", "white")
            )
            std = 1 / (high - low)
            mean = [round(float(value), 6) for value in -low * std]
            self._statistics = tuple(mean), tuple(round(float(value), 6) for value in std)
        return self._statistics


def _of_picture(transform: Transform, image: Image.Image) -> Tensor:
    made = transform(image)
    if not isinstance(made, Tensor) or made.ndim != 3:
        what = shape_text(made.shape) if isinstance(made, Tensor) else f"a {type(made).__name__}"
        raise UsageError(f"the transform must make a normalized (C, H, W) of a picture, and makes {what}")
    return made


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape in words.

    Example:
        >>> shape_text((3, 224, 224))
        '3 x 224 x 224'
    """
    return " x ".join(map(str, shape))


def as_tensor(pictures: Tensor | Sequence[Any], data: ImageData) -> Tensor:
    """Return images or image files as normalized ``(B, C, H, W)``; tensors are returned unchanged."""
    if isinstance(pictures, Tensor):
        whole = (data.in_chans, *data.img_size)
        if pictures.ndim != 4 or pictures.shape[1:] != whole:
            raise UsageError(f"`pictures` must be (B, {', '.join(map(str, whole))}), got {shape_text(pictures.shape)}")
        return pictures
    images = [decode(str(p), data.decoding) if isinstance(p, str | Path) else p for p in pictures]
    return torch.stack([data.eval_transform(image) for image in images])
