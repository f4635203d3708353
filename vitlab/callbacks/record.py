"""What a run writes into its directory while it goes on."""

import datetime
import gc
import json
import logging
import math
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor

from vitlab.callbacks.ending import broken_off, ending_of
from vitlab.callbacks.speed import Speed
from vitlab.callbacks.steps import Steps, logged
from vitlab.errors import Stopped
from vitlab.lightning_overhead import Unprofiled
from vitlab.runs.directory import RunDir

LOG = logging.getLogger("vitlab")
_CALMER = "lower `model.lr`, or raise `model.warmup_epochs`"
PATIENCE = 20  # batches in a row that may be skipped


class RunRecord(Callback):
    """Append metrics to ``metrics.jsonl`` and to the loggers, and keep the status in ``run.json``.

    Training metrics are means over ``trainer.log_every_n_steps`` steps and all processes; until they are due, they stay
    on the device.

    Args:
        run: The run directory.
        describe: Called once the data is set up; writes what is known of the run before its first step.

    Example:
        >>> record = RunRecord(RunDir("runs/mine"), describe=lambda trainer, task: None)
        >>> record.run.metrics
        PosixPath('runs/mine/metrics.jsonl')
    """

    def __init__(self, run: RunDir, describe: Callable[[L.Trainer, L.LightningModule], None]) -> None:
        self.run = run
        self.describe = describe
        self.attempt = 1
        self.row: dict[str, float] = {}
        self.epoch_sums: dict[str, float] = {}
        self.started = False
        self._since = self._waiting_since = self._waited = 0.0
        self._known_bytes: int | None = 0  # of metrics.jsonl, when the checkpoint was written that the run goes on from
        self.validated: dict[str, float] = {}  # what this epoch's validation has measured
        self._steps = Steps()
        self._skipped = 0  # batches in a row, as far as they make up whole rows

    def on_fit_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Write what the run is."""
        if type(trainer.profiler) is PassThroughProfiler:
            trainer.profiler = Unprofiled()
        if trainer.is_global_zero:
            self.run.check_there()
            self.attempt = self.run.record.get("attempts", 0) + 1
            self.describe(trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Drop the rows that are made again, which sharded training knows only now, and start the clocks."""
        if trainer.is_global_zero:
            _drop_later_rows(self.run.metrics, self._known_bytes)
        gc.collect()
        gc.freeze()  # what is there by now stays: the collector need not look through it again and again
        self.started = True
        self._start = self._since = self._waiting_since = time.perf_counter()
        self._first_step = trainer.global_step
        self._speed = Speed(dict(self.run.model) if trainer.is_global_zero else {}, trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the epoch before, unless this is the rest of an epoch that was stopped."""
        self.validated = {}
        if not trainer.fit_loop.restarted_mid_epoch:
            self.epoch_sums = {}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Add up how long training waits for data."""
        self._waited += time.perf_counter() - self._waiting_since

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Measure the gradient of a step that will be written down, where clipping does not measure each."""
        if trainer.gradient_clip_val is None and self._is_due(trainer, trainer.fit_loop.epoch_loop.batch_idx):
            self._steps.measure_gradient(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write a row every ``log_every_n_steps`` and at the end of an epoch."""
        self._steps.add(trainer, pl_module, outputs, batch)
        if self._is_due(trainer, batch_idx):
            self._flush(trainer, pl_module, batch_idx)
        self._waiting_since = time.perf_counter()

    def seconds_left(self, trainer: L.Trainer) -> float:
        """Return how long the rest of the training takes at the speed so far, its validations included."""
        done = trainer.global_step - self._first_step
        total = float(trainer.estimated_stepping_batches)
        return (time.perf_counter() - self._start) / max(1, done) * (total - trainer.global_step)

    def _is_due(self, trainer: Any, batch_idx: int) -> bool:
        steps = trainer.log_every_n_steps * trainer.accumulate_grad_batches
        if (batch_idx + 1) % steps == 0 or batch_idx + 1 == trainer.num_training_batches:
            return True
        return 0 < trainer.max_steps == trainer.global_step  # -1 is no limit; to count the steps takes Lightning long

    def _flush(self, trainer: Any, task: Any, batch_idx: int) -> None:
        losses, norms = self._steps.losses, self._steps.norms
        sums = self._steps.read(trainer, task)
        self._skipped = 0 if sums["n"] else self._skipped + len(losses)
        if not math.isfinite(sums.get("loss", 0.0)) or self._skipped >= PATIENCE:
            saved = "the last checkpoint is good" if self.run.has_checkpoint() else "there is no checkpoint so far"
            raise FloatingPointError(f"{_describe_nan(trainer, losses, norms, batch_idx)}; {saved}: {_CALMER}")
        if self._skipped:
            return
        now = time.perf_counter()
        for name, value in sums.items():
            self.epoch_sums[name] = self.epoch_sums.get(name, 0.0) + value
        n = sums.pop("n")
        self.row = {f"train/{name}": value / n for name, value in sums.items()} | logged(trainer, on_step=True)
        for optimizer in trainer.optimizers[:1]:
            self.row["lr"] = optimizer.param_groups[0]["lr"]
        if self._steps.grad_norm is not None:
            self.row["grad_norm"] = self._steps.grad_norm.item()
        self.row |= {"images_per_second": n / (now - self._since), "data_wait": self._waited / (now - self._since)}
        self.row |= {
            "seconds_left": self.seconds_left(trainer),
            **self._speed.utilization(self.row["images_per_second"], trainer.current_epoch),
        }
        self._since, self._waited = now, 0.0
        self._write(trainer, self.row)
        for logger in trainer.loggers:
            logger.log_metrics(dict(self.row, epoch=trainer.current_epoch), step=trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the epoch so far, and how much of ``metrics.jsonl`` has been written."""
        size = self.run.metrics.stat().st_size if self.run.metrics.is_file() else 0
        return {"epoch_sums": self.epoch_sums, "metrics_bytes": size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the sums of an epoch, and the metrics."""
        self.epoch_sums = dict(state_dict["epoch_sums"])
        self._known_bytes = state_dict.get("metrics_bytes")  # what was saved by an older vitlab does not say

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock of training."""
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the row of a validation."""
        self._since += time.perf_counter() - self._paused
        self._waiting_since = time.perf_counter()
        if not trainer.sanity_checking:
            self.validated = logged(trainer)
            self._write(trainer, self.validated)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write what a module of the user's own has logged of the epoch as a whole."""
        if metrics := logged(trainer):
            self._write(trainer, metrics)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the end of the run."""
        self._end(trainer, "done", ending=ending_of(trainer, self.run))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write why the run ended early."""
        LOG.debug("the run ended early", exc_info=exception)
        status = "preempted" if isinstance(exception, KeyboardInterrupt | Stopped) else "failed"
        error = f"{type(exception).__name__}: {exception}"[:2000]
        self._end(trainer, status, error=error, ending=broken_off(exception))

    def _end(self, trainer: L.Trainer, status: str, **more: Any) -> None:
        gc.unfreeze()
        if trainer.is_global_zero and (self.run.path / "run.json").is_file():  # not where the directory has gone
            with (
                suppress(OSError) if "error" in more else nullcontext()
            ):  # a full disk must not hide the error it caused
                self.run.update("run.json", status=status, ended=now_utc(), peak_memory=peak_memory(), **more)

    def _write(self, trainer: L.Trainer, values: dict[str, float]) -> None:
        if trainer.is_global_zero:
            self.run.check_there()
            head = {"step": trainer.global_step, "epoch": trainer.current_epoch, "attempt": self.attempt}
            with self.run.metrics.open("a") as file:
                file.write(json.dumps(head | values) + "\n")


def _drop_later_rows(path: Path, known: int | None) -> None:
    """Cut off the rows of steps that are made again, after ``known`` bytes, and a last row without its end."""
    text = path.read_bytes() if path.is_file() else b""
    whole = text.rfind(b"\n") + 1
    if known is not None and text[:known].endswith(b"\n" if known else b""):  # else somebody has edited the file
        whole = min(whole, known)
    if whole < len(text):
        with path.open("r+b") as file:
            file.truncate(whole)


def _describe_nan(trainer: Any, losses: list[Tensor], norms: list[Tensor | None], batch_idx: int) -> str:
    """Say where the loss first was not a number, and which samples the step had."""
    bad = torch.nonzero(~torch.isfinite(torch.stack(losses)))
    place = int(bad[0]) if len(bad) else 0
    first, norm = batch_idx + 1 - len(losses) + place, norms[place]
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    text = f"the loss is not finite in epoch {trainer.current_epoch + 1}, batch {first + 1}, near step "
    text += f"{trainer.global_step}, lr {lr:.3g}"
    text += f", gradient norm {norm.item():.3g} in the step before" if norm is not None else ""
    order: Any = getattr(trainer.train_dataloader, "sampler", None)
    if hasattr(order, "steps"):
        text += f"; training samples {next(order.steps(first)).indices.tolist()}"
    return text


def peak_memory() -> dict[str, int]:
    """Return the most bytes that this process has held, on the host and on its NVIDIA device."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    return {**peak, "cuda": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else peak


def now_utc() -> str:
    """Return the time in ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
