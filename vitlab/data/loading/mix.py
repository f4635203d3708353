"""Augmentation of whole training batches on their device: random erasing, mixup, cutmix."""

import numpy as np
import torch
from torch import Tensor

from vitlab.data.loading.loader import send
from vitlab.data.loading.order import Step, kind_text
from vitlab.data.loading.streams import ERASE, generator, stream, uniforms
from vitlab.ranges import check_ranges


class Mix:
    """Erase rectangles (Zhong et al. 2017, arXiv:1708.04896), then mix neighbors by mixup (Zhang et al. 2017,
    arXiv:1710.09412) or cutmix (Yun et al. 2019, arXiv:1905.04899), one per batch.

    Rectangles depend on the sample's seed, mixtures on the step's, and partners are neighbors in the global batch,
    which are no copies of one image (:func:`vitlab.data.loading.order.spread_copies`). So images do not depend on the
    number of processes, if each takes an even number of them.

    Args:
        mixup: Both parameters of the beta distribution of mixup's weight; 0 turns mixup off.
        cutmix: The same for the area that cutmix keeps; 0 turns cutmix off.
        random_erasing: Probability that a rectangle of 2 to 33 % of an image is filled with noise.
        num_classes: Number of classes K.
    """

    def __init__(self, mixup: float, cutmix: float, random_erasing: float, num_classes: int) -> None:
        check_ranges("data", {"mixup": mixup, "cutmix": cutmix, "random_erasing": random_erasing})
        self.erasing = random_erasing
        self.mixing = None
        if mixup or cutmix:
            from timm.data import Mixup

            self.mixing = Mixup(mixup, cutmix, label_smoothing=0.0, num_classes=num_classes)

    def check_targets(self, kind: str, weighted: bool) -> None:
        """Refuse to mix targets other than classes, and weighted rows."""
        if self.mixing and (kind != "class" or weighted):
            what = "rows have weights" if weighted else f"the targets are {kind_text(kind)}"
            raise ValueError(f"`data.mixup` and `data.cutmix` mix classes, and {what}: leave them at 0")

    def check_pairs(self, batch_size: int, world: int, repeats: int = 1) -> None:
        """Refuse pairs across processes, and of an image with itself."""
        if self.mixing and batch_size // world % 2:
            raise ValueError(
                "`data.mixup` and `data.cutmix` mix pairs: `data.batch_size` must be even for each process, "
                f"got batch_size={batch_size} and {world} processes"
            )
        if self.mixing and repeats > batch_size // 2:
            raise ValueError(
                "`data.mixup` and `data.cutmix` mix different images: `data.repeats` must be at most half of "
                f"`data.batch_size`, got repeats={repeats} and batch_size={batch_size}"
            )

    def __call__(self, images: Tensor, targets: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Map normalized ``(B, C, H, W)`` images and ``(B,)`` classes to mixed ones, ``(B, K)`` shares if mixed."""
        if self.erasing:
            images = self._erase(images, step)
        if self.mixing is None:
            return images, targets
        assert step.mix_seed is not None
        state = np.random.get_state()  # timm draws from numpy's global generator
        np.random.seed(step.mix_seed % 2**32)
        try:
            return self.mixing(*(torch.cat((x[::2], x[1::2].flip(0))) for x in (images, targets)))  # 2i with 2i + 1
        finally:
            np.random.set_state(state)

    def _erase(self, images: Tensor, step: Step) -> Tensor:
        (channels, height, width), n = images.shape[1:], len(images)
        seeds = stream(step.seeds.astype(np.int64), ERASE)
        draws = uniforms(seeds, 23)
        area = height * width * (0.02 + (1 / 3 - 0.02) * draws[:, :10])
        aspect = 0.3 ** (2 * draws[:, 10:20] - 1)
        h, w = np.round(np.sqrt(area * aspect)), np.round(np.sqrt(area / aspect))
        fits = (h < height) & (w < width)
        rows, first = np.arange(n), fits.argmax(1)  # up to ten attempts, as usual
        h, w = h[rows, first].astype(int), w[rows, first].astype(int)
        top = (draws[:, 20] * (height - h + 1)).astype(int)
        left = (draws[:, 21] * (width - w + 1)).astype(int)
        chosen = np.flatnonzero((draws[:, 22] < self.erasing) & fits.any(1) & (h * w > 0))
        if not len(chosen):
            return images
        boxes = np.zeros((4, n, 1, 1, 1), dtype=np.int64)
        boxes[:, chosen, 0, 0, 0] = np.stack([top, top + h, left, left + w])[:, chosen]
        noise = [torch.randn(channels * h[i] * w[i], generator=generator(int(seeds[i]))) for i in chosen]
        y0, y1, x0, x1 = send(torch.from_numpy(boxes), images.device)
        y = torch.arange(height, device=images.device)[:, None]
        x = torch.arange(width, device=images.device)
        mask = (y0 <= y) & (y < y1) & (x0 <= x) & (x < x1)
        return images.masked_scatter(mask, send(torch.cat(noise).to(images.dtype), images.device))
