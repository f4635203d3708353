"""What stands in the place of a patch that is taken away: no filling is neutral, so there are several."""

from collections.abc import Callable

import torch
from torch import Tensor

from vitlab.analysis.attribution.maps import cells
from vitlab.errors import UsageError
from vitlab.models.walk import Asked


def mean_color(net: Asked, images: Tensor) -> Tensor:
    """Return the mean color of the training images, which is 0: from it integrated gradients and occlusion start."""
    return torch.zeros_like(images)


def own_mean(net: Asked, images: Tensor) -> Tensor:
    """Return the mean color of each of the ``(B, C, H, W)`` images."""
    return images.mean(dim=(2, 3), keepdim=True).expand_as(images)


def blurred(net: Asked, images: Tensor) -> Tensor:
    """Return ``(B, C, H, W)`` images blurred by a Gaussian whose standard deviation is the side of a patch.

    After Fong and Vedaldi 2017 (arXiv:1704.03296). At the border the weights within the image sum to 1.

    Example:
        >>> from vitlab.models.vit import VisionTransformer
        >>> net = VisionTransformer(img_size=4, patch_size=2, embed_dim=16, depth=1, num_heads=2)
        >>> blurred(net, torch.ones(1, 3, 4, 4)).allclose(torch.ones(1, 3, 4, 4))
        True
    """
    weights = []
    for side, count in zip(net.img_size, net.grid_size, strict=True):
        at = torch.arange(side, device=images.device, dtype=images.dtype)
        weights.append((-0.5 * ((at[:, None] - at) * count / side).square()).softmax(dim=1))
    return weights[0] @ images @ weights[1].T


def another_image(net: Asked, images: Tensor) -> Tensor:
    """Return for each of the ``(B, C, H, W)`` images another one, at random: what it has in the same place."""
    if len(images) < 2:
        raise UsageError("patches of another image need two images at least, and there is one: give more images")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(images.device)
    return images[order.roll(1)[order.argsort()]]


FILLINGS: dict[str, Callable[[Asked, Tensor], Tensor]] = {
    "mean color": mean_color,
    "own mean": own_mean,
    "blur": blurred,
    "another image": another_image,
}


def deleted(net: Asked, images: Tensor, values: Tensor, count: int, filling: Tensor | None = None) -> Tensor:
    """Return ``(B, C, H, W)`` images that have a filling in the ``count`` patches of the largest ``(B, N)`` values.

    Args:
        net: The network, whose grid is taken.
        images: Normalized images.
        values: A value of each patch; of equal ones the first in reading order goes first.
        count: How many patches are replaced.
        filling: Images whose patches replace them, ``(B, C, H, W)``; None is the mean color.

    Example:
        >>> from vitlab.models.vit import VisionTransformer
        >>> net = VisionTransformer(img_size=4, patch_size=2, embed_dim=16, depth=1, num_heads=2)
        >>> deleted(net, torch.ones(1, 1, 4, 4), torch.tensor([[0.0, 3.0, 1.0, 2.0]]), 2)[0, 0]
        tensor([[1., 1., 0., 0.],
                [1., 1., 0., 0.],
                [1., 1., 0., 0.],
                [1., 1., 0., 0.]])
    """
    best = values.argsort(dim=1, descending=True, stable=True)[:, :count]
    mask = cells(net, torch.zeros_like(values).scatter(1, best, 1.0)).bool()
    return torch.where(mask, torch.zeros_like(images) if filling is None else filling, images)
