"""The page of a running training, rewritten after each validation."""

import logging
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from vitlab.analysis.subject import Subject
from vitlab.callbacks.ema import validated_weights
from vitlab.errors import UsageError, named_line
from vitlab.interface import measured_with
from vitlab.look.charts import sparkline
from vitlab.look.facts import SplitPredictions
from vitlab.look.moments import can_be_shown
from vitlab.look.page import RELOAD, render
from vitlab.look.written import stand_still
from vitlab.models.foreign import modes_kept
from vitlab.models.vit import VisionTransformer
from vitlab.runs.atomic import write_text
from vitlab.runs.directory import RunDir
from vitlab.tables import in_short

LOG = logging.getLogger("vitlab")
SHARE = 0.05  # largest share of the time between validations that pictures may take


class LivePage(Callback):
    """Write ``look.html`` into the run after each validation, and print a line with its losses.

    The page reloads itself during training. Besides curves, configuration and environment it shows the results of the
    latest validation, a confusion matrix, the worst mistakes, and attention on a few validation images; after training
    `vitlab look RUN` adds the maps that need gradients. Under EMA all of this is of the average. Training does not
    change, including its random numbers. Pictures are left out if they would take more than a twentieth of the time, if
    weights are sharded or compiled, and for networks that are not vitlab's::

        trainer:
          callbacks:
            - {class_path: vitlab.look.live.LivePage}

    Args:
        pictures: Largest number of validation images whose attention is shown; 0 for none.

    Raises:
        ValueError: ``pictures`` is negative.

    Example:
        >>> LivePage(pictures=2).losses
        []
    """

    def __init__(self, pictures: int = 4) -> None:
        if pictures < 0:
            raise ValueError(f"`pictures` must be at least 0, got {pictures}")
        self.pictures, self.losses, self.share = pictures, list[float](), SHARE
        self._predictions: list[Tensor] = []  # target, prediction and probability of each image, (B, 3) each
        self._shown: Tensor | None = None
        self._cost, self._last = 0.0, time.monotonic()

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Forget the previous validation."""
        self._predictions = []

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Collect the predictions of a classifier, on the device."""
        targets = measured_with(outputs)
        if targets is not None and targets.ndim == 1 and not targets.is_floating_point():
            share, first = outputs.float().softmax(dim=1).max(dim=1)
            self._predictions.append(torch.stack([targets.float(), first.float(), share], dim=1))

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Record the loss and write the page."""
        if trainer.sanity_checking or not trainer.is_global_zero or trainer.state.fn != "fit":
            return
        if (loss := trainer.callback_metrics.get("val/loss")) is not None:
            self.losses.append(float(loss))
            LOG.info("val/loss         %s %s", sparkline(self.losses), in_short(self.losses[-1]))
        self.write(trainer, pl_module, is_last=False)

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the final page, which does not reload."""
        if trainer.is_global_zero:
            self.write(trainer, pl_module, is_last=True)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Leave a page that does not reload."""
        if trainer.is_global_zero:
            stand_still(Path(trainer.default_root_dir) / "look.html")

    def write(self, trainer: L.Trainer, pl_module: Any, is_last: bool) -> None:
        """Write the page; the last one does not reload."""
        reload = 0 if is_last else RELOAD
        path, begun = Path(trainer.default_root_dir), time.monotonic()
        if not (path / "config.yaml").is_file():
            return  # not a run directory
        runs, live = {path.name: RunDir(path)}, self._table(trainer)
        found: dict[str, SplitPredictions] = {path.name: ("val", live)} if live is not None else {}
        text = None
        if self.pictures and self._cost <= self.share * (begun - self._last) and can_be_shown(trainer, pl_module):
            net = pl_module.net
            averaged = nullcontext() if is_last else validated_weights(trainer, pl_module)  # at the end it is there
            devices = [device] if (device := _cuda(net)) is not None else []
            try:
                with modes_kept(net), averaged, torch.random.fork_rng(devices=devices):
                    text = render(
                        path.name, runs, [self._subject(trainer, pl_module, path.name)], self.pictures, reload, found
                    )
            except Exception as error:  # an error in pictures must not stop the training
                self.pictures = 0
                LOG.warning("look.html continues without pictures: %s", named_line(error))
            self._cost = time.monotonic() - begun
        self._last = time.monotonic()
        try:
            write_text(path / "look.html", text or render(path.name, runs, reload=reload, live=found))
        except (OSError, UsageError) as error:
            LOG.warning("look.html could not be written: %s", error)

    def _table(self, trainer: L.Trainer) -> pd.DataFrame | None:
        """Return the predictions of this process; with several processes, the indices of images are unknown."""
        if not self._predictions:
            return None
        target, first, share = torch.cat(self._predictions).cpu().numpy().T
        table = pd.DataFrame({"target": target.astype(np.int64), "prediction": first.astype(np.int64)})
        index = np.arange(len(table)) if trainer.world_size == 1 else -1
        return table.assign(probability=share, index=index)

    def _subject(self, trainer: L.Trainer, task: Any, name: str) -> Subject:
        """Return the network with a few fixed validation images."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        subject = Subject(task.net, data, name=name, pictures=self._shown, task=task)
        if self._shown is None:
            self._shown = subject.pictures = subject.shown(self.pictures)
        return subject


def _cuda(net: VisionTransformer) -> torch.device | None:
    device = next(net.parameters()).device
    return device if device.type == "cuda" else None
