"""Task arguments that take a class, such as ``pos_embed`` or ``opt``: their imports and command-line syntax.

jsonargparse would import the class_path of a mapping, and a name such as "sgd" is not importable; nor does it take
single options such as ``--model.opt.momentum``. So it reads the class of a part alone, as text
(:func:`classes_alone`, :func:`words_of_parts`); :func:`merged_parts` holds what files and words set, and
:func:`give_options` adds it to the result.
"""

import copy
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from vitlab.class_paths import name_and_args, with_current_paths
from vitlab.config.arguments import flags_of, part_files, without_flags
from vitlab.config.keys import flatten_as_typed, key_as_typed
from vitlab.config.trust import import_class
from vitlab.config.yaml_files import read_yaml, read_yaml_text, with_numbers
from vitlab.errors import UsageError
from vitlab.models.old_names import DEFAULTS, OLD, upgrade
from vitlab.objects import PARTS
from vitlab.ranges import check_ranges
from vitlab.tasks.base import Task
from vitlab.tasks.schedule import schedule_and_args

_KEY = re.compile(rf"model\.(?:init_args\.)?({'|'.join(PARTS)})(?:\.(.+))?")
_PLACE = re.compile(rf"(?:model\.)?(?:init_args\.)?(?:{'|'.join(PARTS)})")  # of a part, in a whole file or below a key
_BESIDE = ("interval", "monitor")  # keys of a scheduler besides class_path and init_args


def import_parts(arguments: Mapping[str, Any]) -> None:
    """Import the classes that task arguments name by path; refuse those that are not trusted.

    Raises:
        UsageError: A path is not trusted, or its module fails to import.
    """
    for name, one in _parts_in(arguments):
        path, inner = (one.get("class_path"), one.get("init_args")) if isinstance(one, Mapping) else (one, None)
        if isinstance(path, str):
            import_class(f"model.{name}", path)
        if isinstance(inner, Mapping):
            import_parts(inner)  # the activation of a tokenizer


def check_parts(arguments: Mapping[str, Any]) -> None:
    """Refuse parts that are not written as such, of which a parser names no key, and options out of their range.

    >>> check_parts({"attn": {"class_path": "gated", "init_args": {"qk_scale": 0.5}}, "depth": 3})
    """
    for name, one in _parts_in(arguments):
        if isinstance(one, Mapping):
            read = schedule_and_args if name == "lr_scheduler" else name_and_args
            _, args = read(f"model.{name}", one)
            check_ranges("model", args if name in DEFAULTS else {}, prefix=f"model.{name}.")


def _parts_in(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what task arguments set each part to, with its name; each of a list."""
    for name in PARTS:
        value = arguments.get(name)
        yield from ((name, one) for one in (value if isinstance(value, list | tuple) else [value]))


def later_names(contents: Sequence[Any], pairs: Sequence[tuple[str, Any]]) -> set[str]:
    """Return the old names that are set after the parts they belong to: by a later file, or on the command line.

    Args:
        contents: Contents of the config files, in order.
        pairs: Keys and values of the command line.

    Example:
        >>> later_names([{"model.attn": {"qk_norm": True}}, {"model": {"qk_norm": False}}], [])
        {'qk_norm'}
    """
    typed = [key_as_typed(key) for key, _ in pairs]
    last: dict[str, int] = {}  # for each argument of the model: which source set it last
    for i, keys in enumerate([*map(flatten_as_typed, contents), typed]):
        last |= {key.split(".")[1]: i for key in keys if key.startswith("model.")}
    return {
        name for name, old in OLD.items() if f"model.{name}" in typed or last.get(name, -1) > last.get(old.part, -1)
    }


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
    import_parts(given)  # of a part that the network does not have, too
    parts = {name: arguments[name] for name in DEFAULTS if name in arguments}
    new = upgrade({**parts, **given}, weak=given.keys() - set(later))
    for name, value in new.items():
        arguments[name] = value
    return [name for name in given if new != upgrade({**parts, **{k: v for k, v in given.items() if k != name}})]


@contextmanager
def classes_alone(args: list[str]) -> Iterator[None]:
    """Inside this context, the parser reads of each part of the model its class alone.

    Args:
        args: The arguments; what they and their files say of the model is known by its text. Another value, such as
            the ``config`` of a logger, may have keys of such a name.
    """
    load, texts = get_loader("yaml"), {*_texts_of_model(args)}

    def read(text: str) -> Any:
        value = with_current_paths(load(text))
        return _without_options(value) if text in texts else value

    set_loader("yaml", read, (yaml.YAMLError,))
    try:
        yield
    finally:
        set_loader("yaml", load, (yaml.YAMLError,))


def _texts_of_model(args: list[str]) -> Iterator[str]:
    for flag in flags_of(args):
        value = str(flag.value)
        if flag.name == "config":
            inner = part_files(read_yaml(value), Path(value).parent).get("model")
            yield from (read_yaml_text(path) for path in (value, inner) if path)
        elif key_as_typed(flag.name) == "model":
            yield read_yaml_text(value) if os.path.isfile(value) else value


def _without_options(value: Any, within: str = "") -> Any:
    if not isinstance(value, dict):
        return value
    kept = {}
    for k, v in value.items():
        key = f"{within}{k}"
        if (option := _KEY.fullmatch(key)) and option[2]:
            continue
        if not (_PLACE.fullmatch(key) and isinstance(v, dict) and v):
            kept[k] = _without_options(v, f"{key}.")
        elif "class_path" in v:  # else it has options alone
            kept[k] = v["class_path"]
    return kept


def take_options(arguments: Any) -> dict[str, Any]:
    """Leave of each part among parsed arguments its class alone, as the parser takes it; return the parts."""
    given = {name: arguments[name] for name in PARTS if isinstance(arguments.get(name), dict)}
    parts = {name: part for name, part in given.items() if "class_path" in part}
    for name, part in parts.items():
        arguments[name] = part["class_path"]
    return parts


def give_options(arguments: Any, parts: Mapping[str, Any]) -> None:
    """Put the parts of :func:`merged_parts` into parsed arguments where the parser has read their classes alone."""
    for name, part in parts.items():
        if name in arguments and arguments[name] == part["class_path"]:
            arguments[name] = copy.deepcopy(part)


def words_of_parts(args: list[str], parts: Mapping[str, Any]) -> list[str]:
    """Return command-line arguments as the parser takes them: with the classes of ``parts``, and without options.

    >>> words_of_parts(["--model.opt.eps=1e-6", "--model.lr=1"], {"opt": {"class_path": "adamw"}})
    ['--model.lr=1', '--model.opt=adamw']
    """
    gone = [flag.name for flag in flags_of(args) if (part := _KEY.fullmatch(flag.name)) and part[1] in parts]
    return [*without_flags(args, *gone), *(f"--model.{name}={part['class_path']}" for name, part in parts.items())]


def merged_parts(contents: Sequence[Any], typed: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the parts that files, and after them words, give options, such as ``--model.opt.eps``, in any order.

    >>> merged_parts([{"model": {"opt": "sgd", "attn": "gated"}}], [("model.opt.momentum", 0.9)])
    {'opt': {'class_path': 'sgd', 'init_args': {'momentum': 0.9}}}

    Args:
        contents: Contents of the config files, in order.
        typed: Keys and values of the command line.

    Raises:
        UsageError: An option is set of a part that has no class, such as a list of several.
    """
    parameters = signature(Task).parameters
    found: dict[str, Any] = {name: parameters[name].default for name in PARTS if name in parameters}
    words = [one for key, value in typed for one in _settings_of_parts({key: value})]  # a key may come twice
    for given in [*map(_settings_of_parts, contents), words]:
        for name, option, value in sorted(given, key=lambda one: one[1] not in (None, "class_path")):
            if option is None and not (isinstance(value, dict) and value and "class_path" not in value):
                found[name] = value
            elif option == "class_path":
                found[name] = {"class_path": value}
            elif name in found:
                options = value if option in (None, "init_args") else {option: value}
                found[name] = _with_options(name, found[name], options)
    return {name: part for name, part in found.items() if isinstance(part, dict) and "class_path" in part}


def _settings_of_parts(content: Any, within: str = "") -> Iterator[tuple[str, str | None, Any]]:
    """Yield each part that a mapping sets, under nested or dotted keys: its name, an option or None, the value."""
    for key, value in content.items() if isinstance(content, Mapping) else ():
        place = f"{within}{key}"
        if part := _KEY.fullmatch(place):
            yield part[1], part[2], with_current_paths(with_numbers(value))
        elif place in ("model", "model.init_args"):
            yield from _settings_of_parts(value, f"{place}.")


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
