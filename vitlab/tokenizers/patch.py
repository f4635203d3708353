"""Non-overlapping patches, one linear map: the tokenizer of ViT."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.tokenizers.splits import pair


class PatchEmbed(nn.Module):
    """Cut an image into patches and project each to a token, Dosovitskiy et al. 2021 (arXiv:2010.11929).

    Args:
        img_size: Height and width of the images, in pixels.
        patch_size: Side of a square patch, or its height and width, in pixels; divides the image's.
        in_chans: Number of image channels C.
        embed_dim: Token width D.

    Example:
        >>> PatchEmbed((224, 160), patch_size=16, in_chans=3, embed_dim=384)(torch.randn(1, 3, 224, 160)).shape
        torch.Size([1, 140, 384])
    """

    def __init__(
        self, img_size: tuple[int, int], patch_size: int | Sequence[int], in_chans: int, embed_dim: int
    ) -> None:
        super().__init__()
        H, W = img_size
        self.patch_size = patch = pair("patch_size", patch_size)
        if H % patch[0] or W % patch[1]:
            raise ValueError(
                f"`patch_size` must divide height and width of `img_size`, got patch_size={patch_size} and "
                f"img_size=[{H}, {W}]; choose another `patch_size`, or resize or crop the images"
            )
        self.grid_size = self.grid_of(img_size)
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(B, C, H, W)`` to ``(B, N, D)``: the convolution ``proj``, as one product of all patches, is faster."""
        patches = cut_patches(images, self.grid_of(images.shape[2:])).flatten(2)  # (B, N, C p p)
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)

    def grid_of(self, img_size: Sequence[int]) -> tuple[int, int]:
        """Return rows and columns of the patches of images of this height and width; refuse what they do not fill."""
        sides = tuple(zip(img_size, self.patch_size, strict=True))
        if any(side % patch for side, patch in sides):
            near = [sorted({max(side // patch, 1) * patch, -(-side // patch) * patch}) for side, patch in sides]
            (H, W), (down, across) = img_size, self.patch_size
            sizes = ", ".join(f"{h} x {w}" for h in near[0] for w in near[1])
            raise ValueError(f"patches of {down} x {across} do not fill images of {H} x {W}; the nearest are {sizes}")
        (H, down), (W, across) = sides
        return H // down, W // across


def cut_patches(images: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """Map ``(B, C, H, W)`` to ``(B, N, C, H / h, W / w)``: the patches of an ``(h, w)`` grid in raster order.

    Example:
        >>> cut_patches(torch.randn(1, 3, 224, 160), (14, 10)).shape
        torch.Size([1, 140, 3, 16, 16])
    """
    h, w = grid_size
    patches = images.unflatten(3, (w, -1)).unflatten(2, (h, -1))  # (B, C, h, H / h, w, W / w)
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
