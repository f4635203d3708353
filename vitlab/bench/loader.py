"""``vitlab bench loader``: images per second out of memory, against a usual loader with worker processes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitlab.bench.pairs import compare, interleave
from vitlab.data.order import TrainOrder
from vitlab.data.tensor_loader import TensorLoader

_SIZE, _BATCH = 32, 512


class _Photos(Dataset[tuple[Tensor, int]]):
    """The usual way: one PIL image at a time, cropped, mirrored and normalised."""

    def __init__(self, images: Tensor) -> None:
        from torchvision.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor

        self.images = images.permute(0, 2, 3, 1).numpy()
        steps = [RandomCrop(_SIZE, padding=4), RandomHorizontalFlip(), ToTensor(), Normalize([0.5] * 3, [0.25] * 3)]
        self.transform = Compose(steps)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.images[index])), 0


def measure(rounds: int, budget: float, count: int = 8192) -> list[dict[str, Any]]:
    """Return a row for each loader: an epoch of 32 x 32 images, shifted by up to 4 pixels, mirrored, normalised."""
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, 3, _SIZE, _SIZE), np.uint8))
    usual = {f"DataLoader, {n} workers": DataLoader(_Photos(images), _BATCH, True, num_workers=n) for n in (2, 0)}
    order = TrainOrder(count, _BATCH, seed=0)
    ours = TensorLoader(images, torch.zeros(count, dtype=torch.long), order, (_SIZE, _SIZE), pad=4, augment=True)

    def epoch() -> None:
        for batch in ours:
            torch.sub(batch[0], 127.5).mul_(1 / 63.75)

    works = {name: lambda loader=loader: [None for _ in loader] for name, loader in usual.items()}
    times = interleave({**works, "vitlab TensorLoader": epoch}, rounds, budget, warmups=1)
    found = compare(times, "DataLoader, 2 workers")
    return [{"loader": name, **row, "images_per_second": count / row["seconds"]} for name, row in found.items()]
