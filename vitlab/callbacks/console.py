"""Terminal output of a run: a progress bar, and one line per epoch."""

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
    """A tqdm progress bar, shown only in a terminal; ``hidden`` hides just the bar."""

    hidden = False

    def __init__(self, quiet: bool) -> None:
        super().__init__()
        self.quiet = quiet
        self.bar: tqdm | None = None

    def disable(self) -> None:
        """Show nothing; Lightning calls this on all processes except the first."""
        self.quiet = True

    def _open(self, total: float, title: str | None = None) -> None:
        if not (self.quiet or self.hidden) and sys.stderr is not None and sys.stderr.isatty():
            self.bar = tqdm(total=total, desc=title, leave=False, mininterval=0.2)

    def _close(self) -> None:
        if self.bar is not None:
            with suppress(OSError):
                self.bar.close()
            self.bar = None

    def _advance(self) -> None:
        if self.bar is not None:
            try:
                self.bar.update()
            except OSError:  # the terminal was closed; go on without a bar
                self.bar, self.quiet = None, True


class Console(Bar):
    """Show loss, accuracy, images/s and time left; without a terminal, only one line per epoch.

    Args:
        record: Source of the numbers; the bar itself never waits for the device.
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
        self._shown: dict[str, float] = {}  # the row that the bar shows now

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar of the epoch."""
        self._open(trainer.num_training_batches, _place(trainer))
        self._shown = {}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance the bar."""
        if self.bar is not None:
            if self.record.row is not self._shown and self.record.row:
                self._shown = self.record.row
                self.bar.set_postfix_str(self._numbers(), refresh=False)
            self._advance()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the line of the epoch."""
        self._close()
        if self.quiet:
            return
        sums = dict(self.record.epoch_sums)
        n = sums.pop("n", 0.0)
        parts = [_place(trainer, 3)]
        parts += [f"train/{name} {value / n:.4f}" for name, value in sums.items()]
        shown = {k: v for k, v in self.record.validated.items() if k.count("/") < 2}  # no single targets
        parts += [f"{k} {v:.4f}" for k, v in shown.items() if k not in ("val/n", "val/acc5")]
        if speed := self.record.row.get("images_per_second"):  # none if an epoch is resumed after its last step
            parts.append(f"{speed:6,.0f} images/s")
        parts += [f"MFU {self.record.row['mfu']:3.0%}"] if "mfu" in self.record.row else []
        parts.append(f"{_duration(self.record.seconds_left(trainer)):>5} left")
        LOG.info("  ".join(parts))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Close the bar."""
        self._close()

    def _numbers(self) -> str:
        row = self.record.row
        shown = [f"{name[6:]} {row[name]:.3f}" for name in row if name.startswith("train/")]
        return "  ".join(
            [*shown, f"{row['images_per_second']:,.0f} images/s", f"{_duration(row['seconds_left'])} left"]
        )


class EvaluationConsole(Bar):
    """Show a bar while a split is evaluated; nothing without a terminal.

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
        """Advance the bar."""
        self._advance()

    def on_validation_end(self, *args: Any) -> None:
        """Close the bar."""
        self._close()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]
    on_test_end = on_predict_end = on_validation_end  # type: ignore[assignment]


def _place(trainer: Any, width: int = 1) -> str:
    """Return the epoch from 1, and the number of epochs if it is limited."""
    return f"epoch {trainer.current_epoch + 1:>{width}}" + (f"/{trainer.max_epochs}" if trainer.max_epochs >= 0 else "")


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):  # training has no end
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
