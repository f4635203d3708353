"""Configuration values from environment variables, named as LightningCLI names them."""

import os
import re

NAME = re.compile(r"PL_(?:FIT__)?((?:TRAINER|MODEL|DATA|CHECKPOINT)(?:__\w+)?|CONFIG|SEED_EVERYTHING)")


def with_environment(words: list[str]) -> list[str]:
    """Return the arguments of a new run plus those from the environment; command line and config files take priority.

    ``PL_TRAINER__MAX_EPOCHS=3`` is ``--trainer.max_epochs=3``: capitals, and two underscores for a dot.

    Args:
        words: The arguments of the command line.
    """
    named = {found[1]: value for name, value in os.environ.items() if (found := NAME.fullmatch(name))}
    if not named:
        return words
    from vitlab.config.arguments import config_paths
    from vitlab.config.explain import read_yaml
    from vitlab.config.keys import flatten_as_typed, key_as_typed
    from vitlab.config.parser import resolve_configs, settings

    given = {key_as_typed(key) for key, _ in settings(words)}
    given |= {key for path in config_paths(resolve_configs(words)) for key in flatten_as_typed(read_yaml(path))}
    last: list[str] = []
    first = [f"--config={named.pop('CONFIG')}"] if "CONFIG" in named else []
    for name, value in sorted(named.items()):
        key = key_as_typed(name.lower().replace("__", "."))
        inner = "class_path" if key in ("model", "data") else ""  # whose other keys go with any class
        if not any(f"{one}.".startswith(f"{key}.{inner}") or one == key for one in given):
            (last if "." in key else first).append(f"--{key}={value}")
    return [*first, *words, *last]
