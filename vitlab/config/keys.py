"""The table that says which configuration keys define an experiment, and which may change."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.errors import UsageError
from vitlab.runs.directory import RunDir

GROUPS = ("model", "data", "trainer", "checkpoint")  # the parts of a configuration that hold keys


class Key(NamedTuple):
    """Properties of a key and of all keys below it.

    Args:
        resume: Whether a run may be resumed with another value.
        identity: Whether another value makes a different cell of an ablation.
        table: Whether a table of results shows the value.
    """

    resume: bool = False
    identity: bool = True
    table: bool = True


_TRAINER = {
    "accelerator": Key(resume=True),
    "strategy": Key(resume=True),
    "max_time": Key(resume=True),
    "devices": Key(resume=True, identity=False),
    "num_nodes": Key(resume=True, identity=False),
    **dict.fromkeys(
        ("logger", "log_every_n_steps", "enable_progress_bar", "enable_model_summary", "profiler", "default_root_dir"),
        Key(resume=True, identity=False, table=False),
    ),
}
KEYS = {
    "seed_everything": Key(identity=False, table=False),  # tables group the seeds of a command
    **{f"trainer.{name}": key for name, key in _TRAINER.items()},
    **{f"checkpoint.{name}": Key(True, False, False) for name in ("every_minutes", "every_n_steps")},
    "own_code": Key(True, False, False),  # no key: modules of the user's that had changed when a run was resumed
    **{f"data.{name}": Key(True, False, False) for name in ("num_workers", "root", "download", "cache_gb")},
}


def key_of(name: str) -> Key:
    """Return the properties of a dotted key of a configuration, with or without ``init_args``.

    >>> key_of("trainer.logger.init_args.project").resume, key_of("model.init_args.depth").resume
    (True, False)
    """
    parts = key_as_typed(name).split(".")
    for count in range(len(parts), 0, -1):
        if found := KEYS.get(".".join(parts[:count])):
            return found
    return Key()


def recipe_name(configs: list[str], values: Mapping[str, Any]) -> str:
    """Return a name shared by runs that differ only in the seed and in keys that do not define the experiment."""
    same = {key: value for key, value in sorted(values.items()) if key_of(key).identity}
    stem = Path(configs[-1]).stem if configs else "run"
    return f"{stem}-{hashlib.sha256(json.dumps(same, default=str).encode()).hexdigest()[:4]}"


def check_same_config(run: RunDir, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to resume ``run`` with a configuration that makes it a different experiment."""
    changed = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        sharded = key == "trainer.strategy" and "fsdp2" in (before, after)  # it stores the moments in another order
        if before != after and not is_longer(key, old, new) and (sharded or not key_of(key).resume):
            changed.append(f"{key}: {before} -> {after}")
    if changed:
        raise UsageError(
            f"`--resume`: the configuration differs from that of {run.path} ({'; '.join(changed)}). "
            "Resume it without these changes, or start a new run with --init_from"
        )


def is_longer(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether ``key`` is a length of a training, and larger in the new configuration; -1 is no limit.

    Example:
        >>> is_longer("trainer.max_epochs", {"trainer.max_epochs": 60}, {"trainer.max_epochs": 80})
        True
        >>> is_longer("trainer.max_steps", {"trainer.max_steps": -1}, {"trainer.max_steps": 900})
        False
        >>> is_longer("trainer.max_steps", {"trainer.max_steps": 900}, {"trainer.max_steps": -1})
        True
    """
    before, after = (math.inf if values.get(key) == -1 else values.get(key) for values in (old, new))
    return key in ("trainer.max_epochs", "trainer.max_steps") and before is not None and (after or 0) > before


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as dotted keys; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return flat


def flatten_as_typed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings as the dotted keys that a user types: as :func:`flatten`, without ``init_args``."""
    return {key_as_typed(name): value for name, value in flatten(config).items()}


def key_as_typed(name: str) -> str:
    """Return a dotted key without its ``init_args``."""
    return ".".join(part for part in name.split(".") if part != "init_args")


def flatten_with_classes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings as :func:`flatten_as_typed`, where a class is the value of its part itself.

    >>> flatten_with_classes({"model": {"class_path": "Classifier", "init_args": {"depth": 3}}})
    {'model': 'Classifier', 'model.depth': 3}
    """
    return {name.removesuffix(".class_path"): value for name, value in flatten_as_typed(config).items()}


def class_and_arguments(content: Mapping[str, Any], part: str) -> tuple[str | None, dict[str, Any]]:
    """Return the class of ``model`` or ``data`` in a configuration, as it is written, and the arguments that it states.

    Example:
        >>> class_and_arguments({"data": {"class_path": "Digits", "init_args": {"subset": 0.5}}}, "data")
        ('Digits', {'subset': 0.5})
        >>> class_and_arguments({"data": "Digits"}, "data"), class_and_arguments({"data": {"subset": 0.5}}, "data")
        (('Digits', {}), (None, {'subset': 0.5}))
    """
    given = content.get(part)
    if not isinstance(given, Mapping):
        return given if isinstance(given, str) else None, {}
    arguments = {key: value for key, value in given.items() if key not in ("class_path", "init_args")}
    inner, path = given.get("init_args"), given.get("class_path")
    return None if path is None else str(path), arguments | (dict(inner) if isinstance(inner, Mapping) else {})


def dotted(content: Mapping[str, Any]) -> dict[str, str]:
    """Return settings with the keys of the command line and values as text.

    Example:
        >>> dotted({"model": {"class_path": "Classifier", "init_args": {"depth": 3}}})
        {'model': 'Classifier', 'model.depth': '3'}
    """
    return {name: v if isinstance(v, str) else json.dumps(v) for name, v in flatten_with_classes(content).items()}


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the keys, as typed, in which configurations differ, with their values as text; loggers change no run.

    A number and its text are the same, as on a command line; a key that a configuration lacks has the value ``-``.

    Example:
        >>> differences([{"model.depth": 2, "model.lr": 1}, {"model.depth": "2", "data": "Digits"}])
        [('data', ['-', 'Digits']), ('model.lr', ['1', '-'])]
    """
    texts = [dotted(config) for config in configs]
    keys = sorted({key for text in texts for key in text if not key.startswith("trainer.logger")})
    rows = [(key, [text.get(key, "-") for text in texts]) for key in keys]
    return [(key, values) for key, values in rows if len({*values}) > 1]
