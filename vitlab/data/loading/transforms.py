"""Transforms of single images; all random numbers come from the sample's seed."""

import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from vitlab.class_paths import ClassSpec, build, choice_text, find_class, name_and_args
from vitlab.data.loading.streams import seeded, uniforms
from vitlab.errors import in_own_code, named_line

Interpolation = Literal["bilinear", "bicubic"]
CropMode = Literal["center", "squash", "border", "box"]
Augment = str | list[str | ClassSpec]
Size = tuple[int, int]  # height, width
_Policy = TypeVar("_Policy", bound=Callable[[Image.Image], Image.Image])


def as_size(img_size: int | list[int] | None, native_size: Size | None) -> Size:
    """Return ``img_size`` as height and width; None is the native size."""
    size = native_size if img_size is None else [img_size, img_size] if isinstance(img_size, int) else img_size
    if size is None or len(size) != 2 or min(size) < 1:
        raise ValueError(f"`data.img_size` must be a side or [height, width] in pixels, got {img_size}")
    return int(size[0]), int(size[1])


class Transform(Protocol):
    """A function from an image and a seed to an image."""

    def __call__(self, image: Image.Image, seed: int) -> Image.Image: ...


class CenterCrop:
    """Resize an image and cut out its center, for evaluation; the seed is not used.

    With S = floor(size / crop_pct), `center` resizes so that the image just covers S (for a square, the shorter side to
    S and the longer one rounded down), rounds to whole pixels and then cuts, as timm and torchvision do: pixels are
    equal. `squash` resizes to S whatever the aspect ratio, `border` fits the whole image into S and fills what is left,
    both as in timm. `box` cuts a box of fractional pixels and resizes once, as vitlab did before there was a choice.

    Args:
        size: Height and width of the result, in pixels.
        crop_pct: Share of the shorter side to keep.
        interpolation: How the image is resized.
        mode: How it is resized and cut.
        mean: Mean of each channel in [0, 1], the color of the border.

    >>> image = Image.effect_noise((60, 40), 50)
    >>> image.resize((30, 20)).crop((5, 0, 25, 20)) == CenterCrop((20, 20), 1.0, "bicubic")(image)
    True
    """

    def __init__(
        self,
        size: Size,
        crop_pct: float,
        interpolation: Interpolation,
        mode: CropMode = "center",
        mean: Sequence[float] = (0.0,),
    ) -> None:
        self.size, self.crop_pct, self.filter, self.mode = size, crop_pct, resampling(interpolation), mode
        self.whole = math.floor(size[0] / crop_pct), math.floor(size[1] / crop_pct)
        self.fill = tuple(round(255 * value) for value in mean)

    def __call__(self, image: Image.Image, seed: int = 0) -> Image.Image:
        if self.mode == "box":
            return self._box(image)
        height, width = self.resized((image.height, image.width))
        if (width, height) != image.size:
            image = image.resize((width, height), self.filter)
        (h, w), top, left = self.size, _start(height, self.size[0]), _start(width, self.size[1])
        if h <= height and w <= width:
            return image.crop((left, top, left + w, top + h))
        fill = self.fill if len(self.fill) == len(image.getbands()) else self.fill[:1] * len(image.getbands())
        framed = Image.new(image.mode, (w, h), fill if len(fill) > 1 else fill[0])
        framed.paste(image, (-left, -top))
        return framed

    def resized(self, size: Size) -> Size:
        """Return height and width to which an image of this height and width is resized before it is cut."""
        (h, w), (height, width) = self.whole, size
        if self.mode == "squash":
            return self.whole
        if self.mode == "center" and h == w:  # torchvision rounds down, and timm calls it
            return (h, int(h * width / height)) if height <= width else (int(w * height / width), w)
        scale = (max if self.mode == "border" else min)(height / h, width / w)
        return max(1, round(height / scale)), max(1, round(width / scale))

    def _box(self, image: Image.Image) -> Image.Image:
        scale = min(image.height / self.size[0], image.width / self.size[1]) * self.crop_pct
        height, width = self.size[0] * scale, self.size[1] * scale
        left, top = (image.width - width) / 2, (image.height - height) / 2
        return image.resize(self.size[::-1], self.filter, (left, top, left + width, top + height))


def _start(n: int, wanted: int) -> int:
    """Return the first pixel of the middle ``wanted`` of n; negative where a border is needed."""
    return round((n - wanted) / 2) if n >= wanted else -((wanted - n) // 2)


class RandomCropFlip:
    """Resize a random crop and mirror it with probability 1/2 (Szegedy et al. 2014).

    Args:
        size: Height and width of the result, in pixels.
        scale: Smallest share of the image's area in the crop.
        interpolation: How the crop is resized.
        most: Largest share of the area.
    """

    def __init__(self, size: Size, scale: float, interpolation: Interpolation, most: float = 1.0) -> None:
        self.size, self.scale, self.interpolation, self.most = size, scale, interpolation, most

    def __call__(self, image: Image.Image, seed: int) -> Image.Image:
        return to_image(self.cut(np.asarray(image), seed))

    def cut(self, pixels: np.ndarray, seed: int) -> Tensor:
        """Map uint8 ``(H, W)`` or ``(H, W, C)`` to ``(C, *size)``; only the crop is read."""
        draws = uniforms(np.array([seed], dtype=np.uint64), 23)[0]
        top, left, height, width = self.box((pixels.shape[0], pixels.shape[1]), draws)
        part = torch.from_numpy(pixels[top : top + height, left : left + width].copy())
        planes = part[None] if part.ndim == 2 else part.permute(2, 0, 1)
        # for uint8 torch has an integer kernel like Pillow's, several times as fast
        image = F.interpolate(planes[None], self.size, mode=self.interpolation, antialias=True)[0]
        return image.flip(2) if draws[22] < 0.5 else image

    def box(self, size: Size, draws: np.ndarray) -> tuple[int, int, int, int]:
        """Return top, left, height and width of the crop in whole pixels."""
        aspect = self.size[1] / self.size[0]
        for attempt in range(10):
            area = size[0] * size[1] * (self.scale + (self.most - self.scale) * draws[attempt])
            ratio = aspect * (4 / 3) ** (2 * draws[10 + attempt] - 1)  # 3/4 to 4/3 of the wanted one, log-uniform
            height, width = round((area / ratio) ** 0.5), round((area * ratio) ** 0.5)
            if 0 < height <= size[0] and 0 < width <= size[1]:
                return int((size[0] - height + 1) * draws[21]), int((size[1] - width + 1) * draws[20]), height, width
        ratio = min(max(size[1] / size[0], aspect * 3 / 4), aspect * 4 / 3)  # then the center, as in torchvision
        height, width = min(size[0], round(size[1] / ratio)), min(size[1], round(size[0] * ratio))
        height, width = max(1, height), max(1, width)
        return (size[0] - height) // 2, (size[1] - width) // 2, height, width


class ShiftFlip:
    """Shift an image by up to ``pad`` pixels over black and mirror it with probability 1/2, as `TensorLoader` does.

    Args:
        pad: Largest shift, in pixels.
    """

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, image: Image.Image, seed: int) -> Image.Image:
        draws = uniforms(np.array([seed], dtype=np.uint64), 3)[0]
        top, left = (draws[:2] * (2 * self.pad + 1)).astype(int) - self.pad
        image = image.crop((left, top, left + image.width, top + image.height))
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draws[2] < 0.5 else image


class Augmented:
    """A geometric transform followed by others, which use the global random generators.

    Args:
        first: The geometric transform; None for none.
        steps: Names and classes, see :func:`step_of`.
        mean: Mean of each channel in [0, 1], the color of uncovered areas.
        interpolation: How timm's steps turn, shear and shift an image.
        side: Shorter side of the images, in pixels.
    """

    def __init__(
        self,
        first: Transform | None,
        steps: Sequence[str | ClassSpec],
        mean: tuple[float, ...],
        interpolation: Interpolation = "bicubic",
        side: int = 224,
    ) -> None:
        self.first, self.names = first, [choice_text(step) for step in steps]
        self.steps = [step_of(step, mean, interpolation, side) for step in steps]

    def __call__(self, image: Image.Image, seed: int) -> Image.Image:
        image = self.first(image, seed) if self.first else image
        mode, size = image.mode, image.size
        image = image.convert("RGB")
        with seeded(seed):
            for name, step in zip(self.names, self.steps, strict=True):
                result = step(image)
                if isinstance(result, Tensor) and result.dtype == torch.uint8 and result.ndim == 3:
                    result = to_image(result)
                if not isinstance(result, Image.Image) or result.size != size:
                    got = result.size[::-1] if isinstance(result, Image.Image) else type(result).__name__
                    raise ValueError(f"`data.augment`: {name} must return an image of {size[::-1]}, got {got}")
                image = result
        return image.convert(mode)


def try_on(size: Size, steps: Sequence[str | ClassSpec], interpolation: Interpolation) -> None:
    """Refuse steps that fail on an image of this size, or do not keep the size."""
    trial, gray = Augmented(None, steps, (0.5,), interpolation, min(size)), Image.new("RGB", size[::-1], "gray")
    with torch.device("cpu"):  # even if networks are built on another device
        for seed in range(8):
            try:
                trial(gray, seed)
            except TypeError as error:  # such as that of Normalize, which takes tensors
                raise ValueError(f"`data.augment`: {in_own_code(error) or named_line(error)}") from error


def parts_of(augment: Augment) -> tuple[bool, list[str | ClassSpec]]:
    """Return whether images are cropped or shifted and mirrored, and the further steps; a single name implies both.

    >>> parts_of("rand-m9"), parts_of(["rotate90"]), parts_of(["crop-flip", "ColorJitter"])
    ((True, ['rand-m9']), (False, ['rotate90']), (True, ['ColorJitter']))
    """
    if isinstance(augment, str):
        return augment != "none", [] if augment in ("none", "crop-flip") else [augment]
    steps = list(augment)
    moves = steps[:1] == ["crop-flip"]
    steps = steps[1:] if moves else steps
    if "crop-flip" in steps or "none" in steps:
        raise ValueError(
            f"`data.augment` has crop-flip only first, and none only alone, got {list(map(choice_text, augment))}"
        )
    return moves, steps


def step_of(
    step: str | ClassSpec, mean: tuple[float, ...], interpolation: Interpolation = "bicubic", side: int = 224
) -> Callable[[Image.Image], Image.Image]:
    """Return the transform for a name, a class of torchvision.transforms.v2 or a class path.

    timm's strings get what timm's `create_transform` passes to them: color, interpolation and largest shifts.

    Names are 3-augment (Touvron et al. 2022, arXiv:2204.07118), rotate90 (by 0 to 3 quarter turns), and timm's strings
    rand-... (Cubuk et al. 2019, arXiv:1909.13719), augmix-... (Hendrycks et al. 2019, arXiv:1912.02781), original
    and v0 (AutoAugment: Cubuk et al. 2018, arXiv:1805.09501).
    """
    from timm.data import auto_augment
    from torchvision.transforms import ColorJitter, Compose, v2

    name, args = name_and_args("data.augment", step)
    hparams = {
        "img_mean": tuple(round(255 * value) for value in (mean * 3)[:3]),
        "interpolation": resampling(interpolation),
        "translate_const": int(side * 0.45),
    }
    kind = name.split("-")[0]
    with suppress(AssertionError, ValueError, KeyError):  # then it is no string of timm, nor the name of a class
        if name == "3-augment":
            return Compose([auto_augment.auto_augment_transform("3a", hparams), ColorJitter(0.3, 0.3, 0.3)])
        if name == "rotate90":
            return _rotate90
        if kind in ("original", "v0"):
            auto = auto_augment.auto_augment_transform(name, hparams)
            return _keeping_a_bit(auto, [op for ops in auto.policy for op in ops])
        if kind == "augmix":
            augmix = auto_augment.augment_and_mix_transform(name, {**hparams, "translate_pct": 0.3})
            return _keeping_a_bit(augmix, augmix.ops)
        if kind == "rand":
            randaugment = auto_augment.rand_augment_transform(name, hparams)
            return _keeping_a_bit(randaugment, randaugment.ops)
    words = ("none", "crop-flip", "3-augment", "rotate90", "original", "a timm string such as rand-m9-mstd0.5-inc1")
    cls = find_class("data.augment", name, torch.nn.Module, words, v2.__name__)
    return build("data.augment", cls, args, {})


def _rotate90(image: Image.Image) -> Image.Image:
    turns = random.randrange(4)
    return image.rotate(90 * turns, expand=True) if turns else image


def _keeping_a_bit(policy: _Policy, ops: Sequence[Any]) -> _Policy:
    """Return a policy of timm whose posterizing, among its ``ops``, keeps at least one bit."""
    for op in ops:
        op.aug_fn = _posterize if op.name.startswith("Posterize") else op.aug_fn
    return policy


def _posterize(image: Image.Image, bits: int, **_: object) -> Image.Image:
    # timm's strongest level keeps 0 bits, a black image; Pillow 13 refuses it
    return image if bits >= 8 else ImageOps.posterize(image, max(bits, 1))


def to_tensor(image: Image.Image) -> Tensor:
    """Return a gray or RGB image as uint8 ``(C, H, W)``."""
    pixels = torch.from_numpy(np.array(image))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()


def to_image(pixels: Tensor) -> Image.Image:
    """Return uint8 ``(C, H, W)`` as a gray or RGB image."""
    array = pixels.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def resampling(interpolation: Interpolation) -> Image.Resampling:
    """Return Pillow's constant for an interpolation."""
    return Image.Resampling.BICUBIC if interpolation == "bicubic" else Image.Resampling.BILINEAR
