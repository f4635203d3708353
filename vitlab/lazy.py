"""Names that a package imports when they are first used, so that importing the package costs nothing."""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from vitlab.errors import did_you_mean


def lazy(
    package: str, homes: Mapping[str, Iterable[str]], rooms: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package (PEP 562).

    Args:
        package: Its ``__name__``.
        homes: A module and the names that the package takes from it.
        rooms: Packages inside of it that can be used without a line that imports them.
    """
    module_of = {name: home for home, names in homes.items() for name in names}
    inside = set(rooms)

    def get(name: str) -> Any:
        if name in inside:
            return import_module(f"{package}.{name}")
        if name not in module_of:
            hint = did_you_mean(name, [*module_of, *inside])
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        return getattr(import_module(module_of[name]), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of, *inside})

    return get, names
