"""Which states of a run are kept, and how they reach the disk whole."""

import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import callbacks
from torch.distributed.tensor import DTensor

from vitlab import contract
from vitlab.errors import UsageError
from vitlab.ranges import check_ranges
from vitlab.runs.directory import RunDir
from vitlab.runs.generations import WRITING, BackgroundCheckpointIO, NotSaved, rotate, sweep

LOOK = 8  # batches between two looks at the clock, about which processes have to agree


class Checkpoint(callbacks.Checkpoint):
    """Keep ``last.ckpt``, the one before it as ``previous.ckpt`` and, of the best epoch, ``best.ckpt``.

    Lightning's ``ModelCheckpoint`` writes over the only good file; this one writes beside it, syncs and renames, so
    that every name holds a whole checkpoint whenever the process ends. ``manifest.json`` holds their checksums. A
    thread writes, from a copy in the host's memory, while training goes on.

    Args:
        monitor: Metric that tells which epoch is the best; null takes the task's own.
        mode: Whether the best epoch has the smallest or the largest value; null takes the task's own.
        every_n_epochs: Epochs between two checkpoints; the last epoch is always kept.
        every_n_steps: Steps between two more checkpoints in the middle of an epoch; 0 for none.
        every_minutes: Minutes between two more checkpoints in the middle of an epoch; 0 for none.

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
        every = {"every_n_epochs": every_n_epochs, "every_n_steps": every_n_steps, "every_minutes": every_minutes}
        check_ranges("checkpoint", every)
        self.monitor = monitor
        self.mode = mode
        self.every_n_epochs = every_n_epochs
        self.every_n_steps, self.every_minutes = every_n_steps, every_minutes
        self.best_score: float | None = None
        self.best_epoch: int | None = None
        self.directory = Path("checkpoints")
        self._loader_state: dict[str, Any] | None = None
        self._unsettled: list[str] = []  # the names of what is still being written

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Fill in the task's own choice and the place of the run."""
        self.monitor = self.monitor or (contract.monitor(pl_module) or (None, None))[1]
        self.mode = self.mode or contract.better(pl_module, self.monitor)
        self.run = RunDir(trainer.default_root_dir)
        self.directory = self.run.checkpoints
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = BackgroundCheckpointIO()

    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Start the clock, and continue the epoch at the batch where it was left.

        Lightning hands loaders their state back too early when the schedule has asked for the number of steps.
        """
        self._saved = time.monotonic()
        if trainer.is_global_zero:
            self.run.path.mkdir(parents=True, exist_ok=True)
            self.run.check_there()
            sweep(self.directory)
        if self._loader_state is not None and hasattr(trainer.train_dataloader, "load_state_dict"):
            trainer.train_dataloader.load_state_dict(self._loader_state)
        self._loader_state = None

    def on_save_checkpoint(self, trainer: Any, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add where the training loader is."""
        if hasattr(trainer.train_dataloader, "state_dict"):
            checkpoint["train_loader"] = trainer.train_dataloader.state_dict()

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep where the training loader was."""
        self._loader_state = checkpoint.get("train_loader")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save in the middle of an epoch if it is time; never after its last batch, before its validation."""
        between_steps = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if batch_idx + 1 < trainer.num_training_batches and between_steps and self._is_due(trainer, batch_idx):
            self.save(trainer, ["last"], is_last=False)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save after the epoch's validation, when the epoch is complete."""
        is_last = trainer.current_epoch + 1 == trainer.max_epochs or trainer.should_stop
        if is_last or (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self.save_epoch(trainer, is_last)

    def save_epoch(self, trainer: L.Trainer, is_last: bool = True) -> None:
        """Save a complete epoch, and remember it if it is the best so far."""
        improved = self._improved(trainer)
        if improved:
            self.best_epoch = trainer.current_epoch
        self.save(trainer, ["last", "best"] if improved else ["last"], is_last)

    def on_validation_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Refuse a metric that does not exist before the first step, not after the first epoch."""
        if self.monitor is None:  # a module of the user's own that does not say what to go by
            self.monitor = next((name for name in ("val/loss", "val_loss") if name in trainer.callback_metrics), None)
        asked = [("checkpoint.monitor", self.monitor)] if self.monitor else []
        if contract.sums_its_steps(pl_module):  # else it may log the metric in training
            asked += [("monitor` of `EarlyStopping", stop.monitor) for stop in trainer.early_stopping_callbacks]
        for name, metric in asked if trainer.sanity_checking else ():
            if metric not in trainer.callback_metrics:
                known = ", ".join(sorted(trainer.callback_metrics)) or "nothing: validation_step logs none"
                raise UsageError(f"`{name}` must be one of {known}, got {metric}")
        self.mode = self.mode or contract.better(pl_module, self.monitor)
        if self.monitor in trainer.callback_metrics and self.mode is None:
            raise UsageError(f"`checkpoint.mode` must say whether the best {self.monitor} is its min or its max")

    def state_dict(self) -> dict[str, Any]:
        """Return the best epoch so far."""
        return {"best_score": self.best_score, "best_epoch": self.best_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the best epoch so far."""
        self.best_score, self.best_epoch = state_dict["best_score"], state_dict["best_epoch"]

    def _improved(self, trainer: L.Trainer) -> bool:
        if self.monitor not in trainer.callback_metrics:
            return False  # no validation so far: there is a last state, and no best
        score = float(trainer.callback_metrics[self.monitor])
        if self.best_score is None or (score < self.best_score if self.mode == "min" else score > self.best_score):
            self.best_score = score
            return True
        return False

    def _is_due(self, trainer: L.Trainer, batch_idx: int) -> bool:
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            return True
        if self.every_minutes and batch_idx % LOOK == LOOK - 1:
            late = time.monotonic() - self._saved >= 60 * self.every_minutes
            return trainer.strategy.reduce_boolean_decision(late, all=False) if trainer.world_size > 1 else late
        return False

    def save_between(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Save while the next batch is waited for, or in a validation, which is then to be made anew."""
        if trainer.validating:
            for callback in trainer.callbacks:
                if isinstance(
                    callback, callbacks.WeightAveraging
                ):  # it has put the average in the place of the weights
                    callback.on_validation_epoch_end(trainer, pl_module)
            begun = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
            progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
            progress.load_state_dict({"total": begun, "current": begun, "is_last_batch": False})
        self.save(trainer, ["last"])

    def save(self, trainer: L.Trainer, names: list[str], is_last: bool = True) -> None:
        """Write the state of the run once, under each of ``names``; on every process, or on none, NotSaved.

        What is not the last goes on being written in the background, and is waited for before the next.
        """
        if getattr(trainer, "fast_dev_run", False):
            return
        self.settle(trainer)
        self._saved = time.monotonic()
        if trainer.is_global_zero:
            self.run.check_there()  # or writing would make it anew, without its configuration
        _check_finite(trainer)
        finish = partial(rotate, self.directory, names, {"epoch": trainer.current_epoch, "step": trainer.global_step})
        files = trainer.strategy.checkpoint_io
        if isinstance(files, BackgroundCheckpointIO):
            files.finish = finish
        trainer.save_checkpoint(self.directory / WRITING, weights_only=False)  # everywhere: some strategies gather
        if not isinstance(files, BackgroundCheckpointIO) and trainer.is_global_zero:
            finish()
        self._unsettled = names
        if is_last:
            self.settle(trainer)

    def settle(self, trainer: L.Trainer) -> None:
        """Wait until what was saved is on the disk, and tell the loggers; NotSaved on all processes if it is not."""
        names, self._unsettled = self._unsettled, []
        if not names:
            return
        files = trainer.strategy.checkpoint_io
        failure = files.wait() if isinstance(files, BackgroundCheckpointIO) else None
        if trainer.world_size > 1:
            failure = trainer.strategy.broadcast(failure)
        if failure:
            raise NotSaved(failure)
        for logger in trainer.loggers:
            if hasattr(logger, "keep_checkpoint"):
                aliases = ["latest", *(name for name in names if name == "best")]
                logger.keep_checkpoint(self.directory / f"{names[0]}.ckpt", aliases, at_end=False)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Let what is being written come to its end, unless the user has no time."""
        if isinstance(trainer.strategy.checkpoint_io, BackgroundCheckpointIO) and not isinstance(
            exception, KeyboardInterrupt
        ):
            trainer.strategy.checkpoint_io.wait()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Wait for what is being written: nothing may be left to write when the trainer returns."""
        self.settle(trainer)


def _check_finite(trainer: L.Trainer) -> None:
    named = {name: _local(p.detach()) for name, p in trainer.lightning_module.named_parameters()}
    named = {name: value for name, value in named.items() if value.numel()}
    largest = torch.stack([value.float().abs().amax() for value in named.values()])
    fine = bool(torch.isfinite(largest).all())
    if trainer.world_size > 1:  # where weights are sharded, one process may be the only one to know
        fine = trainer.strategy.reduce_boolean_decision(fine, all=True)
    if not fine:
        bad = next((name for name, value in named.items() if not torch.isfinite(value).all()), "in another process")
        raise FloatingPointError(f"the weights are not finite (first: {bad}); the last good checkpoint is kept")


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
