"""Lightning's loops: where a training is in them, and what they do otherwise than in Lightning.

A training that stops after any step or epoch, or within a validation, goes on from there as if it had not stopped.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from lightning.pytorch import callbacks
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from torch.optim.lr_scheduler import LambdaLR

from vitlab.callbacks.draws import Draws
from vitlab.errors import UsageError, did_you_mean
from vitlab.runs.directory import RunDir

NOT_STOPPED = EarlyStoppingReason.NOT_STOPPED


class Keeper(Protocol):
    """What :class:`Loops` tell the callback that saves, see :class:`~vitlab.callbacks.checkpoint.Checkpoint`."""

    run: RunDir
    ends_with: BaseException | None  # with which the training ends once the present step is saved

    def batch_ended(self, trainer: Any) -> None:
        """A batch within an epoch has ended, with its validation."""

    def epoch_cut(self, trainer: Any) -> None:
        """The epoch ends before its last batch, and its hooks run now."""

    def epoch_ended(self, trainer: Any) -> None:
        """An epoch has ended, with all its hooks."""


class Loops:
    """The loops of a training, which tell the keeper when a batch or an epoch has ended.

    Lightning calls a callback before the module's own hook, and updates schedules that wait for a plateau after both.
    So its methods are wrapped, each by one that says what it does otherwise.

    Args:
        trainer: The trainer.
        keeper: The callback that saves.
        draws: What the training draws.
    """

    def __init__(self, trainer: Any, keeper: Keeper, draws: Draws) -> None:
        self.keeper, self.draws = keeper, draws
        self._stops = False  # a callback has stopped the training within an accumulated step
        self._max_steps: int | None = None  # limit that waits for a repeated validation
        loop = trainer.fit_loop
        # With `max_steps`, Lightning resumes at the end of an epoch with an epoch of no batches, and then draws the
        # samples of the epoch after the next.
        loop._iteration_based_training = lambda: False
        loop.run, loop.epoch_loop.val_loop.run = partial(self._run, trainer), partial(self._validate, trainer)
        loop.epoch_loop.on_advance_end = partial(self._end_batch, trainer)
        loop.epoch_loop._get_monitor_value = partial(_monitored, trainer)
        loop.on_advance_end = partial(self._end_epoch, trainer)
        for stop in trainer.early_stopping_callbacks:
            stop._run_early_stopping_check = partial(self._check_stop, stop)
        _keep_whole_epochs(trainer.checkpoint_callbacks)
        if trainer.precision == "64-true":  # Lightning converts the weights once it has loaded them, rounded to 32 bits
            trainer.strategy.load_model_state_dict = partial(_load_double, trainer.strategy)

    def go_on(self, trainer: Any, schedules: int | None) -> None:
        """Restore what Lightning does not, or only where an epoch begins.

        Args:
            trainer: The trainer, whose first batch comes next.
            schedules: Number of learning-rate schedules in the resumed checkpoint; None if there is none.

        Raises:
            UsageError: This training has another number of schedules.
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
        if schedules is None:
            return
        for config in trainer.lr_scheduler_configs:
            _follow_schedule(config.scheduler)
        if schedules != (ours := len(trainer.lr_scheduler_configs)):
            raise UsageError(f"the checkpoint has {schedules} learning-rate schedules, and this training has {ours}")

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
        with self.draws.repeated(trainer):
            return type(loop).run(loop)

    def _end_batch(self, trainer: Any, fetcher: Any) -> None:
        """Let Lightning end a batch, with its validation, and tell the keeper unless the end of the epoch follows.

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
        if not loop._num_ready_batches_reached():
            self.keeper.batch_ended(trainer)

    def _hold_stop(self, trainer: Any) -> None:
        """Take back a stop within an accumulated step, and give it at its end."""
        if within_step(trainer):
            self._stops, trainer.should_stop = self._stops or trainer.should_stop, False
        elif self._stops:
            self._stops, trainer.should_stop = False, True

    def _end_epoch(self, trainer: Any) -> None:
        """Let Lightning end an epoch, and tell the keeper: of one that is cut, as by `max_steps`, before its hooks run.

        A resume goes on with its next batch, and ends it as if nothing had ended it before.
        """
        loop = trainer.fit_loop
        loop._restarting = False  # else an epoch that was resumed within updates no schedule that waits for a plateau
        if was_cut := is_cut(trainer):
            self.keeper.epoch_cut(trainer)
        type(loop).on_advance_end(loop)
        if not was_cut:
            self.keeper.epoch_ended(trainer)
        if self.keeper.ends_with:
            raise self.keeper.ends_with

    def _check_stop(self, stop: Any, trainer: Any) -> None:
        """Let EarlyStopping read its metric, but not where an epoch is cut: a resume does at its end.

        Where the metric was never measured, the training ends once it is saved.
        """
        if not trainer.validating and is_cut(trainer):
            return
        if stop.strict and stop.monitor not in trainer.callback_metrics and not trainer.fast_dev_run:
            known = sorted(trainer.callback_metrics)
            self.keeper.ends_with = RuntimeError(
                f"`EarlyStopping` is conditioned on metric {stop.monitor}, its `monitor`, and measured so far are "
                f"{', '.join(known) or 'none'}; all steps are saved, for a run with --init_from {self.keeper.run.typed}"
                f"{did_you_mean(stop.monitor, known)}"
            )
            return
        type(stop)._run_early_stopping_check(stop, trainer)


def _keep_whole_epochs(keepers: Sequence[Any]) -> None:
    """Let each ModelCheckpoint with a monitor keep no epoch that is cut, whose weights no validation has measured."""

    def saves(keeper: Any, trainer: Any) -> bool:
        return not is_cut(trainer) and bool(type(keeper)._should_save_on_train_epoch_end(keeper, trainer))

    for keeper in keepers:
        if isinstance(keeper, callbacks.ModelCheckpoint) and keeper.monitor:
            keeper._should_save_on_train_epoch_end = partial(saves, keeper)  # type: ignore[method-assign]


def of_first(trainer: Any, value: Any) -> Any:
    """Return what the first process has measured, by which all of them decide: a module may log that of each."""
    if trainer.world_size == 1:
        return value
    return trainer.strategy.broadcast(value if value is None else float(value))


def _monitored(trainer: Any, metric: str) -> Any:
    """Return the metric that a schedule waits for: with rates of its own, each process would train other weights."""
    return of_first(trainer, trainer.callback_metrics.get(metric))


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


def within_step(trainer: Any) -> bool:
    """Return whether batches wait for the rest of their accumulated step: no checkpoint has their gradient."""
    return bool(trainer.fit_loop._should_accumulate())


def _has_made_max_steps(trainer: Any) -> bool:
    return bool(0 < trainer.max_steps <= trainer.global_step)  # -1 is no limit


def ends_with_epoch(trainer: Any) -> bool:
    """Return whether the present epoch is the last that `max_epochs` or `max_steps` allow."""
    return trainer.current_epoch + 1 == trainer.max_epochs or _has_made_max_steps(trainer)


def is_cut(trainer: Any) -> bool:
    """Return whether `max_steps`, or a callback that stops the training, ends it within the present epoch."""
    ends = trainer.should_stop or _has_made_max_steps(trainer)
    return bool(ends and not trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def is_due(trainer: Any, every: int) -> bool:
    """Return whether a validation is the first at or after a multiple of ``every`` epochs.

    Validations may lie within epochs, and not every epoch has one: ``trainer.check_val_every_n_epoch`` may be above 1,
    or null, which counts batches across epochs. The answer depends on the place in the training alone, so a resumed one
    gets the same.
    """
    epoch, batches, between = trainer.current_epoch, trainer.num_training_batches, trainer.val_check_batch
    apart, loop = trainer.check_val_every_n_epoch, trainer.fit_loop.epoch_loop
    if between is None or not math.isfinite(between + batches):  # a clock decides, or an epoch's length is unknown
        done, before, period = epoch + 1, epoch + 1 - (apart or 1), every
    else:
        done = 1 + (loop.total_batch_idx if apart is None else epoch * batches + loop.batch_idx)
        before, period = done - between, every * batches
        if apart is not None and before <= epoch * batches:  # the first of its epoch
            before = (epoch - apart) * batches + batches // between * between
    return bool(done // period > max(0, before) // period)


def is_last(trainer: Any) -> bool:
    """Return whether a validation is the last that `max_epochs` or `max_steps` allow."""
    left = trainer.num_training_batches - trainer.fit_loop.epoch_loop.batch_idx - 1  # in this epoch
    another = math.isfinite(left) and left >= (trainer.val_check_batch or math.inf)
    return ends_with_epoch(trainer) and (_has_made_max_steps(trainer) or not another)


def step_of_loggers(trainer: Any) -> int:
    """Return the step at which Lightning logs what is measured now: the steps before the present one."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def logged(trainer: Any, on_step: bool = False) -> dict[str, float]:
    """Return the metrics that the current loop has logged, for all its loaders, without those of other loops."""
    metrics: dict[str, Any] = {}
    if (results := trainer._results) is None:
        return {}
    current = results.dataloader_idx
    for index in dict.fromkeys(item.meta.dataloader_idx for item in results.values()):
        results.dataloader_idx = index
        metrics |= results.metrics(on_step)["callback"]
        results.dataloader_idx = current
    return {name: float(value) for name, value in metrics.items()}
