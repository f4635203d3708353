"""Task arguments that take a class, such as ``pos_embed`` or ``opt``: their imports and command-line syntax."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from inspect import signature
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from vitlab.class_paths import name_and_args
from vitlab.config.arguments import without_flags
from vitlab.config.trust import import_class
from vitlab.objects import PARTS
from vitlab.tasks.base import Task

_WORD = re.compile(r"([^({]+)\((\{.*\})\)")
_KEY = re.compile(rf"model\.(?:init_args\.)?({'|'.join(PARTS)})(?:\.(.+))?")
_BESIDE = ("interval", "monitor")  # keys of a scheduler besides class_path and init_args


def import_parts(arguments: Mapping[str, Any]) -> None:
    """Import the classes that task arguments name by path; refuse those that are not trusted.

    Raises:
        UsageError: A path is not trusted, or its module fails to import.
    """
    for name in PARTS:
        value = arguments.get(name)
        for one in value if isinstance(value, list | tuple) else [value]:
            path = one.get("class_path") if isinstance(one, Mapping) else one
            if isinstance(path, str):
                import_class(f"model.{name}", path)


@contextmanager
def parts_as_words() -> Iterator[None]:
    """Inside this context, the parser reads the mapping of a part as one string; :func:`as_mappings` undoes it.

    jsonargparse would import the class_path of every mapping, and a name such as "sgd" is not importable.
    """
    load = get_loader("yaml")
    set_loader("yaml", lambda text: _worded(load(text)), (yaml.YAMLError,))
    try:
        yield
    finally:
        set_loader("yaml", load, (yaml.YAMLError,))


def as_mappings(arguments: Any) -> None:
    """Turn strings of parts back into mappings, among the parsed arguments of a task."""
    for name in PARTS:
        if found := _WORD.fullmatch(str(arguments.get(name))):
            arguments[name] = {"class_path": found[1], **json.loads(found[2])}


def _worded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {k: _word(v) if str(k).rpartition(".")[2] in PARTS else _worded(v) for k, v in value.items()}


def _word(value: Any) -> Any:
    if not isinstance(value, dict) or "class_path" not in value:
        return value
    rest = {key: part for key, part in value.items() if key != "class_path"}
    return f"{value['class_path']}({json.dumps(rest, separators=(',', ':'))})"


def merge_parts(args: list[str], pairs: Sequence[tuple[str, Any]], contents: Sequence[Any]) -> list[str]:
    """Return the arguments with all that set one part, such as ``--model.opt.eps``, merged into one.

    >>> merge_parts(["--model.opt.eps=1e-6"], [("model.opt.eps", 1e-6)], [])
    ['--model.opt=adamw({"init_args":{"eps":1e-06}})']

    Args:
        args: Command-line arguments.
        pairs: Keys and values that they set.
        contents: Contents of the config files, in order, whose values single keys change.
    """
    found: dict[str, Any] = {}
    keys = []
    for key, value in pairs:
        if not (part := _KEY.fullmatch(key)) or (part[1] == "metrics"):
            continue
        keys.append(key)
        name, rest = part.groups()
        if rest is None:
            found[name] = value
            continue
        start = found.get(name) or ([signature(Task).parameters[name].default, *_set_in(contents, name)])[-1]
        path, init_args = name_and_args(f"model.{name}", start, _BESIDE)
        beside = {k: v for k, v in start.items() if k in _BESIDE} if isinstance(start, Mapping) else {}
        if rest == "class_path":
            found[name] = {"class_path": value}
        elif name == "lr_scheduler" and rest in _BESIDE:
            found[name] = {"class_path": path, "init_args": init_args, **beside, rest: value}
        else:
            with suppress(ValueError, TypeError):
                value = json.loads(value)  # YAML reads 1e-6 as a string
            init_args[rest.removeprefix("init_args.")] = value
            found[name] = {"class_path": path, "init_args": init_args, **beside}
    new = {name: value for name, value in found.items() if isinstance(value, Mapping)}
    gone = [key for key in keys if _KEY.fullmatch(key)[1] in new]  # type: ignore[index]
    return [*without_flags(args, *gone), *(f"--model.{name}={_word(value)}" for name, value in new.items())]


def _set_in(content: Any, name: str) -> list[Any]:
    """Return the values that config files give a part, in order, under nested or dotted keys."""
    if isinstance(content, list):
        return [value for one in content for value in _set_in(one, name)]
    if not isinstance(content, Mapping):
        return []
    keys = (f"model.{name}", f"model.init_args.{name}")
    inner = m if isinstance(m := content.get("model"), Mapping) else {}
    places = [(content, keys), (inner, (name, f"init_args.{name}")), (inner.get("init_args"), (name,))]
    return [place[key] for place, keys in places if isinstance(place, Mapping) for key in keys if key in place]
