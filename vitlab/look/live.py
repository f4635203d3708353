"""The page of a run that goes on, written anew after each epoch."""

import logging
import time
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from vitlab.analysis.subject import Subject
from vitlab.data.base import ImageData
from vitlab.errors import UsageError
from vitlab.look.charts import sparkline
from vitlab.look.page import RELOAD, render
from vitlab.models.vit import VisionTransformer
from vitlab.runs.directory import RunDir, write_text

LOG = logging.getLogger("vitlab")
SHARE = 0.05  # of the time between two validations that pictures may take


class LivePage(Callback):
    """Write ``look.html`` into the run after each validation, and a line of its losses on the terminal.

    The page loads itself again while the run goes on. Beside curves, configuration and environment it has what the
    validation has just said, a confusion matrix and the worst mistakes, and attention of a few validation images; after
    the end `vitlab look RUN --overwrite` adds the maps that need gradients. Training stays as it is, random numbers
    included: pictures are left out where they would take more than a twentieth of the time, where weights are
    sharded or compiled, and of networks that are not vitlab's::

        trainer:
          callbacks:
            - {class_path: vitlab.look.live.LivePage}

    Args:
        pictures: Validation images whose attention is shown, at most; 0 for none.

    Example:
        >>> LivePage(pictures=2).losses
        []
    """

    def __init__(self, pictures: int = 4) -> None:
        if pictures < 0:
            raise ValueError(f"`pictures` must be at least 0, got {pictures}")
        self.pictures, self.losses = pictures, list[float]()
        self._said: list[Tensor] = []  # target, first choice and its probability of each image, (B, 3) each
        self._shown: Tensor | None = None
        self._cost, self._last = 0.0, time.monotonic()

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Forget the validation before."""
        self._said = []

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep what was said of each image of one class, on the device."""
        if isinstance(outputs, Tensor) and outputs.ndim == 2 and hasattr(pl_module, "as_targets"):
            targets = pl_module.as_targets(batch[1])
            if targets.ndim == 1 and not targets.is_floating_point():
                share, first = outputs.float().softmax(dim=1).max(dim=1)
                self._said.append(torch.stack([targets.float(), first.float(), share], dim=1))

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Take note of the loss; a page of what is known so far."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        if (loss := trainer.callback_metrics.get("val/loss")) is not None:
            self.losses.append(float(loss))
            LOG.info("val/loss         %s %.4f", sparkline(self.losses), self.losses[-1])
        self._write(trainer, pl_module, RELOAD)

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the last page, which stays as it is."""
        if trainer.is_global_zero:
            self._write(trainer, pl_module, 0)

    def _write(self, trainer: L.Trainer, pl_module: Any, reload: int) -> None:
        path, begun = Path(trainer.default_root_dir), time.monotonic()
        if not (path / "config.yaml").is_file():
            return  # nothing of vitlab's runs
        runs, live = {path.name: RunDir(path)}, self._table(trainer)
        found = {path.name: ("val", live)} if live is not None else {}
        text = None
        if self.pictures and self._cost <= SHARE * (begun - self._last) and _can_be_shown(trainer, pl_module):
            net = pl_module.net
            modes = [(module, module.training) for module in net.modules()]
            try:
                with torch.random.fork_rng(devices=[net_device] if (net_device := _cuda(net)) is not None else []):
                    text = render(
                        path.name, runs, [self._subject(trainer, net, path.name)], self.pictures, reload, found
                    )
            except Exception as error:  # whatever a network or data of the user's own may do: the run is worth more
                self.pictures = 0
                LOG.warning("look.html goes on without pictures: %s: %s", type(error).__name__, error)
            finally:
                for module, mode in modes:
                    module.training = mode
            self._cost = time.monotonic() - begun
        self._last = time.monotonic()
        try:
            write_text(path / "look.html", text or render(path.name, runs, reload=reload, live=found))
        except (OSError, UsageError) as error:
            LOG.warning("look.html could not be written: %s", error)

    def _table(self, trainer: L.Trainer) -> pd.DataFrame | None:
        """Return what was said of the images of this process; which they are is known where it is the only one."""
        if not self._said:
            return None
        target, first, share = torch.cat(self._said).cpu().numpy().T
        table = pd.DataFrame({"target": target.astype(np.int64), "prediction": first.astype(np.int64)})
        index = np.arange(len(table)) if trainer.world_size == 1 else -1
        return table.assign(probability=share, index=index)

    def _subject(self, trainer: L.Trainer, net: Any, name: str) -> Subject:
        """Return the network with a few validation images, always the same."""
        subject = Subject(net, trainer.datamodule, name=name, pictures=self._shown)  # type: ignore[attr-defined]
        if self._shown is None:
            self._shown = subject.pictures = subject.shown(self.pictures)
        return subject


def _can_be_shown(trainer: L.Trainer, pl_module: Any) -> bool:
    """Return whether the network is here as a whole, and of vitlab, and its data as well."""
    net = getattr(pl_module, "net", None)
    whole = isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy)
    ours = isinstance(net, VisionTransformer) and isinstance(trainer.datamodule, ImageData)  # type: ignore[attr-defined]
    return whole and ours and not any(getattr(part, "_compiled_call_impl", None) for part in pl_module.modules())


def _cuda(net: VisionTransformer) -> torch.device | None:
    device = next(net.parameters()).device
    return device if device.type == "cuda" else None
