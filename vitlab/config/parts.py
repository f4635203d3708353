"""Arguments of a task that take a class: what may be imported for them, and their arguments on the command line."""

import json
import re
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from vitlab.classes import name_and_args
from vitlab.config.arguments import without
from vitlab.config.trust import import_class
from vitlab.tasks.base import Task

PARTS = (
    *("tokenizer", "pos_embed", "act_layer", "norm_layer", "t2t_act_layer", "t2t_norm_layer"),
    *("opt", "lr_scheduler", "metrics"),
)
_NESTED = re.compile(rf"model\.(?:init_args\.)?({'|'.join(PARTS)})\.(?:init_args\.)?(.+)")


def import_parts(arguments: Mapping[str, Any]) -> None:
    """Import the classes that the arguments of a task or network name by their paths; refuse what nobody trusts.

    Raises:
        UsageError: A path is not trusted, or its module fails to import.
    """
    for name in PARTS:
        value = arguments.get(name)
        for one in value if isinstance(value, list | tuple) else [value]:
            path = one.get("class_path") if isinstance(one, Mapping) else one
            if isinstance(path, str):
                import_class(f"model.{name}", path)


def joined(args: list[str], pairs: Sequence[tuple[str, Any]], contents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return arguments with one value of a part in place of its class and arguments, each under a key of its own.

    >>> joined(["--model.opt.eps=1e-6"], [("model.opt.eps", 1e-6)], [])
    ['--model.opt={"class_path": "adamw", "init_args": {"eps": 1e-06}}']

    Args:
        args: Arguments of the command line.
        pairs: Keys and values that they set.
        contents: Contents of the config files, in their order.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if nested := _NESTED.fullmatch(key):
            name, rest = nested.groups()
            given = [v for k, v in pairs if k in (f"model.{name}", f"model.init_args.{name}")]
            start = (
                found.get(name) or [signature(Task).parameters[name].default, *_of_files(contents, name), *given][-1]
            )
            path, init_args = name_and_args(f"model.{name}", start)
            is_path = rest == "class_path"
            found[name] = (
                {"class_path": value, "init_args": {}}
                if is_path
                else {"class_path": path, "init_args": {**init_args, rest: value}}
            )
    if not found:
        return args
    keys = [k for k, _ in pairs if _NESTED.fullmatch(k)] + [
        f"model.{i}{name}" for name in found for i in ("", "init_args.")
    ]
    return [*without(args, *keys), *(f"--model.{name}={json.dumps(value)}" for name, value in found.items())]


def _of_files(contents: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """Return what config files set a part to, in their order, nested or under dotted keys."""
    places = [
        c
        for content in contents
        for c in (content, content.get("model"), (content.get("model") or {}).get("init_args"))
        if isinstance(c, Mapping)
    ]
    return [c[key] for c in places for key in (name, f"model.{name}", f"model.init_args.{name}") if key in c]
