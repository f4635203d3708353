"""Close a finished run: write weights and results, print the last lines."""

import math
from typing import Any

from lightning import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from vitlab.data.base import ImageData, protocol_of
from vitlab.errors import trusting
from vitlab.interface import fingerprint, hparams_of
from vitlab.jobs.checkpoint import checkpoint_facts, save_weights
from vitlab.jobs.terminal import say
from vitlab.jobs.train.endings import closing
from vitlab.jobs.train.job import Job, Reached
from vitlab.jobs.train.wandb import SafeWandbLogger
from vitlab.runs.records import metrics_and_n
from vitlab.runs.standing import standing
from vitlab.tables import metrics_text
from vitlab.tasks import Classifier

FAR = 10  # times the loss of guessing, above which a loss has exploded


def log_summary(job: Job, reached: Reached) -> None:
    """Send W&B the best epoch, the reason of the end and, if requested, the checkpoint.

    Results that the summary still shows of weights that have been trained on since become null.
    """
    best, ending = reached.best, reached.ending
    values = {f"best/{k}": v for k, v in best.items() if k not in ("step", "attempt")}
    values |= {"ending": ending["why"] if ending else None}
    for split, result in job.run.stored.items():
        if isinstance(result, dict) and standing(job.run.path, result, "").is_stale:
            names = [f"{split}/{name}" for name in metrics_and_n(result)]
            values |= {name: None for name in (*names, f"{split}/weights") if name not in best}  # those are new
    for logger in job.trainer.loggers:
        if isinstance(logger, SafeWandbLogger):
            logger.log_summary(values)
            if job.keeper and job.run.has_checkpoint():
                logger.keep_checkpoint(job.run.checkpoint(), ["latest", *(["best"] if best else [])], at_end=True)


def close(job: Job, reached: Reached, seconds: float) -> None:
    """Write the weights and results of a finished run, and print them.

    Args:
        job: What was built.
        reached: What its training has reached.
        seconds: How long all of it took.

    Raises:
        RunFailed: They could not be written, as on a full disk.
    """
    with closing(job.run):
        _close(job, reached, seconds)


def _close(job: Job, reached: Reached, seconds: float) -> None:
    ending = reached.ending
    end = f"end   {ending['why']}: {ending['text']}" if ending else ""
    if job.keeper is None or job.config.trainer.fast_dev_run:
        say(end)
        return
    job.run.write("data.json", fingerprint(job.data))  # again, as files may have become unreadable during training
    for name in ("best", "last"):
        if (checkpoint := job.run.checkpoints / f"{name}.ckpt").is_file():
            save_weights(checkpoint, job.run.weights / f"{name}.safetensors", job.task, job.run.fence)
    lines = []
    if reached.best:
        lines.append(f"best {_store_validation(job, reached.best)}")
    elif job.keeper.best_epoch is None and job.keeper.monitor:
        lines.append(_without_best(job, job.keeper.monitor))
    lines += divergence(job)
    minutes, rest = divmod(round(seconds), 60)
    say("\n".join(["", *lines, end]), wrap=True)
    say(f"took  {minutes}:{rest:02}\nrun   {job.run.path}")
    if not job.run.has_checkpoint():
        return
    command = "test" if _has_test(job.data) else "validate"
    say(f"next  {trusting(f'vitlab {command} {job.run.typed}', job.run.path)}")


def _store_validation(job: Job, row: dict[str, Any]) -> str:
    """Store a validation as the run's result, with the weights that it belongs to; return the words about it."""
    values = {k.removeprefix("val/"): v for k, v in row.items() if k not in ("step", "epoch", "attempt")}
    facts = {**checkpoint_facts(job.run.checkpoint()), **protocol_of(job.data), "epoch": row["epoch"]}
    job.run.update("results.json", val={**values, **facts})
    step = "" if job.trainer.val_check_batch == job.trainer.num_training_batches else f", step {row['step']}"
    return f"epoch {row['epoch'] + 1}{step}: {metrics_text(values, 'validation images')}"


def _has_test(data: Any) -> bool:
    """Return whether there are test images, which a column of folds leaves none."""
    if isinstance(data, ImageData):
        return len({**data.splits, **data.held_back}.get("test", ())) > 0
    return type(data).test_dataloader is not LightningDataModule.test_dataloader


def _without_best(job: Job, monitor: str) -> str:
    """Return why there is no best epoch; store the validation of the last step, if any, in place of its own."""
    if seen := [row for row in job.run.rows() if any(name.startswith("val") for name in row)]:
        is_last = seen[-1]["step"] == job.trainer.global_step
        kept = _store_validation(job, seen[-1]) if is_last else "the last epoch"
        return f"no best epoch: no validation has measured {monitor}, `checkpoint.monitor`; kept is {kept}"
    every = job.trainer.check_val_every_n_epoch or 1
    because = f" (trainer.check_val_every_n_epoch={every})" if every > 1 else ""
    return f"never validated{because}; the last epoch is kept"


def divergence(job: Job) -> list[str]:
    """Return a remark if the last loss, of validation if there is one, is far above that of guessing, or the first."""
    rows = job.run.rows()
    name = next((name for name in ("val/loss", "train/loss") if any(name in row for row in rows)), "")
    if not (losses := [row[name] for row in rows if name in row]):
        return []
    guess = _loss_of_guessing(job, name)
    first, what = (losses[0], "the start") if guess is None else (guess, "guessing")
    if losses[-1] <= FAR * max(first, 0.1) and math.isfinite(losses[-1]):
        return []
    lr = hparams_of(job.task).get("lr")
    way_out = f"; model.lr={lr:g} may be too large" if isinstance(lr, int | float) else ""
    return [f"note  the loss exploded: {name} {losses[-1]:.4g} against {first:.3g} of {what}{way_out}"]


def _loss_of_guessing(job: Job, name: str) -> float | None:
    """Return the loss of a network whose logits are all 0; None where that depends on the images or is not known."""
    task, classes = job.task, getattr(job.data, "num_classes", None) or 0
    if not isinstance(task, Classifier):
        return None
    in_training = name == "train/loss"
    decide = ("train_loss", "step_loss", "training_step") if in_training else ("eval_loss", "validation_step")
    is_other = any(is_overridden(method, task, Classifier) for method in decide)
    if is_other or (in_training and task.loss_weights is not None):
        return None
    if task.kind == "multilabel" or (in_training and task.hparams["loss"] == "bce"):
        return math.log(2)  # of each label, whatever their number and the smoothing
    return math.log(classes) if classes > 1 else None
