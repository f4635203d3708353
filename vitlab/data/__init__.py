"""LightningDataModules: images with their splits, statistics and loaders.

The way of an image from disk to batch, through `base.py`, which all data sets share:

- a data set lists its files with their classes, such as `image_folder.py`; `photos.py` numbers the classes;
- `files/splits.py` divides the files, and `files/scan.py` decodes each of them once, for what training must know of it;
- `loading/order.py` draws the images of a step, with a seed for each;
- `loading/sample_loader.py` reads them in its workers: `files/store.py` has bytes, `files/decode.py` makes pixels, and
  `loading/transforms.py` cuts and augments them. What is in memory is cut by `loading/tensor_loader.py` instead;
- `loading/pipeline.py`, which chose between the two, normalizes the batch on its device, and `loading/mix.py` mixes it.

For a data set of your own, open four of these at most: `base.py`, for which it reads `Images`, and `files/sets.py`,
which says what these are; if they lie in files, `photos.py`, for which it lists them, and `files/store.py`.
"""

from vitlab.data.arrays import Arrays
from vitlab.data.base import ImageData
from vitlab.data.hugging_face import HuggingFace
from vitlab.data.image_folder import ImageFolder, Unlabeled
from vitlab.data.imagenet import ImageNet
from vitlab.data.known import CIFAR10, CIFAR100, Digits, FakeData, FashionMNIST, PositionProbe
from vitlab.data.packed import Packed
from vitlab.data.photos import Photos
from vitlab.data.table import Table
from vitlab.data.web_dataset import WebDataset

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "Arrays",
    "Digits",
    "FakeData",
    "FashionMNIST",
    "HuggingFace",
    "ImageData",
    "ImageFolder",
    "ImageNet",
    "Packed",
    "Photos",
    "PositionProbe",
    "Table",
    "Unlabeled",
    "WebDataset",
]
