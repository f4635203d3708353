"""The frame of every image data set: three splits, statistics of the training part, loaders."""

import os
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.data.loader import Batch, Loader
from vitlab.data.order import EvalOrder, TrainOrder
from vitlab.data.sets import TensorImages
from vitlab.data.splits import Indices, SplitName, parse_fold, split
from vitlab.data.tensor_loader import TensorLoader

Part = Literal["train", "test", "all"]


class ImageData(L.LightningDataModule):
    """Labelled images in disjoint training, validation and test splits; only `test` and `predict` read the last.

    Args:
        native_size: Height and width of the images, in pixels; None where they differ.
        in_chans: Number of channels, 1 or 3.
        class_names: Name of each class.
        batch_size: Images per step over all devices and processes.
        img_size: Side, or height and width, of the images the network gets, in pixels; default: as they are.
        num_workers: Processes that decode images, beside each training process.
        augment: Of training images: none, crop-flip, 3-augment or a timm string such as rand-m9-mstd0.5-inc1.
        val_share: Share of block 1 (what is not test) that becomes the validation split.
        test_share: Share of all images that becomes the test split.
        split_seed: Another seed gives other splits.
        fold: k/n: validate on the k-th of n parts of block 1, instead of `val_share`.
        subset: Share of the training split to train on.
        interpolation: How images are resized, bilinear or bicubic.
    """

    def __init__(
        self,
        native_size: tuple[int, int] | None,
        in_chans: int,
        class_names: list[str],
        batch_size: int = 128,
        img_size: int | list[int] | None = None,
        num_workers: int = 2,
        augment: str = "none",
        val_share: float = 0.2,
        test_share: float = 0.2,
        split_seed: int = 0,
        fold: str | None = None,
        subset: float = 1.0,
        interpolation: Literal["bilinear", "bicubic"] = "bicubic",
    ) -> None:
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True  # a process may have nothing to evaluate
        self.native_size = native_size
        self.img_size = _pair(img_size, native_size)
        self.in_chans = in_chans
        self.class_names = list(class_names)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.augment = augment
        self.val_share, self.test_share = val_share, test_share
        self.split_seed = split_seed
        self.fold = parse_fold(fold)
        self.subset = subset
        self.interpolation = interpolation
        self._check()
        self.splits: dict[SplitName, TensorImages] = {}
        self._restored: dict[str, Any] = {}
        self._statistics: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return len(self.class_names)

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of each channel over the training split, of values in [0, 1]."""
        return self._normalisation()[0]

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of each channel over the training split, of values in [0, 1]."""
        return self._normalisation()[1]

    def read(self, part: Part) -> TensorImages:
        """Return block 1 (train), block 2 (test), or all images of a set without an official test split."""
        raise NotImplementedError

    def setup(self, stage: str) -> None:
        """Build what a stage needs: training and validation for fit and validate, the test split for the others."""
        if stage in ("fit", "validate"):
            self._build("train")
            self._normalisation()
        else:
            self._build("test")

    def train_dataloader(self) -> Loader:
        """Return the training batches of this process."""
        rank, world = self._place()
        order = TrainOrder(len(self.splits["train"]), self.batch_size, self.seed, rank, world)
        return self._loader("train", order)

    def val_dataloader(self) -> Loader:
        """Return the validation batches of this process."""
        return self._loader("val", EvalOrder(len(self.splits["val"]), self.batch_size, *self._place()))

    def test_dataloader(self) -> Loader:
        """Return the test batches of this process."""
        return self._loader("test", EvalOrder(len(self.splits["test"]), self.batch_size, *self._place()))

    predict_dataloader = test_dataloader

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Map uint8 ``(B, C, H, W)`` images to normalised ones of `img_size`, on the device where they are."""
        images, targets, _ = batch
        images = images.float()
        if images.shape[2:] != self.img_size:
            images = F.interpolate(images, self.img_size, mode=self.interpolation, antialias=True).clamp(0, 255)
        mean = torch.tensor(self.mean, device=images.device)[:, None, None]
        std = torch.tensor(self.std, device=images.device)[:, None, None]
        return torch.addcmul(-mean / std, images, 1 / (255 * std)), targets

    def finished(self, loader: Iterable[Batch], device: torch.device | str = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of a loader as a task gets them, for use without a Trainer."""
        for images, targets, mix_seed in loader:
            yield self.on_after_batch_transfer((images.to(device), targets.to(device), mix_seed), 0)

    @property
    def seed(self) -> int:
        """The seed of the run: of a checkpoint that is continued, else of `seed_everything`, else torch's."""
        if "seed" not in self._restored:
            self._restored["seed"] = int(os.environ.get("PL_GLOBAL_SEED") or torch.initial_seed())
        return self._restored["seed"]

    def state_dict(self) -> dict[str, Any]:
        """Return what later stages must share with the training run, as primitives."""
        state: dict[str, Any] = {"class_names": self.class_names, "seed": self.seed}
        if self._statistics is not None:
            state |= {"mean": list(self.mean), "std": list(self.std)}
        if "train" in self.splits:
            state["split_hash"] = self.splits["train"].split_hash
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over seed, classes and statistics of the run that wrote the state."""
        self._restored = dict(state_dict)
        self.class_names = list(state_dict["class_names"])
        if "mean" in state_dict:
            self._statistics = tuple(state_dict["mean"]), tuple(state_dict["std"])

    def fingerprint(self) -> dict[str, Any]:
        """Describe the splits built so far and the statistics, for the record of a run."""
        facts: dict[str, Any] = {"data": type(self).__name__, "class_names": self.class_names, "splits": {}}
        for name, images in self.splits.items():
            counts = torch.bincount(images.labels, minlength=self.num_classes).tolist()
            facts["splits"][name] = {"n": len(images), "hash": images.split_hash, "class_counts": counts}
        mean, std = self._normalisation()
        return facts | {"mean": list(mean), "std": list(std), "statistics_from": "train"}

    def _check(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"`data.batch_size` must be at least 1, got {self.batch_size}")
        if not 0 < self.val_share < 1:
            raise ValueError(f"`data.val_share` must lie between 0 and 1, got {self.val_share}")
        if not 0 <= self.test_share < 1:
            raise ValueError(f"`data.test_share` must lie between 0 and 1, got {self.test_share}")
        if not 0 < self.subset <= 1:
            raise ValueError(f"`data.subset` must be above 0 and at most 1, got {self.subset}")
        if self.augment not in ("none", "crop-flip"):
            raise ValueError(f"`data.augment` must be none or crop-flip, got {self.augment!r}")

    def _indices(self, images: TensorImages) -> dict[SplitName, Indices]:
        labels = images.labels.numpy()
        return split(images.ids, labels, self.test_share, self.val_share, self.fold, self.subset, self.split_seed)

    def _build(self, wanted: SplitName) -> None:
        if wanted in self.splits:
            return
        if self.test_share == 0 and wanted == "test":
            self.splits["test"] = self.read("test")
            return
        images = self.read("all" if self.test_share else "train")
        names: tuple[SplitName, ...] = ("test",) if wanted == "test" else ("train", "val")
        indices = self._indices(images)
        self.splits |= {name: images.take(indices[name]) for name in names}

    def _normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if self._statistics is None:
            self._build("train")
            self._statistics = self.splits["train"].statistics()
        return self._statistics

    def _place(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _loader(self, name: SplitName, order: TrainOrder | EvalOrder) -> Loader:
        images = self.splits[name]
        assert self.native_size is not None
        moving = isinstance(order, TrainOrder) and self.augment == "crop-flip"
        pad = max(1, round(max(self.native_size) / 8)) if moving else 0  # 4 pixels for CIFAR's 32, as usual
        device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        return TensorLoader(
            images.images.to(device), images.labels.to(device), order, self.native_size, pad=pad, augment=moving
        )


def _pair(img_size: int | list[int] | None, native_size: tuple[int, int] | None) -> tuple[int, int]:
    size = native_size if img_size is None else [img_size, img_size] if isinstance(img_size, int) else img_size
    if size is None or len(size) != 2 or min(size) < 1:
        raise ValueError(f"`data.img_size` must be a side or [height, width] in pixels, got {img_size}")
    return int(size[0]), int(size[1])
