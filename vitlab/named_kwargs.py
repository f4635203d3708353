"""Classes with named ``**kwargs``: ``help`` shows each with its default, and unknown names are refused."""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from vitlab.errors import UsageError, did_you_mean
from vitlab.objects import Described


class _Signature:
    """The signature that ``inspect.signature``, ``help`` and editors see."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        return full_signature(owner)


class Named(metaclass=Described):
    """A class whose constructors pass on ``**kwargs`` that are annotated with ``Unpack[ATypedDict]``.

    Names and types come from the TypedDict, defaults from the constructors that finally take them. Type checkers read
    the annotation. jsonargparse must not, as it would use the TypedDict, without defaults and help, instead of the
    calls; so the annotation is removed once the class exists.
    """

    __signature__: Any = _Signature()
    _built_from: tuple[Callable[..., Any], ...] = ()  # callables that take its arguments but are no bases
    old_names: ClassVar[Collection[str]] = ()  # arguments that it takes and does not show
    _given: tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments, as the metaclass notes them

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Move the TypedDict of the constructor's ``**kwargs`` out of the annotations."""
        super().__init_subclass__(**kwargs)
        constructor = vars(cls).get("__init__")
        for name, kind in dict(getattr(constructor, "__annotations__", {})).items():
            if typing.get_origin(kind) is typing.Unpack:
                constructor.__annotations__[name] = Any
                constructor.rest = typing.get_args(kind)[0]  # type: ignore[union-attr]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse a name that the class does not take, and suggest the closest."""
        check_names(cls, kwargs)
        return super().__new__(cls)


def check_names(of: Callable[..., Any], arguments: typing.Iterable[str], name: str | None = None) -> None:
    """Refuse arguments that ``of`` does not take.

    Args:
        of: A class or function.
        arguments: Names that it is to be called with.
        name: Its name in the message; default: its own.

    Raises:
        UsageError: There is no such argument; the message suggests the closest.
    """
    parameters = inspect.signature(of).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for given in arguments:
        if given not in parameters and given not in getattr(of, "old_names", ()):
            raise UsageError(f"{name or of.__name__} takes no argument `{given}`{did_you_mean(given, parameters)}")


def taken_by(cls: Any) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a class, with those of its bases as long as each constructor passes ``**kwargs`` on.

    Bases of torch, torchmetrics and timm do not count: what a class gives those is its own choice.
    """
    taken = dict(inspect.signature(cls).parameters)
    takers = [base for base in getattr(cls, "__mro__", ()) if "__init__" in vars(base)]
    for base in takers[1:]:
        passes_on = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        if not passes_on or base.__module__.startswith(("torch.", "torchmetrics.", "timm.")):
            break
        taken = {name: p for name, p in taken.items() if p.kind is not p.VAR_KEYWORD}
        taken = {**inspect.signature(base).parameters, **taken}
    return taken


def check_types(hints: Mapping[str, Any], arguments: Mapping[str, Any], key: str) -> None:
    """Refuse a value that is not of the type of its argument; classes and other types are left to the callee.

    Args:
        hints: Types by name.
        arguments: Values by name.
        key: What they are arguments of, for the message.

    Raises:
        ValueError: Names argument, type and value.
    """
    for name, value in arguments.items():
        if name in hints and not _fits(value, hints[name]):
            words = _words(hints[name])
            kinds = f"one of {', '.join(words)}" if _is_choice(hints[name]) else " or ".join(words)
            raise ValueError(f"`{key}.{name}` must be {kinds}, got {'null' if value is None else repr(value)}")


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is Sequence:
        return isinstance(value, list | tuple) and all(_fits(one, inner[0]) for one in value)
    if typing.is_typeddict(hint):
        return isinstance(value, Mapping)
    plain: dict[Any, Any] = {bool: bool, int: int, float: (int, float), str: str, types.NoneType: types.NoneType}
    return hint not in plain or (isinstance(value, plain[hint]) and (hint is bool or not isinstance(value, bool)))


def _is_choice(hint: Any) -> bool:
    inner = typing.get_args(hint)
    return typing.get_origin(hint) is typing.Literal or (
        typing.get_origin(hint) in (typing.Union, types.UnionType) and any(map(_is_choice, inner))
    )


def _words(hint: Any) -> list[str]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return list(dict.fromkeys(word for one in inner for word in _words(one)))
    if origin is typing.Literal:
        return [str(one) for one in inner]
    if origin is Sequence:
        return ["a list"]
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", types.NoneType: "null"}
    return [names.get(hint, "a class path")]


@functools.cache  # each start of a training asks some fifty times
def full_signature(cls: type) -> inspect.Signature:
    """Return the signature of a class with the names of its ``**kwargs``.

    Args:
        cls: A class that is :class:`Named`.
    """
    constructors = [vars(c)["__init__"] for c in cls.__mro__ if "__init__" in vars(c) and c is not object]
    taken: dict[str, inspect.Parameter] = {}  # by any of them: where a default is found
    for taker in (*constructors, *getattr(cls, "_built_from", ())):
        for parameter in inspect.signature(taker).parameters.values():
            taken.setdefault(parameter.name, parameter)
    shown: dict[str, inspect.Parameter] = {}
    for constructor in constructors:
        own = list(inspect.signature(constructor).parameters.values())[1:]
        late = bool(shown)  # behind what a subclass has
        for parameter in own:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                shown.setdefault(parameter.name, parameter.replace(kind=parameter.KEYWORD_ONLY) if late else parameter)
        rest = next((p for p in own if p.kind is p.VAR_KEYWORD), None)
        if rest is None:
            break
        if hasattr(constructor, "rest"):
            for name, kind in typing.get_type_hints(constructor.rest).items():
                if name in getattr(cls, "old_names", ()):
                    continue  # taken, and not shown
                parameter = taken[name].replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind)
                shown.setdefault(name, parameter)
            break
    return inspect.Signature(list(shown.values()))
