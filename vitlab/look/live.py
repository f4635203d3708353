"""The page of a running training, rewritten after validations: asked for, or within a hundredth of the time."""

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from vitlab.callbacks.ema import validated_weights
from vitlab.errors import UsageError, named_line
from vitlab.interface import measured_with
from vitlab.look.moments import SHARE, can_be_shown, is_small
from vitlab.look.written import is_of_training, stand_still
from vitlab.models.hooks import modes_kept
from vitlab.models.vit import VisionTransformer
from vitlab.runs.atomic import write_text
from vitlab.runs.directory import RunDir
from vitlab.tables import in_short

if TYPE_CHECKING:  # what draws takes seconds to import, and most trainings draw nothing
    import pandas as pd

    from vitlab.analysis.subject import Subject
    from vitlab.look.facts import SplitPredictions

LOG = logging.getLogger("vitlab")
BARS = "▁▂▃▄▅▆▇█"
OF_PICTURES = 0.05  # largest share of the time between validations that pictures may take
FIRST = 2.5  # seconds that the first page of a GrowingPage is taken to cost, imports among them, until one is measured


def sparkline(values: Sequence[float]) -> str:
    """Return the last 32 values as a line of blocks, low to high.

    Example:
        >>> sparkline([3.0, 2.0, 1.0, 1.0])
        '█▅▁▁'
    """
    shown = [value for value in values if value == value][-32:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    return "".join(BARS[round((value - low) / ((high - low) or 1.0) * (len(BARS) - 1))] for value in shown)


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
        self.pictures, self.losses, self.share_of_pictures = pictures, list[float](), OF_PICTURES
        self._predictions: list[Tensor] = []  # target, prediction and probability of each image, (B, 3) each
        self._shown: Tensor | None = None
        self._drawing, self._last = 0.0, time.monotonic()

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
        from vitlab.look.page import RELOAD, render

        reload = 0 if is_last else RELOAD
        path, begun = Path(trainer.default_root_dir), time.monotonic()
        if not (path / "config.yaml").is_file():
            return  # not a run directory
        runs, live = {path.name: RunDir(path)}, self._table(trainer)
        found: dict[str, SplitPredictions] = {path.name: ("val", live)} if live is not None else {}
        text, has_time = None, self._drawing <= self.share_of_pictures * (begun - self._last)
        if self.pictures and has_time and can_be_shown(trainer, pl_module):
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
            self._drawing = time.monotonic() - begun
        self._last = time.monotonic()
        try:
            write_text(path / "look.html", text or render(path.name, runs, reload=reload, live=found))
        except (OSError, UsageError) as error:
            LOG.warning("look.html could not be written: %s", error)

    def _table(self, trainer: L.Trainer) -> "pd.DataFrame | None":
        """Return the predictions of this process; with several processes, the indices of images are unknown."""
        if not self._predictions:
            return None
        import pandas as pd

        target, first, share = torch.cat(self._predictions).cpu().numpy().T
        table = pd.DataFrame({"target": target.astype(np.int64), "prediction": first.astype(np.int64)})
        index = np.arange(len(table)) if trainer.world_size == 1 else -1
        return table.assign(probability=share, index=index)

    def _subject(self, trainer: L.Trainer, task: Any, name: str) -> "Subject":
        """Return the network with a few fixed validation images."""
        from vitlab.analysis.subject import Subject

        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        subject = Subject(task.net, data, name=name, pictures=self._shown, task=task)
        if self._shown is None:
            self._shown = subject.pictures = subject.shown(self.pictures)
        return subject


def _cuda(net: VisionTransformer) -> torch.device | None:
    device = next(net.parameters()).device
    return device if device.type == "cuda" else None


def now() -> np.ndarray:
    """Return the seconds of the clock and of this process on processors, ``(2,)``.

    Example:
        >>> bool((now() <= now()).all())
        True
    """
    return np.array([time.monotonic(), time.process_time()])


class GrowingPage(LivePage):
    """Write the page of :class:`LivePage` after validations, as often as a small share of time allows: for nobody asks.

    A page is written when all pages so far, this one and the last one together cost at most ``share`` of the time
    since the training was built: by the clock, and of the time on processors, as a page takes longer by the clock
    where others are busy, too. So a short run has none. Nothing is written for large networks, over a page that
    `vitlab look` made, and where :class:`~vitlab.look.moments.Moments` keep nothing. ``vitlab fit`` adds this callback
    itself unless the configuration names ``LivePage``; its share is that of ``Moments``: 0 there leaves both out.

    Args:
        share: Largest share of the run's time.

    Raises:
        ValueError: ``share`` is not from 0 to 1.

    Example:
        >>> page = GrowingPage(share=0.01)
        >>> [page.has_time(page.begun + each) for each in (499, 501, (501, 499))]  # two pages of 2.5 seconds each
        [False, True, False]
    """

    def __init__(self, share: float = SHARE) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"`share` of GrowingPage must lie in 0..1, got {share}")
        super().__init__()
        self.share_of_pictures = float("inf")  # they, too, are paid from the share of the whole page
        self.share, self.begun, self.written = share, now(), 0
        self.spent, self._cost, self._is_due = np.zeros(2), np.full(2, FIRST), False

    def has_time(self, at: np.ndarray) -> bool:
        """Return whether a page, and the last one after it, fit into the share at a time as :func:`now` tells it."""
        return bool((self.spent + 2 * self._cost <= self.share * (at - self.begun)).all())

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Decide whether this validation is written; of any after the first page the predictions may be the last."""
        begun = now()
        self._is_due = self._may_write(trainer, pl_module) and self.has_time(begun)
        if self._is_due or self.written:
            import_module("vitlab.look.page")  # now, so that its seconds are none of the page's cost
            super().on_validation_start(trainer, pl_module)
            self.spent += now() - begun

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Collect the predictions of a validation that is written, or may be what the last page tells."""
        if self._is_due or self.written:
            begun = now()
            super().on_validation_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)
            self.spent += now() - begun

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the page, and no line with the losses."""
        if self._is_due:
            self.write(trainer, pl_module, is_last=False)

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the last page, which does not reload, if there was one before."""
        if self.written:
            self.write(trainer, pl_module, is_last=True)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Leave a page that does not reload, if there was one."""
        if self.written:
            super().on_exception(trainer, pl_module, exception)

    def write(self, trainer: L.Trainer, pl_module: Any, is_last: bool) -> None:
        """Write the page and note what it cost; an error ends the pages, and not the training."""
        begun = now()
        try:
            super().write(trainer, pl_module, is_last)
            self.written += 1
        except Exception as error:
            self.share = 0.0
            LOG.warning("look.html is not continued: %s", named_line(error))
        self._cost = now() - begun
        self.spent += self._cost

    def _may_write(self, trainer: L.Trainer, pl_module: Any) -> bool:
        if not self.share or trainer.sanity_checking or not trainer.is_global_zero or trainer.state.fn != "fit":
            return False
        page = Path(trainer.default_root_dir) / "look.html"
        return is_small(trainer, pl_module) and (not page.exists() or is_of_training(page))
