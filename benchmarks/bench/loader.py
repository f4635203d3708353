"""``vitlab bench loader``: images per second from memory, against common loaders with worker processes."""

import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bench.pairs import Work, compare, cpu_seconds, interleave
from vitlab.data.image_folder import ImageFolder
from vitlab.data.loading.order import TrainOrder
from vitlab.data.loading.pipeline import Pipeline
from vitlab.data.loading.tensor_loader import TensorLoader
from vitlab.data.pack.write import pack
from vitlab.data.packed import Packed

_BATCH, _PHOTO_BATCH = 512, 64
_USUAL = "torchvision ImageFolder, 2 workers"
_HEIGHT, _WIDTH = 375, 500  # of a photo, as the median of ImageNet
Epoch = Callable[[], Iterable[Any]]  # tensors of images, or tuples that begin with them


class _Pictures(Dataset[tuple[Tensor, int]]):
    """The common approach: one PIL image at a time, cropped, flipped and normalized."""

    def __init__(self, images: Tensor) -> None:
        from torchvision.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor

        self.images = images.permute(0, 2, 3, 1).squeeze(3).numpy()
        chans = images.shape[1]
        crop = RandomCrop(images.shape[2], padding=4)
        self.transform = Compose([crop, RandomHorizontalFlip(), ToTensor(), Normalize([0.5] * chans, [0.25] * chans)])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), 0


def measure(rounds: int, budget: float, count: int = 4096, photos: int = 400) -> list[dict[str, Any]]:
    """Return a row for each loader: an epoch of small images, shifted by up to 4 pixels, and one of photos, of which
    parts are cut out; mirrored by chance and normalized.

    Args:
        rounds: How often each loader is measured.
        budget: Seconds for all of them.
        count: Number of small images.
        photos: Number of photos.
    """
    rows = []
    for text, shape in (("28x28 gray, as Fashion-MNIST", (1, 28, 28)), ("32x32 RGB, as CIFAR", (3, 32, 32))):
        rows += _rows(text, _small(count, shape), "DataLoader, PIL, 2 workers", rounds, budget / 3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # leave the cores to the workers; busy-waiting threads would count as work
    try:
        with tempfile.TemporaryDirectory() as folder:
            works = _photos(Path(folder), photos)
            rows += _rows("500x375 JPEG to 224x224", works, _USUAL, rounds, budget / 3)
    finally:
        torch.set_num_threads(threads)
    return rows


def _rows(images: str, loaders: dict[str, Epoch], base: str, rounds: int, budget: float) -> list[dict[str, Any]]:
    used: dict[str, list[float]] = {name: [] for name in loaders}
    seen: dict[str, int] = {}  # images of an epoch: none of a batch that is not full
    works: dict[str, Work] = {name: partial(_go_through, name, loaders[name], used[name], seen) for name in loaders}
    found = compare(interleave(works, rounds, budget, warmups=1), base)
    cpu = compare({name: seconds[1:] for name, seconds in used.items()}, base)
    return [
        {"images": images, "loader": name, "base": base, "images_per_second": seen[name] / row["seconds"], **row}
        | {f"cpu_{key}": value for key, value in cpu[name].items() if key != "rounds"}
        for name, row in found.items()
    ]


def _go_through(name: str, epoch: Epoch, used: list[float], seen: dict[str, int]) -> None:
    before = cpu_seconds()
    seen[name] = sum(int(batch.shape[0] if isinstance(batch, Tensor) else batch[0].shape[0]) for batch in epoch())
    used.append(cpu_seconds() - before)


def _small(count: int, shape: tuple[int, int, int]) -> dict[str, Epoch]:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8))
    usual = [DataLoader(_Pictures(images), _BATCH, True, num_workers=n, persistent_workers=n > 0) for n in (2, 0)]
    order, window = TrainOrder(count, _BATCH, seed=0), shape[1:]
    ours = TensorLoader(images, torch.zeros(count, dtype=torch.long), order, window, pad=4)
    pipeline = Pipeline(window, window, "crop-flip", 1.0, 1.0, "bicubic")
    statistics = (0.5,) * shape[0], (0.25,) * shape[0]
    return {
        "DataLoader, PIL, 2 workers": lambda: usual[0],
        "DataLoader, PIL, 0 workers": lambda: usual[1],
        "vitlab, in memory": lambda: (pipeline.normalize(batch[0], statistics) for batch in ours),
    }


def _photos(folder: Path, count: int) -> dict[str, Epoch]:
    rng = np.random.default_rng(0)
    (folder / "photos" / "all").mkdir(parents=True)
    for i in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize((_WIDTH, _HEIGHT))
        grain = rng.normal(0, 6, (_HEIGHT, _WIDTH, 3))
        pixels = np.clip(np.asarray(coarse) + grain, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / "all" / f"{i}.jpg", quality=90)
    pack(str(folder / "photos"), str(folder / "packed"))
    shares = dict.fromkeys(("val_share", "test_share"), 2 / count)  # a split without images is refused
    settings: dict[str, Any] = {"batch_size": _PHOTO_BATCH, "augment": "crop-flip", **shares}
    decoded = ImageFolder(str(folder / "photos"), num_workers=2, **settings)
    packed = Packed(str(folder / "packed"), num_workers=2, **settings)
    usual = _torchvision(folder / "photos")
    return {
        _USUAL: lambda: usual,
        "ImageFolder, 2 workers": partial(decoded.iterate_batches, decoded.train_dataloader()),
        "Packed, 2 workers": partial(packed.iterate_batches, packed.train_dataloader()),
    }


def _torchvision(folder: Path) -> DataLoader[Any]:
    from torchvision import datasets
    from torchvision.transforms import (
        Compose,
        InterpolationMode,
        Normalize,
        RandomHorizontalFlip,
        RandomResizedCrop,
        ToTensor,
    )  # fmt: skip

    crop = RandomResizedCrop(224, interpolation=InterpolationMode.BICUBIC)
    transform = Compose([crop, RandomHorizontalFlip(), ToTensor(), Normalize([0.5] * 3, [0.25] * 3)])
    photos = datasets.ImageFolder(str(folder), transform)
    return DataLoader(photos, _PHOTO_BATCH, True, num_workers=2, drop_last=True, persistent_workers=True)
