"""What a configuration may import; docs/security.md gives the reasons."""

import argparse
import hashlib
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitlab.class_paths import import_own, is_below
from vitlab.errors import (
    PARTS_FILE,
    TRUSTED,
    UsageError,
    defined_elsewhere,
    did_you_mean,
    is_own,
    trust_also,
    with_place,
)
from vitlab.notebook import defined_here, imported_names, is_defined_here, load_classes, without_docstrings

ALLOWED = [
    *("vitlab", "lightning.pytorch", "lightning.fabric.plugins"),
    *("torch.nn", "torch.optim", "torchmetrics", "timm.optim", "timm.scheduler"),
]
FORCED = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def trust(packages: str | Iterable[str]) -> None:
    """Allow class paths from these packages; the working directory is searched too, after everything else.

    A path such as ``runs/first/parts.py`` runs this file, which defines the classes of the notebook of a run.

    Args:
        packages: Their names; a text names one, or several with commas between them.

    Raises:
        UsageError: There is no such package, or it fails to import.
    """
    for name in packages.split(",") if isinstance(packages, str) else packages:
        if name.endswith(f"/{PARTS_FILE}"):
            if name not in TRUSTED:
                _load(name)
                TRUSTED.append(name)
            continue
        if name.endswith(".py") and Path(name).is_file():
            module = ".".join(Path(os.path.relpath(name)).with_suffix("").parts)
            raise UsageError(f'`--trust_imports` must name modules, got {name!r}; did you mean "{module}"?')
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"`--trust_imports` must name packages, such as my_package, got {name!r}")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # last, so that a local file never hides a library
        if name not in TRUSTED:
            import_own(name, f"`--trust_imports {name}`")
            TRUSTED.append(name)


def trust_classes(paths: Iterable[str]) -> None:
    """Allow the modules of classes that the caller of a Python function has in hand, and so has imported."""
    for path in paths:
        if not may_import(path):
            TRUSTED.append(path.rpartition(".")[0])


def allowed_imports() -> list[str]:
    """Return the import paths that a configuration may name, as jsonargparse takes them."""
    named = [name for name in TRUSTED if not name.endswith(".py")]
    return [*ALLOWED, *named, *defined_here()]


def apply_trust_flags(args: list[str]) -> list[str]:
    """Trust the packages of ``--trust_imports``, which every command takes, and return the other arguments.

    Raises:
        UsageError: A package is not named, missing, or fails to import.
    """
    kept, words = [], iter(args)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag != "--trust_imports":
            kept.append(word)
        elif names := value if equals else next(words, ""):
            trust(names)
        else:
            raise UsageError("`--trust_imports` must name packages, such as my_package")
    return kept


def import_problem(path: str) -> str | None:
    """Return why a trusted class path cannot be imported; None if it can, or is not a trusted path."""
    module, _, name = path.rpartition(".")
    if not is_below(path, TRUSTED):
        return None
    try:
        found = import_own(module, f'"{path}"')
    except UsageError as error:
        return str(error)
    return None if hasattr(found, name) else f'"{path}": {module} has no {name}{did_you_mean(name, dir(found))}'


def own_code(content: Any) -> dict[str, str]:
    """Return a digest of each module of the user's that a configuration names, and of those that these import, by name.

    Comments, docstrings and layout do not count, and installed packages are left out. A module that none of them
    imports by a statement is not followed, such as one that is found by a text when the program runs.

    Args:
        content: The configuration. Its trusted class paths are imported, as building it does.

    Example:
        >>> own_code({"model": {"pos_embed": "rope2d"}})
        {}
    """
    left, found, seen = {path.rpartition(".")[0] for path in _trusted_in(content)}, dict[str, str](), {"__main__"}
    for name in left:
        with suppress(UsageError):  # who builds it says what is wrong
            import_own(name, name)
    while left := left - seen:
        seen.add(name := left.pop())
        module = sys.modules.get(name)
        file = Path(getattr(module, "__file__", None) or "")
        if module is None or file.suffix != ".py" or not is_own(file):
            continue
        with suppress(OSError, SyntaxError, ValueError):
            text = file.read_text()
            found[name] = hashlib.sha256(without_docstrings(text).encode()).hexdigest()[:10]
            package = tuple(filter(None, (module.__package__ or "").split(".")))
            left |= {".".join(parts) for parts in imported_names(text, package)}
    return found


def changed_code(before: Mapping[str, str], content: Any) -> dict[str, str]:
    """Return those of :func:`own_code` that had another digest ``before``.

    Example:
        >>> changed_code({"mine": "29f938321c"}, {"model": {"pos_embed": "rope2d"}})
        {}
    """
    return {name: digest for name, digest in own_code(content).items() if before.get(name, digest) != digest}


def _trusted_in(value: Any) -> list[str]:
    """Return the class paths of a configuration that belong to trusted packages."""
    if isinstance(value, Mapping | list | tuple):
        inner = value.values() if isinstance(value, Mapping) else value
        return [path for one in inner for path in _trusted_in(one)]
    return [value] if isinstance(value, str) and not needs_no_trust(value) and is_below(value, TRUSTED) else []


def _load(path: str) -> None:
    try:
        load_classes(path)
    except FileNotFoundError as error:
        raise UsageError(f"`--trust_imports {path}`: there is no such file") from error
    except UsageError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise UsageError(f"`--trust_imports {path}` cannot be imported: {with_place(error)}") from error


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Let the help of a command show ``--trust_imports``, which :func:`apply_trust_flags` reads."""
    text = "packages of yours that class paths in the configuration may import, besides vitlab and Lightning"
    parser.add_argument("--trust_imports", metavar="PACKAGE[,PACKAGE]", help=text)


def check_import(path: str) -> None:
    """Refuse an import path of a configuration that neither vitlab nor the user trusts."""
    if not may_import(path):
        raise UsageError(not_allowed(path))


def import_class(key: str, path: str) -> None:
    """Import the module of the class path under ``key``; a bare name has no module."""
    if "." in path:
        check_import(path)
        import_own(path.rpartition(".")[0], f'`{key}`: "{path}"')


def may_import(path: str) -> bool:
    """Return whether vitlab or the user trusts an import path of a configuration."""
    return needs_no_trust(path) or is_below(path, TRUSTED)


def needs_no_trust(path: str) -> bool:
    """Return whether vitlab imports a path that nobody named, whatever this process has trusted meanwhile.

    Example:
        >>> needs_no_trust("torch.nn.GELU"), needs_no_trust("mine.Part")
        (True, False)
    """
    return "." not in path or is_defined_here(path) or is_below(path, ALLOWED)


def not_allowed(path: str) -> str:
    """Return the message that an import path is refused, with the way out."""
    if path.startswith("__main__."):
        return defined_elsewhere(path.removeprefix("__main__."))
    places = ", ".join(f"{name}." for name in ALLOWED)
    package = path.split(".")[0]
    return (
        f'the class path "{path}" is refused: a configuration imports from {places} only; '
        f'if it is your code, add {trust_also(package)} (in Python, trust_imports="{package}")'
    )


def refuse_forced_loading() -> None:
    """Refuse to start where the environment makes torch run code from checkpoints."""
    if os.environ.get(FORCED):
        raise UsageError(f"{FORCED}={os.environ[FORCED]} lets every checkpoint run code; unset it")
