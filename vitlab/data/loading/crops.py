"""Several crops of one image, for learning without labels."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.class_paths import build, name_and_args
from vitlab.data.loading.loader import send
from vitlab.data.loading.streams import VIEW, Seeds, stream, uniforms
from vitlab.data.loading.transforms import Augment, Interpolation, RandomCropFlip, Size, as_size

_GRAY = (0.299, 0.587, 0.114)
_YIQ = torch.tensor([_GRAY, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312)])


class MultiCrop:
    """Two large and several small crops, Caron et al. 2020 (arXiv:2006.09882), as in DINO (arXiv:2104.14294).

    Each crop is mirrored with probability 1/2 and recolored: color jitter for 80 %; gray for 20 %; blur for all first,
    10 % of the second large and 50 % of the small crops; 20 % of the second crops are solarized. Random numbers depend
    only on the sample's seed and the crop's index. Colors change in whole batches on the device, in this order, hue in
    YIQ. The loader crops photos one by one; images of one size in memory are cropped in batches, bilinearly.

    Args:
        size: Height and width of the large crops, in pixels.
        interpolation: How photos are resized.
        local_crops: Number of small crops.
        local_size: Side, or height and width, of the small crops; null is 3/7 of the large ones.
        global_scale: Least and largest share of the image's area in a large crop.
        local_scale: The same for a small crop.
        colors: Strength of the jitter, 1 as published; 0 turns jitter, gray, blur and solarization off.

    >>> crops = MultiCrop((8, 8), "bilinear", local_crops=1, local_size=4)
    >>> rows = crops(torch.zeros(2, 3, 20, 30, dtype=torch.uint8), np.arange(2, dtype=np.uint64))  # (B, C, 1, S)
    >>> [tuple(crop.shape) for crop in crops.split(rows)]
    [(2, 3, 8, 8), (2, 3, 8, 8), (2, 3, 4, 4)]
    """

    def __init__(
        self,
        size: Size,
        interpolation: Interpolation,
        local_crops: int = 8,
        local_size: int | list[int] | None = None,
        global_scale: Sequence[float] = (0.4, 1.0),
        local_scale: Sequence[float] = (0.05, 0.4),
        colors: float = 1.0,
    ) -> None:
        small = [max(1, round(side * 3 / 7)) for side in size]
        self.local_size, self.colors = as_size(local_size or small, None), colors
        if local_crops < 0 or colors < 0:
            raise ValueError(f"local_crops and colors must be at least 0, got {local_crops} and {colors}")
        for name, scale in (("global_scale", global_scale), ("local_scale", local_scale)):
            if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
                raise ValueError(f"{name} must be two shares, above 0 and at most 1, got {scale}")
        large = RandomCropFlip(size, global_scale[0], interpolation, global_scale[1])
        local = RandomCropFlip(self.local_size, local_scale[0], interpolation, local_scale[1])
        self.parts = [large] * 2 + [local] * local_crops
        self.values = sum(math.prod(part.size) for part in self.parts)  # pixels of all crops

    def __str__(self) -> str:
        (h, w), (y, x) = self.parts[0].size, self.local_size
        small = f" and {len(self.parts) - 2} of {y}x{x}" if len(self.parts) > 2 else ""
        return f"trained on 2 crops of {h}x{w}{small}"

    def cut(self, pixels: np.ndarray, seed: int) -> Tensor:
        """Map one image, ``(H, W)`` or ``(H, W, C)``, to ``(C, 1, S)``: the crops one after the other."""
        seeds = stream(seed, VIEW, np.arange(len(self.parts)))
        crops = [part.cut(pixels, int(part_seed)).flatten(1) for part, part_seed in zip(self.parts, seeds, strict=True)]
        return torch.cat(crops, dim=1)[:, None]

    def __call__(self, images: Tensor, seeds: Seeds) -> Tensor:
        """Map ``(B, C, H, W)`` images, or the ``(B, C, 1, S)`` of :meth:`cut`, to recolored crops; uint8 to [0, 1]."""
        top = 255 if images.dtype == torch.uint8 else 1
        if self.colors and (images.shape[1] not in (1, 3) or not images.dtype == torch.uint8):
            raise ValueError("`data.augment`: MultiCrop recolors only gray and RGB images: set its colors to 0")
        part_seeds = [stream(seeds.astype(np.int64), VIEW, i) for i in range(len(self.parts))]
        if images.shape[2:] == (1, self.values):
            crops = [crop / top for crop in self.split(images)]
        else:
            crops = [cut_batch(images / top, part, s) for part, s in zip(self.parts, part_seeds, strict=True)]
        if self.colors:
            blurs = (1.0, 0.1, *[0.5] * (len(crops) - 2))
            draws = [uniforms(stream(s.astype(np.int64), VIEW), 9) for s in part_seeds]
            crops = [
                recolor(crop, u, self.colors, blur, 0.2 if i == 1 else 0.0)
                for i, (crop, u, blur) in enumerate(zip(crops, draws, blurs, strict=True))
            ]
        return torch.cat([crop.flatten(2) for crop in crops], dim=2)[:, :, None]

    def split(self, images: Tensor) -> list[Tensor]:
        """Map ``(B, C, 1, S)`` to the crops, ``(B, C, h, w)`` each."""
        sizes = [part.size for part in self.parts]
        crops = images.flatten(2).split([h * w for h, w in sizes], dim=2)
        return [crop.unflatten(2, size) for crop, size in zip(crops, sizes, strict=True)]


def cut_batch(images: Tensor, part: RandomCropFlip, seeds: Seeds) -> Tensor:
    """Map ``(B, C, H, W)`` to ``(B, C, h, w)``: the crop of each image by its seed, resized with antialiasing."""
    draws, (H, W) = uniforms(seeds, 23), images.shape[2:]
    boxes = np.array([part.box((H, W), row) for row in draws])
    down = triangles(boxes[:, 0], boxes[:, 2], H, part.size[0])
    across = triangles(boxes[:, 1], boxes[:, 3], W, part.size[1])
    across[draws[:, 22] < 0.5] = across[draws[:, 22] < 0.5, ::-1]
    y, x = (send(torch.from_numpy(one.astype(np.float32)), images.device)[:, None] for one in (down, across))
    return y @ images @ x.mT


def triangles(first: NDArray[Any], length: NDArray[Any], n: int, m: int) -> NDArray[np.float64]:
    """Return ``(B, m, n)`` bilinear weights that resize ``length`` pixels from ``first`` on, of n, to m pixels."""
    scale = (length / m)[:, None, None]
    center = (np.arange(m)[:, None] + 0.5) * scale  # from the first pixel's edge
    place = np.arange(n) - first[:, None, None] + 0.5
    weights = np.maximum(1 - np.abs(place - center) / np.maximum(scale, 1), 0)
    weights *= (place > 0) & (place < length[:, None, None])
    return weights / weights.sum(axis=2, keepdims=True)


def recolor(x: Tensor, draws: NDArray[np.float64], strength: float, blur: float, solarize: float) -> Tensor:
    """Recolor ``(B, C, h, w)`` images in [0, 1] by ``(B, 9)`` random numbers; see :class:`MultiCrop`."""
    u = send(torch.from_numpy(draws.astype(np.float32)), x.device)[:, :, None, None, None].unbind(1)  # (B, 1, 1, 1)
    weights = x.new_tensor(_GRAY if x.shape[1] == 3 else (1.0,))[:, None, None]

    def gray() -> Tensor:
        return (x * weights).sum(dim=1, keepdim=True)

    jittered, room = u[0] < 0.8, min(0.4 * strength, 1.0)
    bright, contrast = (torch.where(jittered, 1 + room * (2 * one - 1), 1) for one in u[1:3])
    x = (x * bright).clamp(0, 1)
    x = torch.lerp(gray().mean(dim=(2, 3), keepdim=True), x, contrast).clamp(0, 1)
    if x.shape[1] == 3:
        x = torch.lerp(gray(), x, torch.where(jittered, 1 + room / 2 * (2 * u[3] - 1), 1)).clamp(0, 1)
        turn = torch.where(jittered, min(0.1 * strength, 0.5) * 2 * math.pi * (2 * u[4] - 1), 0)
        y, i, q = torch.einsum("dc,bchw->bdhw", _YIQ.to(x), x).split(1, dim=1)
        turned = torch.cat([y, i * turn.cos() - q * turn.sin(), i * turn.sin() + q * turn.cos()], dim=1)
        x = torch.einsum("cd,bdhw->bchw", torch.linalg.inv(_YIQ).to(x), turned).clamp(0, 1)
        x = torch.where(u[5] < 0.2, gray(), x)
    sigma = torch.where(u[6] < blur, 0.1 + 1.9 * u[7], 0.1)  # a sigma of 0.1 pixels changes nothing
    down, across = (_gaussians(sigma, side) for side in x.shape[2:])
    x = down @ x @ across.mT
    return torch.where((u[8] < solarize) & (x >= 0.5), 1 - x, x)


def _gaussians(sigma: Tensor, n: int) -> Tensor:
    place = torch.arange(n, device=sigma.device)
    weights = (-((place[:, None] - place) ** 2) / (2 * sigma**2)).exp()
    return weights / weights.sum(dim=-1, keepdim=True)


def multi_crop(augment: Augment, img_size: Size, interpolation: Interpolation, sizes: Any) -> MultiCrop | None:
    """Return the MultiCrop in ``augment``, or None; refuse it together with other steps or with ``sizes``."""
    steps = [augment] if isinstance(augment, str) else augment
    named = [name_and_args("data.augment", step) for step in steps]
    args = [args for name, args in named if name == "MultiCrop"]
    if not args:
        return None
    if len(named) > 1 or sizes:
        others = "other steps, `data.img_size_schedule` or `data.native_patch`"
        raise ValueError(f"`data.augment`: MultiCrop cannot be combined with {others}")
    crops: MultiCrop = build("data.augment", MultiCrop, args[0], {}, img_size, interpolation)
    return crops
