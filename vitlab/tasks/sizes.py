"""The sizes that a task built in Python takes from its data, and images that it cannot be trained on."""

import inspect
import math
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from vitlab.errors import UsageError
from vitlab.interface import LINKS, hparams_of, image_fact, network, own_ratio_of
from vitlab.layers.plain import local_part
from vitlab.models.packed_batch import check_packed
from vitlab.models.vit import VisionTransformer

FEWEST = 4  # tokens per side that a patch size must leave to be chosen where none was given
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def weights_seen(task: Any) -> list[tuple[int, bool, int, int]]:
    """Return a value for each weight of a task that changes if the weight is replaced, frozen or written to."""
    return [(id(p), p.requires_grad, 0 if p.is_inference() else p._version, _sum(p)) for p in task.parameters()]


def _sum(weight: torch.Tensor) -> int:
    """Return the sum of the bits, which is exact in any order; fused optimizers and ``.data`` raise no ``_version``."""
    bits = _INTEGERS.get(weight.element_size())
    if weight.is_meta or bits is None:  # complex numbers of 128 bits
        return 0
    return int(local_part(weight).detach().view(bits).sum())


def take_sizes(task: Any, data: Any) -> None:
    """Rebuild the network of a task for sizes and targets of ``data`` that were not given; see ``Task.take_sizes``."""
    taken, (args, given) = inspect.signature(type(task)).parameters, task._given
    known = {name: image_fact(data, name) for name in LINKS if name in taken and name not in given}
    news = {k: v for k, v in known.items() if v is not None and v not in (now := task.hparams.get(k), [now, now])}
    if "img_size" in news and "patch_size" in taken and not {"patch_size", "tokenizer"} & given.keys():
        usual, sides = taken["patch_size"].default, news["img_size"]
        if (fitting := patch_for(sides, usual)) != usual:
            news["patch_size"] = fitting
            size = " x ".join(map(str, sides))
            rank_zero_info(f"patch_size={fitting}: nobody gave one, and {usual} does not divide images of {size}")
    targets = news.pop("targets", None) or {}
    is_other = bool(targets) and (targets["kind"] != task.kind or task.kind in ("number", "mixed"))
    if not news and not (is_other and task.is_as_built()):
        return
    if not task.is_as_built():
        wanted = ", ".join(f"{name}={value!r}" for name, value in news.items())
        raise ValueError(
            f"{type(task).__name__} was built for other images than {type(data).__name__} has, and its weights "
            f"have been changed since: build it with {wanted}"
        )
    twin = type(task)(*args, **given, **news, **({"targets": targets} if targets else {}))
    vars(task).update({name: value for name, value in vars(twin).items() if name not in ("_trainer", "_fabric")})


def patch_for(img_size: list[int], usual: int) -> int:
    """Return the usual patch size if it divides an image, else the largest below it that leaves 4 x 4 tokens or more.

    Example:
        >>> patch_for([224, 224], 16), patch_for([8, 8], 16), patch_for([28, 28], 16), patch_for([3, 3], 16)
        (16, 2, 7, 1)
    """
    whole = math.gcd(*img_size)
    if whole % usual == 0:
        return usual
    sides = (side for side in range(usual, 1, -1) if whole % side == 0 and min(img_size) // side >= FEWEST)
    return next(sides, 1)


def check_forms(task: Any, data: Any) -> None:
    """Refuse crops, or images at their own aspect ratio, that a task does not take."""
    check_crops(task, data)
    _check_own_ratio(task, data)


def check_crops(task: Any, data: Any) -> None:
    """Refuse crops for a task that takes whole images, and mixing or erasing of crops."""
    if getattr(getattr(data, "pipeline", None), "crops", None) is None:
        return
    if not getattr(task, "takes_crops", False):
        name = type(task).__name__
        raise UsageError(
            f"`data.augment`: MultiCrop yields crops, which `model: {name}` does not take; use --model=DINO"
        )
    if data.mix.mixing or data.mix.erasing:
        raise UsageError("`data.mixup`, `data.cutmix` and `data.random_erasing` do not work on crops: set them to 0")


def _check_own_ratio(task: Any, data: Any) -> None:
    """Refuse images at their own aspect ratio for a task or network that takes one size."""
    if not (own := own_ratio_of(data)):
        return
    net: Any = network(task)
    try:
        if not getattr(task, "takes_native", True) or not isinstance(net, VisionTransformer):
            raise ValueError(f"{type(task).__name__} takes images of one size: leave it out")
        if hparams_of(task).get("compile"):
            raise ValueError(
                "sizes change at every step, and `model.compile` would compile each: leave one of them out"
            )
        check_packed(net, net.in_chans, (own.patch, own.patch))
    except ValueError as error:
        raise UsageError(f"`data.native_patch`: {error}") from None


def check_size(net: VisionTransformer, size: tuple[int, int]) -> None:
    """Refuse a height and width of images that a network does not take, with any of its patch sizes."""
    tokenizer, images = net.tokenizer, torch.empty(1, net.in_chans, *size)
    for side in getattr(tokenizer, "flexi_patch", ()):
        tokenizer.drawn = (side, side)
        net.positions(images)
    if hasattr(tokenizer, "drawn"):
        tokenizer.drawn = tokenizer.patch_size
    net.positions(images)
