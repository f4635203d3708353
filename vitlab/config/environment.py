"""Configuration values from environment variables, named as LightningCLI names them."""

import os
import re

from vitlab.config.arguments import config_paths, flags_of
from vitlab.config.keys import flatten_as_typed, key_as_typed
from vitlab.shipped import find_file

NAME = re.compile(r"PL_(?:FIT__)?((?:TRAINER|MODEL|DATA|CHECKPOINT)(?:__\w+)?|CONFIG|SEED_EVERYTHING)")

_OF_LIGHTNING = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "PL_RECONCILE_PROCESS")


def idle_variables(words: list[str], resumed: bool) -> list[str]:
    """Return a sentence for each ``PL_`` variable that does nothing: misspelled, or overridden.

    Args:
        words: The arguments of the command line.
        resumed: Whether the run is continued, which reads none.
    """
    sentences = []
    used = [] if resumed else with_environment(words)
    for name in sorted(name for name in os.environ if name.startswith("PL_") and name not in _OF_LIGHTNING):
        if not (found := NAME.fullmatch(name)):
            way_out = "two underscores stand for a dot, as in PL_TRAINER__MAX_EPOCHS"
            sentences.append(f"{name} is not read: {way_out}")
        elif resumed:
            sentences.append(f"{name} is not read: a run is resumed with its own configuration")
        elif f"--{(key := _key(found[1]))}={os.environ[name]}" not in used:
            sentences.append(f"{name} is not used: a config file or the command line sets {key}")
    return sentences


def _key(name: str) -> str:
    return key_as_typed(name.lower().replace("__", "."))


def with_environment(words: list[str]) -> list[str]:
    """Return the arguments of a new run plus those from the environment; command line and config files take priority.

    ``PL_TRAINER__MAX_EPOCHS=3`` is ``--trainer.max_epochs=3``: capitals, and two underscores for a dot.

    Args:
        words: The arguments of the command line.
    """
    named = {found[1]: value for name, value in os.environ.items() if (found := NAME.fullmatch(name))}
    if not named:
        return words
    from vitlab.config.yaml_files import read_yaml  # and PyYAML, only where such a variable is set

    first = [f"--config={named.pop('CONFIG')}"] if "CONFIG" in named else []
    files = [find_file(path, "--config") for path in config_paths([*first, *words])]
    given = {key_as_typed(flag.name) for flag in flags_of(words)}
    given |= {key for path in files for key in flatten_as_typed(read_yaml(path))}
    used: list[str] = []
    for name, value in sorted(named.items()):
        key = _key(name)
        inner = "class_path" if key in ("model", "data") else ""  # whose other keys go with any class
        if not any(f"{one}.".startswith(f"{key}.{inner}") or one == key for one in given):
            used.append(f"--{key}={value}")
    return [*first, *words, *used]
