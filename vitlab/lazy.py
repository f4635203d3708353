"""Fast start-up: names that are imported on first use, and faster imports for commands."""

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from vitlab.errors import did_you_mean


def lazy(
    package: str, homes: Mapping[str, Iterable[str]], rooms: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package (PEP 562).

    Args:
        package: Its ``__name__``.
        homes: Modules and the names that the package takes from them.
        rooms: Subpackages that are imported on first use.
    """
    module_of = {name: home for home, names in homes.items() for name in names}
    inside = set(rooms)

    @cache  # jsonargparse asks every package for each of its types, many times
    def hint(name: str) -> str:
        return did_you_mean(name, [*module_of, *inside])

    def get(name: str) -> Any:
        if name in inside:
            return import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint(name)}")
        return getattr(import_module(module_of[name]), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of, *inside})

    return get, names


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import lightning and its dependencies in two thirds of the time.

    Imports create no garbage, yet the collector scans all their objects many times, so it is off. And torchmetrics
    imports scipy.signal, with half of scipy, only to set an alias for other packages' audio metrics: a dummy module
    takes the alias. Gain: 0.9 and 1.5 of 6.8 CPU seconds. Delete the latter when torchmetrics (1.9) stops doing so.
    """
    collecting, stand_in = gc.isenabled(), ModuleType("scipy.signal")
    stand_in.__dict__["hamming"] = None
    gc.disable()
    try:
        if not {"torchmetrics", stand_in.__name__} & set(sys.modules):
            sys.modules[stand_in.__name__] = stand_in
        yield
    finally:
        if sys.modules.get(stand_in.__name__) is stand_in:
            del sys.modules[stand_in.__name__]
        gc.freeze()  # imported objects stay alive, so the collector can skip them
        if collecting:
            gc.enable()
