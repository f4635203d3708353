"""Close a finished run: write weights and results, print the last lines."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vitlab.data.base import ImageData
from vitlab.interface import fingerprint, recipe
from vitlab.jobs.terminal import say
from vitlab.jobs.train.job import Job
from vitlab.jobs.train.wandb import SafeWandbLogger
from vitlab.models.weights_file import weights_digest
from vitlab.runs.directory import as_umask, atomic_write
from vitlab.runs.fence import Fence
from vitlab.runs.shards import read_checkpoint
from vitlab.runs.standing import checksum
from vitlab.tasks import Classifier

FAR = 10  # times the loss of guessing, above which a loss has exploded


def log_summary(job: Job) -> None:
    """Send W&B the best epoch, the reason of the end and, if requested, the checkpoint."""
    best, ending = best_row(job), job.run.record.get("ending")
    values = {f"best/{k}": v for k, v in best.items() if k not in ("step", "attempt")}
    values |= {"ending": ending["why"] if ending else None}
    for logger in job.trainer.loggers:
        if isinstance(logger, SafeWandbLogger):
            logger.log_summary(values)
            if job.keeper and job.run.has_checkpoint():
                logger.keep_checkpoint(job.run.checkpoint(), ["latest", *(["best"] if best else [])], at_end=True)


def best_row(job: Job) -> dict[str, Any]:
    """Return the validation metrics of the best epoch; empty if there is none."""
    keeper = job.keeper
    rows = [row for row in job.run.rows() if keeper and keeper.monitor in row and row["epoch"] == keeper.best_epoch]
    return rows[-1] if rows else {}


def close(job: Job, seconds: float) -> None:
    """Write the weights and results of a finished run, and print them."""
    keeper, ending = job.keeper, job.run.record.get("ending")
    end = f"end   {ending['why']}: {ending['text']}" if ending else ""
    if keeper is None or job.config.trainer.fast_dev_run:
        say(end)
        return
    job.run.write("data.json", fingerprint(job.data))  # again, as files may have become unreadable during training
    for name in ("best", "last"):
        if (job.run.checkpoints / f"{name}.ckpt").is_file():
            save_weights(job.run.checkpoints / f"{name}.ckpt", job.run.weights / f"{name}.safetensors", job.run.fence)
    lines = []
    if best := best_row(job):
        path = job.run.checkpoint()
        values = {k.removeprefix("val/"): v for k, v in best.items() if k not in ("step", "epoch", "attempt")}
        facts = {**checkpoint_facts(path), **protocol_of(job.data), "epoch": keeper.best_epoch}
        job.run.update("results.json", val={**values, **facts})
        lines.append(f"best epoch {best['epoch'] + 1}: {metrics_text(values, 'validation images')}")
    elif keeper.best_epoch is None and keeper.monitor:
        lines.append(_never_validated(job))
    lines += divergence(job)
    minutes, rest = divmod(round(seconds), 60)
    say("\n".join(["", *lines, end, f"took  {minutes}:{rest:02}", f"run   {job.run.path}"]))
    say(f"next  vitlab test {job.run.path}")


def _never_validated(job: Job) -> str:
    """Return why there is no best epoch: in which epoch the first validation would have been, if any."""
    every, epochs = job.trainer.check_val_every_n_epoch, job.trainer.current_epoch
    because = ""
    if every and every > epochs:
        trained = "1 epoch was" if epochs == 1 else f"{epochs} epochs were"
        because = f" (trainer.check_val_every_n_epoch={every}, and {trained} trained)"
    return f"never validated{because}; the last epoch is kept"


def divergence(job: Job) -> list[str]:
    """Return a remark if the last loss, of validation if there is one, is far above that of guessing, or the first."""
    rows = job.run.rows()
    name = next((name for name in ("val/loss", "train/loss") if any(name in row for row in rows)), "")
    if not (losses := [row[name] for row in rows if name in row]):
        return []
    classes = getattr(job.data, "num_classes", 0) if isinstance(job.task, Classifier) else 0
    first, what = (math.log(classes), "guessing") if classes > 1 else (losses[0], "the start")
    if losses[-1] <= FAR * max(first, 0.1) and math.isfinite(losses[-1]):
        return []
    lr = recipe(job.task).get("lr")
    way_out = f"; model.lr={lr:g} may be too large" if isinstance(lr, int | float) else ""
    return [f"note  the loss exploded: {name} {losses[-1]:.4g} against {first:.3g} of {what}{way_out}"]


def metrics_text(values: dict[str, float], images: str) -> str:
    """Return metrics as one line of text."""
    shown = ", ".join(f"{k} {v:.4f}" for k, v in values.items() if k != "n")
    return f"{shown} on {values['n']:.0f} {images}" if "n" in values else shown


def checkpoint_facts(path: Path) -> dict[str, Any]:
    """Return what identifies the weights that a result was measured with."""
    averaged = "averaging_state" in torch.load(path, map_location="meta", weights_only=True, mmap=True)
    return {"checkpoint": path.name, "sha256": checksum(path), "weights": "ema" if averaged else "raw"}


def protocol_of(data: Any) -> dict[str, Any]:
    """Return how the images of a result were prepared; nothing for a data module that is not vitlab's."""
    if not isinstance(data, ImageData):
        return {}
    return {"images": {**data.pipeline.protocol(), "color_profile": data.decoding.color_profile}}


def save_weights(checkpoint: Path, path: Path, fence: Fence | None = None) -> None:
    """Write the network of a checkpoint as safetensors."""
    content = read_checkpoint(checkpoint, map_location="cpu")
    state = content["state_dict"]
    inside = {k.removeprefix("net."): v for k, v in state.items() if k.startswith("net.")} or state
    weights = {k: v.clone(memory_format=torch.contiguous_format) for k, v in inside.items()}  # tied ones apart
    arguments = json.dumps(content.get("hyper_parameters", {}), default=str)
    digests = {"sha256": weights_digest(weights, arguments), "checkpoint": str(checksum(checkpoint))}
    metadata = {"format": "pt", "hyper_parameters": arguments, **digests}
    with atomic_write(path, fence) as beside:
        save_file(weights, beside, metadata=metadata)
        as_umask(beside)
