"""A checkpoint's way from disk and back: to resume from, to be measured, and as weights alone.

It is written by :class:`~vitlab.callbacks.checkpoint.Checkpoint`, under a checksum in the manifest of its folder.
"""

import json
import textwrap
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vitlab.config.parser import user_mistakes
from vitlab.errors import UsageError
from vitlab.interface import network
from vitlab.jobs.train.facts import has_grid
from vitlab.models.weights_file import check_readable, read_weights, weights_digest
from vitlab.runs.atomic import as_umask, atomic_write
from vitlab.runs.directory import RunDir
from vitlab.runs.fence import Fence
from vitlab.runs.format import check_resumable
from vitlab.runs.shards import read_checkpoint
from vitlab.runs.standing import checksum


def checkpoint_to_resume(run: RunDir) -> Path | None:
    """Return the newest intact checkpoint of a run, once it is known that training can go on from it.

    Raises:
        UsageError: There are checkpoints, and none is intact, or it is not of a training.
    """
    checkpoint = run.last_checkpoint()
    if checkpoint:
        with user_mistakes():
            check_readable(checkpoint)
            check_resumable(checkpoint)
    return checkpoint


def checkpoint_facts(path: Path) -> dict[str, Any]:
    """Return what identifies the weights that a result was measured with; a safetensors file names its checkpoint's."""
    if path.suffix == ".safetensors":
        return {"checkpoint": path.name, "sha256": checksum(path)}
    averaged = "averaging_state" in torch.load(path, map_location="meta", weights_only=True, mmap=True)
    return {"checkpoint": path.name, "sha256": checksum(path), "weights": "ema" if averaged else "raw"}


def load_checkpoint(task: Any, checkpoint: Path) -> None:
    """Load the weights of a checkpoint into a module.

    Raises:
        UsageError: The weights do not fit the module.
    """
    try:
        if has_grid(task) or checkpoint.suffix == ".safetensors":
            network(task).load_state_dict(read_weights(checkpoint).state_dict)
        else:  # a module of the user's may have weights outside of its network
            check_readable(checkpoint)
            content = read_checkpoint(checkpoint, map_location="cpu")
            task.load_state_dict(content["state_dict"])
    except RuntimeError as error:
        raise misfit(checkpoint, error) from error


def misfit(checkpoint: Path | None, error: RuntimeError) -> UsageError:
    """Return the message for weights that do not fit the network; re-raise other errors."""
    if "loading state_dict" not in str(error):
        raise error
    differences = textwrap.shorten(str(error).partition("\n")[2], 400, placeholder=" ...")
    return UsageError(
        f"{checkpoint or 'the given object'} does not fit the network of the configuration: {differences}"
    )


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
