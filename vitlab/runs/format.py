"""What a checkpoint of a training is: its format, the sections that it must have, and how older formats are migrated.

1. As Lightning writes it, with the state of the training loader as ``train_loader``; since 0.2.0 ``loader_states``
   has those of all processes.
2. The state of ``RunRecord`` has ``metrics_bytes``, the size of ``metrics.jsonl``.
3. A section ``vitlab`` names the format, vitlab's version, and how many optimizers and schedules there are; and the
   trained parameters, since 0.2.0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.runs.machine import own_version

FORMAT = 3
_SECTIONS: dict[str, type] = {
    "epoch": int,
    "global_step": int,
    "pytorch-lightning_version": str,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "vitlab": dict,
}
_LOOPS = ("epoch_progress", "epoch_loop.state_dict", "epoch_loop.batch_progress")


class NewerFormat(ValueError):
    """A later vitlab has written the file."""


def describe_format(optimizers: int, schedules: int, data: str | None, trained: Sequence[str] = ()) -> dict[str, Any]:
    """Return the section ``vitlab`` of a checkpoint.

    Args:
        optimizers: Number of optimizers.
        schedules: Number of learning-rate schedules.
        data: Name of the section with the state of the data; None if there is none.
        trained: Names of the parameters that are trained.
    """
    counts = {"optimizers": optimizers, "schedules": schedules, "data": data, "trained": [*trained]}
    return {"format": FORMAT, "version": own_version(), **counts}


def format_of(content: Mapping[str, Any]) -> int:
    """Return the format of a checkpoint.

    Example:
        >>> format_of({"epoch": 3, "callbacks": {}})
        1
    """
    section = content.get("vitlab")
    if isinstance(section, Mapping) and type(section.get("format")) is int:
        return section["format"]
    callbacks = content.get("callbacks")
    record = callbacks.get("RunRecord") if isinstance(callbacks, Mapping) else None
    return 2 if isinstance(record, Mapping) and "metrics_bytes" in record else 1


def refuse_newer(content: Any, path: str | Path) -> None:
    """Refuse a checkpoint whose format this vitlab does not know."""
    if isinstance(content, Mapping) and (found := format_of(content)) > FORMAT:
        wrote = content["vitlab"].get("version", "a later one")
        raise NewerFormat(
            f"{path} has format {found}, of vitlab {wrote}; this is vitlab {own_version()}, which reads up to "
            f"format {FORMAT}: update vitlab"
        )


def _to_2(content: dict[str, Any]) -> None:
    content["callbacks"]["RunRecord"]["metrics_bytes"] = None  # no row is known to be later


def _to_3(content: dict[str, Any]) -> None:
    counts = len(content["optimizer_states"]), len(content["lr_schedulers"])
    content["vitlab"] = {**describe_format(*counts, None), "version": None}


_MIGRATIONS: dict[int, Callable[[dict[str, Any]], None]] = {1: _to_2, 2: _to_3}


def migrate(content: dict[str, Any]) -> dict[str, Any]:
    """Bring a checkpoint to the present format, in place; leave one that lacks what is migrated to be refused.

    Example:
        >>> old = {"callbacks": {"RunRecord": {}}, "optimizer_states": [{}], "lr_schedulers": []}
        >>> migrate(old)["vitlab"]["optimizers"]
        1
    """
    try:
        for step in range(format_of(content), FORMAT):
            _MIGRATIONS[step](content)
    except (KeyError, TypeError, AttributeError):
        pass
    return content


def read_resumable(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint, memory-mapped, in the present format.

    Args:
        path: An intact file.

    Raises:
        UsageError: A training cannot continue from it as it was: it is incomplete, of a wrong type, or not finite.
    """
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    refuse_newer(content, path)
    wrong = _wrong(content) if isinstance(content, dict) else f"it holds no checkpoint but {type(content).__name__}"
    if wrong:
        previous = path.with_name("previous.ckpt")
        way_on = f"; to continue from the checkpoint before it, rename {previous} to it" if previous.is_file() else ""
        raise UsageError(f"{path} cannot be resumed: {wrong}{way_on}")
    return content


def _wrong(content: dict[str, Any]) -> str | None:
    """Return what is wrong with a checkpoint, None if a training can continue from it."""
    migrate(content)
    for name, kind in _SECTIONS.items():
        if name not in content:
            return f"it has no section `{name}`"
        if not isinstance(content[name], kind) or isinstance(content[name], bool):
            return f"its section `{name}` must be {kind.__name__}, not {type(content[name]).__name__}"
    for name in ("epoch", "global_step"):
        if content[name] < 0:
            return f"its `{name}` must not be negative, got {content[name]}"
    return _wrong_version(content) or _wrong_sections(content) or _not_finite(content)


def _wrong_version(content: dict[str, Any]) -> str | None:
    wrote, ours = content["pytorch-lightning_version"], L.__version__
    major = wrote.partition(".")[0]
    if not major.isdigit() or not 2 <= int(major) <= int(ours.partition(".")[0]):
        return f"it was written with Lightning {wrote}, and this is Lightning {ours}"
    return None


def _wrong_sections(content: dict[str, Any]) -> str | None:
    fit, section = content["loops"].get("fit_loop"), content["vitlab"]
    if not isinstance(fit, dict) or (missing := [name for name in _LOOPS if not isinstance(fit.get(name), dict)]):
        return f"its section `loops` lacks {'fit_loop' if not isinstance(fit, dict) else f'fit_loop.{missing[0]}'}"
    if not isinstance(content["callbacks"].get("RunRecord"), dict):
        return "its section `callbacks` lacks RunRecord"
    if "shards" not in content and not _is_state(content.get("state_dict")):
        return "it has no weights: its section `state_dict` must be a dict of tensors"
    for name, count in (("optimizer_states", "optimizers"), ("lr_schedulers", "schedules")):
        if len(content[name]) != section.get(count):
            return f"its section `{name}` has {len(content[name])} entries, and {section.get(count)} were written"
    if not content["optimizer_states"] and section["version"] is None:  # migrated: nobody counted them
        return "its section `optimizer_states` is empty"
    if (data := section.get("data")) and not isinstance(content.get(data), dict):
        return f"it has no state of the data, `{data}`"
    return None


def _is_state(state: Any) -> bool:
    if not isinstance(state, dict) or not state:
        return False
    return all(isinstance(value, Tensor) or str(name).endswith("_extra_state") for name, value in state.items())


def _not_finite(content: dict[str, Any]) -> str | None:
    """Return what is not finite: buffers and frozen parameters may be so on purpose, as a mask of attention is."""
    state, trained = content.get("state_dict", {}), content["vitlab"].get("trained", ())
    weights = {name: state[name] for name in trained if name in state}
    for section, values in (("state_dict", weights), ("optimizer_states", content["optimizer_states"])):
        for name, value in _tensors(values, section):
            if value.is_floating_point() and not torch.isfinite(value).all():
                return f"{name} is not finite"
    return None


def _tensors(content: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(content, Tensor):
        yield name, content
    elif isinstance(content, dict | list):
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in pairs:
            yield from _tensors(value, f"{name}.{key}")
