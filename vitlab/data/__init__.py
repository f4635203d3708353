"""LightningDataModules: images with their splits, statistics and loaders."""

from vitlab.data.arrays import Arrays
from vitlab.data.base import ImageData
from vitlab.data.hugging_face import HuggingFace
from vitlab.data.image_folder import ImageFolder, ImageNet, Unlabeled
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
