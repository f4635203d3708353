"""The page of a run that goes on, written anew after each epoch."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from vitlab.errors import UsageError
from vitlab.look.charts import sparkline
from vitlab.look.page import RELOAD, render
from vitlab.runs.directory import RunDir, write_text

LOG = logging.getLogger("vitlab")


class LivePage(Callback):
    """Write ``look.html`` into the run after each validation, and a line of its losses on the terminal.

    The page loads itself again while the run goes on; curves, configuration and environment are on it, and after the
    end `vitlab look RUN --overwrite` adds pictures. Training does not notice: only files of the run are read::

        trainer:
          callbacks:
            - {class_path: vitlab.look.live.LivePage}

    Example:
        >>> LivePage().losses
        []
    """

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Take note of the loss; a page of what is known so far."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        if (loss := trainer.callback_metrics.get("val/loss")) is not None:
            self.losses.append(float(loss))
            LOG.info("val/loss         %s %.4f", sparkline(self.losses), self.losses[-1])
        self._write(trainer, RELOAD)

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the last page, which stays as it is."""
        if trainer.is_global_zero:
            self._write(trainer, 0)

    def _write(self, trainer: L.Trainer, reload: int) -> None:
        path = Path(trainer.default_root_dir)
        if not (path / "config.yaml").is_file():
            return  # nothing of vitlab's runs
        try:
            write_text(path / "look.html", render(path.name, {path.name: RunDir(path)}, reload=reload))
        except (OSError, UsageError) as error:
            LOG.warning("look.html could not be written: %s", error)
