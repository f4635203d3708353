"""Configuration values from environment variables, named as LightningCLI names them."""

import os
import re

from vitlab.config.arguments import flags_of, read_configs
from vitlab.config.keys import flatten_as_typed, key_as_typed

NAME = re.compile(r"PL_(?:FIT__)?((?:TRAINER|MODEL|DATA|CHECKPOINT)(?:__\w+)?|CONFIG|SEED_EVERYTHING)")

_OF_LIGHTNING = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "PL_RECONCILE_PROCESS")


def with_environment(words: list[str], resumed: bool = False) -> tuple[list[str], list[str]]:
    """Return the arguments of a run plus those from the environment; command line and config files take priority.

    ``PL_TRAINER__MAX_EPOCHS=3`` is ``--trainer.max_epochs=3``: capitals, and two underscores for a dot.

    Args:
        words: The arguments of the command line.
        resumed: Whether the run is continued, which reads no variables.

    Returns:
        The arguments, and a sentence for each ``PL_`` variable that does nothing: misspelled, or overridden.
    """
    names = [name for name in os.environ if name.startswith("PL_") and name not in _OF_LIGHTNING]
    keys = {name: key_as_typed(m[1].lower().replace("__", ".")) for name in names if (m := NAME.fullmatch(name))}
    first = [f"--config={os.environ[name]}" for name, key in keys.items() if key == "config" and not resumed]
    given = {key_as_typed(flag.name) for flag in flags_of(words)} - {"config"}
    if keys and not resumed:
        given |= {key for content in read_configs([*first, *words]) for key in flatten_as_typed(content)}
    used: list[str] = []
    idle: list[str] = []
    for name in sorted(names, key=lambda name: keys.get(name, "")):
        key = keys.get(name)
        part = f"{key}.class_path" if key in ("model", "data") else key  # their other keys go with any class
        if key is None:
            idle.append(f"{name} is not read: two underscores stand for a dot, as in PL_TRAINER__MAX_EPOCHS")
        elif resumed:
            idle.append(f"{name} is not read: a run is resumed with its own configuration")
        elif key in given or any(f"{one}.".startswith(f"{part}.") for one in given):
            idle.append(f"{name} is not used: a config file or the command line sets {key}")
        elif key != "config":
            used.append(f"--{key}={os.environ[name]}")
    return [*first, *words, *used], idle
