"""How classes and objects of Python are written into a configuration: as class paths with their arguments."""

import datetime
import functools
import inspect
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from vitlab.errors import UsageError, named_line

PARTS = (  # arguments that take a class: a word, a class path, or, in Python, a class or an object
    *("tokenizer", "pos_embed", "block", "attn", "mlp_layer", "global_pool"),
    *("act_layer", "norm_layer", "t2t_act_layer", "t2t_norm_layer"),
    *("opt", "lr_scheduler", "metrics"),
)
_PLAIN = (str, bool, int, float, type(None))


def written(key: str, value: Any, used: list[str] | None = None) -> Any:
    """Return a value as a configuration holds it; classes and objects become class paths with arguments.

    An object is described by the arguments that it was built with: vitlab's classes remember them, another must keep
    each under its own name or in ``hparams``, and what is built from them again must equal the object.

    Args:
        key: What the value belongs to, for the message.
        value: Anything; plain values, and mappings and lists of them, are returned unchanged.
        used: Gets the class paths of classes and objects, which the caller has imported.

    Raises:
        UsageError: The value cannot be written; the message says what to give instead.

    >>> import collections, fractions
    >>> written("opt", collections.Counter), written("at", [1, "a"])
    ('collections.Counter', [1, 'a'])
    >>> written("part", functools.partial(fractions.Fraction, numerator=3))
    {'class_path': 'fractions.Fraction', 'init_args': {'numerator': 3}}
    """
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # numbers of NumPy, some of which are floats, and tensors
        if getattr(value, "ndim", 0) == 0:
            return value.tolist()
        raise UsageError(f"`{key}`: a {type(value).__name__} cannot be written into a configuration: give a list")
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, os.PathLike | datetime.date):
        return str(value)
    if isinstance(value, Mapping):
        return {name: written(key, one, used) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [written(key, one, used) for one in value]
    if isinstance(value, type):
        return _spec(key, value, {}, used)
    if isinstance(value, functools.partial):
        return _spec(key, value.func, _named(key, value.func, value.args, value.keywords), used)
    if isinstance(value, FunctionType | BuiltinFunctionType | ModuleType):
        what = "a lambda" if value.__name__ == "<lambda>" else f"the {type(value).__name__} {value.__name__}"
        raise UsageError(
            f"`{key}`: {what} cannot be written into a configuration: give a class, as in MyClass, an object of one, "
            "or functools.partial(MyClass, width=3)"
        )
    if used is not None:
        used += getattr(value, "_given_classes", ())
    return _spec(key, type(value), arguments_of(key, value), used)


def class_path(key: str, cls: type) -> str:
    """Return the path of a class under which it is found again: of vitlab's own that which a reader types.

    Raises:
        UsageError: It is defined inside of a function or class, or its name now leads to another class.

    >>> class_path("model", UsageError)
    'vitlab.errors.UsageError'
    """
    module, name = cls.__module__, cls.__qualname__
    if "." in name:
        raise UsageError(
            f"`{key}`: {name} is defined inside of {name.rpartition('.')[0].removesuffix('.<locals>')}, where no "
            "configuration finds it: move it to the top level of its file or cell"
        )
    found = getattr(sys.modules.get(module), name, None)
    if found is not cls:
        state = "defined again" if found is not None else "renamed or deleted"
        raise UsageError(f"`{key}`: {module}.{name} was {state} since: give the class as it is now, or a new object")
    if module.startswith("vitlab.") and name in getattr(sys.modules["vitlab"], "__all__", ()):
        return f"vitlab.{name}"
    return f"{module}.{name}"


def arguments_of(key: str, thing: Any) -> dict[str, Any]:
    """Return the arguments that an object was built with.

    Raises:
        UsageError: It does not keep one of them, another object is built from what it keeps, or it was changed since.
    """
    cls, given = type(thing), vars(thing).get("_given") if hasattr(thing, "__dict__") else None
    name = cls.__name__
    if given is not None:
        if change := _change(thing):
            raise UsageError(f"`{key}`: {change}")
        return _named(key, cls, *given)
    way_out = f"give functools.partial({name}, ...) or, if {name} is yours, keep each argument as self.ARGUMENT"
    if hasattr(cls, "save_hyperparameters"):
        way_out += ", or call self.save_hyperparameters()"
    saved = dict(getattr(thing, "hparams_initial", None) or {})
    kept: dict[str, Any] = {}
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in saved or hasattr(thing, parameter.name):
            kept[parameter.name] = saved.get(parameter.name, _as_given(parameter, getattr(thing, parameter.name, None)))
        elif parameter.default is parameter.empty:
            raise UsageError(f"`{key}`: {name} does not keep its argument `{parameter.name}`: {way_out}")
    kept = {p.name: kept[p.name] for p in parameters if p.name in kept and kept[p.name] is not p.default}
    if difference := _difference(thing, cls, kept):
        if ".requires_grad`" in difference or "`hparams." in difference:
            way_out = f"set it in its `__init__`, or in a subclass of {name}"
        raise UsageError(f"`{key}`: how this {name} was built is not known ({difference}): {way_out}")
    return kept


def _as_given(parameter: inspect.Parameter, kept: Any) -> Any:
    """Return the argument that an attribute of its name keeps: of a flag, as ``bias=False``, whether it is there."""
    if isinstance(parameter.default, bool) and (kept is None or hasattr(kept, "requires_grad")):
        return kept is not None
    return kept


def changes_since_built(thing: Any) -> dict[str, tuple[Any, Any]]:
    """Return what of an object of a :class:`Described` class somebody has changed since it was built: before, and now.

    >>> from vitlab import VisionTransformer
    >>> net = VisionTransformer(img_size=8, in_chans=1, patch_size=4, embed_dim=8, depth=1, num_heads=2)
    >>> net.norm.eps = 0.1
    >>> changes_since_built(net)
    {'norm.eps': ('1e-06', '0.1')}
    """
    before, now = vars(thing).get("_as_built", {}), dict(_settings(thing))
    names = [name for name in {**before, **now} if name in before or (before and "." not in name)]  # no later parts
    both = {name: (before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)}
    return {name: (getattr(was, "__name__", was), getattr(is_, "__name__", is_)) for name, (was, is_) in both.items()}


def unsharded_class(thing: Any) -> type:
    """Return the class of an object; of a module that `fsdp2` shards, and so gives another one, that which it had.

    >>> unsharded_class(UsageError("no")).__name__
    'UsageError'
    """
    cls = type(thing)
    is_sharded = cls.__module__.startswith("torch.distributed.fsdp") and len(cls.__bases__) > 1
    return cls.__bases__[1] if is_sharded else cls  # behind FSDPModule


def _change(thing: Any) -> str:
    """Return what of an object of vitlab somebody has changed since it was built; empty if nothing."""
    if not (found := changes_since_built(thing)):
        return ""
    changed, (was, value) = next(iter(found.items()))
    cls = type(thing)
    way_out = "give it as an argument, or build it so in a subclass"
    if changed.endswith(".requires_grad") and "freeze" in inspect.signature(cls).parameters:
        way_out = "freeze parts by its argument `freeze`, or build it so in a subclass"
    return (
        f"`{changed}` of this {cls.__name__} was {was} when it was built and is {value} now, and a run is built from "
        f"arguments: {way_out}"
    )


def _settings(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield what arguments decide of an object of vitlab and somebody may change later, by name, as it is now."""
    for place, module in _modules(thing):
        cls: Any = unsharded_class(module)
        yield f"{place}.__class__".lstrip("."), cls
        arguments = _argument_names(cls)
        for name, value in vars(module).items():
            if name in arguments:
                yield f"{place}.{name}".lstrip("."), repr(value) if _is_plain(value) else type(value)
    yield from _hparams(thing)
    yield from _trained(thing)


def _modules(thing: Any) -> Iterable[tuple[str, Any]]:
    """Return an object and the modules in it, by name."""
    return thing.named_modules() if hasattr(thing, "named_modules") else [("", thing)]


@functools.cache
def _argument_names(cls: type) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(cls).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _hparams(thing: Any) -> Iterator[tuple[str, str]]:
    kept = getattr(thing, "hparams", None)
    for name, value in kept.items() if isinstance(kept, Mapping) else ():
        if _is_plain(value):
            yield f"hparams.{name}", repr(value)


def _trained(thing: Any) -> Iterator[tuple[str, bool]]:
    for name, value in thing.named_parameters() if hasattr(thing, "named_parameters") else ():
        yield f"{name}.requires_grad", value.requires_grad


def _difference(thing: Any, cls: type, kept: Mapping[str, Any]) -> str:
    """Return how an object differs from one built from the arguments that it keeps; empty if it does not."""
    import torch

    try:
        with torch.random.fork_rng(devices=[]):
            twin = cls(**kept)
    except Exception as error:  # foreign code can raise anything
        return f"{cls.__name__} built from what it keeps raises {named_line(error)}"
    facts, others = dict(_facts(thing)), dict(_facts(twin))
    names = [name for name in {**facts, **others} if facts.get(name, "nothing") != others.get(name, "nothing")]
    return f"`{names[0]}` differs in one built from what it keeps" if names else ""


def _facts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield what its arguments decide of an object: plain attributes, of a module with its parts, and shapes."""
    for place, module in _modules(thing):
        yield f"class of {place or 'it'}", type(module)
        for name, value in vars(module).items() if hasattr(module, "__dict__") else ():
            if not name.startswith("_") and name != "training" and _is_plain(value):
                yield f"{place}.{name}".lstrip("."), value
    for name, value in thing.named_parameters() if hasattr(thing, "named_parameters") else ():
        yield name, tuple(getattr(value, "shape", ())) if "Uninitialized" not in type(value).__name__ else None
    for name, value in thing.named_buffers() if hasattr(thing, "named_buffers") else ():
        yield name, value.tolist()
    yield from _hparams(thing)
    yield from _trained(thing)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN)


def _named(key: str, cls: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return positional and named arguments by name, without those that only a network gives its parts."""
    given = dict(kwargs)
    if args:
        names = [p.name for p in inspect.signature(cls).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(args) > len(names):
            raise UsageError(f"`{key}`: give the arguments of {cls.__name__} by name")
        given = dict(zip(names, args, strict=False)) | given
    completed = getattr(cls, "completed_by", ())
    dropped = {completed[0], *_needed(cls)} if completed else ()  # a network gives the first in any case
    return {name: value for name, value in given.items() if name not in dropped}


def as_yaml(value: Any, is_inside: bool = False) -> str:
    """Return a value as a flag takes it; text inside of a list or mapping needs quotes.

    >>> as_yaml(None), as_yaml("rope2d"), as_yaml({"scheduling": {"0": 2}})
    ('null', 'rope2d', '{"scheduling": {"0": 2}}')
    """
    import yaml

    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {as_yaml(one, True)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(as_yaml(one, True) for one in value)}]"
    if isinstance(value, str) and not is_inside:
        return value  # as it would be typed: a text flag takes "12" as text, and quotes as part of it
    if isinstance(value, float) and not math.isfinite(value):
        return yaml.safe_dump(value).split()[0]  # JSON's NaN and Infinity are text in YAML
    return json.dumps(value, ensure_ascii=False)  # which is YAML too


def _spec(key: str, cls: Any, arguments: Mapping[str, Any], used: list[str] | None) -> Any:
    if not isinstance(cls, type):
        return written(key, cls)  # refused
    path = class_path(key, cls)
    if used is not None:
        used.append(path)
    if not arguments:
        return path
    return {"class_path": path, "init_args": {k: written(f"{key}.{k}", v, used) for k, v in arguments.items()}}


def given_to(thing: Any) -> dict[str, Any]:
    """Return the arguments by name that an object of a :class:`Described` class was built with; of others none."""
    args, named = vars(thing).get("_given", ((), {}))
    return dict(zip(inspect.signature(type(thing)).parameters, args, strict=False)) | named


class _OfConstructor:
    """The signature of a class by its constructor; a ``__signature__`` of the class wins over that of its metaclass."""

    def __get__(self, cls: Any, metaclass: type) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class Described(type):
    """The metaclass of classes whose objects remember the arguments that they were built with.

    Arguments in :data:`PARTS` may be classes and objects, and arrive as a configuration holds them. A class with
    ``completed_by``, the names of what a network adds, gives a :class:`functools.partial` where these are missing.

    >>> class Sized(metaclass=Described):
    ...     def __init__(self, width=3, opt="adamw"):
    ...         self.width, self.opt = width, opt
    >>> arguments_of("data", Sized(4)), Sized(opt=UsageError).opt
    ({'width': 4}, 'vitlab.errors.UsageError')
    """

    __signature__ = _OfConstructor()  # else inspect takes that of `__call__`
    completed_by: tuple[str, ...] = ()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build an object."""
        if cls.completed_by and _lacks(cls, args, kwargs):
            return functools.partial(cls, *args, **kwargs)
        used: list[str] = []  # classes that the caller has in hand
        kwargs = {name: written(name, value, used) if name in PARTS else value for name, value in kwargs.items()}
        made = super().__call__(*args, **kwargs)
        if isinstance(made, cls):
            vars(made)["_given"], vars(made)["_as_built"] = (args, kwargs), dict(_settings(made))
            vars(made)["_given_classes"] = used
            if (built := getattr(made, "on_built", None)) is not None:
                built()
        return made


def _lacks(cls: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether arguments that the network gives are missing, and nothing else is wrong."""
    try:
        bound = inspect.signature(cls).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return False
    return any(name not in bound for name in _needed(cls))


def _needed(cls: Any) -> list[str]:
    """Return the arguments that the network gives and that a class cannot do without."""
    parameters = inspect.signature(cls).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.name in cls.completed_by]
