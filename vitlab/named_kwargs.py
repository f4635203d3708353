"""Classes with named ``**kwargs``: ``help`` shows each with its default, and unknown names are refused."""

import inspect
import typing
from collections.abc import Callable
from typing import Any

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
        if given not in parameters:
            raise UsageError(f"{name or of.__name__} takes no argument `{given}`{did_you_mean(given, parameters)}")


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
                parameter = taken[name].replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind)
                shown.setdefault(name, parameter)
            break
    return inspect.Signature(list(shown.values()))
