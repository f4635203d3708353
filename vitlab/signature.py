"""Classes whose ``**kwargs`` have names: ``help`` shows each with its default, and a wrong one is refused by name."""

import inspect
import typing
from collections.abc import Callable
from typing import Any

from vitlab.errors import UsageError, did_you_mean


class _Signature:
    """What ``inspect.signature`` reads, and so do ``help`` and editors."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        return full_signature(owner)


class Named:
    """A class whose constructors hand on ``**kwargs`` that are annotated with ``Unpack[ATypedDict]``.

    Names and types are those of the TypedDict, defaults those of the constructors that take them in the end. Type
    checkers read the annotation. jsonargparse must not: it would take the TypedDict, which has no defaults and no help,
    in place of the calls, which have both; so the annotation goes once the class is made.
    """

    __signature__: Any = _Signature()
    _built_from: tuple[Callable[..., Any], ...] = ()  # what takes arguments of this class and is no base of it

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the TypedDict of the constructor's ``**kwargs`` apart."""
        super().__init_subclass__(**kwargs)
        constructor = vars(cls).get("__init__")
        for name, kind in dict(getattr(constructor, "__annotations__", {})).items():
            if typing.get_origin(kind) is typing.Unpack:
                constructor.__annotations__[name] = Any
                constructor.rest = typing.get_args(kind)[0]  # type: ignore[union-attr]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse a name that the class does not take, with the closest that it does."""
        check_names(cls, kwargs)
        return super().__new__(cls)


def check_names(of: Callable[..., Any], arguments: typing.Iterable[str], name: str | None = None) -> None:
    """Refuse arguments that ``of`` does not take.

    Args:
        of: A class or function.
        arguments: Names that it is to be called with.
        name: What to call it in the message; default: its own name.

    Raises:
        UsageError: There is no such argument; the closest is named.
    """
    parameters = inspect.signature(of).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for given in arguments:
        if given not in parameters:
            raise UsageError(f"{name or of.__name__} takes no argument `{given}`{did_you_mean(given, parameters)}")


def full_signature(cls: type) -> inspect.Signature:
    """Return the signature of a class with the names that its ``**kwargs`` stand for.

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
