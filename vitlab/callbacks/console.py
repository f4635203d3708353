"""Terminal output of a run: a progress bar, and one line per epoch."""

import logging
import math
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from vitlab.callbacks.record import RunRecord
from vitlab.callbacks.steps import means
from vitlab.runs.records import without_counts
from vitlab.tables import in_short

LOG = logging.getLogger("vitlab")
_BAR = 8  # columns of the bar itself, at least, beside its numbers
_REPEAT = 20  # rows of a table under one line of names


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

    def _open(self, total: float, title: str | None = None, done: int = 0) -> None:
        if not (self.quiet or self.hidden) and sys.stderr is not None and sys.stderr.isatty():
            self.bar = tqdm(total=total, desc=title, initial=done, leave=False, mininterval=0.2)

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


class EpochTable:
    """A table of numbers that grows a row at a time and is never wider than the terminal.

    Example:
        >>> table = EpochTable()
        >>> print(table.add({"epoch": "1/2", "val/loss": "0.6412", "left": "0:02"}, width=80))
        epoch  val/loss  left
          1/2    0.6412  0:02
        >>> print(table.add({"epoch": "2/2", "val/loss": "0.5198", "left": "0:00"}, width=80))
          2/2    0.5198  0:00
    """

    def __init__(self) -> None:
        self._widths: dict[str, int] = {}  # of all columns so far, in order
        self._named: list[str] = []  # the columns and widths under the last line of names
        self._count = 0  # rows below it

    def add(self, cells: dict[str, str], width: int, spare: Iterable[str] = ()) -> str:
        """Return the next row, below a line of names if this is the first one or the columns have changed.

        Args:
            cells: Text of each column; a column that is known from before and is missing here stays empty.
            width: Columns of the terminal.
            spare: Names to leave out while the row is too wide, in this order.
        """
        order = [*cells, *(name for name in self._widths if name not in cells)]
        if self._widths.keys() >= cells.keys():
            order = [*self._widths]
        self._widths = {name: max(self._widths.get(name, len(name)), len(cells.get(name, ""))) for name in order}
        shown = dict(self._widths)
        for name in spare:
            if sum(shown.values()) + 2 * (len(shown) - 1) > width:
                shown.pop(name, None)
        row = "  ".join(cells.get(name, "").rjust(length) for name, length in shown.items())
        named = [name.rjust(length) for name, length in shown.items()]
        if named == self._named and self._count < _REPEAT:
            self._count += 1
            return row
        self._named, self._count = named, 1
        return "  ".join(named) + "\n" + row


class Console(Bar):
    """Show loss, accuracy, images/s and time left; without a terminal, only one line per epoch.

    A terminal shows the epochs as the rows of a table, and as many columns as fit. Pipes and train.log get a line that
    names each of its numbers.

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
        self._table = EpochTable()
        self._shown: dict[str, float] = {}  # the row that the bar shows now

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar of an epoch that is resumed in its middle: Lightning does not start it again."""
        if trainer.fit_loop.restarted_mid_epoch:
            done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self._open(trainer.num_training_batches, _place(trainer), done)

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
                self._show(self.bar)
            self._advance()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the line of the epoch."""
        self._close()
        if self.quiet:
            return
        numbers = {f"train/{name}": in_short(value) for name, value in means(self.record.epoch_sums).items()}
        shown = {k: v for k, v in self.record.validated.items() if k.count("/") < 2}  # no single targets
        numbers |= {k: in_short(shown[k]) for k in without_counts(shown) if k not in ("val/n", "val/acc5")}
        speed, measured = {}, self.record.epoch_speed(trainer)
        if measured:
            speed["images/s"] = f"{measured['images_per_second']:,.0f}"
        if "mfu" in measured:
            speed["MFU"] = f"{measured['mfu']:3.0%}"
        left = _duration(self.record.seconds_left(trainer))
        parts = [_place(trainer, 3), *(f"{name} {number}" for name, number in numbers.items())]
        parts += [f"{value:>6} {name}" if name == "images/s" else f"{name} {value}" for name, value in speed.items()]
        place = _place(trainer, len(str(trainer.max_epochs))).partition(" ")[2]
        row = {"epoch": place, **numbers, **speed, "left": f"{left:>7}"}
        best = getattr(trainer.checkpoint_callback, "monitor", None)
        spare = [
            "MFU",
            "images/s",
            *(name for name in reversed(numbers) if not name.endswith("/loss") and name != best),
        ]
        text = self._table.add(row, shutil.get_terminal_size().columns, spare)
        LOG.info("  ".join([*parts, f"{left:>5} left"]), extra={"on_terminal": text})

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Close the bar."""
        self._close()

    def _show(self, bar: tqdm) -> None:
        """Write the last row's numbers behind the bar, as many as fit, and the time left."""
        row = self.record.row
        shown = [f"{name[6:]} {in_short(row[name], 3)}" for name in row if name.startswith("train/")]
        shown += [f"{row['images_per_second']:,.0f} images/s"]
        left = f"{_duration(row.get('seconds_left', math.inf))} left"
        room = shutil.get_terminal_size().columns - len(f"{bar.desc} || {bar.total}/{bar.total}, ") - _BAR
        while shown and len("  ".join([*shown, left])) >= room:
            shown.pop()
        bar.bar_format = "{desc} |{bar}| {n_fmt}/{total_fmt}{postfix}"  # in place of tqdm's own speed and time left
        bar.set_postfix_str("  ".join([*shown, left]), refresh=False)


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
    if not math.isfinite(seconds):  # training has no end, or one that is not known
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
