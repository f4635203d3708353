"""The pipeline from stored images to the batches of a network, whose sizes may grow with the epochs."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, get_args

import torch
from PIL import Image
from torch import Tensor

from vitlab.class_paths import choice_text
from vitlab.data.files.sets import FileImages, Images, Statistics, TensorImages
from vitlab.data.loading.crops import multi_crop
from vitlab.data.loading.loader import Loader, Prefetch
from vitlab.data.loading.order import EvalOrder, Step, TrainOrder
from vitlab.data.loading.own_ratio import OwnRatio, OwnRatioCropFlip, Tokens
from vitlab.data.loading.sample_loader import OnUnreadable, SampleLoader
from vitlab.data.loading.sizes import Sizes
from vitlab.data.loading.tensor_loader import TensorLoader
from vitlab.data.loading.transforms import (
    Augment,
    Augmented,
    CenterCrop,
    CropMode,
    Interpolation,
    RandomCropFlip,
    ShiftFlip,
    Size,
    Transform,
    parts_of,
    to_tensor,
    try_on,
)
from vitlab.packed_batch import PackedBatch
from vitlab.ranges import check_ranges, check_word
from vitlab.resized import resize_images

_CHUNK = 2**18  # values that fit in the cache of a core
_HOW = get_args(Interpolation)
_MODES: dict[CropMode, str] = {
    "center": "the center, {} of the shorter side",
    "squash": "the center, {} of both sides, without their aspect ratio",
    "border": "the center with a border, {} of the longer side",
    "box": "the center, {} of the shorter side, cut before it is resized",
}


class Pipeline:
    """Cut, augment, resize and normalize.

    Images of one native size are shifted over black, arrays over the mean, and resized in batches; photos are cropped
    and resized one by one. Images in memory without further augmentation are processed in chunks.

    Args:
        native_size: Height and width of the stored images, in pixels; None if they differ.
        img_size: Height and width of the network's input, in pixels.
        augment: Training augmentation; see :class:`vitlab.data.base.ImageData`.
        crop_scale: Smallest share of a photo's area in a random crop; default: .08.
        crop_pct: Share of a photo's shorter side that evaluation uses; default: .875.
        interpolation: How images are resized.
        schedule: Sizes of training images by epoch; see :class:`Sizes`.
        native_patch: Side of the patches of images that keep their aspect ratio; None resizes all to one size.
        crop_mode: How evaluation resizes and cuts photos; see :class:`CenterCrop`.
    """

    def __init__(
        self,
        native_size: Size | None,
        img_size: Size,
        augment: Augment,
        crop_scale: float | None,
        crop_pct: float | None,
        interpolation: Interpolation,
        schedule: Sequence[Sequence[int]] | None = None,
        native_patch: int | None = None,
        crop_mode: CropMode = "center",
    ) -> None:
        crop_scale = 0.08 if crop_scale is None else crop_scale
        crop_pct = 0.875 if crop_pct is None else crop_pct
        check_ranges("data", {"crop_scale": crop_scale, "crop_pct": crop_pct})
        check_word("data.crop_mode", crop_mode, get_args(CropMode))
        check_word("data.interpolation", interpolation, _HOW)
        self.native_size, self.img_size, self.interpolation = native_size, img_size, interpolation
        self.crops = multi_crop(augment, img_size, interpolation, schedule or native_patch)
        self.moves, self.steps = (False, []) if self.crops else parts_of(augment)
        self.sizes = Sizes(schedule, img_size)
        self.own_ratio = None if native_patch is None else OwnRatio(native_patch, img_size, interpolation)
        self.crop_scale, self.crop_pct, self.crop_mode = crop_scale, crop_pct, crop_mode
        if self.steps:  # refuse wrong steps now
            try_on((native_patch, 2 * native_patch) if native_patch else self._step_size, self.steps, interpolation)
        self.pad = max(1, round(max(native_size) / 8)) if native_size else 0  # 4 pixels for 32, as usual

    def __str__(self) -> str:
        """Describe the crops of training and evaluation.

        >>> str(Pipeline(None, (80, 80), "crop-flip", 0.3, 1.0, "bicubic"))
        'random crops of 30 to 100 % of the area, evaluated on the center, 100 % of the shorter side'
        """
        then = "".join(f", {choice_text(step)}" for step in self.steps)
        then += f", {self.sizes}" if self.sizes.steps[1:] else ""
        if self.native_size:
            crops = f"{self.crops}, evaluated on " if self.crops else ""
            return f"{crops}whole images" + (f", shifted by up to {self.pad} pixels" if self.moves else "") + then
        if self.own_ratio:
            part = f"random parts of {100 * self.crop_scale:.4g} to 100 % of the area" if self.moves else "whole images"
            return f"{part}{then}, evaluated on whole images, {self.own_ratio}"
        center = f"evaluated on {_MODES[self.crop_mode].format(f'{100 * self.crop_pct:.4g} %')}"
        if self.crops or not self.moves:
            return f"{self.crops}, {center}" if self.crops else f"trained and {center}{then}"
        return f"random crops of {100 * self.crop_scale:.4g} to 100 % of the area{then}, {center}"

    def facts(self) -> dict[str, Any]:
        """Return sizes and crop, for the record of a run."""
        native = self.native_size and list(self.native_size)
        seen = {} if self.own_ratio else {"crop_pct": self.crop_pct}
        return {
            "img_size": list(self.img_size), "native_size": native, **seen,
            "crop_mode": self.crop_mode, "interpolation": self.interpolation,
        }  # fmt: skip

    def protocol(self) -> dict[str, Any]:
        """Return how evaluation prepares an image, for the record of a result.

        >>> Pipeline(None, (80, 80), "none", None, 1.0, "bicubic").protocol()
        {'img_size': [80, 80], 'crop': 'center', 'crop_pct': 1.0, 'interpolation': 'bicubic'}
        """
        if self.own_ratio:
            crop: dict[str, Any] = {"crop": "none, at most the patches of img_size"}
        elif self.native_size:
            crop = {"crop": "none"}
        else:
            crop = {"crop": self.crop_mode, "crop_pct": self.crop_pct}
        return {"img_size": list(self.img_size), **crop, "interpolation": self.interpolation}

    def loader(
        self,
        images: Images,
        order: TrainOrder | EvalOrder,
        mean: tuple[float, ...],
        num_workers: int,
        device: torch.device,
        on_unreadable: OnUnreadable,
    ) -> Loader:
        """Return the loader of a split, with augmentation if ``order`` is that of training."""
        if train := isinstance(order, TrainOrder):
            self.sizes.check_end()
        loader: Loader
        if self.native_size and isinstance(images, TensorImages) and not (train and self.steps):
            pixels, labels = images.images, images.labels
            if device.type == "cuda" and pixels.nbytes < torch.cuda.mem_get_info(device)[0] // 4:
                pixels, labels = pixels.to(device), labels.to(device)
            pad, fill = self.pad if train and self.moves else 0, mean if pixels.is_floating_point() else None
            loader = TensorLoader(pixels, labels, order, self.native_size, pad, fill)
            if pixels.device.type == "cuda":
                return loader
        else:
            own = self.own_ratio if order.tokens else None
            what = self.crops if train and self.crops else self.transform(train, mean, own)
            loader = SampleLoader(images, order, what, num_workers, on_unreadable, own.patch if own else None)
        return Prefetch(loader, device) if device.type == "cuda" else loader

    def normalize(self, images: Any, statistics: Statistics, step: Step | None = None) -> Any:
        """Normalize uint8 ``(B, C, H, W)`` images on their device, and resize them to the size of the step.

        Packed images keep their sizes.
        """
        if isinstance(images, PackedBatch):
            return images.on(self._scaled(images.patches, statistics, tuple(images.patches.shape[2:])))
        if step is None or step.mix_seed is None:
            return self._scaled(images, statistics, self.img_size)
        if self.crops:
            crops = self.crops(images, step.seeds)
            return self._scaled(crops, statistics, tuple(crops.shape[2:]))
        return self._scaled(images, statistics, self.sizes.at(step.epoch))

    def _scaled(self, images: Tensor, statistics: Statistics, size: Sequence[int]) -> Tensor:
        scale = 255 if images.dtype == torch.uint8 else 1
        if tuple(images.shape[2:]) != size:
            images = resize_images(images.float(), size, self.interpolation)
            images = images.clamp(0, 255) if scale == 255 else images
        factor, shift = _line(statistics, scale, images.device)
        if images.device.type != "cpu":
            return torch.mul(images, factor).sub_(shift)
        target = torch.empty(images.shape, dtype=torch.float32, device=images.device)
        chunk = max(1, _CHUNK // math.prod(images.shape[1:]))
        for part, source in zip(target.split(chunk), images.split(chunk), strict=True):
            part.copy_(source).mul_(factor).sub_(shift)
        return target

    def tokens(self, images: Images) -> Tokens | None:
        """Return the numbers of patches of files that keep their aspect ratio; None if all have one size."""
        own = self.own_ratio
        return own.tokens(images.known["size"]) if own and isinstance(images, FileImages) else None

    def joined(self, images: Sequence[Tensor]) -> Tensor | PackedBatch:
        """Join several normalized ``(C, H, W)`` images into a batch."""
        return PackedBatch.of(images, self.own_ratio.patch) if self.own_ratio else torch.stack(list(images))

    def eval_image(self, image: Image.Image, statistics: Statistics) -> Tensor:
        """Map one gray or RGB image to a normalized ``(C, H, W)``, as in evaluation."""
        if not self.own_ratio:
            return self.cut_image(image, statistics)
        pixels = to_tensor(self.own_ratio(image))
        return self._scaled(pixels[None], statistics, tuple(pixels.shape[1:]))[0]

    def cut_image(self, image: Image.Image, statistics: Statistics) -> Tensor:
        """Map one gray or RGB image to a normalized ``(C, H, W)`` of the size of all, whatever evaluation does."""
        crop = self.center(statistics[0])
        return self.normalize(to_tensor(crop(image))[None], statistics)[0]

    def transform(self, train: bool, mean: tuple[float, ...], own: OwnRatio | None = None) -> Transform | None:
        """Return the transform of single images in training or evaluation; None if there is none."""
        move: Transform | None = None if train and self.native_size else own or self.center(mean)
        if train and self.moves:
            crop: Transform = RandomCropFlip(self.img_size, self.crop_scale, self.interpolation)
            crop = OwnRatioCropFlip(own, self.crop_scale) if own else crop
            move = ShiftFlip(self.pad) if self.native_size else crop
        if not train or not self.steps:
            return move
        return Augmented(move, self.steps, mean, self.interpolation, min(self._step_size))

    @property
    def _step_size(self) -> Size:
        """Height and width of the images that augmentation gets after the crop."""
        return self.native_size or self.img_size

    def center(self, mean: tuple[float, ...] = (0.0,)) -> CenterCrop:
        """Return the one transform of photos in evaluation; where images have one size, others are resized to it."""
        if self.native_size:
            return CenterCrop(self.native_size, 1.0, self.interpolation, "squash", mean)
        return CenterCrop(self.img_size, self.crop_pct, self.interpolation, self.crop_mode, mean)


@lru_cache(8)
@torch.inference_mode(False)  # evaluation may be the first to ask
def _line(statistics: Statistics, scale: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return factor and shift of the normalization, cached: creating them in a step would wait for the GPU."""
    mean, std = (torch.tensor(values)[:, None, None] for values in statistics)
    return (1 / (scale * std)).to(device), (mean / std).to(device)
