"""Task arguments that take a class, such as ``pos_embed`` or ``opt``: their imports and command-line syntax."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from inspect import signature
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from vitlab.class_paths import name_and_args, with_current_paths
from vitlab.config.arguments import without_flags
from vitlab.config.keys import flatten, key_as_typed
from vitlab.config.trust import import_class
from vitlab.errors import UsageError
from vitlab.models.old_names import DEFAULTS, OLD, upgrade
from vitlab.objects import PARTS
from vitlab.ranges import check_ranges
from vitlab.tasks.base import Task
from vitlab.tasks.schedule import schedule_and_args

_WORD = re.compile(r"([^({]+)\((\{.*\})\)")
_KEY = re.compile(rf"model\.(?:init_args\.)?({'|'.join(PARTS)})(?:\.(.+))?")
_PLACE = re.compile(rf"(?:model\.)?(?:init_args\.)?(?:{'|'.join(PARTS)})")  # of a part, in a whole file or below a key
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
            inner = one.get("init_args") if isinstance(one, Mapping) else None
            if isinstance(inner, Mapping):
                import_parts(inner)  # the activation of a tokenizer


def check_parts(arguments: Mapping[str, Any]) -> None:
    """Refuse parts that are not written as such, of which a parser names no key, and options out of their range.

    >>> check_parts({"attn": {"class_path": "gated", "init_args": {"qk_scale": 0.5}}, "depth": 3})
    """
    for name in PARTS:
        value = arguments.get(name)
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, Mapping):
                read = schedule_and_args if name == "lr_scheduler" else name_and_args
                _, args = read(f"model.{name}", one)
                check_ranges("model", args if name in DEFAULTS else {}, prefix=f"model.{name}.")


def later_names(contents: Sequence[Any], pairs: Sequence[tuple[str, Any]]) -> set[str]:
    """Return the old names that are set after the parts they belong to: by a later file, or on the command line.

    Args:
        contents: Contents of the config files, in order.
        pairs: Keys and values of the command line.

    Example:
        >>> later_names([{"model.attn": {"qk_norm": True}}, {"model": {"qk_norm": False}}], [])
        {'qk_norm'}
    """
    sources = [[key_as_typed(key) for key in flatten(one)] for one in contents if isinstance(one, Mapping)]
    last: dict[str, int] = {}
    for i, keys in enumerate([*sources, typed := [key_as_typed(key) for key, _ in pairs]]):
        last |= {key.removeprefix("model.").partition(".")[0]: i for key in keys if key.startswith("model.")}
    is_typed = {key.removeprefix("model.") for key in typed}
    return {name for name, old in OLD.items() if name in is_typed or last.get(name, -1) > last.get(old.part, -1)}


def in_parts(arguments: Any, cls: Any, later: Collection[str]) -> list[str]:
    """Move options with old names among the parsed arguments of a task to their parts; return the names.

    Args:
        arguments: Parsed arguments of a task, which are changed.
        cls: The class of the task, which may itself have an argument of such a name.
        later: Names of which the value overrides what a part says, see :func:`later_names`.
    """
    own = signature(cls).parameters
    names = [name for name in OLD if name in arguments and name not in own]
    given = {name: value for name in names if (value := arguments.pop(name)) is not None}
    check_ranges("model", given)  # by the name that was typed
    as_mappings(given)
    import_parts(given)  # of a part that the network does not have, too
    as_mappings(arguments)
    parts = {name: arguments[name] for name in DEFAULTS if name in arguments}
    new = upgrade({**parts, **given}, weak=given.keys() - set(later))
    for name, value in new.items():
        arguments[name] = value
    return [name for name in given if new != upgrade({**parts, **{k: v for k, v in given.items() if k != name}})]


@contextmanager
def parts_as_words() -> Iterator[None]:
    """Inside this context, the parser reads the mapping of a part as one string; :func:`as_mappings` undoes it.

    jsonargparse would import the class_path of every mapping, and a name such as "sgd" is not importable.
    """
    load = get_loader("yaml")
    set_loader("yaml", lambda text: _worded(with_current_paths(load(text))), (yaml.YAMLError,))
    try:
        yield
    finally:
        set_loader("yaml", load, (yaml.YAMLError,))


def as_mappings(arguments: Any) -> None:
    """Turn strings of parts back into mappings, among the parsed arguments of a task."""
    for name in PARTS:
        if found := _WORD.fullmatch(str(arguments.get(name))):
            arguments[name] = {"class_path": found[1], **json.loads(found[2])}


def parts_to_words(arguments: Any) -> None:
    """Turn mappings of parts into strings, as the parser reads them."""
    for name in PARTS:
        if name in arguments:
            arguments[name] = _word(arguments[name])


def _worded(value: Any, within: str = "") -> Any:
    if not isinstance(value, dict):
        return value
    worded = {}
    for k, v in value.items():
        key = f"{within}{k}"
        if (deep := _KEY.fullmatch(key)) and deep[2]:
            continue  # as below
        is_part = _PLACE.fullmatch(key)
        if not (is_part and _is_partial(v)):  # which merge_parts has read
            worded[k] = _word(v) if is_part else _worded(v, f"{key}.")
    return worded


def _is_partial(value: Any) -> bool:
    """Return whether a mapping changes options of a part and leaves its class."""
    return isinstance(value, Mapping) and bool(value) and "class_path" not in value


def _word(value: Any) -> Any:
    if not isinstance(value, dict) or "class_path" not in value:
        return value
    rest = {key: part for key, part in value.items() if key != "class_path"}
    return f"{value['class_path']}({json.dumps(rest, separators=(',', ':'))})"


def merge_parts(args: list[str], pairs: Sequence[tuple[str, Any]], contents: Sequence[Any]) -> list[str]:
    """Return the arguments with all that set one part, such as ``--model.opt.eps``, merged into one, in any order.

    >>> merge_parts(["--model.opt.eps=1e-6"], [("model.opt.eps", 1e-6)], [])
    ['--model.opt=adamw({"init_args":{"eps":1e-06}})']

    Args:
        args: Command-line arguments.
        pairs: Keys and values that they set.
        contents: Contents of the config files, in order, whose values single keys change.

    Raises:
        UsageError: An option is set of a part that has no class, such as a list of several.
    """
    parameters = signature(Task).parameters
    found: dict[str, Any] = {name: parameters[name].default for name in PARTS if name in parameters}
    typed = [(key, *part.groups(), value) for key, value in pairs if (part := _KEY.fullmatch(key)) and part[1] in found]
    merged = {name for _, name, *_ in typed}
    settings = [one for content in contents for one in _classes_first(_settings_of_parts(content))]
    settings += _classes_first((name, option, _number(value) if option else value) for _, name, option, value in typed)
    for name, option, value in settings:
        if option is None and not _is_partial(value):
            found[name] = value
        elif option == "class_path":
            found[name] = {"class_path": value}
        elif name in found:
            found[name] = _with_options(name, found[name], value if option in (None, "init_args") else {option: value})
            merged.add(name)
    new = {name: value for name, value in found.items() if name in merged and isinstance(value, Mapping)}
    gone = [key for key, name, option, _ in typed if name in new or option is not None]
    return [*without_flags(args, *gone), *(f"--model.{name}={_word(value)}" for name, value in new.items())]


def _settings_of_parts(content: Any, within: str = "") -> Iterator[tuple[str, str | None, Any]]:
    """Yield each part that a config file sets, under nested or dotted keys: its name, an option or None, the value."""
    for key, value in content.items() if isinstance(content, Mapping) else ():
        place = f"{within}{key}"
        if part := _KEY.fullmatch(place):
            yield part[1], part[2], value
        elif place in ("model", "model.init_args"):
            yield from _settings_of_parts(value, f"{place}.")


def _classes_first(settings: Iterable[tuple[str, str | None, Any]]) -> list[tuple[str, str | None, Any]]:
    return sorted(settings, key=lambda one: one[1] not in (None, "class_path"))


def _number(value: Any) -> Any:
    """Return a typed value, of which YAML reads 1e-6 as text."""
    with suppress(ValueError, TypeError):
        return json.loads(value)
    return value


def _with_options(name: str, part: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part, a word or a mapping, with these options of its class, and of a scheduler those beside it."""
    try:
        path, init_args = name_and_args(f"model.{name}", part, _BESIDE)
    except ValueError as error:
        raise UsageError(f"options of a part change one class_path, not several: {error}") from error
    beside = {key: value for key, value in part.items() if key in _BESIDE} if isinstance(part, Mapping) else {}
    for key, value in {**options, **(options.get("init_args") or {})}.items():
        is_beside = name == "lr_scheduler" and key in _BESIDE
        if key != "init_args":
            (beside if is_beside else init_args)[key.removeprefix("init_args.")] = value
    return {"class_path": path, "init_args": init_args, **beside}
