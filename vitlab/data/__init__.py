"""LightningDataModules: images with their splits, statistics and loaders."""

from vitlab.data.arrays import Arrays
from vitlab.data.base import ImageData
from vitlab.data.hugging_face import HuggingFace
from vitlab.data.image_folder import ImageFolder, ImageNet, Unlabeled
from vitlab.data.known.cifar import CIFAR10, CIFAR100
from vitlab.data.known.digits import Digits
from vitlab.data.known.fake import FakeData
from vitlab.data.known.fashion_mnist import FashionMNIST
from vitlab.data.known.position_probe import PositionProbe
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
