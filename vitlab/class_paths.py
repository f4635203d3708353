"""Find and build the class that a configuration names by a word or a class path.

Only classes are found that are already imported, or lie in a package that the user trusts, so that no file of weights
or of a run can import other code: :mod:`vitlab.config.trust` knows these packages, a script imports what it needs.
"""

import ast
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Required, TypedDict, get_type_hints

from vitlab.errors import (
    TRUSTED,
    UsageError,
    defined_elsewhere,
    did_you_mean,
    in_own_code,
    named_line,
    one_line,
    trust_also,
    with_place,
)
from vitlab.named_kwargs import check_names, check_types, taken_by
from vitlab.objects import as_yaml, written
from vitlab.shipped import HERE


class ClassSpec(TypedDict, total=False):
    """A class path and its arguments.

    >>> spec: ClassSpec = {"class_path": "mypkg.Coordinates", "init_args": {"width": 64}}
    """

    class_path: Required[str]
    init_args: dict[str, Any]


@functools.cache  # hundreds of runs name the same classes
def current_path(path: str) -> str:
    """Return the present path of a class of vitlab that an earlier version had in another place.

    A class of vitlab has a name of its own, by which it is found. Other paths are returned unchanged.

    >>> current_path("vitlab.tasks.linear_probe.LinearProbe"), current_path("mypkg.Mine")
    ('vitlab.tasks.classifier.LinearProbe', 'mypkg.Mine')
    >>> current_path("vitlab.data.image_folder.ImageNet"), current_path("vitlab.data.ImageNet")
    ('vitlab.data.imagenet.ImageNet', 'vitlab.data.ImageNet')
    """
    module, _, name = path.rpartition(".")
    package, *folders = module.split(".")
    if package != HERE.name or not name.isidentifier():
        return path
    place = HERE.joinpath(*folders)
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if file.is_file() and any(getattr(node, "name", "") == name for node in ast.walk(ast.parse(file.read_text()))):
        return path  # it is defined there, or imported
    found = (one for one in HERE.rglob("*.py") if re.search(rf"^class {name}\b", one.read_text(), re.M))
    home = next(found, None)
    return path if home is None else ".".join([package, *home.relative_to(HERE).with_suffix("").parts, name])


def with_current_paths(content: Any) -> Any:
    """Return what a configuration holds with the class paths of earlier versions replaced, see :func:`current_path`.

    >>> with_current_paths({"callbacks": [{"class_path": "vitlab.tasks.linear_probe.LinearProbe"}]})
    {'callbacks': [{'class_path': 'vitlab.tasks.classifier.LinearProbe'}]}
    """
    if isinstance(content, str):
        return current_path(content)
    if isinstance(content, list):
        return [with_current_paths(one) for one in content]
    return {k: with_current_paths(v) for k, v in content.items()} if isinstance(content, dict) else content


def name_and_args(key: str, value: Any, more: Iterable[str] = ()) -> tuple[str, dict[str, Any]]:
    """Return the word or class path that ``key`` is set to, and its arguments.

    >>> name_and_args("opt", {"class_path": "sgd", "init_args": {"momentum": 0.5}})
    ('sgd', {'momentum': 0.5})
    """
    known = {"class_path", "init_args", *more}
    if not isinstance(value, str | Mapping | list | tuple | bool | int | float | None):
        value = written(key, value)
    if isinstance(value, str):
        return current_path(value), {}
    if not isinstance(value, Mapping) or "class_path" not in value:
        form = "{class_path: mypkg.Mine, init_args: {...}}"
        raise ValueError(f"`{key}` must be a word, a class path or {form}, got {value!r}")
    if not isinstance(args := value.get("init_args") or {}, Mapping):
        raise ValueError(f"`{key}`: init_args must name arguments, as in {{momentum: 0.9}}, got {args!r}")
    if beside := {name: one for name, one in value.items() if name not in known}:
        right = {name: one for name, one in value.items() if name in known} | {"init_args": {**args, **beside}}
        raise ValueError(f"`{key}`: arguments of a class stand under init_args: {as_yaml(right)}")
    return current_path(str(value["class_path"])), dict(args)


def word_of(key: str, value: Any, words: Iterable[str]) -> str | None:
    """Return the word that ``key`` is set to, alone or as a ``class_path``; None for a class.

    Raises:
        ValueError: The word has arguments.

    >>> word_of("act_layer", {"class_path": "gelu"}, ["gelu"]), word_of("act_layer", "Tanh", ["gelu"])
    ('gelu', None)
    """
    word, args = name_and_args(key, value)
    if word in words and args:
        raise ValueError(f"`{key}`: {word} takes no arguments, got {choice_text(value)}")
    return word if word in words else None


def choice_text(value: Any) -> Any:
    """Return a word or class path with its arguments as text for tables and titles; anything else unchanged.

    >>> choice_text({"class_path": "mypkg.Coordinates", "init_args": {"width": 64}}), choice_text(["learned", "rope2d"])
    ('mypkg.Coordinates(width=64)', 'learned + rope2d')
    """
    if isinstance(value, list | tuple) and not all(isinstance(one, str | Mapping) for one in value):
        return str(list(value))
    if isinstance(value, list | tuple):
        return " + ".join(str(choice_text(one)) for one in value)
    if not isinstance(value, Mapping) or "class_path" not in value:
        return value
    args = ", ".join(f"{name}={choice_text(arg)}" for name, arg in (value.get("init_args") or {}).items())
    return f"{value['class_path']}({args})" if args else value["class_path"]


def is_below(path: str, names: Iterable[str]) -> bool:
    """Return whether an import path is one of these packages or modules, or lies in one.

    >>> is_below("mypkg.layers.Mine", ["mypkg"]), is_below("mypkg2.Mine", ["mypkg"])
    (True, False)
    """
    return any(f"{path}.".startswith(f"{name}.") for name in names)


def import_own(name: str, shown: str) -> Any:
    """Import a module that the user trusts.

    Args:
        name: Its name.
        shown: What names it, for the message.

    Raises:
        UsageError: There is no such module, or its code fails.

    >>> import_own("collections", "`opt`").__name__
    'collections'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"{shown}: there is no module {error.name}, neither installed nor in {os.getcwd()}"
            ) from error
        raise UsageError(f"{shown} cannot be imported: {with_place(error)}") from error
    except Exception as error:  # the user's code may raise anything
        raise UsageError(f"{shown} cannot be imported: {with_place(error)}") from error


def find_class(key: str, path: str, kind: Any, words: Iterable[str] = (), home: str = "") -> Any:
    """Return the class of a path, imported before or in a trusted package, or of a bare name in the module ``home``.

    Args:
        key: The key that names the class, for the message.
        path: The class path, or a name.
        kind: The required base class, or several.
        words: Other values that the key takes, for the message.
        home: Module whose classes need no path.

    Raises:
        ValueError: There is no such class, it is not imported and not trusted, or it has another base class.

    >>> find_class("opt", "collections.Counter", dict).__name__
    'Counter'
    """
    module, _, name = path.rpartition(".")
    space = sys.modules.get(module or home)
    if space is None and is_below(path, TRUSTED):
        space = import_own(module, f'`{key}`: "{path}"')
    found, kinds = getattr(space, name, None), kind if isinstance(kind, tuple) else (kind,)
    names = " or ".join(f"{k.__module__.removeprefix('torch.nn.modules.')}.{k.__name__}" for k in kinds)
    if not module and not isinstance(found, type):
        near = [*words, *(n for n in dir(space) if isinstance(c := getattr(space, n), type) and issubclass(c, kinds))]
        named = f"must be one of {', '.join(words)}, " if words else "must be "
        library = f"any class of {home}, " if words and home else f"a class of {home} " if home else ""
        rule = f"{named}{library}or a class path such as mypkg.Mine"
        raise ValueError(f"`{key}` {rule}, got {path!r}{did_you_mean(path, near)}")
    if module == "__main__" and found is None:
        raise ValueError(f"`{key}`: {defined_elsewhere(name)}")
    if space is None:
        way_out = f"import {module} first; on the command line, add {trust_also(module.split('.')[0])}"
        raise ValueError(f'`{key}`: the class path "{path}" is not imported: {way_out}')
    if found is None:
        raise ValueError(f'`{key}`: {module} has no class "{name}"{did_you_mean(name, dir(space))}')
    if not isinstance(found, type) or not issubclass(found, kinds):
        raise ValueError(f"`{key}`: {path} must be a subclass of {names}")
    if getattr(getattr(found, "forward", None), "__name__", "") == "_forward_unimplemented":  # that of nn.Module
        raise ValueError(f"`{key}`: {path} has no `forward`, which maps what it gets to a tensor")
    return found


def build(key: str, cls: Any, args: Mapping[str, Any], offered: Mapping[str, Any], *first: Any) -> Any:
    """Build a class from ``first``, its ``args``, and those of the ``offered`` values that its signature takes.

    Raises:
        ValueError: The class does not take an argument or its value, fails, or has a tensor by a name that is taken.

    >>> build("bound", range, {}, {}, 1, 4)
    range(1, 4)
    """
    path = f"{cls.__module__}.{cls.__qualname__}"
    try:
        parameters: Mapping[str, Any] = taken_by(cls)
        check_names(cls, args, f"`{key}`: {path}")
    except (TypeError, ValueError) as error:  # a builtin has no signature
        if args:
            raise error
        parameters = {}
    try:
        return cls(*first, **{name: value for name, value in offered.items() if name in parameters} | dict(args))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{key}`: {path} refuses its arguments: {one_line(error, 2000)}") from error
    except (AttributeError, KeyError, NotImplementedError) as error:
        if re.search(r"before Module\.__init__|no attribute '_modules'", str(error)):
            raise ValueError(_without_super(key, path)) from error
        raise ValueError(f"`{key}`: {path} cannot be built: {in_own_code(error) or named_line(error)}") from error


def build_part(key: str, cls: Any, args: Mapping[str, Any], offered: Mapping[str, Any], *first: Any) -> Any:
    """Build a module of a network by :func:`build`.

    Raises:
        ValueError: As there, or what it would train is none of its parameters, which optimizers and state dicts have.

    >>> import torch
    >>> build_part("act_layer", torch.nn.GELU, {}, {})
    GELU(approximate='none')
    """
    module, path = build(key, cls, args, offered, *first), f"{cls.__module__}.{cls.__qualname__}"
    if "_modules" not in vars(module):
        raise ValueError(_without_super(key, path))
    if outside := _outside_state(module):
        ways = "make it an nn.Parameter, or a list of them an nn.ParameterList or nn.ModuleList"
        raise ValueError(f"`{key}`: neither optimizer nor state dict would have `{outside}` of {path}: {ways}")
    return module


def _without_super(key: str, path: str) -> str:
    return f"`{key}`: `__init__` of {path} must call `super().__init__` first"


def _outside_state(module: Any) -> str | None:
    """Return the first attribute of a module or its parts that holds leaves to train beside its parameters."""
    known = {id(parameter) for parameter in module.parameters()}
    for place, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_modules") and any(id(leaf) not in known for leaf in _leaves(value)):
                return f"{place}.{name}" if place else name
    return None


def _leaves(value: Any) -> Iterator[Any]:
    """Return the tensors to train in a value: itself, of a module, or in lists and mappings."""
    if isinstance(value, Mapping | list | tuple | set):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(one)
    elif not isinstance(value, type) and hasattr(value, "named_parameters"):
        yield from (parameter for parameter in value.parameters() if parameter.requires_grad)
    elif getattr(value, "requires_grad", None) is True and value.is_leaf:
        yield value


def build_choice(key: str, value: Any, words: Mapping[Any, Any], kind: Any, offered: Mapping[str, Any]) -> Any:
    """Build what ``key`` is set to: a word, a class path, or a mapping with ``class_path`` and ``init_args``.

    Args:
        key: The key, for messages.
        value: What it is set to.
        words: The words, and the class or function that each stands for.
        kind: Base class of a class path.
        offered: Values of which each gets those that its signature takes.

    Raises:
        ValueError: There is no such word or class, or it does not take an argument, or refuses its value.

    >>> from collections import Counter
    >>> build_choice("bag", {"class_path": "counter", "init_args": {"a": 2}}, {"counter": Counter}, dict, {})
    Counter({'a': 2})
    """
    path, args = name_and_args(key, value)
    if (cls := words.get(path)) is None:
        return build_part(key, find_class(key, path, kind, words), args, offered)
    check_names(cls, args, f"{key}={path}")
    taker: Any = cls.func if isinstance(cls, partial) else cls
    check_types(get_type_hints(vars(taker).get("__init__", taker)), args, key)
    if fixed := [name for name in ("dim", "place") if name in args and name in offered]:
        raise ValueError(f"`{key}.{fixed[0]}` follows from the network: leave it out, got {args[fixed[0]]!r}")
    parameters = inspect.signature(cls).parameters
    return cls(**{name: value for name, value in offered.items() if name in parameters} | args)
