"""Data sets with known classes and sizes: published and synthetic ones."""

import gzip
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Unpack, get_args
from urllib.error import URLError

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.data.arguments import DataArgs, FixedTestArgs
from vitlab.data.base import ImageData, Part
from vitlab.data.files.sets import TensorImages
from vitlab.errors import one_line
from vitlab.ranges import check_word


class Digits(ImageData):
    """1,797 handwritten digits of 8 x 8 pixels and 17 gray levels, Alpaydin and Kaynak 1998 (UCI 80).

    Args:
        **data: Passed to :class:`ImageData`.

    Example:
        >>> data = Digits(batch_size=64)
        >>> data.setup("fit")
        >>> images, labels = next(iter(data.train_dataloader()))[:2]
        >>> images.shape, images.dtype
        (torch.Size([64, 1, 8, 8]), torch.uint8)
    """

    def __init__(self, **data: Unpack[DataArgs]) -> None:
        super().__init__(native_size=(8, 8), in_chans=1, class_names=[str(digit) for digit in range(10)], **data)

    def read(self, part: Part) -> TensorImages:
        """Return all images."""
        table = torch.from_numpy(_table())
        pixels = table[:, :64].reshape(-1, 1, 8, 8).mul(255 / 16).round().to(torch.uint8)
        return TensorImages(pixels, table[:, 64].long())


def _table() -> NDArray[np.float64]:
    """Return the 64 gray levels and the class of each digit, without the slow import of scikit-learn."""
    home = find_spec("sklearn")
    file = Path((home.submodule_search_locations or ["."])[0] if home else ".") / "datasets/data/digits.csv.gz"
    if file.is_file():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    return np.column_stack(load_digits(return_X_y=True))


class Downloaded(ImageData):
    """A published set with a test split, which torchvision downloads.

    Args:
        root: Folder of its files: cifar-10-batches-py or cifar-100-python, or FashionMNIST/raw with the four published
            files, compressed or not.
        download: Whether to download missing files.
        **data: Passed to :class:`ImageData`.

    Example:
        >>> issubclass(CIFAR100, Downloaded)
        True
    """

    has_test_split = True
    published: str  # torchvision's class
    folder: str  # in `root`
    megabytes: int
    shape: tuple[int, int, int]  # channels, height and width of an image
    classes: list[str]

    def __init__(self, root: str = "data", download: bool = False, **data: Unpack[FixedTestArgs]) -> None:
        chans, height, width = self.shape
        super().__init__(native_size=(height, width), in_chans=chans, class_names=self.classes, test_share=0.5, **data)
        self.root, self.download = root, download
        if not download:
            self.check_there("train")

    def missing(self, part: Part) -> str:
        """Return which file or folder of a part is missing; empty if none is."""
        return "" if (Path(self.root) / self.folder).is_dir() else f"the folder {self.folder}"

    def check_there(self, part: Part) -> None:
        """Refuse a part of which a file is missing."""
        if missing := self.missing(part):
            raise ValueError(
                f"`data.root` must hold {missing}, which is missing in {self.root}; --data.download=true fetches it"
            )

    def absent(self) -> str:
        """Return which files :meth:`prepare_data` would download, and their size."""
        missing = self.download and (self.missing("train") or self.missing("test"))
        return f"{Path(self.root) / self.folder} ({self.megabytes} MB)" if missing else ""

    def prepare_data(self) -> None:
        """Download what is missing, if asked to, or say what to do without a network."""
        if not self.download:
            return
        import torchvision.datasets

        try:
            getattr(torchvision.datasets, self.published)(self.root, download=True)
        except (URLError, RuntimeError) as error:  # torchvision's own words where each mirror of a file has failed
            reason = error.reason if isinstance(error, URLError) else one_line(error)
            raise ValueError(
                f"{self.absent() or self.root} cannot be downloaded: {reason}; download it on a machine with a network "
                "and copy it here, or name the folder that holds it by --data.root"
            ) from error


_CLOTHES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"


class FashionMNIST(Downloaded):
    """70,000 gray pictures of clothes, 28 x 28, 10 classes, Xiao et al. 2017 (arXiv:1708.07747).

    Example:
        >>> FashionMNIST(root="nowhere")
        Traceback (most recent call last):
        ValueError: ...
    """

    published, folder, megabytes = "FashionMNIST", "FashionMNIST/raw", 31
    shape, classes = (1, 28, 28), _CLOTHES.split(",")

    def missing(self, part: Part) -> str:
        """Return which file of a part is missing; empty if none is."""
        lost = [path for path in self._files(part) if not path.is_file()]
        return f"{self.folder}/{lost[0].name} or the same with .gz" if lost else ""

    def read(self, part: Part) -> TensorImages:
        """Return the training or the test images."""
        self.check_there(part)
        images, labels = map(_read_idx, self._files(part))
        if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
            raise ValueError(f"{self.folder}: {part} has images {images.shape} and labels {labels.shape}")
        if len(labels) and labels.max() > 9:
            raise ValueError(f"{self.folder}: {part} has the label {int(labels.max())}, above 9")
        return TensorImages(images[:, None], labels.long())

    def _files(self, part: Part) -> list[Path]:
        """Return the files of images and labels of a part, each with .gz where it is there in this form alone."""
        prefix = "t10k" if part == "test" else "train"
        plain = [Path(self.root) / self.folder / f"{prefix}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
        return [path if path.is_file() or not (gz := path.with_suffix(".gz")).is_file() else gz for path in plain]


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


_TEN = "airplane automobile bird cat deer dog frog horse ship truck"
_HUNDRED = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""


class CIFAR10(Downloaded):
    """60,000 color photos of 32 x 32 pixels, 10 classes, Krizhevsky 2009 (Learning Multiple Layers of Features).

    Example:
        >>> CIFAR10(root="nowhere")
        Traceback (most recent call last):
        ValueError: `data.root` must hold the folder cifar-10-batches-py, which is missing in nowhere; ...
    """

    published, folder, megabytes = "CIFAR10", "cifar-10-batches-py", 170
    shape, classes = (3, 32, 32), _TEN.split()

    def read(self, part: Part) -> TensorImages:
        """Return the training or the test images."""
        import torchvision.datasets

        # torchvision compares each file with its published MD5 before it reads pickled arrays
        try:
            stored = getattr(torchvision.datasets, self.published)(self.root, train=part == "train")
        except RuntimeError as error:
            what = str(error).partition(". You can use")[0]  # an argument of torchvision
            raise ValueError(f"{self.root}: {what}; --data.download=true fetches what is missing") from None
        images = torch.from_numpy(stored.data).permute(0, 3, 1, 2).contiguous()
        return TensorImages(images, torch.tensor(stored.targets))


class CIFAR100(CIFAR10):
    """60,000 color photos of 32 x 32 pixels, 100 classes, Krizhevsky 2009 (Learning Multiple Layers of Features).

    Example:
        >>> CIFAR100(root="nowhere")
        Traceback (most recent call last):
        ValueError: `data.root` must hold the folder cifar-100-python, which is missing in nowhere; ...
    """

    published, folder = "CIFAR100", "cifar-100-python"
    classes = _HUNDRED.split()


ProbeTask = Literal["bag", "abs", "rel"]

_TASKS = {
    "bag": ["marker 0", "marker 1", "marker 2", "marker 3"],
    "abs": ["top left", "top right", "bottom left", "bottom right"],
    "rel": ["right", "left", "below", "above"],
}
_GRID = 4  # cells in a row and in a column
_CELL = 4  # pixels in a row and in a column of a cell
_SEEDS = {"markers": 0, "train": 1, "test": 2}
_UNIT = 24  # gray levels per unit; noise has std 0.5, markers 1.5; black and white lie at 5.3 units


class PositionProbe(ImageData):
    """Noise of 16 x 16 pixels with a marker in one or two of 4 x 4 cells; four classes of equal size, chance is 25 %.

    bag: which of four markers is there, which needs no position. abs: in which quadrant the marker is. rel: on which
    side of marker A marker B is, in the same row or column. There are 2,000 test images, and 1,500 (rel: 3,000)
    training images for the default `val_share` of 0.2. The images do not depend on the seed of the run.

    Args:
        task: What to classify: bag, abs or rel.
        **data: Passed to :class:`ImageData`.

    Example:
        >>> PositionProbe(task="rel").class_names
        ['right', 'left', 'below', 'above']
    """

    has_test_split = True

    def __init__(self, task: ProbeTask = "rel", **data: Unpack[FixedTestArgs]) -> None:
        check_word("data.task", task, get_args(ProbeTask))
        side = _GRID * _CELL
        super().__init__(native_size=(side, side), in_chans=1, class_names=_TASKS[task], test_share=0.5, **data)
        self.task, augment = task, data.get("augment", "none")
        self.mirrors = "crop-flip" in ([augment] if isinstance(augment, str) else augment)

    def setup(self, stage: str) -> None:
        """Build what a stage needs; places are not learned from mirrored images."""
        if stage == "fit" and self.mirrors and self.task != "bag":
            what = f"the classes of `data.task: {self.task}` are places"
            raise ValueError(f"`data.augment`: crop-flip mirrors images, and {what}: leave it out")
        super().setup(stage)

    def read(self, part: Part) -> TensorImages:
        """Draw the training or the test images; every call returns the same."""
        rng = torch.Generator().manual_seed(_SEEDS[part])
        n = 2000 if part == "test" else 3750 if self.task == "rel" else 1875
        labels = torch.randperm(n, generator=rng) % 4
        cells = 0.5 * torch.randn(n, _GRID, _GRID, _CELL, _CELL, generator=rng)
        markers = 1.5 * torch.randn(4, _CELL, _CELL, generator=torch.Generator().manual_seed(_SEEDS["markers"]))
        rows = torch.arange(n)
        for marker, y, x in _places(self.task, labels, rng):
            cells[rows, y, x] += markers[marker]
        images = cells.transpose(2, 3).reshape(n, 1, _GRID * _CELL, _GRID * _CELL)
        return TensorImages((128 + _UNIT * images).round().clamp(0, 255).to(torch.uint8), labels)


def _places(task: ProbeTask, labels: Tensor, rng: torch.Generator) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return marker, row and column, ``(n,)`` each, for every marker of the images with these labels."""

    def draw(stop: Tensor | int) -> Tensor:
        return (torch.rand(len(labels), generator=rng) * stop).long()  # in [0, stop)

    first = torch.zeros_like(labels)
    match task:
        case "bag":
            return [(labels, draw(_GRID), draw(_GRID))]
        case "abs":
            half = _GRID // 2
            return [(first, labels // 2 * half + draw(half), labels % 2 * half + draw(half))]
        case "rel":
            distance = 1 + draw(_GRID - 1)
            near, across = draw(_GRID - distance), draw(_GRID)  # on the common line, and the line itself
            b_is_far, in_row = labels % 2 == 0, labels < 2
            a = torch.where(b_is_far, near, near + distance)
            b = torch.where(b_is_far, near + distance, near)
            y = [torch.where(in_row, across, along) for along in (a, b)]
            x = [torch.where(in_row, along, across) for along in (a, b)]
            return [(first, y[0], x[0]), (first + 1, y[1], x[1])]


class FakeData(ImageData):
    """Random images with random labels.

    Args:
        n: Number of images.
        native_size: Side of the square images, in pixels.
        in_chans: Number of channels, 1 or 3.
        num_classes: Number of classes K.
        **data: Passed to :class:`ImageData`.

    Example:
        >>> data = FakeData(n=20, native_size=8)
        >>> data.setup("fit")
        >>> {split: len(images) for split, images in data.splits.items()}
        {'train': 13, 'val': 3}
    """

    def __init__(
        self, n: int = 64, native_size: int = 32, in_chans: int = 3, num_classes: int = 10, **data: Unpack[DataArgs]
    ) -> None:
        names = [f"class {k}" for k in range(num_classes)]
        super().__init__(native_size=(native_size, native_size), in_chans=in_chans, class_names=names, **data)
        self.shape = (n, in_chans, native_size, native_size)

    def read(self, part: Part) -> TensorImages:
        """Return all images; every call returns the same."""
        rng = torch.Generator().manual_seed(0)
        images = torch.randint(256, self.shape, generator=rng, dtype=torch.uint8)
        return TensorImages(images, torch.arange(len(images)) % self.num_classes)
