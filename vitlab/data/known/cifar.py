"""CIFAR-10 and CIFAR-100 in the format of torchvision."""

from pathlib import Path
from typing import Any, Unpack

import torch

from vitlab.data.arguments import CIFARArgs, FixedTestArgs
from vitlab.data.base import ImageData, Part
from vitlab.data.files.sets import TensorImages

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


class CIFAR10(ImageData):
    """60,000 color photos of 32 x 32 pixels, 10 classes, Krizhevsky 2009 (Learning Multiple Layers of Features).

    Args:
        root: Folder that holds cifar-10-batches-py.
        download: Whether to download missing files.
        **data: Passed to :class:`ImageData`.

    Example:
        >>> CIFAR10(root="nowhere")
        Traceback (most recent call last):
        ValueError: `data.root` must hold the folder cifar-10-batches-py, which is missing in nowhere; ...
    """

    has_test_split = True
    published = "CIFAR10"
    folder = "cifar-10-batches-py"
    classes = _TEN.split()

    def __init__(self, root: str = "data", download: bool = False, **data: Unpack[FixedTestArgs]) -> None:
        super().__init__(native_size=(32, 32), in_chans=3, class_names=self.classes, test_share=0.5, **data)
        self.root, self.download = root, download
        if not download and not (Path(root) / self.folder).is_dir():
            raise ValueError(
                f"`data.root` must hold the folder {self.folder}, which is missing in {root}; "
                "--data.download=true fetches it"
            )

    def prepare_data(self) -> None:
        """Download what is missing, if asked to."""
        if self.download:
            self._open(train=True, download=True)

    def read(self, part: Part) -> TensorImages:
        """Return the training or the test images."""
        stored = self._open(train=part == "train")
        images = torch.from_numpy(stored.data).permute(0, 3, 1, 2).contiguous()
        return TensorImages(images, torch.tensor(stored.targets))

    def _open(self, train: bool, download: bool = False) -> Any:
        import torchvision.datasets

        # torchvision compares each file with its published MD5 before it reads pickled arrays
        try:
            return getattr(torchvision.datasets, self.published)(self.root, train=train, download=download)
        except RuntimeError as error:
            raise ValueError(f"{self.root}: {error}; --data.download=true fetches what is missing") from None


class CIFAR100(CIFAR10):
    """60,000 color photos of 32 x 32 pixels, 100 classes, Krizhevsky 2009 (Learning Multiple Layers of Features).

    Args:
        **cifar: Passed to :class:`CIFAR10`.

    Example:
        >>> CIFAR100(root="nowhere")
        Traceback (most recent call last):
        ValueError: `data.root` must hold the folder cifar-100-python, which is missing in nowhere; ...
    """

    published = "CIFAR100"
    folder = "cifar-100-python"
    classes = _HUNDRED.split()

    def __init__(self, **cifar: Unpack[CIFARArgs]) -> None:
        super().__init__(**cifar)
