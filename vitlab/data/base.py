"""The base of every image data set: three splits, statistics of the training split, loaders."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from PIL import Image
from torch import Tensor

from vitlab.data.arguments import RuleArgs
from vitlab.data.files.array_images import is_array, read_array
from vitlab.data.files.decode import ColorProfile, Decoding, ImageError, decode, decode_opened
from vitlab.data.files.sets import Images, Statistics, given_statistics, summary
from vitlab.data.files.splits import Indices, SplitName, SplitRule
from vitlab.data.files.twins import twins
from vitlab.data.loading.loader import Batch, Loader, send
from vitlab.data.loading.mix import Mix
from vitlab.data.loading.order import Draw, EvalOrder, Sampling, Step, TrainOrder, check_shares
from vitlab.data.loading.own_ratio import check_own_ratio
from vitlab.data.loading.pipeline import Pipeline
from vitlab.data.loading.transforms import Augment, CropMode, Interpolation, as_size
from vitlab.data.record import RUN
from vitlab.data.resume import changed_order, check_same_training, state_of
from vitlab.errors import preview
from vitlab.interface import Weighted
from vitlab.named_kwargs import Named
from vitlab.packed_batch import PackedBatch
from vitlab.ranges import check_ranges
from vitlab.tables import counted

CPU = torch.device("cpu")
Part = Literal["train", "test", "all"]  # what a data set reads: block 1, block 2, or, without the latter, all


class ImageData(Named, L.LightningDataModule):
    """Labeled images in disjoint training, validation and test splits; only the stages test and predict build the last.

    Args:
        native_size: Height and width of the images, in pixels; None if they differ.
        in_chans: Number of channels, 1 or 3.
        class_names: Name of each class.
        batch_size: Images per step over all devices and processes.
        img_size: Side, or height and width, of the network's input, in pixels; default: that of the images.
        img_size_schedule: Growing sizes of training images, [[0, 16], [10, 28]]: first epoch, from 0, and side.
        native_patch: Side of the network's patches, in pixels. Photos then keep their aspect ratio, with at most the
            patches of img_size; a batch has as many as fit into the patches of batch_size images. Default: one size.
        num_workers: Processes per training process that decode images; images in memory need none.
        augment: Training augmentation: none, crop-flip, 3-augment, a timm string such as rand-m9-mstd0.5-inc1, or
            a list: crop-flip (only first), these words, rotate90, classes of torchvision.transforms.v2, class paths.
        crop_scale: Smallest share of a photo's area in a random crop; default: .08.
        sampling: How often an epoch shows a class of n images: as n (natural), its root (sqrt), equally (balanced).
        repeats: Differently augmented copies of each image in a batch, in different processes if there are as many
            with multiples of 4 images; an epoch is as long as without, and shows one in `repeats` images.
        random_erasing: Probability that a rectangle of a training image is filled with noise.
        mixup: Parameter of mixup's beta distribution; 0 turns mixup off.
        cutmix: Parameter of cutmix's beta distribution; 0 turns cutmix off.
        crop_pct: Share of a photo's shorter side that evaluation uses; default: .875.
        interpolation: How images are resized, bilinear or bicubic.
        crop_mode: How evaluation cuts photos: center is timm's and torchvision's way, squash and border are timm's;
            box cuts before it resizes, as runs of vitlab before this option.
        mean: Mean of each channel in [0, 1], for normalization; default: that of the training split.
        std: Standard deviation of each channel; given together with the mean.
        value_range: Values mapped to black and white in files of over 8 bits; default: the range of each file, and
            in the evaluation of a run that of its training.
        max_pixels: Largest number of pixels of a file.
        color_profile: srgb converts photos with an embedded ICC profile, such as CMYK ones, to sRGB; ignore takes
            their values as they are, as runs of vitlab before this option.
        **split: Passed to :class:`SplitRule`.

    >>> from vitlab.data import Digits
    >>> data = Digits(batch_size=4)
    >>> next(data.iterate_batches(data.val_dataloader()))[0].shape
    torch.Size([4, 1, 8, 8])
    """

    _built_from = (SplitRule,)
    has_test_split = False  # whether a test split is given; otherwise one is cut off
    statistics_from = "train"
    targets: dict[str, Any]  # kind: class, multilabel, number or mixed; for the latter two also names, mean and std
    _restored: dict[str, Any]
    splits: dict[SplitName, Images]
    held_back: dict[SplitName, Images]  # the test split during training, only for its checksums
    unreadable: dict[str, str]  # path: reason, for files left out
    notes: list[str]  # for the header of the training log
    _ready: dict[SplitName, Images]
    sample_weights: Tensor | None = None  # (N,), of the training images in the loss
    _statistics: Statistics | None = None
    arrays = False  # whether images are arrays, which are kept as floats
    deals_samples = True  # its loaders divide samples among processes

    def __init__(
        self,
        native_size: tuple[int, int] | None,
        in_chans: int,
        class_names: list[str],
        batch_size: int = 128,
        img_size: int | list[int] | None = None,
        img_size_schedule: list[list[int]] | None = None,
        native_patch: int | None = None,
        num_workers: int = 2,
        augment: Augment = "none",
        crop_scale: float | None = None,
        sampling: Sampling = "natural",
        repeats: int = 1,
        random_erasing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        crop_pct: float | None = None,
        interpolation: Interpolation = "bicubic",
        crop_mode: CropMode = "center",
        mean: list[float] | None = None,
        std: list[float] | None = None,
        value_range: list[float] | None = None,
        max_pixels: int = 50_000_000,
        color_profile: ColorProfile = "srgb",
        **split: Unpack[RuleArgs],
    ) -> None:
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True  # no image may be for validation
        check_ranges("data", {"batch_size": batch_size, "repeats": repeats, "num_workers": num_workers})
        run = RUN.get()
        value_range = run.value_range if run and value_range is None else value_range
        self.img_size, self.in_chans, self.class_names = as_size(img_size, native_size), in_chans, list(class_names)
        self.decoding = Decoding("L" if in_chans == 1 else "RGB", value_range, max_pixels, color_profile)
        self.batch_size, self.num_workers, self.repeats, self.sampling = batch_size, num_workers, repeats, sampling
        self.rule = SplitRule(**split, even_folds=run is None or run.even_folds)
        mixes = {"mixup": mixup, "cutmix": cutmix, "random_erasing": random_erasing, "crop_pct": crop_pct}
        draws = {"repeats": repeats > 1, "sampling": sampling != "natural", "img_size_schedule": img_size_schedule}
        check_own_ratio(native_patch, native_size, mixes | draws)
        self.pipeline = Pipeline(
            native_size, self.img_size, augment, crop_scale, crop_pct, interpolation, img_size_schedule, native_patch,
            crop_mode,
        )  # fmt: skip
        if self.pipeline.steps and in_chans not in (1, 3):  # Pillow would take the last channel for opacity
            raise ValueError(f"`data.augment` must be none or crop-flip for {in_chans} channels, got {augment}")
        self.splits, self.held_back, self.unreadable, self.notes, self._ready = {}, {}, {}, [], {}
        self.targets, self._restored = {"kind": "class"}, {}
        self.mix = Mix(mixup, cutmix, random_erasing, self.num_classes)
        if run and run.class_names not in ([], self.class_names):
            self.adopt_classes(run.class_names)
        if (given := given_statistics(mean, std, in_chans)) is not None:
            self._statistics, self.statistics_from = given, "given"

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return len(self.class_names)

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of each channel over the training split."""
        return self.statistics()[0]

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of each channel over the training split."""
        return self.statistics()[1]

    def take_images(self, known: Mapping[str, Any], given: Collection[str] = ()) -> dict[str, Any]:
        """Normalize and cut images by the arguments in ``known``, except for those that the user has ``given``.

        Returns:
            The arguments that apply: mean and std for as many channels, crop_pct unless whole images are evaluated.
        """
        taken: dict[str, Any] = {}
        if not {"mean", "std"} & set(given) and len(known.get("mean", ())) == self.in_chans:
            taken |= {name: known[name] for name in ("mean", "std")}
            self._statistics = given_statistics(known["mean"], known["std"], self.in_chans)
            self.statistics_from = "given"
        is_whole = self.pipeline.native_size or self.pipeline.own_ratio
        if "crop_pct" in known and "crop_pct" not in given and not is_whole:
            taken["crop_pct"] = self.pipeline.crop_pct = known["crop_pct"]
        return taken

    def read(self, part: Part) -> Images:
        """Return block 1 (train), block 2 (test), or, without a given test split, all images."""
        raise NotImplementedError

    def indices(self, images: Images) -> dict[SplitName, Indices]:
        """Divide block 1, or, without a given test split, all images."""
        return self.rule.indices(images.ids, images.labels.numpy(), cut_test=not self.has_test_split)

    def scanned(self, images: Images) -> Images:
        """Return the readable images among those of a split, and note the others in `unreadable`."""
        readable, reasons = images.scanned(self.num_workers)
        self.unreadable |= reasons
        return readable

    def check_images(self, images: Images) -> None:
        """Refuse images that the run cannot take, such as those of another size."""

    def absent(self) -> str:
        """Return which files `prepare_data` would download, and their size; empty if none."""
        return ""

    def check_readable(self) -> None:
        """Refuse more unreadable files than are allowed."""

    def check_processes(self, world: int) -> None:
        """Refuse a global batch that so many processes cannot share, before they are started."""
        check_shares(self.batch_size, world)
        self.mix.check_pairs(self.batch_size, world, self.repeats)

    def ready(self, images: Images) -> Images:
        """Return the images of a split as loaders read them, such as decoded in memory."""
        return images

    def statistics(self) -> Statistics:
        """Return mean and standard deviation of each channel over the training split."""
        if self._statistics is None:
            self.build("train")
            self._statistics = self.splits["train"].statistics()
        return self._statistics

    def setup(self, stage: str) -> None:
        """Build the splits of a stage: training and validation for fit and validate, test for the others."""
        self.build("train" if stage in ("fit", "validate") else "test")
        if stage == "fit":
            self.statistics()
        if self.trainer is not None:
            _leave_batches(self.trainer.precision_plugin)

    def build(self, wanted: SplitName) -> None:
        """Read the block that a split belongs to, unless it has been read; refuse a split without images."""
        if wanted in self.splits:
            return
        names: tuple[SplitName, ...] = ("test",) if wanted == "test" else ("train", "val")
        found = self._split_images(names)
        readable = {name: self.scanned(images) for name, images in found.items()}
        for images in readable.values():
            self.check_images(images)
        self.check_readable()
        for name, images in readable.items():
            if not len(images) and (name == wanted or wanted == "train"):
                files = len(found[name])
                why = f": none of its {files} files can be read" if files else self.why_empty(name)
                raise ValueError(f"the {name} split has no image{why}")
            self.splits[name] = images
            if run := RUN.get():
                run.compare(name, images, self.split_rule())

    def split_rule(self) -> dict[str, Any]:
        """Return the settings that determine the splits, for the record of a run."""
        return self.rule.facts()

    def why_empty(self, name: SplitName) -> str:
        """Return what divided the images where a split has none, for messages."""
        return self.rule.why_empty(name, self.has_test_split)

    def compare_with_test(self) -> None:
        """Read the checksums of the test split, and nothing else, to report duplicates of training images.

        Its unreadable files count like those of the other splits, so that training does not begin in vain.
        """
        self.hold_test_back()
        self.check_readable()

    def hold_test_back(self) -> None:
        """Read the checksums of the test split, unless it has been read, and note what cannot be read."""
        if "test" in self.splits or self.held_back:
            return
        try:
            (images,) = self._split_images(("test",)).values()
            images = self.scanned(images)
        except (ValueError, OSError) as error:
            self.note(f"the test split cannot be read: {error}")
            return
        self.held_back["test"] = images
        if not len(images):
            self.note("the test split has no image")

    def note(self, text: str) -> None:
        """Add a line to the header of the training log, unless it has it."""
        if text not in self.notes:
            self.notes.append(text)

    def _split_images(self, names: tuple[SplitName, ...]) -> dict[SplitName, Images]:
        """Return the images of some splits of one block, unread where they are files."""
        if names == ("test",) and self.has_test_split:
            return {"test": self.read("test")}
        images = self.read("train" if self.has_test_split else "all")
        indices = self.indices(images)
        return {name: images.take(indices[name]) for name in names}

    def train_dataloader(self) -> Loader:
        """Return the training batches of this process."""
        self.build("train")
        place, images = self._place(), self.splits["train"]
        self.mix.check_targets(self.targets["kind"], weighted=self.sample_weights is not None)
        self.mix.check_pairs(self.batch_size, place[1], self.repeats)
        how = (self.batch_size, self.seed, *place, self.repeats, self.pipeline.tokens(images))
        draw = Draw(images.labels, self.sampling, self.targets["kind"])
        same = getattr(self.trainer, "overfit_batches", 0) > 0
        return self._loader("train", TrainOrder(draw, *how, same=same))

    def val_dataloader(self) -> Loader:
        """Return the validation batches of this process."""
        return self._loader("val")

    def test_dataloader(self) -> Loader:
        """Return the test batches of this process."""
        return self._loader("test")

    predict_dataloader = test_dataloader

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> tuple[Tensor, Tensor] | Weighted:
        """Normalize and mix uint8 ``(B, C, H, W)`` images on their device."""
        images, targets, step = batch
        self.step = step  # for tasks whose random numbers depend on the samples
        images = self.as_precise(self.pipeline.normalize(images, self.statistics(), step))
        if step.mix_seed is not None:
            images, targets = self.mix(images, targets, step)
        if step.mix_seed is None or self.sample_weights is None:
            return images, targets
        return Weighted(images, targets, send(self.sample_weights[torch.from_numpy(step.indices)], images.device))

    def as_precise(self, images: Any) -> Any:
        """Return images in the precision of the training, after they are normalized."""
        if self.trainer is None:
            return images
        convert = self.trainer.precision_plugin.convert_input
        return images.on(convert(images.patches)) if isinstance(images, PackedBatch) else convert(images)

    def iterate_batches(self, loader: Iterable[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of a loader as a task receives them, for use without a Trainer."""
        for batch in loader:
            yield self.on_after_batch_transfer(batch, 0)[:2]

    def eval_batches(
        self, images: Images, batch_size: int, pipeline: Pipeline | None = None, device: torch.device = CPU
    ) -> Iterator[tuple[Tensor, Tensor, Indices]]:
        """Yield normalized ``(B, C, H, W)`` images of a split, their labels and ``(B,)`` numbers, as in evaluation.

        Images that have become unreadable are left out.
        """
        pipeline = pipeline or self.pipeline
        order = EvalOrder(len(images), batch_size)
        for pixels, labels, step in pipeline.loader(images, order, self.mean, 0, CPU, self.on_unreadable):
            yield pipeline.normalize(pixels.to(device), self.statistics()), labels.to(device), step.indices

    def eval_transform(self, image: Image.Image) -> Tensor:
        """Map one image, decoded or as Pillow opens it, to a normalized ``(C, H, W)``, as in evaluation."""
        return self.pipeline.eval_image(decode_opened(image, self.decoding), self.statistics())

    def cut_transform(self, image: Image.Image) -> Tensor:
        """Do the same, but cut the image to ``img_size`` where evaluation keeps its aspect ratio (`native_patch`)."""
        if not self.pipeline.own_ratio:
            return self.eval_transform(image)
        return self.pipeline.cut_image(decode_opened(image, self.decoding), self.statistics())

    def eval_file(self, path: Path) -> Tensor:
        """Map a file, an image or, where images are arrays, an array, to a normalized ``(C, H, W)``, as in evaluation.

        Raises:
            ImageError: The file cannot be read, or has another number of channels.
        """
        if not self.arrays or not is_array(path):  # pages of a TIFF file are channels only if they were in training
            image = decode(path, self.decoding)
            if (bands := len(image.getbands())) != self.in_chans:
                has = f"an image of {bands} channels, the network takes {self.in_chans}"
                raise ImageError(str(path), f"{has}: give an array, .npy or TIFF")
            return self.pipeline.eval_image(image, self.statistics())
        try:
            array = read_array(path)
        except ValueError as error:
            raise ImageError(str(path), str(error)) from None
        if len(array) != self.in_chans:
            raise ImageError(str(path), f"an array of {len(array)} channels, the network takes {self.in_chans}")
        return self.pipeline.normalize(torch.from_numpy(array)[None], self.statistics())[0]

    def preparation(self) -> dict[str, Any]:
        """Return how images are normalized and cut in evaluation, as plain values, for files of weights."""
        pipeline, crop = self.pipeline, self.pipeline.center()
        return {
            "mean": list(self.mean),
            "std": list(self.std),
            "native_size": pipeline.native_size and list(pipeline.native_size),
            "crop_pct": crop.crop_pct,
            "crop_mode": crop.mode,
            "interpolation": pipeline.interpolation,
            **{name: getattr(self.decoding, name) for name in ("color_profile", "value_range", "max_pixels")},
            **({"arrays": True} if self.arrays else {}),
            **({"native_patch": pipeline.own_ratio.patch} if pipeline.own_ratio else {}),
        }

    @property
    def seed(self) -> int:
        """The seed of the run: from a resumed checkpoint, else from `seed_everything`, else torch's."""
        if "seed" not in self._restored:
            self._restored["seed"] = int(os.environ.get("PL_GLOBAL_SEED") or torch.initial_seed())
        return self._restored["seed"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later stages must share with the training run, as plain values."""
        return state_of(self, self._statistics)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore seed, classes and statistics of the training run."""
        if state_dict["class_names"] != self.class_names:
            self.adopt_classes(list(state_dict["class_names"]))
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            check_same_training(self, state_dict)
            self.notes += changed_order(self, state_dict)
        self._restored = dict(state_dict)
        if self.statistics_from != "given" and "mean" in state_dict:
            self._statistics = tuple(state_dict["mean"]), tuple(state_dict["std"])

    def adopt_classes(self, class_names: list[str]) -> None:
        """Use the class numbers of a trained run."""
        both = {"the checkpoint": class_names, "the data": self.class_names}
        common = {*class_names} & {*self.class_names}
        alone = {place: [name for name in names if name not in common] for place, names in both.items()}
        told = [f"{len(own):,} of {len(both[place]):,} only in {place}: {preview(own)}" for place, own in alone.items()]
        told = [text for text, own in zip(told, alone.values(), strict=True) if own] or ["the same in another order"]
        raise ValueError(
            f"the checkpoint has the classes of other data ({'; '.join(told)}); choose data of the same classes, or "
            "train a new run on these with --init_from"
        )

    def read_again(self) -> None:
        """Read what was read so far, after classes were given other numbers; loaders made before keep the old ones."""
        built, held_back = [*self.splits], bool(self.held_back)
        for known in (self.splits, self.held_back, self._ready):
            known.clear()
        for name in built:
            self.build(name)
        if held_back:
            self.hold_test_back()
        if self.mix.mixing is not None:
            self.mix.mixing.num_classes = self.num_classes

    def fingerprint(self) -> dict[str, Any]:
        """Return the record of a run's data as plain values; a held-back test split is only checked for duplicates."""
        return {
            "data": type(self).__name__,
            "class_names": self.class_names,
            "splits": {name: summary(images, self.num_classes) for name, images in self.splits.items()},
            **twins({**self.splits, **self.held_back}),
            "unreadable": self.unreadable,
            "targets": self.targets,
            "notes": self.notes,
            "mean": list(self.mean),
            "std": list(self.std),
            "statistics_from": self.statistics_from,
            "in_chans": self.in_chans,
            **({"arrays": True} if self.arrays else {}),
            **self.pipeline.facts(),
            "color_profile": self.decoding.color_profile,
            **({"value_range": list(limits)} if (limits := self.decoding.value_range) else {}),
            "split_rule": self.split_rule(),
        }

    def on_unreadable(self, error: ImageError) -> None:
        """Handle a sample that has become unreadable: count it, or raise."""
        raise error

    def _place(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _loader(self, name: SplitName, order: TrainOrder | EvalOrder | None = None) -> Loader:
        self.build(name)
        device, images = self.trainer.strategy.root_device if self.trainer else CPU, self.splits[name]
        n, world = len(images), self._place()[1]
        if name != "train" and 0 < n < world:  # Lightning skips the loop of a process without batches; others wait
            few = f"use at most {counted(n, 'process')} (--trainer.devices={n})"
            raise ValueError(f"the {name} split has {counted(n, 'image')} for {world} processes: {few}")
        if name not in self._ready:
            self._ready[name] = self.ready(images)
        order = order or EvalOrder(len(images), self.batch_size, *self._place(), self.pipeline.tokens(images))
        return self.pipeline.loader(self._ready[name], order, self.mean, self.num_workers, device, self.on_unreadable)


def _leave_batches(plugin: Any) -> None:
    """Keep Lightning from rounding targets, and images before they are normalized, where weights have 16 bits."""
    convert = plugin.convert_input
    if not isinstance(convert, partial):
        plugin.convert_input = partial(_convert_others, convert)


def _convert_others(convert: Callable[[Any], Any], batch: Any) -> Any:
    return batch if isinstance(batch, tuple | list) and batch and isinstance(batch[-1], Step) else convert(batch)


def protocol_of(data: Any) -> dict[str, Any]:
    """Return how the images of a result were prepared; nothing for a data module that is not vitlab's."""
    if not isinstance(data, ImageData):
        return {}
    return {"images": {**data.pipeline.protocol(), "color_profile": data.decoding.color_profile}}
