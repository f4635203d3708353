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
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from torch.optim.lr_scheduler import LambdaLR

from vitlab import interface
from vitlab.callbacks.draws import Draws
from vitlab.callbacks.ema import follow_swaps, swap_back
from vitlab.callbacks.record import RunRecord
from vitlab.callbacks.steps import ends_with_epoch, is_cut, keep_whole_epochs, logged
from vitlab.errors import Diverged, UsageError, did_you_mean
from vitlab.layers.plain import local_part
from vitlab.ranges import check_ranges
from vitlab.runs.directory import RunDir
from vitlab.runs.format import describe_format
from vitlab.runs.generations import BackgroundCheckpointIO, NotSaved, rotate, sweep, writing

NOT_STOPPED = EarlyStoppingReason.NOT_STOPPED
LOOK = 8  # batches, and the rest of a step, between two checks of the clock, on which processes have to agree


class Checkpoint(callbacks.Checkpoint):
    """Keep ``last.ckpt``, the one before it as ``previous.ckpt``, and that of the best validation as ``best.ckpt``.

    Lightning's ``ModelCheckpoint`` overwrites the only good file. This callback writes a new file, syncs and renames
    it, so every name holds a complete checkpoint whenever the process ends. ``manifest.json`` has their checksums. A
    thread writes from a copy in host memory while training continues. A validation within an epoch, as
    ``trainer.val_check_interval`` asks for, is saved at once if it is the best: later steps change the weights.

    What ends, a step or an epoch, is saved once all of it has ended: Lightning calls a callback before the module's own
    hook, and updates schedules that wait for a plateau after both.

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
        self._stops = False  # a callback has stopped the training within an accumulated step
        self._looks = (0, 0)  # epoch, and how often LOOK batches had passed in it at the last look at the clock
        self._max_steps: int | None = None  # limit that waits for a repeated validation
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
        loop: Any = trainer.fit_loop
        # With `max_steps`, Lightning resumes at the end of an epoch with an epoch of no batches, and then draws the
        # samples of the epoch after the next.
        loop._iteration_based_training = lambda: False
        loop.run, loop.epoch_loop.val_loop.run = partial(self._run, trainer), partial(self._validate, trainer)
        loop.epoch_loop.on_advance_end = partial(self._end_batch, trainer)
        loop.on_advance_end = partial(self._end_epoch, trainer)
        stops: list[Any] = trainer.early_stopping_callbacks
        for stop in stops:
            stop._run_early_stopping_check = partial(self._check_stop, stop)
        keep_whole_epochs(trainer.checkpoint_callbacks)
        strategy: Any = trainer.strategy
        if trainer.precision == "64-true":  # Lightning converts the weights once it has loaded them, rounded to 32 bits
            strategy.load_model_state_dict = partial(_load_double, strategy)
        if type(strategy.checkpoint_io) is TorchCheckpointIO:
            strategy.checkpoint_io = BackgroundCheckpointIO()

    def _run(self, trainer: Any) -> None:
        """Run Lightning's loop, which repeats an interrupted validation, but no other.

        It would be done before that where a resumed training has made `max_steps`: this limit waits. Once it has
        repeated one, its total count would call each later validation of the epoch interrupted, too.
        """
        loop = trainer.fit_loop.epoch_loop
        progress = loop.val_loop.batch_progress
        if progress.current.processed == progress.current.started:
            progress.total.reset_on_restart()
        elif loop.restarting and 0 < loop.max_steps <= loop.global_step:
            self._max_steps, loop.max_steps = loop.max_steps, -1
        type(trainer.fit_loop).run(trainer.fit_loop)

    def _limit_steps(self, trainer: Any) -> None:
        """Set the limit of steps again, if :meth:`_run` has lifted it."""
        if self._max_steps is not None:
            trainer.fit_loop.epoch_loop.max_steps, self._max_steps = self._max_steps, None

    def _validate(self, trainer: Any) -> Any:
        """Run Lightning's validation, which a resume from what is saved within repeats."""
        loop = trainer.fit_loop.epoch_loop.val_loop
        self._limit_steps(trainer)
        with self._draws.repeated(trainer):
            return type(loop).run(loop)

    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Start the clock, and restore what the training draws, and how many batches a step accumulates.

        Lightning restores the latter only where an epoch begins.
        """
        for callback in trainer.callbacks:
            if isinstance(callback, callbacks.GradientAccumulationScheduler):
                callback.on_train_epoch_start(trainer)
            if isinstance(callback, callbacks.EarlyStopping) and callback.stopping_reason is not NOT_STOPPED:
                trainer.should_stop = True  # it had stopped before the resume; Lightning would go on
        loop = trainer.fit_loop
        if loop.epoch_loop.val_loop.restarted_mid_evaluation:
            trainer._last_val_time = -math.inf  # where a clock decides, the validation is due again
        if trainer.should_stop or not loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
            self._limit_steps(trainer)  # none is repeated
        if self._schedules is not None:
            for config in trainer.lr_scheduler_configs:
                _follow_schedule(config.scheduler)
        if self._schedules not in (None, len(trainer.lr_scheduler_configs)):
            ours = len(trainer.lr_scheduler_configs)
            raise UsageError(
                f"the checkpoint has {self._schedules} learning-rate schedules, and this training has {ours}"
            )
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

    def _end_batch(self, trainer: Any, fetcher: Any) -> None:
        """Let Lightning end a batch, with its validation; then save what is due within an epoch, and exit on a signal.

        A callback such as Lightning's Timer or EarlyStopping that stops the training within an accumulated step does so
        at its end.
        """
        loop = trainer.fit_loop.epoch_loop
        if loop._skip_next_val:  # the resumed checkpoint was saved after this
            loop._skip_next_val = False
            return
        self._hold_stop(trainer)
        type(loop).on_advance_end(loop, fetcher)
        self._hold_stop(trainer)  # that of a validation, such as early stopping
        if loop._num_ready_batches_reached():
            return  # the end of the epoch saves
        ends, improved = not within_step(trainer), self._improved(trainer)
        stops = ends and self.ends_with is not None
        is_due = ends and (self._is_due(trainer, loop.batch_idx) or improved or stops)
        if names := ["last"] * is_due + ["best"] * improved:
            self.save(trainer, names, is_last=stops)
        if stops and self.ends_with:
            raise self.ends_with

    def _hold_stop(self, trainer: Any) -> None:
        """Take back a stop within an accumulated step, and give it at its end."""
        if within_step(trainer):
            self._stops, trainer.should_stop = self._stops or trainer.should_stop, False
        elif self._stops:
            self._stops, trainer.should_stop = False, True

    def _end_epoch(self, trainer: Any) -> None:
        """Let Lightning end an epoch; then save it, and exit on a signal.

        One that is not due is saved only if it is the best. One that is cut, as by `max_steps`, is saved before its
        hooks run: a resume goes on with its next batch, and ends it as if nothing had ended it before.
        """
        loop = trainer.fit_loop
        loop._restarting = False  # else an epoch that was resumed within updates no schedule that waits for a plateau
        if was_cut := is_cut(trainer):
            self.save(trainer, ["last"])
        type(loop).on_advance_end(loop)
        if not was_cut:
            self._save_epoch(trainer)
        if self.ends_with:
            raise self.ends_with

    def _save_epoch(self, trainer: Any) -> None:
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

    def _check_stop(self, stop: Any, trainer: Any) -> None:
        """Let EarlyStopping read its metric, but not where an epoch is cut: a resume does at its end.

        Where the metric was never measured, the training ends once it is saved.
        """
        if not trainer.validating and is_cut(trainer):
            return
        if stop.strict and stop.monitor not in trainer.callback_metrics and not trainer.fast_dev_run:
            known = sorted(trainer.callback_metrics)
            self.ends_with = RuntimeError(
                f"`EarlyStopping` is conditioned on metric {stop.monitor}, its `monitor`, and measured so far are "
                f"{', '.join(known) or 'none'}; all steps are saved, for a run with --init_from {self.run.typed}"
                f"{did_you_mean(stop.monitor, known)}"
            )
            return
        type(stop)._run_early_stopping_check(stop, trainer)

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
        score, best = float(trainer.callback_metrics[self.monitor]), self.best_score
        if trainer.world_size > 1:  # a module of the user's may log that of each process: all save together
            score = trainer.strategy.broadcast(score)
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
        files = trainer.strategy.checkpoint_io
        if isinstance(files, BackgroundCheckpointIO):
            files.finish = finish
        trainer.save_checkpoint(
            self.directory / writing(self.run.fence), weights_only=False
        )  # everywhere: some strategies gather
        if not isinstance(files, BackgroundCheckpointIO) and trainer.is_global_zero:
            finish()
        self._unsettled = names
        if is_last:
            self.settle(trainer)

    def settle(self, trainer: L.Trainer) -> None:
        """Wait until the last save is on disk, and notify the loggers; raise NotSaved on all processes if it failed."""
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
        """Wait for the checkpoint that is being written, except on Ctrl-C."""
        if isinstance(trainer.strategy.checkpoint_io, BackgroundCheckpointIO) and not isinstance(
            exception, KeyboardInterrupt
        ):
            trainer.strategy.checkpoint_io.wait()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Wait until all checkpoints are written; say so if there is no best, as its metric was never measured."""
        self.settle(trainer)
        if self.monitor and self.best_score is None and trainer.fit_loop.epoch_loop.val_loop._has_run:
            warnings.warn(f"no checkpoint is the best: no validation has measured {self.monitor}", stacklevel=2)


def _load_double(strategy: Any, *given: Any, **options: Any) -> None:
    strategy.lightning_module.double()
    type(strategy).load_model_state_dict(strategy, *given, **options)


def _follow_schedule(scheduler: Any) -> None:
    """Give a resumed training the learning rates of its own schedule; a longer one has others at the same step."""
    if type(scheduler) is LambdaLR:
        for group, base, factor in zip(
            scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(scheduler.last_epoch)


def usual_mode(trainer: Any, task: Any, metric: str | None) -> Literal["min", "max"] | None:
    """Return how a metric is compared, as far as a callback that measures it or the task says; None if unknown."""
    if any(metric in getattr(callback, "higher_is_better", ()) for callback in trainer.callbacks):
        return "max"
    return interface.mode_of(task, metric)


def within_step(trainer: Any) -> bool:
    """Return whether batches wait for the rest of their accumulated step: no checkpoint has their gradient."""
    return bool(trainer.fit_loop._should_accumulate())


def _trained(module: L.LightningModule) -> dict[str, torch.Tensor]:
    """Return the parameters that are trained, of this process; a frozen one may be infinite on purpose."""
    return {name: local_part(p.detach()) for name, p in module.named_parameters() if p.requires_grad}


def _check_finite(trainer: L.Trainer) -> None:
    named = {name: value for name, value in _trained(trainer.lightning_module).items() if value.numel()}
    largest = [value.float().abs().amax() for value in named.values()]
    finite = not largest or bool(torch.isfinite(torch.stack(largest)).all())
    if trainer.world_size > 1:  # with sharded weights, only one process may see it
        finite = trainer.strategy.reduce_boolean_decision(finite, all=True)
    if not finite:
        bad = next((name for name, value in named.items() if not torch.isfinite(value).all()), "in another process")
        raise Diverged(f"the weights are not finite (first: {bad}); the last good checkpoint is kept")
