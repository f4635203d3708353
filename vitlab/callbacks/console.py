"""What a run shows in the terminal: a bar while it works, one line an epoch."""

import logging
import math
import sys
from contextlib import suppress
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from vitlab.callbacks.record import RunRecord

LOG = logging.getLogger("vitlab")


class Bar(ProgressBar):
    """A bar of tqdm where there is a terminal; ``hidden`` leaves it out and nothing else."""

    hidden = False

    def __init__(self, quiet: bool) -> None:
        super().__init__()
        self.quiet = quiet
        self.bar: tqdm | None = None

    def disable(self) -> None:
        """Show nothing; Lightning calls it on all processes but the first."""
        self.quiet = True

    def _open(self, total: float, title: str | None = None) -> None:
        if not (self.quiet or self.hidden) and sys.stderr.isatty():
            self.bar = tqdm(total=total, desc=title, leave=False, mininterval=0.2)

    def _close(self) -> None:
        if self.bar is not None:
            with suppress(OSError):
                self.bar.close()
            self.bar = None

    def _move(self) -> None:
        if self.bar is not None:
            try:
                self.bar.update()
            except OSError:  # the terminal was closed; the run may go on without, or save and leave
                self.bar, self.quiet = None, True


class Console(Bar):
    """Show loss, accuracy, images/s and the time left; without a terminal, only the lines of the epochs.

    Args:
        record: Where the numbers come from; the bar itself never waits for the device.
        quiet: Whether to show nothing.

    Example:
        >>> from vitlab.runs.directory import RunDir
        >>> record = RunRecord(RunDir("runs/mine"), describe=lambda trainer, task: None)
        >>> Console(record, quiet=True).quiet
        True
    """

    def __init__(self, record: RunRecord, quiet: bool = False) -> None:
        super().__init__(quiet)
        self.record = record
        self._shown: dict[str, float] = {}  # the row that the bar shows

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar of an epoch."""
        self._open(trainer.num_training_batches, _place(trainer))
        self._shown = {}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the bar."""
        if self.bar is not None:
            if self.record.row is not self._shown and self.record.row:
                self._shown = self.record.row
                self.bar.set_postfix_str(self._numbers(), refresh=False)
            self._move()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the line of an epoch."""
        self._close()
        if self.quiet:
            return
        sums = dict(self.record.epoch_sums)
        n = sums.pop("n", 0.0)
        parts = [_place(trainer, 3)]
        parts += [f"train/{name} {value / n:.4f}" for name, value in sums.items()]
        shown = {k: v for k, v in self.record.validated.items() if k.count("/") < 2}  # of several targets, not each
        parts += [f"{k} {v:.4f}" for k, v in shown.items() if k not in ("val/n", "val/acc5")]
        parts.append(f"{self.record.row.get('images_per_second', 0):,.0f} images/s")
        parts += [f"MFU {self.record.row['mfu']:.0%}"] if "mfu" in self.record.row else []
        parts.append(f"{_duration(self.record.seconds_left(trainer))} left")
        LOG.info("  ".join(parts))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave no half bar behind."""
        self._close()

    def _numbers(self) -> str:
        row = self.record.row
        shown = [f"{name[6:]} {row[name]:.3f}" for name in row if name.startswith("train/")]
        return "  ".join(
            [*shown, f"{row['images_per_second']:,.0f} images/s", f"{_duration(row['seconds_left'])} left"]
        )


class EvaluationConsole(Bar):
    """Show a bar while a split is measured; nothing without a terminal.

    Args:
        quiet: Whether to show nothing.
    """

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar."""
        self._open(sum(trainer.num_val_batches))

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar."""
        self._open(sum(trainer.num_test_batches))

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar."""
        self._open(sum(trainer.num_predict_batches))

    def on_validation_batch_end(self, *args: Any) -> None:
        """Move the bar."""
        self._move()

    def on_validation_end(self, *args: Any) -> None:
        """Close the bar."""
        self._close()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]
    on_test_end = on_predict_end = on_validation_end  # type: ignore[assignment]


def _place(trainer: Any, width: int = 1) -> str:
    """Return which epoch it is, of how many if that is known."""
    return f"epoch {trainer.current_epoch + 1:>{width}}" + (f"/{trainer.max_epochs}" if trainer.max_epochs >= 0 else "")


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):  # no end was set
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
