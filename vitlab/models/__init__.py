"""Vision Transformers: build one by name, load one from a file, read what passes through it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitlab.models.create import create_model
    from vitlab.models.load import load_network
    from vitlab.models.sizes import SIZES
    from vitlab.models.vit import VisionTransformer

__all__ = ["SIZES", "VisionTransformer", "create_model", "load_network"]

_HOMES = {"create_model": "create", "load_network": "load", "SIZES": "sizes", "VisionTransformer": "vit"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:  # on first use, so that a list of sizes needs no torch
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
