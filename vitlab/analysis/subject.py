"""The subject of an analysis, and its finding."""

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import lightning as L
import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from vitlab.analysis.pictures import LoadedImages, PreparedPictures, as_tensor
from vitlab.analysis.typeset import INCHES, LITERAL, Format, Width, figure_bytes, make_literal, printed
from vitlab.class_paths import choice_text
from vitlab.data.base import ImageData
from vitlab.data.files.sets import Images
from vitlab.data.files.splits import SplitName
from vitlab.data.loading.order import fixed_order
from vitlab.data.loading.pipeline import Pipeline
from vitlab.errors import UsageError, printable
from vitlab.models.foreign import AnyNetwork
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import Asked, all_finite, as_asked, heads_of, outputs
from vitlab.models.weights_file import weights_digest
from vitlab.runs.atomic import atomic_write
from vitlab.tables import shape_text

T = TypeVar("T")
CkaTokens = Literal["mean", "class", "flattened"]


@dataclass
class Subject:
    """A trained network and the images to analyze it with.

    Args:
        net: The network, in float32: any module that maps images to class scores; set to evaluation mode. A ViT
            of vitlab, or one of timm with an equivalent, supports every analysis, others those whose parts they have.
            The equivalent is a copy: after training the one of timm, make another subject.
        data: The data set it was trained on; a LightningDataModule of your own, whose batches are images and targets;
            or a function from a PIL image to a normalized ``(C, H, W)``: then ``pictures`` are the only images, and
            have no labels.
        arguments: The arguments it was built with.
        name: Its name in figures.
        classifies: Whether its outputs are scores of the data's classes.
        pictures: Images, image files, or normalized ``(B, C, H, W)``, to draw maps for; None takes validation images.
        num_images: Largest number of images to measure with.
        layer: The block to analyze, from 0; None leaves the choice to the analysis.
        head: The head to analyze, from 0; None for all.
        query: Row and column of the patch whose attention is shown; None for the class token.
        other: Another network to compare with.
        split: Split that errors, confusion and calibration use completely.
        is_elsewhere: Whether the data has other classes than the training; so it has if their number differs.
        task: The LightningModule that trained the network; None if there is none.
        tokens: By which tokens cka compares images: mean of the patches, class, or flattened.
        masks: Folder of masks for segmentation, with the names of the images.
        folds: Folder of the cross-validation whose held-out predictions labels compares.

    Example:
        >>> from PIL import Image
        >>> from vitlab.data import Digits
        >>> net = VisionTransformer(img_size=8, in_chans=1, patch_size=2, embed_dim=16, depth=2, num_heads=2)
        >>> subject = Subject(net, Digits(), num_images=16)
        >>> subject.labeled()[0].shape
        torch.Size([16, 1, 8, 8])
        >>> Subject(net, lambda image: torch.zeros(1, 8, 8), pictures=[Image.new("L", (9, 9))]).shown().shape
        torch.Size([1, 1, 8, 8])
        >>> own = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> Subject(own, Digits(), num_images=16).outputs().shape
        torch.Size([16, 10])
    """

    net: Asked
    data: Any
    arguments: dict[str, Any] = field(default_factory=dict)
    name: str = "model"
    classifies: bool = True
    pictures: Any = None
    num_images: int = 512
    layer: int | None = None
    head: int | None = None
    query: tuple[int, int] | None = None
    other: "Subject | None" = None
    split: SplitName = "val"
    is_elsewhere: bool = False
    task: Any = None
    tokens: CkaTokens = "mean"
    masks: str | Path | None = None
    folds: str | Path | None = None
    _known: dict[str, Any] = field(default_factory=dict, repr=False, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.net, nn.Module):
            raise UsageError(f"`net` must be a torch.nn.Module that maps images to outputs, got {self.net!r:.80}")
        if isinstance(self.data, L.LightningDataModule) and not isinstance(self.data, ImageData):
            self.data = LoadedImages(self.data, self.task)
        if not isinstance(self.data, ImageData):
            self.data = PreparedPictures.of(self.data, self.net, self.pictures, self.name)
        self.classifies = self.classifies and not self.has_no_data
        self.net = as_asked(self.net, self.name, self.data.img_size, self.data.in_chans).eval()
        if isinstance(self.data, LoadedImages):
            self.data.name_targets(self.net.num_classes)
            self.classifies = self.data.targets["kind"] == "class"
        if self.data.targets["kind"] == "class" and self.net.num_classes > 1:
            self.is_elsewhere |= self.net.num_classes != self.data.num_classes
        self.net.predicts_labels = self.data.targets["kind"] == "multilabel" and not self.is_elsewhere
        self._check_images()
        if self.pictures is not None:
            self.pictures = as_tensor(self.pictures, self.data)
        self._check_choices()

    def _check_images(self) -> None:
        """Refuse images of another size or precision than the network takes."""
        takes, made = ((each.in_chans, *each.img_size) for each in (self.net, self.data))
        if takes != made:
            raise UsageError(f"{self.name} takes images of {shape_text(takes)}, and its data has {shape_text(made)}")
        values = (*self.net.parameters(), *self.net.buffers())
        dtype = next((value.dtype for value in values if value.is_floating_point()), torch.float32)
        own = [torch.float64] if isinstance(self.data, PreparedPictures) else []  # images may be of 64 bits, too
        if dtype not in (torch.float32, *own):
            known = f"{self.name} computes in {str(dtype).removeprefix('torch.')}, and analyses in float32"
            raise UsageError(f"{known}: take `net.float()`, or of a copy, `copy.deepcopy(net).float()`")

    def _check_choices(self) -> None:
        """Refuse a layer, a head or a patch that the network does not have, and other values that mean nothing."""
        counts = {"layer": len(self.net.blocks), "head": max(heads_of(self.net), default=0)}
        for name, count in counts.items():
            if (value := getattr(self, name)) is not None and not 0 <= value < count:
                range_of = f"must lie in 0..{count - 1}" if count else f"cannot be chosen, as {self.name} shows none"
                raise ValueError(f"`--{name}` {range_of}, got {value}")
        (h, w), query = self.net.grid_size, self.query
        if query is not None and not (0 <= query[0] < h and 0 <= query[1] < w):
            raise ValueError(f"`--query` must be a row in 0..{h - 1} and a column in 0..{w - 1}, got {query}")
        if self.tokens not in get_args(CkaTokens):
            raise ValueError(f"`--tokens` must be {', '.join(get_args(CkaTokens))}, got {self.tokens}")
        if self.num_images < 1:
            raise ValueError(f"`--num_images` must be at least 1, got {self.num_images}")

    @property
    def pos_embed(self) -> str:
        """The name of the network's position embedding."""
        if isinstance(self.net, AnyNetwork):
            return "unknown"
        return choice_text(self.arguments.get("pos_embed", type(self.net.pos_embed).__name__))

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next((value.device for value in (*self.net.parameters(), *self.net.buffers())), torch.device("cpu"))

    def batches(
        self, split: SplitName = "val", limit: int | None = None, pipeline: Pipeline | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield normalized ``(B, C, H, W)`` images and their ``(B,)`` classes.

        Args:
            split: Which images; never augmented. Beyond the limit, a fixed random sample.
            limit: Largest number of images; default: ``num_images``.
            pipeline: Preprocessing; default: the network's, without augmentation.
        """
        if self.has_no_data:
            return self._of_pictures(split, self.num_images if limit is None else limit)
        images, limit = self.images(split), self.num_images if limit is None else limit
        if len(images) > limit:
            images = images.take(np.sort(fixed_order(len(images))[:limit]))
        return self.prepared(images, pipeline)

    def batches_for(
        self, other: "Subject", split: SplitName = "val", limit: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of :meth:`batches`, normalized as those of another subject."""
        if other is self or self.data.statistics() == other.data.statistics():
            yield from self.batches(split, limit)
            return
        (mean, std), (new_mean, new_std) = (_planes(each.data, self.device) for each in (self, other))
        for images, labels in self.batches(split, limit):
            yield (images * std + mean - new_mean) / new_std, labels

    @property
    def rival(self) -> "Subject | None":
        """``other``, under a name of its own."""
        if self.other is None or self.other.name != self.name:
            return self.other
        rival = copy.copy(self.other)
        rival.name = f"{self.name} (other)"
        return rival

    def images(self, split: SplitName) -> Images:
        """Return the images of a split, read; refuse data whose files are missing."""
        try:
            self.data.build(split)
        except NotImplementedError:  # data that was rebuilt without its files
            raise UsageError(f"this needs the images that {self.name} was trained on, and they are missing") from None
        return self.data.splits[split]

    def _of_pictures(self, split: SplitName, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
        if self.pictures is None or split != "val":
            what = "images (--images DIR)" if split == "val" else f"images of a {split} split"
            raise UsageError(f"{self.name} has no data, and this needs {what}")
        return ((part, torch.full((len(part),), -1)) for part in self.for_net(self.pictures[:limit]).split(32))

    @property
    def has_no_data(self) -> bool:
        """Whether the only images are ``pictures``, which have no classes."""
        return isinstance(self.data, PreparedPictures) and not isinstance(self.data, LoadedImages)

    @property
    def has_pictures(self) -> bool:
        """Whether there are images to draw maps for."""
        return self.pictures is not None or not self.has_no_data

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return the result of ``make``, cached for other analyses until weights, data or number of images change."""
        modules = [module for module in (self.net, self.task) if isinstance(module, nn.Module)]
        values = dict.fromkeys(value for module in modules for value in (*module.parameters(), *module.buffers()))
        tensors = [*values, *([] if self.pictures is None else [self.pictures])]
        state = self.data, self.num_images, weights_digest({str(i): each for i, each in enumerate(tensors)}, "")
        if self._known.get("state") != state:
            self._known.clear()
            self._known["state"] = state
        if name not in self._known:
            self._known[name] = make()
        return self._known[name]

    def outputs(self) -> Tensor:
        """Return the ``(n, K)`` outputs for the images of :meth:`labeled`."""
        parts = (outputs(self.net, images) for images, _ in self.batches())
        return self.once("outputs", lambda: all_finite(torch.cat(list(parts))))

    def for_net(self, images: Tensor) -> Tensor:
        """Return images where the network is, and set it to evaluation mode again, if it was trained in between."""
        self.net.eval()
        return images.to(self.device)

    def prepared(self, images: Images, pipeline: Pipeline | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of some images of the data set, as :meth:`batches` does."""
        return ((pixels, labels) for pixels, labels, _ in self.numbered(images, pipeline))

    def numbered(
        self, images: Images, pipeline: Pipeline | None = None
    ) -> Iterator[tuple[Tensor, Tensor, NDArray[np.int64]]]:
        """Yield the batches of :meth:`prepared` with the numbers of their images: some may be unreadable by now."""
        size = min(self.data.batch_size, 32)
        for pixels, labels, numbers in self.data.eval_batches(images, size, pipeline, self.device):
            yield self.for_net(pixels), labels, numbers

    def labeled(self) -> tuple[Tensor, Tensor]:
        """Return the images and classes of :meth:`batches`, concatenated."""
        images, labels = zip(*self.batches(), strict=True)
        return torch.cat(images), torch.cat(labels)

    def shown(self, count: int = 4) -> Tensor:
        """Return up to ``count`` images to draw maps for, ``(B, C, H, W)``: the first of one fixed random order.

        So figures of few images and of many show the same first ones, those of :meth:`batches` among them.
        """
        if self.pictures is not None:
            return self.for_net(self.pictures[:count])
        if self.has_no_data:
            return next(self._of_pictures("val", count))[0]  # refuses: there are none
        return self._first(count)[0]

    def shown_classes(self, count: int = 4) -> list[int]:
        """Return the classes of the images of :meth:`shown`; empty if they are unknown, or not the network's."""
        known = self.pictures is None and self.data.targets["kind"] == "class"
        if not known or self.is_elsewhere or not self.classifies:
            return []
        return self._first(count)[1].tolist()

    def _first(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the first ``count`` validation images of the fixed order, prepared, and their labels."""
        images = self.images("val")
        batches = list(self.prepared(images.take(fixed_order(len(images))[:count])))
        return torch.cat([pixels for pixels, _ in batches]), torch.cat([labels for _, labels in batches])

    def pixels(self, images: Tensor) -> Tensor:
        """Return normalized ``(B, C, H, W)`` images as ``(B, H, W, C)`` values in [0, 1], for display.

        Arrays, which have their own unit, are gray at their mean, black and white at 2.5 standard deviations.
        """
        if self.data.arrays:
            images = images if images.shape[1] in (1, 3) else images.mean(dim=1, keepdim=True)
            return (images / 5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu()
        mean, std = _planes(self.data, images.device)
        return (images * std + mean).clamp(0, 1).permute(0, 2, 3, 1).cpu()

    def pixels_of(self, images: Images) -> NDArray[np.float32]:
        """Return some images of the data set as :meth:`pixels` does, ``(n, H, W, C)``."""
        return torch.cat([self.pixels(batch) for batch, _ in self.prepared(images)]).numpy()

    def black(self) -> Tensor:
        """Return the ``(C, 1, 1)`` normalized value of a black pixel."""
        mean, std = _planes(self.data, self.device)
        return -mean / std

    @property
    def class_names(self) -> list[str]:
        """The names of the outputs."""
        numbered = [f"class {k}" for k in range(self.net.num_classes)]
        return numbered if self.is_elsewhere else self.data.class_names or numbered

    def called(self, k: int) -> str:
        """Return the name of an output, its number where the data name fewer."""
        names = self.class_names
        return names[k] if k < len(names) else f"class {k}"

    @property
    def scores_classes(self) -> bool:
        """Whether the outputs are scores of classes or labels: not features, numbers, nor targets of several kinds."""
        others = ("number", "mixed", "feature")
        predicts_numbers = self.data.targets["kind"] in others and not self.is_elsewhere
        return self.net.num_classes > 1 and not isinstance(self.net.head, nn.Identity) and not predicts_numbers

    def check_classes(self) -> None:
        """Refuse to measure accuracy on images without classes, or with classes that the network does not know."""
        if self.has_no_data:
            raise UsageError(f"the images for {self.name} have no classes, so accuracy cannot be measured")
        if self.data.targets["kind"] == "none":
            raise UsageError(f"the targets for {self.name} are neither classes nor numbers that it predicts")
        if self.data.targets["kind"] == "mixed":
            names = ", ".join(self.data.targets["names"])
            raise UsageError(f"{self.name} predicts {names}, and this measures targets of one kind")
        if self.data.targets["kind"] == "class" and not self.scores_classes:
            raise UsageError(f"{self.name} has no outputs for classes, so accuracy cannot be measured")
        if self.is_elsewhere:
            raise UsageError(f"these images have other classes than {self.name}, so accuracy cannot be measured")

    def need_classes(self, name: str) -> None:
        """Refuse an analysis of accuracy for a network or images without classes."""
        self.check_classes()
        if not self.classifies:
            what = {"multilabel": "labels"}.get(self.data.targets["kind"], "numbers")
            raise UsageError(f"{name} needs a classifier and {self.name} predicts {what}; use probe or cka instead")

    def transformer(self, name: str, needs: str) -> VisionTransformer:
        """Return the network if it is a Vision Transformer of vitlab; refuse another one, naming what it lacks."""
        if isinstance(self.net, AnyNetwork):
            raise UsageError(f"{name} needs {needs}, and {self.kind} has none that vitlab can reach")
        return self.net

    @property
    def kind(self) -> str:
        """Name and class of the network, for messages."""
        return f"{self.name} ({type(self.net.net if isinstance(self.net, AnyNetwork) else self.net).__name__})"


def _planes(data: ImageData, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of the data as ``(C, 1, 1)`` on a device."""
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in data.statistics())
    return mean, std


@dataclass
class Finding:
    """The result of an analysis.

    Args:
        table: The numbers.
        figure: The numbers as a figure.
        note: Number of images, and what else the numbers depend on.
        gallery: Images as PNG, each with what to say of it, for a page to leaf through.

    Example:
        >>> finding = Finding(pd.DataFrame({"head": [0, 1], "distance": [1.5, 2.0]}), Figure(), "2 heads of 8 images")
        >>> [path.name for path in finding.save(Path("found"), "distance")]
        ['distance.csv', 'distance.png', 'distance.svg']
    """

    table: pd.DataFrame
    figure: Figure
    note: str = ""
    gallery: list[tuple[bytes, dict[str, str]]] = field(default_factory=list)

    def picture(self) -> bytes:
        """Return the figure as PNG, as wide as it was drawn."""
        make_literal(self.figure)
        with matplotlib.rc_context(LITERAL):
            self.figure.savefig(file := io.BytesIO(), format="png", dpi=100, bbox_inches="tight")
        return file.getvalue()

    _repr_png_ = picture  # for notebooks

    def save(
        self,
        folder: Path,
        name: str,
        formats: Sequence[Format] = ("png", "svg"),
        width: Width = "page",
        title: str = "",
    ) -> list[Path]:
        """Write table and figure atomically as ``name`` with suffixes csv and those of ``formats``; return the files.

        The figure is set for a ``column`` or a ``page`` in print, with a title above it. Files of an earlier figure in
        other formats go: none is older than its table.
        """
        paths = [folder / f"{name}.{suffix}" for suffix in ("csv", *formats)]
        figure = printed(self.figure, INCHES[width], printable(title))
        for path, form in zip(paths[1:], formats, strict=True):
            with atomic_write(path) as beside:
                beside.write_bytes(figure_bytes(figure, form))
        with atomic_write(paths[0]) as beside:
            kept = [name for name in self.table if str(name).startswith(("target/", "prediction/"))]  # all digits
            table = self.table.astype(dict.fromkeys(kept, "float32")).astype(dict.fromkeys(kept, object))
            table.to_csv(beside, index=False, float_format="%.6g")
        for form in set(get_args(Format)) - set(formats):
            (folder / f"{name}.{form}").unlink(missing_ok=True)
        return paths
