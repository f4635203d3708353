"""Which heights and widths an exported graph takes: one size, or any that its network can take."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitlab.errors import MISTAKES, UsageError, in_own_code, named_line
from vitlab.interface import path_of
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import token_steps
from vitlab.tables import shape_text
from vitlab.tokenizers.patch import PatchEmbed

_MOST = 8192  # pixels of a side of a graph of any size


@dataclass
class Side:
    """The heights, or widths, that a graph of any size takes, in pixels.

    Args:
        multiple_of: Every side is a multiple of it.
        least: The smallest one.
        most: The largest one that the graph was made for.
    """

    multiple_of: int
    least: int
    most: int


def open_sides(net: VisionTransformer, to: str = "onnx") -> list[Side]:
    """Return the heights and the widths that a graph of ``net`` in the format ``to`` can leave open.

    Raises:
        UsageError: The tokenizer takes images of one size only, or one of several patch sizes; or another part does.
            Or the network has one row or column of tokens, which a graph of pt2, or one with T2T, takes for a constant.

    Example:
        >>> open_sides(VisionTransformer(img_size=32, patch_size=16, embed_dim=48, depth=1, num_heads=3))[0]
        Side(multiple_of=16, least=16, most=8192)
    """
    tokenizer: Any = net.tokenizer
    if not hasattr(tokenizer, "grid_of"):
        raise UsageError(
            f"`--dynamic size` needs a tokenizer with `grid_of(size)`: {path_of(tokenizer)} takes only images of "
            "{} x {}; leave the option out".format(*net.img_size)
        )
    steps = token_steps(net)
    if any(side % step for side, step in zip(net.img_size, steps, strict=True)):
        own, some = ("{} x {}".format(*each) for each in (net.img_size, steps))
        raise UsageError(f"`--dynamic size` leaves multiples of {some} pixels open, not {own}: leave the option out")
    least = 1 if isinstance(tokenizer, PatchEmbed) and to != "pt2" else 2  # torch.export takes 1 for a constant
    if min(net.grid_size) < least:
        grid = "{} x {}".format(*net.grid_size)
        raise UsageError(f"`--dynamic size` leaves 2 or more rows and columns open, not {grid}: leave the option out")
    sides = []
    for axis, step in enumerate(steps):
        fits = (n for n in range(1, _MOST // step + 1) if _tokens(tokenizer, axis, n * step, net.img_size) >= least)
        sides.append(Side(step, step * next(fits), _MOST // step * step))
    for size in sizes_to_check(net, sides):
        try:
            with torch.inference_mode():
                net(torch.zeros(1, net.in_chans, *size))
        except MISTAKES as error:
            why, side = in_own_code(error) or named_line(error), "{} x {}".format(*size)
            text = f"`--dynamic size`: this network does not take images of {side} pixels; leave the option out ({why})"
            raise UsageError(text) from error
    return sides


def _tokens(tokenizer: Any, axis: int, side: int, img_size: tuple[int, ...]) -> int:
    """Return the rows (axis 0) or columns of tokens of images with this height or width; 0 if they are refused."""
    size = [side if i == axis else other for i, other in enumerate(img_size)]
    try:
        return int(tokenizer.grid_of((size[0], size[1]))[axis])
    except ValueError:
        return 0


def sizes_to_check(net: Any, sides: list[Side] | None) -> list[tuple[int, ...]]:
    """Return the height and width at which a graph is compared: the trained ones, and three others if it leaves them.

    Among these are the smallest height and the smallest width.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=16, embed_dim=48, depth=1, num_heads=3)
        >>> sizes_to_check(net, open_sides(net))
        [(32, 32), (16, 48), (64, 16), (48, 64)]
    """
    if not sides:
        return [tuple(net.img_size)]
    own = tuple(net.img_size)
    more, most = ([n + by * side.multiple_of for side, n in zip(sides, own, strict=True)] for by in (1, 2))
    return [own, (sides[0].least, more[1]), (most[0], sides[1].least), (more[0], most[1])]


def check_images(
    shape: tuple[int, ...], in_chans: int, img_size: Sequence[int], sides: Sequence[Side] | None, path: Path | str
) -> None:
    """Refuse images of a shape that the graph in ``path`` was not made for.

    Example:
        >>> check_images((1, 3, 32, 32), 3, (32, 32), None, "net.onnx")
        >>> check_images((1, 3, 40, 32), 3, (32, 32), None, "net.onnx")
        Traceback (most recent call last):
        vitlab.errors.UsageError: net.onnx takes images of 3 x 32 x 32, got 3 x 40 x 32; export it with --dynamic size
    """
    got = shape_text(shape[1:])
    if len(shape) != 4:
        raise UsageError(f"{path} takes a batch of images, (B, C, H, W), got {len(shape)} dimensions")
    if sides is None:
        if tuple(shape[1:]) != (in_chans, *img_size):
            way_out = "; export it with --dynamic size" if shape[1] == in_chans else ""
            raise UsageError(f"{path} takes images of {in_chans} x {img_size[0]} x {img_size[1]}, got {got}{way_out}")
        return
    fits = (
        n % side.multiple_of == 0 and side.least <= n <= side.most for n, side in zip(shape[2:], sides, strict=True)
    )
    if shape[1] != in_chans or not all(fits):
        raise UsageError(f"{path} takes images of {in_chans} channels, {sides_text(sides)}, got {got}")


def sides_text(sides: Sequence[Side]) -> str:
    """Return which heights and widths a graph of any size takes.

    Example:
        >>> sides_text([Side(4, 8, 8192), Side(1, 8, 8192)])
        'heights of 8 to 8192 in steps of 4 and widths of 8 to 8192'
    """
    words = [
        f"{name}s of {side.least} to {side.most}" + (f" in steps of {side.multiple_of}" if side.multiple_of > 1 else "")
        for name, side in zip(("height", "width"), sides, strict=True)
    ]
    return " and ".join(words)
