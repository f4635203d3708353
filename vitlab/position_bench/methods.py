"""How posbench names a position embedding, and tells its source from another."""

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from vitlab.class_paths import name_and_args
from vitlab.config.trust import import_class, may_import, trust_classes
from vitlab.errors import UsageError
from vitlab.layers.pos_embed import POS_EMBEDS, PosEmbed
from vitlab.notebook import source_of, without_docstrings
from vitlab.objects import written

Method = Any  # a name, a class path, or a mapping of class_path and init_args


def method_of(method: Any) -> Method:
    """Return a method as a configuration names it.

    Raises:
        UsageError: It is neither a name nor a PosEmbed.
    """
    if isinstance(method, str):
        if method not in POS_EMBEDS:
            if "." not in method:
                raise UsageError(
                    f"{method!r} is not a position embedding: choose {', '.join(POS_EMBEDS)}, or a class path"
                )
            import_class("pos_embed", method)
        return method
    if isinstance(method, Mapping):
        return dict(method)
    made = method.func if isinstance(method, partial) else method  # what a network is yet to give sizes is a partial
    cls = made if isinstance(made, type) else type(made)
    if not issubclass(cls, PosEmbed):
        raise UsageError(f"{cls.__qualname__} is not a PosEmbed: inherit from vitlab.PosEmbed")
    used: list[str] = []
    found = written("pos_embed", method, used)
    trust_classes(used)
    return found


def label_of(method: Method) -> str:
    """Return the name of a method, as its folder is called; with a digest where signs that no folder has are left out.

    Example:
        >>> label_of("coordinates.Coordinates"), label_of({"class_path": "rope2d", "init_args": {"theta": 10}})
        ('coordinates.Coordinates', 'rope2d_theta_10')
    """
    name, args = name_and_args("pos_embed", method)
    words = [name, *(f"{key}_{value}" for key, value in args.items())]
    text = "_".join(words)
    label = re.sub(r"[^\w.+-]+", "_", text)
    return label if label == text else f"{label}_{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def method_text(method: Method) -> str:
    """Return a method in words, as it is called now."""
    name, args = name_and_args("pos_embed", method)
    return f"{name} {json.dumps(args, sort_keys=True)}" if args else name


def code_of(method: Method) -> str | None:
    """Return the digest of the modules that define a class of the user's and its bases, whatever their comments.

    None for a method of vitlab, for modules without a source, and for a class that is neither imported nor trusted.

    Raises:
        UsageError: It is a class of a notebook or script, whose source is not known or cannot be kept.

    Example:
        >>> code_of("rope2d") is None
        True
    """
    path, _ = name_and_args("pos_embed", method)
    if may_import(path):
        import_class("pos_embed", path)
    module, _, name = path.rpartition(".")
    kinds = getattr(getattr(sys.modules.get(module), name, None), "__mro__", ())
    homes = list(dict.fromkeys(kind.__module__ for kind in kinds))
    homes = [home for home in homes if home.partition(".")[0] not in ("vitlab", "torch", "builtins")]
    try:
        texts = [source_of([name]) if home == "__main__" else inspect.getsource(sys.modules[home]) for home in homes]
        plain = "\n".join(map(without_docstrings, texts))
    except (OSError, TypeError, SyntaxError):
        return None
    return hashlib.sha256(plain.encode()).hexdigest() if plain else None
