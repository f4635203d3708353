"""Fashion-MNIST in the format of torchvision."""

import gzip
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from vitlab.data.arguments import FixedTestArgs
from vitlab.data.base import ImageData, Part
from vitlab.data.files.sets import TensorImages

_CLASSES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
_PREFIX = {"train": "train", "test": "t10k"}


class FashionMNIST(ImageData):
    """70,000 gray pictures of clothes, 28 x 28, 10 classes, Xiao et al. 2017 (arXiv:1708.07747).

    Args:
        root: Folder that holds FashionMNIST/raw with the four published files, compressed or not.
        download: Whether to download missing files.
        **data: Passed to :class:`ImageData`.

    Example:
        >>> FashionMNIST(root="nowhere")
        Traceback (most recent call last):
        ValueError: ...
    """

    has_test_split = True

    def __init__(self, root: str = "data", download: bool = False, **data: Unpack[FixedTestArgs]) -> None:
        super().__init__(native_size=(28, 28), in_chans=1, class_names=_CLASSES.split(","), test_share=0.5, **data)
        self.root, self.download = root, download
        self.folder = Path(root) / "FashionMNIST" / "raw"
        if not download:
            for kind in ("images-idx3", "labels-idx1"):
                _find(self.folder, f"train-{kind}-ubyte")

    def prepare_data(self) -> None:
        """Download what is missing, if asked to."""
        if self.download:
            from torchvision.datasets import FashionMNIST as Published

            Published(self.root, download=True)

    def read(self, part: Part) -> TensorImages:
        """Return the training or the test images."""
        prefix = _PREFIX[part]
        images = _read_idx(_find(self.folder, f"{prefix}-images-idx3-ubyte"))
        labels = _read_idx(_find(self.folder, f"{prefix}-labels-idx1-ubyte"))
        if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
            raise ValueError(f"{self.folder}: {prefix} has images {images.shape} and labels {labels.shape}")
        return TensorImages(images[:, None], labels.long())


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise ValueError(
        f"`data.root` must hold FashionMNIST/raw/{name} or the same with .gz, which is missing in "
        f"{folder.parent.parent}; --data.download=true fetches it"
    )


def _read_idx(path: Path) -> Tensor:
    """Return the uint8 array of an idx file: 0, 0, 8 (uint8), number of axes, their big-endian lengths, the bytes."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if data[:3] != b"\0\0\x08":
            raise ValueError("not an idx file of bytes")
        shape = np.frombuffer(data, ">u4", count=data[3], offset=4).astype(int)
        return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape).copy())
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise ValueError(f"{path}: {error}") from None
