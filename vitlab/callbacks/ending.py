"""State why a training ended."""

import math
import signal
from datetime import timedelta
from typing import Any

from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from vitlab.errors import Stopped
from vitlab.runs.directory import RunDir
from vitlab.runs.records import Ending


def ending_of(trainer: Any, run: RunDir) -> Ending:
    """Return why a training without errors ended.

    Args:
        trainer: The trainer, after its last step.
        run: The run, whose metrics show when the stopping metric was best.
    """
    total = f" of {trainer.max_epochs}" if trainer.max_epochs >= 0 else ""
    epoch = f"epoch {trainer.current_epoch}{total} was the last"
    if 0 <= trainer.max_steps <= trainer.global_step:
        limit = "fast_dev_run" if trainer.fast_dev_run else "max_steps"
        return {"why": "steps", "text": f"trainer.{limit}={trainer.max_steps}"}
    is_cut = trainer.should_stop and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    if 0 <= trainer.max_epochs <= trainer.current_epoch and not is_cut:
        return {"why": "finished", "text": f"all {trainer.max_epochs} epochs" if trainer.max_epochs > 1 else "1 epoch"}
    for callback in trainer.callbacks:
        if isinstance(callback, EarlyStopping) and callback.stopping_reason is not EarlyStoppingReason.NOT_STOPPED:
            return {"why": "early stop", "text": f"{_stopping_reason(callback, run)}; {epoch}"}
        if isinstance(callback, Timer) and (callback.time_remaining() or 1.0) <= 0:
            after = timedelta(seconds=round(callback.time_elapsed()))
            return {"why": "time", "text": f"{after} have passed; {epoch}"}
    return {"why": "asked for", "text": f"a callback or the module has set trainer.should_stop; {epoch}"}


def _stopping_reason(stop: EarlyStopping, run: RunDir) -> str:
    match stop.stopping_reason:
        case EarlyStoppingReason.NON_FINITE_METRIC:
            return f"{stop.monitor} is not finite"
        case EarlyStoppingReason.STOPPING_THRESHOLD:
            return f"{stop.monitor} has reached {stop.stopping_threshold:g}"
        case EarlyStoppingReason.DIVERGENCE_THRESHOLD:
            return f"{stop.monitor} is beyond {stop.divergence_threshold:g}"
    best = float(stop.best_score)
    since = [row["epoch"] + 1 for row in run.rows() if math.isclose(row.get(stop.monitor, math.nan), best)]
    best_epoch = f" since epoch {since[0]}" if since else ""
    return f"{stop.monitor} has not improved{best_epoch} ({best:.4g}), patience {stop.patience}"


def broken_off(error: BaseException) -> Ending:
    """Return why a training was interrupted."""
    if isinstance(error, KeyboardInterrupt):
        return {"why": "signal", "text": "SIGINT"}
    if isinstance(error, Stopped) and len(error.args) == 1:  # a second argument says what hangs
        return {"why": "signal", "text": signal.Signals(error.args[0]).name}
    what = error.args[1] if isinstance(error, Stopped) else f"{type(error).__name__}: {error}"
    return {"why": "error", "text": " ".join(str(what).split())[:2000]}
