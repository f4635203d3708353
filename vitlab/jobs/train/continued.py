"""Whether a run may go on with a configuration: with that of its start, and for longer if its schedule can."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from jsonargparse import Namespace

from vitlab.config.keys import check_same_config, flatten_as_typed, is_longer
from vitlab.config.parser import class_at
from vitlab.errors import UsageError
from vitlab.jobs.checkpoint import read_to_resume
from vitlab.jobs.stored import stored_config
from vitlab.models.old_names import upgrade
from vitlab.named_kwargs import taken_by
from vitlab.runs.directory import RunDir
from vitlab.tasks.base import Task
from vitlab.tasks.schedule import SHAPES, schedule_and_args, schedule_class

COUNTS = ("last_epoch", "_step_count")  # of every schedule of torch: how far it is


def check_continued(run: RunDir, config: Namespace, values: dict[str, Any]) -> None:
    """Refuse to continue a run with values that would change what it is, or for longer than its schedule allows.

    Args:
        run: The run.
        config: The configuration with which it is to go on.
        values: The same by dotted key, as typed.
    """
    if not (old := stored_config(run)):
        return
    classes = {name: class_at(config[name].class_path) for name in ("model", "data")}
    old_values = _defaults_among(values, classes) | flatten_as_typed(_in_parts(old, classes["model"]))
    check_same_config(run, old_values, values)
    if any(is_longer(key, old_values, values) for key in values):
        check_extensible(run, old_values["trainer.max_epochs"], _is_told_steps(old, classes["model"]))


def _defaults_among(values: dict[str, Any], classes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are defaults of their arguments: an older run without such a key had that value."""
    taken = {f"{name}.{p.name}": p.default for name, cls in classes.items() for p in signature(cls).parameters.values()}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in taken.items()}
    return {key: value for key, value in values.items() if key in plain and plain[key] == value}


def _in_parts(stored: dict[str, Any], task: type) -> dict[str, Any]:
    """Return the stored configuration of a run with its options under their present names, see ``old_names.py``."""
    model = stored.get("model")
    if not issubclass(task, Task) or not isinstance(model, dict):
        return stored
    return {**stored, "model": {**model, "init_args": upgrade(model.get("init_args") or {})}}


def _is_told_steps(stored: dict[str, Any], task: type) -> bool:
    """Return whether the schedule of a run is a class that asks for ``total_steps``."""
    spec = ((stored.get("model") or {}).get("init_args") or {}).get("lr_scheduler")
    if not issubclass(task, Task) or spec is None:
        return False
    path, _ = schedule_and_args("lr_scheduler", spec)
    return path not in SHAPES and "total_steps" in taken_by(schedule_class(path))


def check_extensible(run: RunDir, epochs: int | None, is_told_steps: bool = False) -> None:
    """Refuse more epochs or steps for a run whose schedule keeps the number for which it was made.

    OneCycleLR would fail, CosineAnnealingLR climb back to its peak, linear ones and those of timm stay at their end.

    Args:
        run: The run to continue.
        epochs: Its epochs so far, for a schedule that advances at every epoch; -1 where `trainer.max_steps` ends it.
        is_told_steps: Whether its schedule was told the number of steps, and may keep it under a name of its own.

    Raises:
        UsageError: The schedule ends with the run.
    """
    if not (checkpoint := run.last_checkpoint()):
        return
    content = read_to_resume(checkpoint)
    done = content["loops"]["fit_loop"]["epoch_loop.state_dict"].get("_batches_that_stepped", content["global_step"])
    for state in content["lr_schedulers"]:
        told = [value for name, value in state.items() if is_told_steps and name not in COUNTS and type(value) is int]
        if not (ends := _ends(state) + told):  # nor is a record needed, which may be damaged
            continue
        at = _position(state)
        by_epoch = state.get("t_in_epochs", at <= content["epoch"] + 1 and at != done)  # the first: of timm
        # a schedule may be stepped several times in a step of the training, as with several optimizers
        made = content["epoch"] + 1 if by_epoch else at or done
        planned = epochs if by_epoch and epochs != -1 else run.record.get("steps", done) * made // max(done, 1)
        over = [end for end in ends if planned is None or planned - 1 <= end <= planned]
        if over:
            raise UsageError(
                f"`--resume`: the schedule of {run.path} was made for {over[0]} {'epochs' if by_epoch else 'steps'} "
                f"and has no more: resume it without a larger `trainer.max_epochs` or `trainer.max_steps`, or start a "
                f"new run with --init_from {run.typed}"
            )


def _ends(state: Mapping[str, Any], begin: int = 0) -> list[int]:
    """Return where schedules that fall over a number of steps end, counted from their own beginning, too.

    Args:
        state: The state of a schedule, which may consist of others.
        begin: Where it begins.

    Example:
        >>> parts = [{"total_iters": 3, "start_factor": 0.1, "end_factor": 1.0}, {"T_max": 7}]
        >>> _ends({"_schedulers": parts, "_milestones": [3]}), _ends({"T_0": 4})
        ([10, 7], [])
        >>> _ends({"t_initial": 4, "cycle_limit": 2, "cycle_mul": 2, "warmup_t": 1, "warmup_prefix": True})  # of timm
        [13, 12]
    """
    if "t_initial" in state:
        limit, factor = min(state["cycle_limit"], 999), state["cycle_mul"]
        cycles = limit if factor == 1 else (1 - factor**limit) / (1 - factor)
        warmup = state["warmup_t"] * state["warmup_prefix"]
        return _ends({"T_max": int(state["t_initial"] * cycles)}, begin + warmup)
    falls = "power" in state or state.get("end_factor", 1) < state.get("start_factor", 1)  # others warm up
    names = ["total_steps", "T_max", *["total_iters"] * falls]
    parts = state.get("_schedulers", [])
    begins = [0, *state.get("_milestones", [0] * len(parts))]
    own = [state[name] + later for name in names if name in state for later in dict.fromkeys((begin, 0))]
    return own + [end for part, later in zip(parts, begins, strict=False) for end in _ends(part, begin + later)]


def _position(state: Mapping[str, Any]) -> int:
    """Return how often a schedule has been stepped, 0 of timm's; a ChainedScheduler does not count itself."""
    return int(state.get("last_epoch", 0)) or max(map(_position, state.get("_schedulers", [])), default=0)
