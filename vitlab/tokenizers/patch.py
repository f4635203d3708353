"""Non-overlapping patches, one linear map: the tokenizer of ViT."""

import torch.nn.functional as F
from torch import Tensor, nn


class PatchEmbed(nn.Module):
    """Cut an image into square patches and project each to a token, Dosovitskiy et al. 2021 (arXiv:2010.11929).

    Args:
        img_size: Height and width of the images, in pixels.
        patch_size: Side of a patch, in pixels; divides both.
        in_chans: Number of image channels C.
        embed_dim: Token width D.
    """

    def __init__(self, img_size: tuple[int, int], patch_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        H, W = img_size
        if patch_size < 1 or H % patch_size or W % patch_size:
            raise ValueError(
                f"`patch_size` must divide height and width of `img_size`, got patch_size={patch_size} and "
                f"img_size=[{H}, {W}]; choose another `patch_size`, or resize or crop the images"
            )
        self.grid_size = (H // patch_size, W // patch_size)
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(B, C, H, W)`` to ``(B, N, D)``: the convolution ``proj``, as one product of all patches, is faster."""
        patches = cut_patches(images, self.grid_size).flatten(2)  # (B, N, C p p)
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


def cut_patches(images: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """Map ``(B, C, H, W)`` to ``(B, N, C, H / h, W / w)``: the patches of an ``(h, w)`` grid in raster order."""
    h, w = grid_size
    patches = images.unflatten(3, (w, -1)).unflatten(2, (h, -1))  # (B, C, h, H / h, w, W / w)
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
