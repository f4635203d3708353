"""Predict image files with a run, as a table."""

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning as L
import pandas as pd
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from vitlab.callbacks.console import EvaluationConsole
from vitlab.config.explain import user_mistakes
from vitlab.config.images import Problem
from vitlab.data.base import ImageData
from vitlab.data.files.decode import Decoding, ImageError, decode
from vitlab.errors import UsageError, escaped
from vitlab.interface import (
    BATCH_HOOKS,
    answering,
    answers_itself,
    as_outputs,
    class_names,
    embedder,
    image_sizes,
    network,
    path_of,
    targets_of,
    transform_of,
)
from vitlab.jobs.load import load_exported
from vitlab.jobs.restore import restore
from vitlab.runs.directory import RunDir
from vitlab.runs.launch import of_all
from vitlab.tasks import MultiTask, Regressor
from vitlab.tasks.base import Task
from vitlab.tasks.multi_task import Head, answers_of_heads, target_heads

_Sample = tuple[Tensor, int, str]  # (C, H, W), number of the file, why it could not be read
_Batch = tuple[Any, list[int], list[str]]
_Answer = tuple[list[float], list[int]]  # numbers, and the classes that they are the probabilities of
NOT_FINITE = "the outputs of the network are not finite"  # why a file that was read has no row
_FEW = 64  # files that are decoded faster than worker processes start


def predict(
    run: RunDir, checkpoint: Path, rest: list[str], files: list[str], topk: int, quiet: bool, features: bool = False
) -> tuple[pd.DataFrame | None, list[Problem]]:
    """Return one row per readable file, in order, and the others with their reasons: unreadable, or `NOT_FINITE`.

    Args:
        run: The run.
        checkpoint: Which of its weights to use.
        rest: Arguments of the command line that change values of its configuration.
        files: Paths of the images.
        topk: Number of classes to name for each image.
        quiet: Whether to show no progress.
        features: Whether to return the pooled features, the input of the head, instead of its outputs.

    Only rank 0 returns a table.

    Raises:
        UsageError: The weights do not fit, or predictions of other processes are missing.
    """
    collector, bar = _Collector(topk), EvaluationConsole(quiet)
    settings = {"fast_dev_run": False, "limit_predict_batches": None, "use_distributed_sampler": False}
    cli = restore(run, checkpoint, rest, [collector, bar], **settings)
    data: Any = cli.datamodule
    asked, collector.meaning = None, _meaning(data, cli.model)
    is_headless = getattr(network(cli.model), "num_classes", None) == 0 and not answers_itself(cli.model)
    if features or is_headless:
        asked, collector.meaning = embedder(cli.model), FEATURES
    elif not isinstance(cli.model, Task) or is_overridden("predict_step", cli.model, Task):
        asked = answering(cli.model)  # as every command asks it
    pictures = _Pictures(files, data)
    model = cli.model if asked is None else _ForwardOnly(cli.model, asked)
    with user_mistakes(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"You have overridden `\w+` in both")  # as _Pictures does on purpose
        cli.trainer.predict(model, datamodule=pictures, return_predictions=False)
    collector.gather()
    if not cli.trainer.is_global_zero:
        return None, []
    if lost := len(pictures.files) - len(collector.values) - len(collector.reasons):
        raise UsageError(f"{lost} predictions were not collected from other processes; use --trainer.strategy=ddp")
    return collector.answers(pictures.files)


class _Meaning(NamedTuple):
    """What the outputs of a network stand for.

    Args:
        classes: Names of the classes, of which the likeliest are told; empty if each output is a number.
        names: Names of numbers or labels.
        heads: The targets of a task that has several.
    """

    classes: Sequence[str] = ()
    names: Sequence[str] = ()
    heads: Sequence[Head] = ()


FEATURES = _Meaning(names=["feature"])


def _meaning(data: Any, task: Any = None) -> _Meaning:
    """Return what outputs stand for, as data name them: those of a run with its task, or those of an export."""
    facts, names = targets_of(data), class_names(data)
    match facts.get("kind"):
        case "multilabel":  # one probability per label
            return _Meaning(names=names)
        case "feature":
            return FEATURES
        case "mixed" if task is None:
            return _Meaning(heads=target_heads(facts))
    heads = task.heads if isinstance(task, MultiTask) else ()
    return _Meaning([] if isinstance(task, Regressor) else names, facts.get("names", []), heads)


def predict_exported(path: Path, files: list[str], topk: int) -> tuple[pd.DataFrame, list[Problem]]:
    """Return what :func:`predict` does, by a file of ``vitlab export`` and the card beside it.

    Args:
        path: The file, of ONNX or safetensors.
        files: Paths of the images.
        topk: Number of classes to name for each image.

    Raises:
        UsageError: There is no card, or it does not say how to prepare images or what the outputs mean.
    """
    net, data, card = load_exported(path)
    if card.get("targets") is None:
        raise UsageError(f"{path} was exported by an older vitlab and does not say what it predicts; export it again")
    collector = _Collector(topk)
    collector.meaning = _meaning(data)
    is_logits = data.targets["kind"] == "multilabel" and card.get("scores", "logits") == "logits"
    preparation = _Preparation(data)
    read = _Files(files, range(len(files)), preparation)
    for images, numbers, reasons in DataLoader(read, _FEW, collate_fn=partial(_batch, preparation.join)):
        with torch.inference_mode():
            outputs = net(images)
        collector.collect(outputs.sigmoid() if is_logits else outputs, numbers, reasons)
    return collector.answers(files)


def _table(files: list[str], values: list[_Answer], meaning: _Meaning) -> pd.DataFrame:
    """Return a row for each file; the folder of an image is its target, where it is a class."""
    if meaning.heads:
        return _table_of_heads(files, values, meaning.heads)
    classes = meaning.classes
    table: dict[str, Any] = {"path": [escaped(file) for file in files]}
    folders = [os.path.basename(os.path.dirname(os.path.abspath(file))) for file in files]
    if any(found := [name if name in classes else "" for name in folders]):
        table["target"] = found
    count = len(values[0][0]) if values else 0
    for k in range(count):
        number = pd.Series([numbers[k] for numbers, _ in values], dtype="float32")
        if classes:
            table[f"class_{k + 1}"] = [classes[chosen[k]] for _, chosen in values]
            table[f"probability_{k + 1}"] = number
        else:
            table[_unused(table, _column(k, count, meaning.names))] = number
    return pd.DataFrame(table)


def _table_of_heads(files: list[str], values: list[_Answer], heads: Sequence[Head]) -> pd.DataFrame:
    """Return a column for each target: its number, or the name of the likeliest class, whose probability follows."""
    table: dict[str, Any] = {"path": [escaped(file) for file in files]}
    outputs = torch.tensor([numbers for numbers, _ in values]).view(len(values), heads[-1].at.stop)
    for head, (answer, probability) in zip(heads, answers_of_heads(heads, outputs), strict=True):
        named = [head.classes[k] for k in answer.tolist()] if head.classes else answer.numpy()
        table[_unused(table, head.name)] = named
        if probability is not None:
            table[_unused(table, f"probability/{head.name}")] = probability.numpy()
    return pd.DataFrame(table)


def _unused(table: dict[str, Any], name: str) -> str:
    """Return the name of a column; with `output/` before it if there is such a one, as of the files' paths."""
    return _unused(table, f"output/{name}") if name in table else name


def _column(k: int, count: int, targets: Sequence[str]) -> str:
    """Return the name of output ``k`` of ``count``."""
    if len(targets) == count and targets != ["feature"]:
        return targets[k]
    word = "feature" if targets == ["feature"] else "value"
    return "value" if count == 1 and word == "value" else f"{word}_{k + 1}"


def predict_from_data(run: RunDir, checkpoint: Path, rest: list[str], quiet: bool) -> pd.DataFrame:
    """Return the outputs for the samples of the data's ``predict_dataloader``, or several, one row each, in order.

    Raises:
        UsageError: The data belong to vitlab, which predicts image files; ``predict_step`` returns no tensor; or each
            of several processes would have a part of the samples.
    """
    cli = restore(run, checkpoint, rest, [EvaluationConsole(quiet)])
    if isinstance(cli.datamodule, ImageData):
        raise UsageError("no images given: name files, folders or patterns, `vitlab predict RUN IMAGE|DIR|GLOB ...`")
    if cli.trainer.world_size > 1:
        raise UsageError("`predict` of the samples of your data takes one device: leave --trainer.devices out")
    own = is_overridden("predict_step", cli.model, L.LightningModule)
    model = cli.model if own else _ForwardOnly(cli.model, answering(cli.model))
    with user_mistakes():
        found: Any = cli.trainer.predict(model, datamodule=cli.datamodule)
    if len(cli.trainer.num_predict_batches) > 1:  # a list for each loader
        found = [outputs for each in found for outputs in each]
    if not all(isinstance(outputs, Tensor) and outputs.ndim for outputs in found):
        kind = type(next(outputs for outputs in found if not isinstance(outputs, Tensor) or not outputs.ndim)).__name__
        raise UsageError(f"`predict_step` of {path_of(cli.model)} must return a tensor (B, ...), got {kind}")
    values = torch.cat([outputs.float().reshape(len(outputs), -1) for outputs in found])
    names = ["value"] if values.shape[1] == 1 else [f"value_{k + 1}" for k in range(values.shape[1])]
    return pd.DataFrame(values.cpu().numpy(), columns=names).reset_index(names="index")


class _ForwardOnly(L.LightningModule):
    """Predicts with a forward pass of the images of a batch.

    Args:
        module: The module whose parameters, and hooks of batches, it uses.
        asked: What maps the images, a tensor or a list, to outputs.
    """

    def __init__(self, module: nn.Module, asked: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module, self._asked = module, (asked,)
        for name in BATCH_HOOKS:
            setattr(self, name, getattr(module, name, getattr(self, name)))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        images = batch[0] if isinstance(batch, list | tuple) and batch else batch
        if not isinstance(images[0] if isinstance(images, list) and images else images, Tensor):
            what = f"batches that do not begin with images, {type(batch).__name__}"
            raise UsageError(f"{path_of(self.module)} has {what}: give it a `predict_step`")
        return as_outputs(self._asked[0](images), self.module)


class _Collector(L.Callback):
    """Collects the outputs for each file.

    Args:
        topk: Number of classes to keep.
    """

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.meaning = _Meaning()
        self.softmax = False  # whether the outputs are class logits
        self.values: dict[int, _Answer] = {}  # by number of the file
        self.reasons: dict[int, str] = {}

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: Any,
        outputs: Tensor,
        batch: _Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.collect(outputs, *batch[1:])

    def collect(self, outputs: Tensor, files: Sequence[int], reasons: Sequence[str]) -> None:
        """Keep the outputs ``(B, ...)`` for the files of these numbers, in one row, or why one could not be read."""
        numbers, classes = outputs.float().reshape(len(outputs), -1), torch.empty(len(outputs), 0)
        finite = numbers.isfinite().all(dim=1).tolist()  # the largest of others is none
        self.softmax = bool(self.meaning.classes) and outputs.shape[1:] == (len(self.meaning.classes),)
        if self.softmax:
            numbers, classes = numbers.softmax(dim=1).topk(min(self.topk, outputs.shape[1]), dim=1)
        both = zip(numbers.tolist(), classes.tolist(), strict=True)
        for i, reason, is_finite, found in zip(files, reasons, finite, both, strict=True):
            if reason or not is_finite:
                self.reasons[i] = reason or NOT_FINITE
            else:
                self.values[i] = (found[0], found[1])

    def gather(self) -> None:
        """Take the outputs of all processes; every process must call it."""
        for values, reasons in of_all((self.values, self.reasons)):
            self.values |= values
            self.reasons |= reasons

    def answers(self, files: list[str]) -> tuple[pd.DataFrame, list[Problem]]:
        """Return one row per file that was read, in order, and the others with their reasons."""
        read, meaning = sorted(self.values), self.meaning if self.softmax else self.meaning._replace(classes=())
        table = _table([files[i] for i in read], [self.values[i] for i in read], meaning)
        return table, [(files[i], self.reasons[i]) for i in sorted(self.reasons)]


class _Pictures(L.LightningDataModule):
    """Image files, each read by one process, and by several only if there are fewer files than processes.

    ``eval_transform`` prepares them for the network, so the hooks of a module of the user's do not change them again.

    Args:
        files: Paths of the images; rank 0 decides.
        data: The data set whose evaluation transform they get.
    """

    def __init__(self, files: list[str], data: Any) -> None:
        super().__init__()
        self.files, self.data = files, data
        self.preparation = _preparation(data)

    def on_before_batch_transfer(self, batch: _Batch, dataloader_idx: int) -> _Batch:
        """Change nothing, as the hooks below."""
        return batch

    def transfer_batch_to_device(self, batch: _Batch, device: torch.device, dataloader_idx: int) -> _Batch:
        """Move the images."""
        moved: _Batch = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return moved

    def on_after_batch_transfer(self, batch: _Batch, dataloader_idx: int) -> _Batch:
        """Change nothing."""
        return batch

    def predict_dataloader(self) -> DataLoader[_Sample]:
        """Return the batches of this process."""
        trainer: Any = self.trainer
        rank, world = trainer.global_rank, trainer.world_size
        self.files = trainer.strategy.broadcast(self.files)
        numbers = range(min(rank, len(self.files) - 1), len(self.files), world)
        workers = min(getattr(self.data, "num_workers", 0), os.cpu_count() or 1) if len(numbers) > _FEW else 0
        return DataLoader(
            _Files(self.files, numbers, self.preparation),
            batch_size=max(1, getattr(self.data, "batch_size", 64) // world),
            num_workers=workers,
            collate_fn=partial(_batch, self.preparation.join),
            pin_memory=trainer.strategy.root_device.type == "cuda",
        )


class _Files(Dataset[_Sample]):
    def __init__(self, files: list[str], numbers: range, preparation: "_Preparation") -> None:
        self.files, self.numbers, self.preparation = files, numbers, preparation

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> _Sample:
        number = self.numbers[index]
        try:
            return self.preparation.read(self.files[number]), number, ""
        except ImageError as error:
            return self.preparation.blank(), number, error.reason


def _batch(join: Callable[[Sequence[Tensor]], Any], samples: list[_Sample]) -> _Batch:
    images, numbers, reasons = zip(*samples, strict=True)
    return join(images), list(numbers), list(reasons)


class _Preparation:
    """How data of vitlab prepare image files for a network.

    Args:
        data: The data set.
    """

    def __init__(self, data: Any) -> None:
        self.data = data

    def read(self, file: str) -> Tensor:
        """Return the image in a file as ``(C, H, W)``; raise ImageError if it cannot be read."""
        return self.data.eval_file(Path(file))

    def blank(self) -> Tensor:
        """Return an image in place of one that cannot be read."""
        return torch.zeros(self.data.in_chans, *self.data.img_size)

    def join(self, images: Sequence[Tensor]) -> Any:
        """Return a batch of images."""
        return self.data.pipeline.joined(images)


class _OwnPreparation(_Preparation):
    """How data of the user's own prepare them: by ``eval_transform``, which is tried at once."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.transform = transform_of(data)
        self.mode: Literal["RGB", "L"] = "L" if getattr(data, "in_chans", 3) == 1 else "RGB"
        self.blank()

    def read(self, file: str) -> Tensor:
        return self.transform(decode(file, Decoding(self.mode, None)))

    def blank(self) -> Tensor:
        h, w = image_sizes(None, self.data)["img_size"] or (64, 64)
        return self.transform(Image.new(self.mode, (w, h)))

    def join(self, images: Sequence[Tensor]) -> Tensor:
        if len({image.shape for image in images}) > 1:
            raise UsageError("`eval_transform` must return tensors (C, H, W) of one size")
        return torch.stack(list(images))


def _preparation(data: Any) -> _Preparation:
    return _Preparation(data) if isinstance(data, ImageData) else _OwnPreparation(data)
