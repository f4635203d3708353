"""Predict image files with a run, as a table."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pandas as pd
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from vitlab.callbacks.console import EvaluationConsole
from vitlab.config.images import escaped
from vitlab.config.parser import user_mistakes
from vitlab.data.base import ImageData
from vitlab.data.files.decode import ImageError
from vitlab.data.loading.pipeline import Pipeline
from vitlab.errors import UsageError
from vitlab.interface import network, path_of
from vitlab.jobs.rebuild import one_device
from vitlab.jobs.restore import check_parts_of_vitlab, restore
from vitlab.runs.directory import RunDir
from vitlab.tasks import Regressor
from vitlab.tasks.base import Task

_Sample = tuple[Tensor, int, str]  # (C, H, W), number of the file, why it could not be read
_Batch = tuple[Any, list[int], list[str]]
_FEW = 64  # files that are decoded faster than worker processes start


def predict(
    run: RunDir, checkpoint: Path, rest: list[str], files: list[str], topk: int, quiet: bool, features: bool = False
) -> tuple[pd.DataFrame | None, dict[str, str]]:
    """Return one row per readable file, in order, and the reason for each unreadable one.

    Args:
        run: The run.
        checkpoint: Which of its weights to use.
        rest: Arguments of the command line that change values of its configuration.
        files: Paths of the images.
        topk: Number of classes to name for each image.
        quiet: Whether to show no progress.
        features: Whether to return the pooled features, the input of the head, instead of its outputs.

    Only rank 0 returns a table.
    """
    collector, bar = _Collector(topk), EvaluationConsole(quiet)
    settings = {"fast_dev_run": False, "limit_predict_batches": None, "use_distributed_sampler": False}
    rest = [*one_device(run), *rest]
    cli = restore(run, checkpoint, rest, [collector, bar], default_root_dir=str(run.path), **settings)
    if not isinstance(cli.datamodule, ImageData):
        own = path_of(cli.datamodule)
        raise UsageError(f"{own} does not define how to read image files; leave them out to predict its own samples")
    facts, names = cli.datamodule.targets, None if isinstance(cli.model, Regressor) else cli.datamodule.class_names
    targets = facts.get("names", [])
    if facts["kind"] == "multilabel":  # one probability per label
        names, targets = None, cli.datamodule.class_names
    net: Any = network(cli.model)
    if features or getattr(net, "num_classes", None) == 0:  # a network without a head
        check_parts_of_vitlab(cli, "vitlab embed")
        net.reset_head(0)
        names, targets = None, [f"feature_{k + 1}" for k in range(net.num_features)]
    collector.num_classes = len(names or [])
    pictures = _Pictures(files, cli.datamodule)
    model = cli.model if isinstance(cli.model, Task) and not features else _ForwardOnly(net if features else cli.model)
    with user_mistakes():
        cli.trainer.predict(model, datamodule=pictures, return_predictions=False)
    names = names if collector.softmax else None
    values, reasons = collector.gathered()
    if not cli.trainer.is_global_zero:
        return None, {}
    files = pictures.files
    lost = len(files) - len(values) - len(reasons)
    if lost:
        raise UsageError(f"{lost} predictions were not collected from other processes; use --trainer.strategy=ddp")
    table = _table([files[i] for i in sorted(values)], [values[i] for i in sorted(values)], names, targets)
    if names and any(found := [name if name in names else "" for name in _folders(files, sorted(values))]):
        table.insert(1, "target", found)  # the folder of an image, where it is a class
    return table, {files[i]: reasons[i] for i in sorted(reasons)}


def _table(
    files: list[str], values: list[tuple[list[float], list[int]]], names: list[str] | None, targets: Sequence[str] = ()
) -> pd.DataFrame:
    table: dict[str, Any] = {"path": [escaped(file) for file in files]}
    count = len(values[0][0]) if values else 0
    for k in range(count):
        number = pd.Series([numbers[k] for numbers, _ in values], dtype="float32")
        if names is None:
            table[targets[k] if targets else "value" if count == 1 else f"value_{k + 1}"] = number
        else:
            table[f"class_{k + 1}"] = [names[classes[k]] for _, classes in values]
            table[f"probability_{k + 1}"] = number
    return pd.DataFrame(table)


def _folders(files: list[str], chosen: Sequence[int]) -> list[str]:
    return [os.path.basename(os.path.dirname(os.path.abspath(files[i]))) for i in chosen]


def predict_from_data(run: RunDir, checkpoint: Path, rest: list[str], quiet: bool) -> pd.DataFrame:
    """Return the outputs for the samples of the data's ``predict_dataloader``, one row each, in order."""
    cli = restore(
        run, checkpoint, [*one_device(run), *rest], [EvaluationConsole(quiet)], default_root_dir=str(run.path)
    )
    if isinstance(cli.datamodule, ImageData):
        raise UsageError("no images given: `vitlab predict RUN IMAGE|DIR|GLOB ...`")
    model = cli.model if is_overridden("predict_step", cli.model, L.LightningModule) else _ForwardOnly(cli.model)
    with user_mistakes():
        found: Any = cli.trainer.predict(model, datamodule=cli.datamodule)
    if not all(isinstance(outputs, Tensor) and outputs.ndim for outputs in found):
        kind = type(next(outputs for outputs in found if not isinstance(outputs, Tensor) or not outputs.ndim)).__name__
        raise UsageError(f"`predict_step` of {path_of(cli.model)} must return a tensor (B, ...), got {kind}")
    values = torch.cat([outputs.float().reshape(len(outputs), -1) for outputs in found])
    names = ["value"] if values.shape[1] == 1 else [f"value_{k + 1}" for k in range(values.shape[1])]
    return pd.DataFrame(values.cpu().numpy(), columns=names).reset_index(names="index")


class _ForwardOnly(L.LightningModule):
    """Predicts with the forward pass of a module, on the images of a batch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.module(batch if isinstance(batch, Tensor) else batch[0])


class _Collector(L.Callback):
    """Collects the outputs for each file.

    Args:
        topk: Number of classes to keep.
    """

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.num_classes = 0
        self.softmax = False  # whether the outputs are class logits
        self.values: dict[int, tuple[list[float], list[int]]] = {}  # by file: numbers, and classes if softmax
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
        numbers, classes = outputs.float(), torch.empty(len(outputs), 0)
        self.softmax = bool(self.num_classes) and outputs.shape[1:] == (self.num_classes,)
        if self.softmax:
            numbers, classes = numbers.softmax(dim=1).topk(min(self.topk, outputs.shape[1]), dim=1)
        for i, reason, *found in zip(*batch[1:], numbers.tolist(), classes.tolist(), strict=True):
            if reason:
                self.reasons[i] = reason
            else:
                self.values[i] = (found[0], found[1])

    def gathered(self) -> tuple[dict[int, tuple[list[float], list[int]]], dict[int, str]]:
        """Return the outputs of all processes; every process must call it."""
        values, reasons = dict(self.values), dict(self.reasons)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            parts: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, (values, reasons))
            for part in parts:
                values |= part[0]
                reasons |= part[1]
        return values, reasons


class _Pictures(L.LightningDataModule):
    """Image files, each read by one process, and by several only if there are fewer files than processes.

    Args:
        files: Paths of the images; rank 0 decides.
        data: The data set whose evaluation transform they get.
    """

    def __init__(self, files: list[str], data: ImageData) -> None:
        super().__init__()
        self.files, self.data = files, data

    def predict_dataloader(self) -> DataLoader[_Sample]:
        """Return the batches of this process."""
        trainer: Any = self.trainer
        rank, world = trainer.global_rank, trainer.world_size
        self.files = trainer.strategy.broadcast(self.files)
        numbers = range(min(rank, len(self.files) - 1), len(self.files), world)
        workers = min(self.data.num_workers, os.cpu_count() or 1) if len(numbers) > _FEW else 0
        return DataLoader(
            _Samples(self.files, numbers, self.data),
            batch_size=max(1, self.data.batch_size // world),
            num_workers=workers,
            collate_fn=partial(_stack, self.data.pipeline),
            pin_memory=trainer.strategy.root_device.type == "cuda",
        )


class _Samples(Dataset[_Sample]):
    def __init__(self, files: list[str], numbers: range, data: ImageData) -> None:
        self.files, self.numbers, self.data = files, numbers, data

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> _Sample:
        number, data = self.numbers[index], self.data
        file = self.files[number]
        try:
            known = data.decoding, data.in_chans, data.statistics(), data.arrays
            return data.pipeline.eval_file(Path(file), *known), number, ""
        except ImageError as error:
            return torch.zeros(data.in_chans, *data.img_size), number, error.reason


def _stack(pipeline: Pipeline, samples: list[_Sample]) -> _Batch:
    images, numbers, reasons = zip(*samples, strict=True)
    return pipeline.joined(images), list(numbers), list(reasons)
