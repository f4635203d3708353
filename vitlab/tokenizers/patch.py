"""The tokenizer of ViT: non-overlapping patches and a linear map."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vitlab.layers.linear import linear_layer
from vitlab.layers.plain import is_plain
from vitlab.packed_batch import PackedBatch
from vitlab.resized import resize_images
from vitlab.tokenizers.splits import pair


class PatchEmbed(nn.Module):
    """Cut an image into patches and project each to a token, Dosovitskiy et al. 2021 (arXiv:2010.11929).

    With ``flexi_patch`` one kernel, of ``patch_size``, serves patches of all sizes: it is resized so that the token of
    a resized patch changes as little as possible, FlexiViT, Beyer et al. 2023 (arXiv:2212.08013). Evaluation uses
    ``eval_patch``, by default ``patch_size``.

    Args:
        img_size: Height and width of the images, in pixels.
        patch_size: Side of a square patch, or its height and width, in pixels; divides ``img_size``.
        in_chans: Number of image channels C.
        embed_dim: Token width D.
        flexi_patch: Patch sides that training draws from, step by step, alike for every seed; None is one size.

    Example:
        >>> PatchEmbed((224, 160), patch_size=16, in_chans=3, embed_dim=384)(torch.randn(1, 3, 224, 160)).shape
        torch.Size([1, 140, 384])
    """

    def __init__(
        self,
        img_size: tuple[int, int],
        patch_size: int | Sequence[int],
        in_chans: int,
        embed_dim: int,
        flexi_patch: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        H, W = img_size
        self.patch_size = patch = pair("patch_size", patch_size)
        if H % patch[0] or W % patch[1]:
            raise ValueError(
                f"`patch_size` must divide height and width of `img_size`, got patch_size={patch_size} and "
                f"img_size=[{H}, {W}]; choose another `patch_size`, or resize or crop the images"
            )
        self.flexi_patch = check_flexi(flexi_patch, img_size)
        self.eval_patch, self.drawn = patch, patch
        self._resizes: dict[Any, Tensor] = {}  # cache of the resize matrices, by patch size, precision and device
        self.grid_size = self.grid_of(img_size)
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor | PackedBatch) -> Tensor:
        """Map ``(B, C, H, W)`` to ``(B, N, D)``, or T packed patches to ``(1, T, D)``.

        This equals the convolution ``proj``, but one matrix product of all patches is faster.
        """
        if isinstance(images, PackedBatch):
            patches = images.patches[None]
        else:
            patches = cut_patches(images, self.grid_of(images.shape[2:]))  # (B, N, C, p, p)
        if is_plain(self.proj, nn.Conv2d):
            return linear_layer(patches.flatten(2), self.weight_of(self.patch).flatten(1), self.proj.bias)
        return self._call(patches.flatten(0, 1)).view(*patches.shape[:2], -1)

    def _call(self, patches: Tensor) -> Tensor:
        """Map ``(N, C, p, p)`` to ``(N, D, 1, 1)`` by ``proj`` itself, which somebody has changed or watches."""
        if self.patch == self.patch_size:
            projected: Tensor = self.proj(patches)
            return projected
        if type(self.proj) is not nn.Conv2d:
            kind = type(self.proj).__name__
            raise ValueError(
                f"`flexi_patch` resizes the kernel of a Conv2d, but `tokenizer.proj` is a {kind}: leave it out"
            )
        return functional_call(self.proj, {"weight": self.weight_of(self.patch)}, (patches,))

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width of the current patches, which differ between training and evaluation."""
        return self.drawn if self.training else self.eval_patch

    def draw(self, step: int) -> None:
        """Draw the patch size of a training step: the same in every process, in a resumed run and for every seed."""
        if self.flexi_patch:
            side = random.Random(step).choice(self.flexi_patch)
            self.drawn = (side, side)

    def weight_of(self, patch: tuple[int, int]) -> Tensor:
        """Return the ``(D, C, *patch)`` kernel, resized to ``patch``."""
        weight = self.proj.weight
        if patch == self.patch_size:
            return weight
        key = patch, weight.dtype, weight.device
        if key not in self._resizes:
            with torch.inference_mode(False):  # a matrix of an evaluation serves training, too
                self._resizes[key] = pseudo_inverse_resize(self.patch_size, patch).to(weight)
        return (weight.flatten(2) @ self._resizes[key].T).unflatten(2, patch)

    def grid_of(self, img_size: Sequence[int]) -> tuple[int, int]:
        """Return the rows and columns of patches for this image height and width; refuse sizes that do not divide."""
        sides = tuple(zip(img_size, self.patch, strict=True))
        if any(side % patch for side, patch in sides):
            near = [sorted({max(side // patch, 1) * patch, -(-side // patch) * patch}) for side, patch in sides]
            (H, W), (down, across) = img_size, self.patch
            sizes = ", ".join(f"{h} x {w}" for h in near[0] for w in near[1])
            raise ValueError(f"patches of {down} x {across} do not fill images of {H} x {W}; the nearest are {sizes}")
        (H, down), (W, across) = sides
        return H // down, W // across


def check_flexi(flexi_patch: Sequence[int] | None, img_size: tuple[int, int]) -> tuple[int, ...]:
    """Return the patch sides to draw from, empty for None; refuse sides that do not divide the image.

    Example:
        >>> check_flexi([8, 12, 16], (48, 96))
        (8, 12, 16)
    """
    sides = () if flexi_patch is None else tuple(flexi_patch)
    if flexi_patch is not None and (len(set(sides)) < 2 or not all(isinstance(side, int) for side in sides)):
        raise ValueError(f"`flexi_patch` must list at least two patch sides, got {flexi_patch}")
    if wrong := [side for side in sides if side < 1 or img_size[0] % side or img_size[1] % side]:
        raise ValueError(f"`flexi_patch` must divide height and width of `img_size`, {list(img_size)}, got {wrong[0]}")
    return sides


def pseudo_inverse_resize(old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Return FlexiViT's ``(new pixels, old pixels)`` matrix that resizes a patch kernel, in float64.

    It is the pseudo-inverse of B^T, where B resizes a patch bilinearly: the new kernel maps an enlarged patch to the
    token that the old kernel gives for the original.

    Example:
        >>> pseudo_inverse_resize((4, 4), (6, 6)).shape
        torch.Size([36, 16])
    """
    pixels = torch.eye(old[0] * old[1], dtype=torch.float64).view(-1, 1, *old)
    return torch.linalg.pinv(resize_images(pixels, new, "bilinear").flatten(1))


def cut_patches(images: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """Map ``(B, C, H, W)`` to ``(B, N, C, H / h, W / w)``: the patches of an ``(h, w)`` grid in raster order.

    Example:
        >>> cut_patches(torch.randn(1, 3, 224, 160), (14, 10)).shape
        torch.Size([1, 140, 3, 16, 16])
    """
    h, w = grid_size
    patches = images.unflatten(3, (w, -1)).unflatten(2, (h, -1))  # (B, C, h, H / h, w, W / w)
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
