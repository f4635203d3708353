"""A checkpoint's way from disk and back: to resume from, to be measured, and as weights alone.

It is written by :class:`~vitlab.callbacks.checkpoint.Checkpoint`, under a checksum in the manifest of its folder.
"""

import json
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from safetensors.torch import save_file

from vitlab.config.explain import user_mistakes
from vitlab.errors import UsageError
from vitlab.interface import has_grid, network, own_answer, path_of, redefines
from vitlab.layers.resample import ResizePolicy
from vitlab.models.create import stated_classes
from vitlab.models.load import NEW_HEAD, load_weights
from vitlab.models.weights_file import check_readable, facts_beside, read_content, read_weights, weights_digest
from vitlab.runs.atomic import as_umask, atomic_write
from vitlab.runs.directory import RunDir
from vitlab.runs.fence import Fence
from vitlab.runs.format import read_resumable
from vitlab.runs.shards import read_checkpoint
from vitlab.runs.standing import checksum
from vitlab.shipped import LIBRARIES, find_weights
from vitlab.tasks.regressor import refuse_own_units


def checkpoint_to_resume(run: RunDir) -> Path | None:
    """Return the newest intact checkpoint of a run, once it is known that training can go on from it.

    Raises:
        UsageError: There are checkpoints, and none is intact, or it is not of a training.
    """
    checkpoint = run.last_checkpoint()
    if checkpoint:
        read_to_resume(checkpoint)
    return checkpoint


def read_to_resume(checkpoint: Path) -> dict[str, Any]:
    """Return the content of a checkpoint, once it is known that training can go on from it."""
    with user_mistakes():
        check_readable(checkpoint)
        return read_resumable(checkpoint)


def checkpoint_facts(path: Path) -> dict[str, Any]:
    """Return what identifies the weights that a result was measured with; a safetensors file names its checkpoint's."""
    if path.suffix == ".safetensors":
        return {"checkpoint": path.name, "sha256": checksum(path)}
    averaged = "averaging_state" in torch.load(path, map_location="meta", weights_only=True, mmap=True)
    return {"checkpoint": path.name, "sha256": checksum(path), "weights": "ema" if averaged else "raw"}


def load_checkpoint(task: Any, checkpoint: Path) -> None:
    """Load the weights of a checkpoint into a module: those that its outputs are of.

    Of a task of vitlab that is the network; a class of the user's may have weights, and more, outside of it.

    Raises:
        UsageError: The weights do not fit the module, or are an export in the units of its targets.
    """
    refuse_own_units(task, checkpoint, facts_beside(checkpoint))
    if not needs_more_than_net(task):
        part, file = network(task), read_weights(checkpoint)
        state = file.extra | file.state_dict
    else:
        whole = _state_of(task, checkpoint)
        part, state = _part_of(task, whole, checkpoint)
    _fill(task, part, state, checkpoint)


def needs_more_than_net(task: Any) -> bool:
    """Return whether a task may need more of a checkpoint than a network of vitlab: one of the user's, or its class."""
    return not has_grid(task) or not path_of(task).startswith("vitlab.")


def _state_of(task: Any, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all weights of a file, once a class of the user's has taken what it keeps in a checkpoint beside them."""
    content = read_content(checkpoint)
    if redefines(task, "on_load_checkpoint"):
        if len(content) > 1:
            task.on_load_checkpoint(content)
        else:
            name = f"{type(task).__name__}.on_load_checkpoint"
            warnings.warn(f"{checkpoint} has weights alone: what {name} reads stays as it is built", stacklevel=2)
    state: dict[str, torch.Tensor] = content["state_dict"]
    return state


def load_own(task: Any, state: dict[str, torch.Tensor], checkpoint: Path) -> None:
    """Load the weights of a file into a class of the user's: into all of it, or into its network if it has that alone.

    Raises:
        UsageError: The weights do not fit, or are the network's alone and the class has others.
    """
    _fill(task, *_part_of(task, state, checkpoint), checkpoint)


def _part_of(task: Any, state: dict[str, torch.Tensor], checkpoint: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return what the weights of a file fill, and these: a whole class of the user's, or its network alone."""
    have, given = ({name.removeprefix("net.") for name in names} for names in (task.state_dict(), state))
    if is_overridden("configure_model", task, L.LightningModule) and not given <= have:
        task.configure_model()  # as a Trainer does before it loads weights
    if any(name.startswith("net.") for name in state) or state.keys() == task.state_dict().keys():
        return task, state
    return alone(task, checkpoint), {name.replace("_orig_mod.", ""): value for name, value in state.items()}


def _fill(task: Any, part: Any, state: dict[str, torch.Tensor], checkpoint: Path) -> None:
    """Load the weights of a file into a task, or its network, as a Trainer does."""
    own = {name: value for name, value in part.state_dict().items() if name.endswith("_extra_state")}
    try:
        part.load_state_dict({**own, **state}, strict=task.strict_loading)  # safetensors have no extra state
    except RuntimeError as error:
        late = next((name for name in state if name not in part.state_dict()), None)
        if part is task and late and is_overridden("setup", task, L.LightningModule):
            raise UsageError(
                f"{type(task).__name__} has no {late} before its `setup`, which only a Trainer calls, and {checkpoint} "
                "has: build the network in `__init__` or `configure_model`"
            ) from error
        raise misfit(checkpoint, error) from error


def load_resized(
    task: Any,
    checkpoint: Path,
    resize: ResizePolicy | Literal["usual"] = "usual",
    antialias: bool = True,
    grid: Sequence[int] | None = None,
) -> list[str]:
    """Load the weights of a file into the network of a task, of another grid, too; return what that changed.

    Args:
        task: The task.
        checkpoint: The file.
        resize: As for :func:`~vitlab.models.load.load_weights`.
        antialias: As for :func:`~vitlab.models.load.load_weights`.
        grid: As for :func:`~vitlab.models.load.load_weights`.

    Raises:
        UsageError: The head of the file is in the units of its targets.
        ValueError: The weights do not fit the network.
    """
    sentences = load_weights(network(task), checkpoint, resize, antialias, grid)  # type: ignore[arg-type]
    if not any(sentence.startswith(NEW_HEAD) for sentence in sentences):
        refuse_own_units(task, checkpoint, facts_beside(checkpoint))
    return sentences


def named_outputs(source: str | Path) -> list[str]:
    """Return the classes or targets that outputs of weights stand for, as they name them; empty if they do not.

    Args:
        source: A file, of a run or with a card, ``vitlab:NAME``, or a network of another library.

    Example:
        >>> named_outputs("vitlab:photos64_vit")[:3]
        ['Motorbikes', 'airplanes', 'bonsai']
    """
    if str(source).startswith(LIBRARIES):
        return stated_classes(str(source))
    file = Path(find_weights(str(source)))
    card, run = facts_beside(file), RunDir.around(file)
    told = {"class_names": card["outputs"]} if isinstance(card.get("outputs"), list) else card
    return meanings(told) or (meanings(run.read("data.json")) if run.config.is_file() else [])


def weights_outside(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights outside of the network; none of a file that has that alone."""
    is_whole = any(name.startswith("net.") for name in state)
    weights = {name: value for name, value in state.items() if not name.endswith("_extra_state")}
    return {name: value for name, value in weights.items() if is_whole and not name.startswith("net.")}


def meanings(facts: Mapping[str, Any]) -> list[str]:
    """Return the classes or targets that the outputs of a head stand for; empty if unknown."""
    targets = facts.get("targets") or {}
    numbers = [*targets.get("names", []), *(name for names in targets.get("classes", []) for name in names)]
    return [*(facts.get("class_names") or numbers)]


def alone(task: Any, checkpoint: Path) -> Any:
    """Return the network of a task, which is all that a file has.

    Raises:
        UsageError: The task has weights outside of it, such as a decoder.
    """
    net = network(task)
    if outside := [] if net is task else [*weights_outside(task.state_dict())]:
        raise UsageError(
            f"{checkpoint} would give the network alone, and {type(task).__name__} is measured with {outside[0]} and "
            f"its like, {len(outside)} in all, too: take a checkpoint of its run, as it was trained"
        )
    return net


def load_outside(task: Any, checkpoint: Path) -> None:
    """Load the weights that a task has outside of its network, such as a decoder.

    Raises:
        UsageError: The file has the network alone, or they do not fit.
    """
    state = _state_of(task, checkpoint)
    if not weights_outside(state):
        alone(task, checkpoint)
        return
    stays = {k: v for k, v in task.state_dict().items() if k.startswith("net.") or k.endswith("_extra_state")}
    others = {name: value for name, value in state.items() if not name.startswith("net.")}
    try:
        task.load_state_dict({**stays, **others}, strict=task.strict_loading)
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


def save_weights(checkpoint: Path, path: Path, task: Any, fence: Fence | None = None) -> None:
    """Write the network of a checkpoint as safetensors; all weights of a class of the user's with some outside it."""
    content = read_checkpoint(checkpoint, map_location="cpu")
    state = content["state_dict"]
    state = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}  # without extra state
    inside = {k.removeprefix("net.").replace("_orig_mod.", ""): v for k, v in state.items() if k.startswith("net.")}
    inside = inside if inside and (not needs_more_than_net(task) or len(inside) == len(state)) else state
    weights = {k: v.clone(memory_format=torch.contiguous_format) for k, v in inside.items()}  # tied ones apart
    arguments = json.dumps({**content.get("hyper_parameters", {}), **content.get("network", {})}, default=str)
    digests = {"sha256": weights_digest(weights, arguments), "checkpoint": str(checksum(checkpoint))}
    metadata = {"format": "pt", "hyper_parameters": arguments, "own": json.dumps(own_answer(task)), **digests}
    with atomic_write(path, fence) as beside:
        save_file(weights, beside, metadata=metadata)
        as_umask(beside)
