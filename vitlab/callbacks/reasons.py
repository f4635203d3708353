"""Why a training ended, as ``run.json`` has it, or diverged, in words."""

import datetime
import math
from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from torch import Tensor

from vitlab.callbacks.loops import is_cut
from vitlab.errors import Stopped, named_line, one_line, preview
from vitlab.runs.directory import RunDir
from vitlab.runs.records import Ending

_SAMPLES = 8  # of a batch, to name
_NO_BATCH = 2**40  # later than any


def ending_of(trainer: Any, run: RunDir) -> Ending:
    """Return why a training without errors ended.

    Args:
        trainer: The trainer, after its last step.
        run: The run, whose metrics show when the stopping metric was best.
    """
    total = f" of {trainer.max_epochs}" if trainer.max_epochs >= 0 else ""
    epochs = trainer.fit_loop.epoch_progress.current.ready  # begun; `current_epoch` lacks the last after a vain resume
    epoch = f"epoch {epochs}{total} was the last"
    if 0 <= trainer.max_steps <= trainer.global_step:
        limit = "fast_dev_run" if trainer.fast_dev_run else "max_steps"
        return {"why": "steps", "text": f"trainer.{limit}={trainer.max_steps}"}
    if 0 <= trainer.max_epochs <= epochs and not is_cut(trainer):
        names = {0: "no epoch, as trainer.max_epochs=0 asks", 1: "1 epoch"}
        return {"why": "finished", "text": names.get(trainer.max_epochs, f"all {trainer.max_epochs} epochs")}
    for callback in trainer.callbacks:
        if isinstance(callback, EarlyStopping) and callback.stopping_reason is not EarlyStoppingReason.NOT_STOPPED:
            return {"why": "early stop", "text": f"{_stopping_reason(callback, run)}; {epoch}"}
        if isinstance(callback, Timer) and (callback.time_remaining() or 1.0) <= 0:
            after = datetime.timedelta(seconds=round(callback.time_elapsed()))
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
    """Return why a training ended early."""
    if isinstance(error, KeyboardInterrupt):
        return {"why": "signal", "text": "SIGINT"}
    if isinstance(error, Stopped):
        return {"why": "error" if error.reason else "signal", "text": one_line(error, 2000)}
    return {"why": "error", "text": named_line(error, 2000)}


def first_not_finite(
    trainer: Any, losses: dict[int, tuple[Tensor, Tensor | None]], batch_idx: int, lr: float | None
) -> str:
    """Describe the first batch whose loss is not finite, with its learning rate and samples.

    Every process must call it. Each describes its own, and all return the text of the one that is first: its batches
    are not those of others. Where all losses are finite, a gradient is not, which several processes share.
    """
    bad = [batch for batch, (loss, _) in losses.items() if not loss.isfinite()]
    first, world, strategy = (bad or [*losses] or [batch_idx])[0], trainer.world_size, trainer.strategy
    place = torch.tensor((first if bad else _NO_BATCH) * world + trainer.global_rank, device=strategy.root_device)
    process = int(strategy.reduce(place, reduce_op="min")) % world
    whose = f" of process {trainer.global_rank}" if bad and world > 1 else ""
    text = f"the {'loss' if bad else 'gradient'}{whose} is not finite in epoch {trainer.current_epoch + 1}"
    text += f", batch {first + 1}, near step {trainer.global_step}"
    text += f", lr {lr:.3g}" if lr is not None else ""
    norm = losses[first][1] if losses else None
    text += f", gradient norm {norm.item():.3g} in the step before" if norm is not None else ""
    order: Any = getattr(trainer.train_dataloader, "sampler", None)
    if hasattr(order, "steps") and (bad or world == 1):
        samples = next(order.steps(first)).indices.tolist()
        text += f"; training samples {preview(samples, _SAMPLES)}"
    told: str = strategy.broadcast(text, process)
    return told


def way_out(trainer: Any) -> str:
    """Return what may keep the loss finite: with weights of 16 bits, which may round `eps` to 0, a larger one."""
    for group in (group for optimizer in trainer.optimizers for group in optimizer.param_groups):
        eps, dtype = group.get("eps"), next((p.dtype for p in group["params"]), torch.float32)
        if isinstance(eps, float) and eps > 0 and not torch.tensor(eps, dtype=dtype):
            of = str(dtype).removeprefix("torch.")
            return f"set `model.opt.eps` to 1e-4, as {of} rounds {eps:g} to 0, or train in bf16-true or 16-mixed"
    return "lower `model.lr`, or raise `model.warmup_epochs`"
