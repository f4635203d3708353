"""Write metrics and status of a run into its directory while it trains."""

import gc
import logging
import math
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, Timer

from vitlab.callbacks.loops import logged, step_of_loggers
from vitlab.callbacks.reasons import broken_off, ending_of, first_not_finite, way_out
from vitlab.callbacks.steps import Speed, Steps, images, means
from vitlab.errors import Diverged, Stopped, UsageError
from vitlab.interface import is_task
from vitlab.layers.precision import unscale
from vitlab.runs.before import forget
from vitlab.runs.directory import RunDir
from vitlab.runs.fence import Fence, Fenced
from vitlab.runs.records import now_utc

LOG = logging.getLogger("vitlab")
PATIENCE = 20  # consecutive batches that may be skipped


class RunRecord(Callback):
    """Append metrics to ``metrics.jsonl``, send them to the loggers, and keep the status in ``run.json``.

    Training metrics are means over ``trainer.log_every_n_steps`` steps and all processes; in between they stay on the
    device.

    Args:
        run: The run directory.
        describe: Function called once the data is set up, which records the facts known before the first step.

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
        self._images = self._seconds = 0.0  # of this epoch, in this attempt
        self._restored = 0.0  # images since the last row before the resume, in all processes
        self._batches = 0  # of this attempt
        self._known_bytes: int | None = 0  # size of metrics.jsonl when the resumed checkpoint was written
        self.validated: dict[str, float] = {}  # validation metrics of this epoch
        self._steps = Steps()
        # Two things of the run before wait until this attempt has something of its own: its configuration, see
        # `settle`, and what `--overwrite` has set aside, which stays there if no row is ever written.
        self.waiting: list[Callable[[], None]] = []
        self._has_a_row = False
        self._lr: float | None = None  # of the last step, if it is logged
        self._skipped = 0  # consecutive skipped batches, counted in whole rows

    def on_fit_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Write the facts of the run."""
        if trainer.world_size > 1:  # whichever process is left at the end writes the last record
            token = trainer.strategy.broadcast(self.run.fence.token if self.run.fence else None)
            self.run.fence = self.run.fence or (token and Fence(self.run.path, token))
        _ = trainer.estimated_stepping_batches  # all processes count them together, and the first writes them down
        if trainer.is_global_zero:
            self.run.check_there()
            self.attempt = self.run.record.get("attempts", 0) + 1
            self.describe(trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Drop the metrics of steps that are repeated, which sharded training only knows now, and start the clocks."""
        if trainer.is_global_zero:
            self.run.drop_later_rows(self._known_bytes, trainer.global_step)
        gc.collect()
        gc.freeze()  # these objects live as long as the run: exclude them from later collections
        self.started = True
        self._start = self._since = self._waiting_since = time.perf_counter()
        self._first_step, self._batches = trainer.global_step, 0
        self._speed = Speed(dict(self.run.model) if trainer.is_global_zero else {}, trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reset the sums of the last epoch; a resume within an epoch does not start it again."""
        self.validated, self.epoch_sums = {}, {}
        self._images = self._seconds = 0.0
        self._since = self._waiting_since = time.perf_counter()  # what was done in between is no training

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Add the time that training has waited for this batch; end if another process has taken over."""
        self._end_if_fenced()
        self._waited += time.perf_counter() - self._waiting_since

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Keep the learning rate of a step that is logged, and measure its gradient norm unless clipping does."""
        self._steps.forget_gradient(pl_module)
        self._lr = None
        batch_idx, step = trainer.fit_loop.epoch_loop.batch_idx, trainer.global_step + 1  # once it is done
        if not self._is_due(trainer, batch_idx, step):
            return
        self._lr = _rate(trainer, pl_module)  # a schedule by step moves on before the batch ends
        if not (trainer.gradient_clip_val and is_task(pl_module)):
            unscale(trainer, optimizer)
            self._steps.measure_gradient(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write a row every ``log_every_n_steps`` and at the end of an epoch."""
        if self.waiting and self.has_stepped(trainer):
            self.settle()
        self._steps.add(pl_module, outputs, batch, batch_idx)
        self._batches += 1
        if self._is_due(trainer, batch_idx, trainer.global_step):
            self._flush(trainer, pl_module, batch_idx)
        self._waiting_since = time.perf_counter()

    def has_stepped(self, trainer: L.Trainer) -> bool:
        """Return whether this attempt has made an optimizer step."""
        return self.started and trainer.global_step > self._first_step

    def settle(self) -> None:
        """Do what waits for the first step: until then, a resumed run keeps the configuration of its weights."""
        waiting, self.waiting = self.waiting, []
        for write in waiting:
            write()

    def seconds_left(self, trainer: Any) -> float:
        """Estimate the seconds until training ends from the mean times so far, validations included.

        It ends at the first of `max_epochs`, `max_steps` and `max_time`; infinite where none of them tells.
        """
        passed, steps = time.perf_counter() - self._start, trainer.global_step - self._first_step
        left = [timer.time_remaining() for timer in trainer.callbacks if isinstance(timer, Timer)]
        if trainer.max_epochs >= 0:
            begun = trainer.fit_loop.epoch_loop.batch_idx + 1  # in this epoch
            batches = (trainer.max_epochs - trainer.current_epoch) * trainer.num_training_batches - begun
            left.append(passed / max(1, self._batches) * batches)
        if trainer.max_steps >= 0:  # a module that optimizes by itself may make several in a batch
            left.append(passed / max(1, steps) * (trainer.max_steps - trainer.global_step))
        return max(0.0, min((seconds for seconds in left if seconds is not None), default=math.inf))

    def epoch_speed(self, trainer: L.Trainer) -> dict[str, float]:
        """Return images per second and utilization over the steps of this epoch; empty before its first row."""
        if not self._seconds:  # an epoch that is resumed after its last step
            return {}
        speed = self._images / self._seconds
        return {"images_per_second": speed, **self._speed.utilization(speed, trainer.current_epoch)}

    def _is_due(self, trainer: Any, batch_idx: int, step: int) -> bool:
        steps = trainer.log_every_n_steps * trainer.accumulate_grad_batches
        ends = trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches  # a loader may have no length
        if (batch_idx + 1) % steps == 0 or ends:
            return True
        return 0 < trainer.max_steps <= step  # -1 is no limit; counting all steps is slow in Lightning

    def _flush(self, trainer: Any, task: Any, batch_idx: int) -> None:
        losses = self._steps.losses
        sums = self._steps.read(task)
        self._skipped = 0 if sums["n"] else self._skipped + len(losses)
        if not math.isfinite(sums.get("loss", 0.0)) or self._skipped >= PATIENCE:
            saved = "the last checkpoint is good" if self.run.has_checkpoint() else "there is no checkpoint so far"
            raise Diverged(f"{first_not_finite(trainer, losses, batch_idx, self._lr)}; {saved}: {way_out(trainer)}")
        now = time.perf_counter()
        for name, value in sums.items():
            self.epoch_sums[name] = self.epoch_sums.get(name, 0.0) + value
        self.row = {f"train/{name}": value for name, value in means(sums).items()} | logged(trainer, on_step=True)
        if self._lr is not None:
            self.row["lr"] = self._lr
        if (norm := self._steps.grad_norm) is not None and norm.isfinite():  # JSON has no others
            self.row["grad_norm"] = norm.item()
        count, seconds = images(sums) - self._restored, now - self._since
        self.row |= {"images_per_second": count / seconds, "data_wait": self._waited / seconds}
        if math.isfinite(left := self.seconds_left(trainer)):
            self.row["seconds_left"] = left
        self.row |= self._speed.utilization(self.row["images_per_second"], trainer.current_epoch)
        self._images, self._seconds = self._images + count, self._seconds + seconds
        self._since, self._waited, self._restored = now, 0.0, 0.0
        self._write(trainer, self.row)
        for logger in trainer.loggers:
            logger.log_metrics(dict(self.row, epoch=trainer.current_epoch), step=step_of_loggers(trainer))

    def state_dict(self) -> dict[str, Any]:
        """Return sums and validation metrics of the epoch so far, and the size of ``metrics.jsonl`` in bytes."""
        size = self.run.metrics.stat().st_size if self.run.metrics.is_file() else 0
        return {"epoch_sums": self.epoch_sums, "validated": self.validated, "metrics_bytes": size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore sums and validation metrics of the epoch, and the size of ``metrics.jsonl``."""
        self.epoch_sums, self.validated = dict(state_dict["epoch_sums"]), dict(state_dict.get("validated", {}))
        self._known_bytes = state_dict.get("metrics_bytes")  # missing in checkpoints of older versions

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the sums since the last row."""
        checkpoint["train_sums"] = self._steps.state(pl_module)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Restore the sums since the last row, and note how many images they are of."""
        sums = checkpoint.get("returned_sums") or checkpoint.get("train_sums", {})  # the first: of steps of the user's,
        self._steps.restore(sums, trainer.is_global_zero)  # in checkpoints written before they were one
        self._restored = images(sums)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Pause the clock of training."""
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the metrics of a validation."""
        self._since += time.perf_counter() - self._paused
        self._waiting_since = time.perf_counter()
        if not trainer.sanity_checking:
            self.validated = logged(trainer)
            self._write(trainer, self.validated)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the last steps of an epoch that is cut, and what a module of the user has logged for it.

        A training that trains nothing ends here.
        """
        self._flush_rest(trainer, pl_module)
        if self.epoch_sums.get("skipped") and not (self.epoch_sums.get("n") or self._steps.gave_loss):
            raise UsageError(
                f"no weight has changed: `{type(pl_module).__name__}.training_step` returned None for every batch of "
                f"epoch {trainer.current_epoch + 1}: return the loss, or set `automatic_optimization = False` if it "
                "makes the steps itself"
            )
        if metrics := logged(trainer):
            self._write(trainer, metrics)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the last steps of a cut epoch anew if the resumed training has made no other ones."""
        self._flush_rest(trainer, pl_module)

    def _flush_rest(self, trainer: Any, task: Any) -> None:
        if self._steps.sums:
            self._flush(trainer, task, trainer.fit_loop.epoch_loop.batch_idx)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write that the run is done, and why it ended."""
        self.settle()
        self._end(trainer, "done", ending=ending_of(trainer, self.run))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write why the run ended early."""
        if isinstance(exception, Fenced):
            return  # its log belongs to another process, too
        LOG.debug("the run ended early", exc_info=exception)
        status = "preempted" if isinstance(exception, KeyboardInterrupt | Stopped) else "failed"
        error = f"{type(exception).__name__}: {exception}"[:2000]
        self._end(trainer, status, error=error, ending=broken_off(exception))

    def on_validation_batch_start(self, *args: Any) -> None:
        """End if another process has taken over."""
        self._end_if_fenced()

    def _end_if_fenced(self) -> None:
        if self.run.fence and self.run.fence.loss:
            raise self.run.fence.loss

    def _end(self, trainer: L.Trainer, status: str, **facts: Any) -> None:
        gc.unfreeze()
        if trainer.is_global_zero and (self.run.fence or (self.run.path / "run.json").is_file()):
            with suppress(OSError) if "error" in facts else nullcontext():  # a full disk must not hide its own error
                self.run.update("run.json", status=status, ended=now_utc(), peak_memory=peak_memory(), **facts)

    def _write(self, trainer: L.Trainer, values: dict[str, float]) -> None:
        if trainer.is_global_zero:
            if not self._has_a_row:
                forget(self.run)
                self._has_a_row = True
            head = {"step": trainer.global_step, "epoch": trainer.current_epoch, "attempt": self.attempt}
            self.run.append_row(head | values | head)  # a module may log a `step`, as an axis for TensorBoard


def _rate(trainer: Any, task: Any) -> float | None:
    """Return the learning rate that follows from `model.lr`: earlier layers, positions and head may have another.

    Of a module of the user, and where a scheduler or an optimizer sets other rates than those of the task's groups, it
    is that of the first group. Without an optimizer, Lightning's has no groups.
    """
    groups = [group for optimizer in trainer.optimizers[:1] for group in optimizer.param_groups]
    peak = task.peak_rate() if is_task(task) else None
    rates = [group["lr"] for group in groups if peak is not None and group.get("initial_lr") == peak]
    moving = [group for group in groups if group.get("initial_lr")]
    if peak is not None and not rates and moving:  # no group has the peak rate
        first, shares = moving[0]["initial_lr"], [one["lr"] / task.hparams["lr"] for one in task.optimizer_groups()]
        if any(math.isclose(first, peak * share) for share in shares):
            return float(peak * (moving[0]["lr"] / first))
    rates = rates or [group["lr"] for group in groups]
    return rates[0] if rates else None


def peak_memory() -> dict[str, int]:
    """Return the peak memory of this process in bytes, on the host and on its NVIDIA GPU."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    return {**peak, "cuda": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else peak
