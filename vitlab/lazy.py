"""Fast start-up: names that are imported on first use, and faster imports for commands."""

import ast
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from vitlab.errors import did_you_mean


def lazy(
    package: str, homes: Mapping[str, Iterable[str]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package (PEP 562), which import a name on first use.

    Args:
        package: Its ``__name__``.
        homes: Modules and the names that the package takes from them; default: what its source imports ``if
            TYPE_CHECKING``, for type checkers and, by this, for all others.
    """

    @cache
    def home_of() -> dict[str, str]:
        if homes is None:
            return _shown_to_type_checkers(package)
        return {name: home for home, names in homes.items() for name in names}

    @cache  # jsonargparse asks every package for each of its types, many times
    def hint(name: str) -> str:
        return did_you_mean(name, home_of())

    def get(name: str) -> Any:
        if name not in home_of():
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint(name)}")
        home = home_of()[name]
        return import_module(f"{package}.{name}") if home == package else getattr(import_module(home), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of()})

    return get, names


def _shown_to_type_checkers(package: str) -> dict[str, str]:
    """Return the module from which a package imports each name ``if TYPE_CHECKING``; its own for a subpackage."""
    body = ast.parse(Path(str(sys.modules[package].__file__)).read_text()).body
    blocks = [node.body for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


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
