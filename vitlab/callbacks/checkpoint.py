"""Save checkpoints of a run so that every file is complete at any time."""

import math
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import callbacks

from vitlab import interface
from vitlab.callbacks.draws import Draws
from vitlab.callbacks.ema import follow_swaps, swap_back
from vitlab.callbacks.loops import Loops, ends_with_epoch, logged, of_first, within_step
from vitlab.callbacks.record import RunRecord
from vitlab.errors import Diverged, UsageError, did_you_mean
from vitlab.layers.plain import local_part
from vitlab.ranges import check_ranges
from vitlab.runs.directory import RunDir
from vitlab.runs.format import describe_format
from vitlab.runs.generations import BackgroundCheckpointIO, NotSaved, being_written, rotate, sweep, writing

LOOK = 8  # batches, and the rest of a step, between two checks of the clock, on which processes have to agree


class Checkpoint(callbacks.Checkpoint):
    """Keep ``last.ckpt``, the one before it as ``previous.ckpt``, and that of the best validation as ``best.ckpt``.

    Lightning's ``ModelCheckpoint`` overwrites the only good file. This callback writes a new file, syncs and renames
    it, so every name holds a complete checkpoint whenever the process ends. ``manifest.json`` has their checksums. A
    thread writes from a copy in host memory while training continues. A validation within an epoch, as
    ``trainer.val_check_interval`` asks for, is saved at once if it is the best: later steps change the weights.

    What ends, a step or an epoch, is saved once all of it has ended, as :class:`~vitlab.callbacks.loops.Loops` tell.

    Args:
        monitor: Metric that decides which validation is best; null is that of the task.
        mode: Whether the best validation has the smallest or the largest value; null is the default of the task.
        every_n_epochs: Epochs between two checkpoints; the last epoch is always saved.
        every_n_steps: Steps between two additional checkpoints within an epoch; 0 for none.
        every_minutes: Minutes between two additional checkpoints within an epoch; 0 for none.

    Example:
        >>> checkpoint = Checkpoint(every_minutes=15)
        >>> L.Trainer(callbacks=[checkpoint], logger=False, accelerator="cpu").checkpoint_callback is checkpoint
        True
    """

    def __init__(
        self,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        every_n_epochs: int = 1,
        every_n_steps: int = 0,
        every_minutes: float = 10.0,
    ) -> None:
        intervals = {"every_n_epochs": every_n_epochs, "every_n_steps": every_n_steps, "every_minutes": every_minutes}
        check_ranges("checkpoint", intervals)
        self.monitor = monitor
        self.mode = mode
        self.every_n_epochs = every_n_epochs
        self.every_n_steps, self.every_minutes = every_n_steps, every_minutes
        self.directory = Path("checkpoints")
        self._given: tuple[str | None, Literal["min", "max"] | None] | None = None  # metric and mode, before defaults
        self._forget()

    def _forget(self) -> None:
        """Reset what an earlier training has left, as this object may serve a second one."""
        self.best_score: float | None = None
        self.best_epoch: int | None = None
        self.best_step: int | None = None  # None in older checkpoints, which were saved at the end of an epoch
        self._validated = False  # whether a validation has ended that may be the best
        self.ends_with: BaseException | None = None  # with which the training ends once the present step is saved
        self._looks = (0, 0)  # epoch, and how often LOOK batches had passed in it at the last look at the clock
        self._draws = Draws()
        self._metrics: dict[str, torch.Tensor] = {}  # of the resumed checkpoint, as is the next one
        self._schedules: int | None = None
        self._unsettled: list[str] = []  # names of checkpoints that are still being written

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Fill in the defaults of the task, and the directory of the run."""
        self._given = self._given or (self.monitor, self.mode)
        if stage == "fit":
            self._forget()
            self.monitor, self.mode = self._given
            follow_swaps(trainer)
        interface.take_sizes_early(pl_module, trainer)  # what a task watches may depend on the targets
        self.monitor = self.monitor or (interface.monitor(pl_module) or (None, None))[1]
        self.mode = self.mode or usual_mode(trainer, pl_module, self.monitor)
        records = [callback.run for callback in trainer.callbacks if isinstance(callback, RunRecord)]  # type: ignore[attr-defined]
        self.run = records[0] if records else RunDir(trainer.default_root_dir)
        self.directory = self.run.checkpoints
        self._loops = Loops(trainer, self, self._draws)
        strategy: Any = trainer.strategy
        if type(strategy.checkpoint_io) is TorchCheckpointIO:
            strategy.checkpoint_io = BackgroundCheckpointIO()

    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Start the clock, and restore what Lightning does not: places in its loops, and what the training draws."""
        self._loops.go_on(trainer, self._schedules)
        device = trainer.strategy.root_device
        trainer._logger_connector._callback_metrics |= {name: v.to(device) for name, v in self._metrics.items()}
        self._saved = time.monotonic()
        if trainer.is_global_zero:
            self.run.path.mkdir(parents=True, exist_ok=True)
            self.run.check_there()
            sweep(self.directory)
        self._draws.restore(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add what the training draws, its metrics, and what the checkpoint consists of."""
        data = trainer.datamodule
        named = type(data).__qualname__ if data is not None and data.state_dict() else None  # as Lightning calls it
        counts = len(trainer.optimizers), len(trainer.lr_scheduler_configs)
        checkpoint["vitlab"] = describe_format(*counts, named, [*_trained(pl_module)])
        if not interface.is_task(pl_module):  # a task of vitlab notes it itself, with any trainer
            checkpoint["own"] = interface.own_answer(pl_module)
            checkpoint["network"] = interface.arguments_of_net(pl_module)
        metrics = trainer.callback_metrics.items()  # where no validation follows, others read those of the one before
        checkpoint["metrics"] = {name: value for name, value in metrics if isinstance(value, torch.Tensor)}
        checkpoint |= self._draws.state(trainer)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep draws, metrics and the number of schedules for :meth:`on_train_start`."""
        self._draws.load(checkpoint)
        self._metrics = checkpoint.get("metrics", {})
        self._schedules = len(checkpoint.get("lr_schedulers", ()))

    def batch_ended(self, trainer: Any) -> None:
        """Save what is due within an epoch, and exit on a signal."""
        ends, improved = not within_step(trainer), self._improved(trainer)
        stops = ends and self.ends_with is not None
        is_due = ends and (self._is_due(trainer, trainer.fit_loop.epoch_loop.batch_idx) or improved or stops)
        if names := ["last"] * is_due + ["best"] * improved:
            self.save(trainer, names, is_last=stops)
        if stops and self.ends_with:
            raise self.ends_with

    def epoch_cut(self, trainer: Any) -> None:
        """Save an epoch that is not whole, for a resume that goes on within it."""
        self.save(trainer, ["last"])

    def epoch_ended(self, trainer: Any) -> None:
        """Save an epoch; one that is not due only if it is the best."""
        counts = trainer.fit_loop.epoch_progress.total, trainer.fit_loop.epoch_progress.current
        for count in counts:  # the checkpoint is that of the epoch, and not of the next one
            count.completed -= 1
        is_last = ends_with_epoch(trainer) or trainer.should_stop or self.ends_with is not None
        is_due = is_last or (trainer.current_epoch + 1) % self.every_n_epochs == 0
        try:
            if names := ["last"] * is_due + ["best"] * self._improved(trainer):
                self.save(trainer, names, is_last)
        finally:
            for count in counts:
                count.completed += 1

    def on_validation_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Refuse a metric that does not exist before the first step, not after the first epoch."""
        measured = logged(trainer)  # Lightning leaves `callback_metrics` empty in a sanity check with several loaders
        if self.monitor is None:  # a module of the user without a monitor
            self.monitor = next((name for name in ("val/loss", "val_loss") if name in measured), None)
        monitors = [("checkpoint.monitor", self.monitor)] if self.monitor else []
        if interface.is_task(pl_module):  # other modules may log the metric in training
            monitors += [("monitor` of `EarlyStopping", stop.monitor) for stop in trainer.early_stopping_callbacks]
        for name, metric in monitors if trainer.sanity_checking else ():
            if metric not in measured:
                none = "validation_step logs none in the check that --trainer.num_sanity_val_steps=0 leaves out"
                known = ", ".join(sorted(measured)) or f"nothing: {none}"
                hint = did_you_mean(metric, measured)
                raise UsageError(f"`{name}` must be one of {known}, got {metric}{hint}")
        self.mode = self.mode or usual_mode(trainer, pl_module, self.monitor)
        if self.monitor in measured and self.mode is None:
            raise UsageError(f"`checkpoint.mode` must be min or max, to define the best {self.monitor}")
        self._validated = not trainer.sanity_checking and trainer.state.fn == "fit"

    def state_dict(self) -> dict[str, Any]:
        """Return the best validation so far: its score, epoch and step."""
        return {"best_score": self.best_score, "best_epoch": self.best_epoch, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best validation so far."""
        self.best_score, self.best_epoch = state_dict["best_score"], state_dict["best_epoch"]
        self.best_step = state_dict.get("best_step")

    def _improved(self, trainer: L.Trainer) -> bool:
        validated, self._validated = self._validated, False
        if not validated or self.monitor not in trainer.callback_metrics:
            return False
        score, best = float(of_first(trainer, trainer.callback_metrics[self.monitor])), self.best_score
        if best is None or math.isnan(best):
            is_better = best is None or not math.isnan(score)
        else:
            is_better = score < best if self.mode == "min" else score > best
        if is_better:
            self.best_score, self.best_epoch, self.best_step = score, trainer.current_epoch, trainer.global_step
        return is_better

    def _is_due(self, trainer: L.Trainer, batch_idx: int) -> bool:
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            return True
        looks = (trainer.current_epoch, (batch_idx + 1) // LOOK)
        if self.every_minutes and looks[1] and looks != self._looks:
            self._looks = looks
            late = time.monotonic() - self._saved >= 60 * self.every_minutes
            return trainer.strategy.reduce_boolean_decision(late, all=False) if trainer.world_size > 1 else late
        return False

    def save_between(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Save while waiting for a batch, or during a validation, which is then repeated after resuming.

        Within an accumulated step, nothing is saved: a resume would make it without the batches before.
        """
        if within_step(trainer):
            return
        if trainer.validating:
            swap_back(trainer, pl_module)
            begun = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
            progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
            progress.load_state_dict({"total": begun, "current": begun, "is_last_batch": False})
        self.save(trainer, ["last"])

    def save(self, trainer: L.Trainer, names: list[str], is_last: bool = True) -> None:
        """Write the state of the run once, under each of ``names``; raise NotSaved on all processes if it fails.

        Unless ``is_last``, a thread writes in the background, and the next save waits for it.
        """
        if getattr(trainer, "fast_dev_run", False):
            return
        self.settle(trainer)
        self._saved = time.monotonic()
        if trainer.is_global_zero:
            self.run.check_there()  # writing would recreate the directory, without its configuration
        _check_finite(trainer)
        facts = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        facts |= {"within_step": True} if within_step(trainer) and "last" not in names else {}
        finish = partial(rotate, self.directory, names, facts, fence=self.run.fence)
        if files := self._files(trainer):
            files.finish = finish
        path = self.directory / writing(self.run.fence)
        trainer.save_checkpoint(path, weights_only=False)  # everywhere: some strategies gather
        if not files and trainer.is_global_zero:
            finish()
        self._unsettled = names
        if is_last:
            self.settle(trainer)

    def _files(self, trainer: L.Trainer) -> BackgroundCheckpointIO | None:
        """Return what writes the files, unless the user has given a plugin of another class for it."""
        files = trainer.strategy.checkpoint_io
        return files if isinstance(files, BackgroundCheckpointIO) else None

    def settle(self, trainer: L.Trainer) -> None:
        """Wait until the last save is on disk, and notify the loggers; raise NotSaved on all processes if it failed."""
        names, self._unsettled = self._unsettled, []
        if not names:
            return
        files = self._files(trainer)
        with being_written(self.directory):
            failure = files.wait() if files else None
            if trainer.world_size > 1:
                failure = trainer.strategy.broadcast(failure)
        if failure:
            raise NotSaved(failure)
        for logger in trainer.loggers:
            if hasattr(logger, "keep_checkpoint"):
                aliases = ["latest", *(name for name in names if name == "best")]
                logger.keep_checkpoint(self.directory / f"{names[0]}.ckpt", aliases, at_end=False)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Wait for the checkpoint that is being written, except on Ctrl-C."""
        if (files := self._files(trainer)) and not isinstance(exception, KeyboardInterrupt):
            files.wait()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Wait until all checkpoints are written; say so if there is no best, as its metric was never measured."""
        self.settle(trainer)
        if self.monitor and self.best_score is None and trainer.fit_loop.epoch_loop.val_loop._has_run:
            warnings.warn(f"no checkpoint is the best: no validation has measured {self.monitor}", stacklevel=2)


def usual_mode(trainer: Any, task: Any, metric: str | None) -> Literal["min", "max"] | None:
    """Return how a metric is compared, as far as a callback that measures it or the task says; None if unknown."""
    if any(metric in getattr(callback, "higher_is_better", ()) for callback in trainer.callbacks):
        return "max"
    return interface.mode_of(task, metric)


def _trained(module: L.LightningModule) -> dict[str, torch.Tensor]:
    """Return the parameters that are trained, of this process; a frozen one may be infinite on purpose."""
    return {name: local_part(p.detach()) for name, p in module.named_parameters() if p.requires_grad}


def _check_finite(trainer: L.Trainer) -> None:
    named = {name: value for name, value in _trained(trainer.lightning_module).items() if value.numel()}
    largest = [value.abs().amax().float() for value in named.values()]  # of a complex one, too
    finite = not largest or bool(torch.isfinite(torch.stack(largest)).all())
    if trainer.world_size > 1:  # with sharded weights, only one process may see it
        finite = trainer.strategy.reduce_boolean_decision(finite, all=True)
    if not finite:
        bad = next((name for name, value in named.items() if not torch.isfinite(value).all()), "in another process")
        raise Diverged(f"the weights are not finite (first: {bad}); the last good checkpoint is kept")
