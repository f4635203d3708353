"""Several crops of one image, for learning without labels."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.classes import build, name_and_args
from vitlab.data.loading.prefetch import send
from vitlab.data.loading.streams import VIEW, Seeds, stream, uniforms
from vitlab.data.loading.transforms import Augment, Interpolation, RandomCropFlip, Size, as_size

_GRAY = (0.299, 0.587, 0.114)
_YIQ = torch.tensor([_GRAY, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312)])


class MultiCrop:
    """Two large crops and several small ones, Caron et al. 2020 (arXiv:2006.09882), as DINO takes them (2104.14294).

    Each is mirrored by chance and recolored: jitter of brightness, contrast, saturation and hue for 80 %, gray for 20
    %, blur for all first, 10 % of second large and half of small crops, and 20 % of second ones solarized. Every draw
    comes from the sample's seed and the crop's number. Colors are the batch's work, on its device, in that order; hue
    is turned in YIQ. Photos are cut one by one by the loader; images of one size in memory by the batch, bilinearly.

    Args:
        size: Height and width of the large crops, in pixels.
        interpolation: How photos are resized.
        local_crops: Number of small crops.
        local_size: Side of the small crops, or height and width; null is 3/7 of the large ones'.
        global_scale: Least and largest share of the image's area in a large crop.
        local_scale: The same of a small one.
        colors: Strength of the jitter, 1 as published; 0 leaves colors, blur and solarization out.

    >>> crops = MultiCrop((8, 8), "bilinear", local_crops=1, local_size=4)
    >>> images = crops(torch.zeros(2, 3, 20, 30), np.arange(2, dtype=np.uint64))  # (B, C, 1, 2 * 8 * 8 + 4 * 4)
    >>> [tuple(crop.shape) for crop in crops.split(images)]
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
        return f"trained on 2 crops of {h}x{w} and {len(self.parts) - 2} of {y}x{x}"

    def cut(self, pixels: np.ndarray, seed: int) -> Tensor:
        """Map one image, ``(H, W)`` or ``(H, W, C)``, to ``(C, 1, S)``: the crops one after the other."""
        seeds = stream(seed, VIEW, np.arange(len(self.parts)))
        parts = [part.cut(pixels, int(own)).flatten(1) for part, own in zip(self.parts, seeds, strict=True)]
        return torch.cat(parts, dim=1)[:, None]

    def __call__(self, images: Tensor, seeds: Seeds) -> Tensor:
        """Map ``(B, C, H, W)`` images, or the ``(B, C, 1, S)`` of :meth:`cut`, to recolored crops; uint8 to [0, 1]."""
        top = 255 if images.dtype == torch.uint8 else 1
        if self.colors and (images.shape[1] not in (1, 3) or not images.dtype == torch.uint8):
            raise ValueError("`data.augment`: MultiCrop recolors gray and RGB images alone: give it colors: 0")
        own = [stream(seeds.astype(np.int64), VIEW, i) for i in range(len(self.parts))]
        if images.shape[2:] == (1, self.values):
            found = [crop / top for crop in self.split(images)]
        else:
            found = [cut_batch(images / top, part, one) for part, one in zip(self.parts, own, strict=True)]
        if self.colors:
            blurs = (1.0, 0.1, *[0.5] * (len(found) - 2))
            draws = [uniforms(stream(one.astype(np.int64), VIEW), 9) for one in own]
            found = [
                recolor(crop, u, self.colors, blur, 0.2 if i == 1 else 0.0)
                for i, (crop, u, blur) in enumerate(zip(found, draws, blurs, strict=True))
            ]
        return torch.cat([crop.flatten(2) for crop in found], dim=2)[:, :, None]

    def split(self, images: Tensor) -> list[Tensor]:
        """Map ``(B, C, 1, S)`` to the crops, ``(B, C, h, w)`` each."""
        sizes = [part.size for part in self.parts]
        crops = images.flatten(2).split([h * w for h, w in sizes], dim=2)
        return [crop.unflatten(2, size) for crop, size in zip(crops, sizes, strict=True)]


def cut_batch(images: Tensor, part: RandomCropFlip, seeds: Seeds) -> Tensor:
    """Map ``(B, C, H, W)`` to ``(B, C, h, w)``: of each image the box of its seed, resized as antialiased triangles."""
    draws, (H, W) = uniforms(seeds, 23), images.shape[2:]
    boxes = np.array([part.box((H, W), row) for row in draws])
    down = triangles(boxes[:, 0], boxes[:, 2], H, part.size[0])
    across = triangles(boxes[:, 1], boxes[:, 3], W, part.size[1])
    across[draws[:, 22] < 0.5] = across[draws[:, 22] < 0.5, ::-1]
    y, x = (send(torch.from_numpy(one.astype(np.float32)), images.device)[:, None] for one in (down, across))
    return y @ images @ x.mT


def triangles(first: NDArray[Any], length: NDArray[Any], n: int, m: int) -> NDArray[np.float64]:
    """Return ``(B, m, n)`` weights that resize ``length`` of n pixels from ``first`` on to m pixels."""
    scale = (length / m)[:, None, None]
    center = (np.arange(m)[:, None] + 0.5) * scale  # from the first pixel's edge
    place = np.arange(n) - first[:, None, None] + 0.5
    weights = np.maximum(1 - np.abs(place - center) / np.maximum(scale, 1), 0)
    weights *= (place > 0) & (place < length[:, None, None])
    return weights / weights.sum(axis=2, keepdims=True)


def recolor(x: Tensor, draws: NDArray[np.float64], strength: float, blur: float, solarize: float) -> Tensor:
    """Return ``(B, C, h, w)`` images of [0, 1] recolored by ``(B, 9)`` numbers; see :class:`MultiCrop`."""
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
    sigma = torch.where(u[6] < blur, 0.1 + 1.9 * u[7], 0.1)  # 0.1 pixels change nothing
    down, across = (_gaussians(sigma, side) for side in x.shape[2:])
    x = down @ x @ across.mT
    return torch.where((u[8] < solarize) & (x >= 0.5), 1 - x, x)


def _gaussians(sigma: Tensor, n: int) -> Tensor:
    place = torch.arange(n, device=sigma.device)
    weights = (-((place[:, None] - place) ** 2) / (2 * sigma**2)).exp()
    return weights / weights.sum(dim=-1, keepdim=True)


def multi_crop(augment: Augment, img_size: Size, interpolation: Interpolation, sizes: Any) -> MultiCrop | None:
    """Return the crops that ``augment`` asks for, None where it is something else; ``sizes`` cannot be beside them."""
    steps = [augment] if isinstance(augment, str) else augment
    named = [name_and_args("data.augment", step) for step in steps]
    args = [args for name, args in named if name == "MultiCrop"]
    if not args:
        return None
    if len(named) > 1 or sizes:
        beside = "without other steps, `data.img_size_schedule` and `data.native_patch`"
        raise ValueError(f"`data.augment`: MultiCrop stands alone, {beside}")
    found: MultiCrop = build("data.augment", MultiCrop, args[0], {}, img_size, interpolation)
    return found
