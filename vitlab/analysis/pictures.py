"""Images that no data set of vitlab prepares: pictures without classes, and batches of a user's loaders."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerState
from lightning.pytorch.utilities.model_helpers import is_overridden
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitlab.data.base import CPU, ImageData
from vitlab.data.files.decode import decode, decode_opened
from vitlab.data.files.sets import Images, Statistics, TensorImages
from vitlab.data.files.splits import Indices, SplitName
from vitlab.data.loading.pipeline import Pipeline
from vitlab.errors import UsageError
from vitlab.interface import BATCH_HOOKS, PAGE, class_names, path_of, targets_of, transform_of
from vitlab.models.foreign import AnyNetwork
from vitlab.models.hooks import modes_kept
from vitlab.models.vit import VisionTransformer
from vitlab.resized import resize_images
from vitlab.tables import shape_text

Transform = Callable[[Image.Image], Tensor]
PROBE = (320, 256)  # width and height of a picture that shows what a transform makes
MOST_BYTES = 2**31  # of a split of one's own data, which is kept in memory


class PreparedPictures(ImageData):
    """Replaces a data set when there is only a function that prepares images.

    Args:
        transform: Maps a PIL image to a normalized ``(C, H, W)``.
        img_size: Height and width of what it makes.
        in_chans: Number of its channels.

    Example:
        >>> data = PreparedPictures(lambda image: torch.tensor([[[image.getpixel((0, 0)) / 255 - 0.5]]]), (1, 1), 1)
        >>> data.statistics()  # what black and white become tells how pixels are normalized
        ((0.5,), (1.0,))
    """

    def __init__(self, transform: Transform, img_size: tuple[int, int], in_chans: int) -> None:
        super().__init__(None, in_chans, [], img_size=list(img_size))
        self.transform, self.targets = transform, {"kind": "none"}
        self.arrays = in_chans not in (1, 3)

    @classmethod
    def of(cls, transform: Transform, net: nn.Module, pictures: Any, name: str) -> "PreparedPictures":
        """Return what a transform prepares for a network, or for given pictures; else one picture tells its size."""
        if not callable(transform):
            raise UsageError(f"{name} needs a data set or a function that prepares an image, got {transform!r:.80}")
        if isinstance(net, VisionTransformer | AnyNetwork):
            return cls(transform, net.img_size, net.in_chans)
        if isinstance(pictures, Tensor) and pictures.ndim == 4:
            return cls(transform, (pictures.shape[2], pictures.shape[3]), pictures.shape[1])
        in_chans = next((layer.in_channels for layer in net.modules() if isinstance(layer, nn.Conv2d)), 3)
        made = _of_picture(transform, Image.new("L" if in_chans == 1 else "RGB", PROBE))
        return cls(transform, (made.shape[1], made.shape[2]), made.shape[0])

    def eval_transform(self, image: Image.Image) -> Tensor:
        """Map one image to a normalized ``(C, H, W)``."""
        made, whole = _of_picture(self.transform, decode_opened(image, self.decoding)), (self.in_chans, *self.img_size)
        if made.shape != whole:
            raise UsageError(
                f"a picture of {image.height} x {image.width} pixels becomes {shape_text(made.shape)}, and must become "
                f"{shape_text(whole)}: end the transform with a resize and a crop to that size"
            )
        return made

    def statistics(self) -> Statistics:
        """Return the mean and standard deviation that the function takes from each channel's pixels in [0, 1]."""
        if self._statistics is None:
            h, w = self.img_size
            sizes = (max(w, 8), max(h, 8))
            low, high = (
                self.eval_transform(Image.new(self.decoding.mode, sizes, color)).flatten(1).mean(dim=1).double()
                for color in ("black", "white")
            )
            std = 1 / torch.where(high == low, 1.0, high - low)  # a transform may not tell black from white
            mean = [round(float(value), 6) for value in -low * std]
            self._statistics = tuple(mean), tuple(round(float(value), 6) for value in std)
        return self._statistics


class LoadedImages(PreparedPictures):
    """The images and targets of a LightningDataModule that is not vitlab's, as its loaders give them: normalized.

    Args:
        module: The data. Its training images come in the order of one seed.
        task: The LightningModule of the network, whose hooks change batches where the data have none of that name.
        trainer: What the hooks find as ``self.trainer``, in evaluation; without it, that of the data.

    Raises:
        UsageError: Its loaders give no batches of images ``(B, C, H, W)`` and targets ``(B,)`` or ``(B, T)``.

    Example:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> class Mine(L.LightningDataModule):
        ...     def val_dataloader(self):
        ...         return DataLoader(TensorDataset(torch.rand(6, 1, 8, 8), torch.arange(6) % 2), batch_size=4)
        >>> data = LoadedImages(Mine())
        >>> data.img_size, data.in_chans, [len(images) for images, _ in data.read_batches("val")]
        ((8, 8), 1, [4, 2])
        >>> data.name_targets(num_outputs=2)
        >>> data.targets, data.class_names
        ({'kind': 'class'}, ['class 0', 'class 1'])
    """

    def __init__(
        self, module: L.LightningDataModule, task: L.LightningModule | None = None, trainer: L.Trainer | None = None
    ) -> None:
        self.module, self.task, self._is_set_up = module, task, set[str]()
        for each in (module, task) if trainer else ():
            if each is not None:
                each.trainer = trainer
        self.first = next(self.read_batches("val"), None)
        if self.first is None:
            raise UsageError(f"the validation split of {path_of(module)} is empty")
        images, own = self.first[0], getattr(module, "eval_transform", None)
        super().__init__(transform_of(module), (images.shape[2], images.shape[3]), images.shape[1])
        if not callable(own):  # black and white are the darkest and the brightest value
            low, high = float(images.min()), float(images.max())
            span = high - low or 1.0
            self._statistics = (-low / span,) * self.in_chans, (1 / span,) * self.in_chans

    def name_targets(self, num_outputs: int) -> None:
        """Find what the targets are: what ``targets`` of the data module says, else what their values look like.

        Whole numbers below the number of outputs are classes; for each output a column, zeros and ones are labels, and
        other floats numbers.
        """
        assert self.first is not None
        facts, own = targets_of(self.module), class_names(self.module)
        kind = _kind_of(self.first[1], num_outputs, facts.get("kind"))
        if kind in ("class", "multilabel"):
            what = "class" if kind == "class" else "label"
            self.class_names = own if len(own) == num_outputs else [f"{what} {k}" for k in range(num_outputs)]
            self.targets = {"kind": kind}
        elif kind == "number":
            usual = {"names": [f"value {k + 1}" for k in range(num_outputs)]}
            self.targets = {**usual, **facts, "kind": kind}

    def build(self, wanted: SplitName) -> None:
        """Read a split, unless it has been read."""
        if wanted in self.splits:
            return
        parts, size = [], 0
        for images, targets in self.read_batches(wanted):
            size += images.nbytes
            if size > MOST_BYTES:
                raise UsageError(
                    f"the {wanted} images of {path_of(self.module)} take more than {MOST_BYTES / 1e9:.1f} GB, which an "
                    "analysis keeps in memory: analyze with data of fewer images"
                )
            parts.append((images, targets))
        if not parts:
            raise UsageError(f"the {wanted} split of {path_of(self.module)} is empty")
        images, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        if self.targets["kind"] in ("number", "multilabel"):
            targets = targets.float().view(len(targets), -1)
        self.splits[wanted] = TensorImages(images, targets)

    def read_batches(self, split: SplitName) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of a split as the network gets them in an evaluation, on the CPU."""
        stage = "test" if split == "test" else "fit"
        if stage not in self._is_set_up:
            self.module.prepare_data()
            self.module.setup(stage)
            self._is_set_up.add(stage)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            loader: Any = getattr(self.module, f"{split}_dataloader")()
            for batch in loader:
                with self._evaluating(split):
                    batch = self._transferred(batch)
                yield self._images_and_targets(batch)

    @contextmanager
    def _evaluating(self, split: SplitName) -> Iterator[None]:
        """Let task and trainer evaluate, as hooks of the user's may ask for it."""
        state = self.module.trainer.state if self.module.trainer else TrainerState()
        stage, task = state.stage, self.task or nn.Module()
        with torch.no_grad(), modes_kept(task):
            task.eval()
            try:
                state.stage = RunningStage.TESTING if split == "test" else RunningStage.VALIDATING
                yield
            finally:
                state.stage = stage

    def _transferred(self, batch: Any) -> Any:
        """Return a batch after the hooks that Lightning calls: of the data where they define one, else of the task."""
        for name in BATCH_HOOKS:
            owner: Any = self.module if self.task is None or is_overridden(name, self.module) else self.task
            device = torch.device("cpu") if self.task is None else self.task.device
            batch = getattr(owner, name)(batch, *((device,) if name == "transfer_batch_to_device" else ()), 0)
        return batch

    def _images_and_targets(self, batch: Any) -> tuple[Tensor, Tensor]:
        if isinstance(batch, list | tuple) and len(batch) >= 2 and all(isinstance(x, Tensor) for x in batch[:2]):
            images, targets = batch[:2]
            if images.ndim == 4 and images.is_floating_point() and targets.ndim in (1, 2):
                return images.detach().cpu(), targets.detach().cpu()
        raise UsageError(
            f"the loaders of {path_of(self.module)} must give images (B, C, H, W) and targets (B,) or (B, T) for "
            f"analyses, and give a {type(batch).__name__}; {PAGE}"
        )

    def eval_batches(
        self, images: Images, batch_size: int, pipeline: Pipeline | None = None, device: torch.device = CPU
    ) -> Iterator[tuple[Tensor, Tensor, Indices]]:
        """Yield batches of images as the loaders gave them; those for another pipeline are resized to its size."""
        assert isinstance(images, TensorImages)
        size, first = (pipeline or self.pipeline).img_size, 0
        for pixels, labels in zip(images.images.split(batch_size), images.labels.split(batch_size), strict=True):
            pixels = pixels if size == self.img_size else resize_images(pixels, size, "bilinear")
            yield pixels.to(device), labels.to(device), np.arange(first, first := first + len(labels))


def _kind_of(targets: Tensor, num_outputs: int, said: str | None) -> str:
    """Return class, multilabel, number, or none where ``(B,)`` or ``(B, T)`` targets do not fit the outputs.

    >>> labels = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    >>> _kind_of(labels, 2, None), _kind_of(labels, 2, "number"), _kind_of(labels[:, 0].long(), 2, None)
    ('multilabel', 'number', 'class')
    """
    is_whole, width = not targets.is_floating_point(), 1 if targets.ndim == 1 else targets.shape[1]
    if is_whole and targets.ndim == 1 and said in (None, "class"):
        return "class" if int(targets.min()) >= 0 and int(targets.max()) < num_outputs else "none"
    if width != num_outputs or said not in (None, "multilabel", "number"):
        return "none"
    if said is None and width > 1 and bool(((targets == 0) | (targets == 1)).all()):
        return "multilabel"
    return said or ("none" if is_whole else "number")


def _of_picture(transform: Transform, image: Image.Image) -> Tensor:
    made = transform(image)
    if not isinstance(made, Tensor) or made.ndim != 3:
        what = shape_text(made.shape) if isinstance(made, Tensor) else f"a {type(made).__name__}"
        raise UsageError(f"the transform must make a normalized (C, H, W) of a picture, and makes {what}")
    return made


def as_image(pixels: NDArray[np.floating]) -> Image.Image:
    """Return ``(H, W, C)`` values in [0, 1] as an image, gray or in color.

    Example:
        >>> as_image(np.full((1, 2, 1), 0.5)).tobytes()
        b'\\x80\\x80'
    """
    values = (pixels * 255).round().astype(np.uint8)
    return Image.fromarray(values[..., 0] if values.shape[-1] == 1 else values)


def as_tensor(pictures: Any, data: ImageData) -> Tensor:
    """Return an image or image file, or several, as normalized ``(B, C, H, W)``; tensors are returned unchanged."""
    if isinstance(pictures, Tensor):
        whole = (data.in_chans, *data.img_size)
        if pictures.ndim != 4 or pictures.shape[1:] != whole:
            raise UsageError(f"`pictures` must be (B, {', '.join(map(str, whole))}), got {shape_text(pictures.shape)}")
        return pictures
    one = str | Path | Image.Image
    given: list[Any] = [pictures] if isinstance(pictures, one) else list(pictures)
    if not given or not all(isinstance(p, one) for p in given):
        kinds = ", ".join(sorted({type(p).__name__ for p in given})) or "none"
        raise UsageError(f"`pictures` must be PIL images or image files, got {kinds}")
    images = [p if isinstance(p, Image.Image) else decode(str(p), data.decoding) for p in given]
    return torch.stack([data.cut_transform(image) for image in images])
