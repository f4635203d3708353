"""Classes that a notebook or script defines: their source is kept beside a run, and brings them back elsewhere."""

import ast
import linecache
import sys
import textwrap
from collections.abc import Iterable, Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from vitlab.errors import UsageError

PARTS_FILE = "parts.py"  # in a run directory: the source of its classes
_LOADED: dict[str, Path] = {}  # classes that came from such a file, by name


def is_defined_here(path: str) -> bool:
    """Return whether a class path names a class that the running notebook or script itself defines.

    >>> is_defined_here("__main__.Missing")
    False
    """
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules["__main__"], name, None)
    return module == "__main__" and isinstance(found, type) and found.__module__ == "__main__"


def defined_here() -> list[str]:
    """Return the paths of all classes that the running notebook or script defines."""
    return [path for name in list(vars(sys.modules["__main__"])) if is_defined_here(path := f"__main__.{name}")]


def names_in(value: Any) -> list[str]:
    """Return the names of classes of a notebook or script that a configuration holds.

    >>> names_in({"model": {"class_path": "__main__.Net"}, "data": "Digits"})
    ['Net']
    """
    if isinstance(value, dict | list | tuple):
        inner = value.values() if isinstance(value, dict) else value
        return list(dict.fromkeys(name for one in inner for name in names_in(one)))
    module, _, name = value.rpartition(".") if isinstance(value, str) else ("", "", "")
    return [name] if module == "__main__" and name.isidentifier() else []


def source_of(names: Iterable[str]) -> str:
    """Return a module with classes of the running notebook or script, and all that they use of it.

    Args:
        names: Names of the classes.

    Raises:
        UsageError: The source of one is not known, or it uses a value that cannot be written.
    """
    names = list(names)
    files = {_LOADED[name] for name in names if name in _LOADED}
    if len(files) == 1 and all(name in _LOADED for name in names):
        return files.pop().read_text()
    lines: list[str] = []
    parts: list[str] = []
    seen: set[str] = set()
    for name in names:
        _collect(name, name, seen, lines, parts)
    head = '"""Classes of the notebook or script that started the run; vitlab wrote this file."""'
    return "\n\n\n".join([f"{head}\n\n" + "\n".join(lines), *parts]) + "\n"


def _collect(name: str, of: str, seen: set[str], lines: list[str], parts: list[str]) -> None:
    """Add what defines a name: an import or constant to ``lines``, or a class or function to ``parts``."""
    main = vars(sys.modules["__main__"])
    if name in seen or name not in main:
        return
    seen.add(name)
    value = main[name]
    home, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(value, ModuleType):
        lines.append(f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}")
    elif home == "__main__" and path == name:
        text = _segment(name, value)
        for used in _names_used(text):
            _collect(used, of, seen, lines, parts)
        parts.append(text)
    elif isinstance(home, str) and getattr(sys.modules.get(home), str(path), None) is value:
        lines.append(f"from {home} import {path}" + ("" if path == name else f" as {name}"))
    elif _is_literal(value):
        lines.append(f"{name} = {value!r}")
    else:
        kind = type(value).__name__
        raise UsageError(
            f"{of} uses `{name}` of its notebook, a {kind}, whose source cannot be kept: make it an argument of {of}, "
            "or put the class into a file"
        )


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, RecursionError):
        return False


def _names_used(text: str) -> list[str]:
    return list(dict.fromkeys(node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)))


def _segment(name: str, value: Any) -> str:
    """Return the source of a class or function of the notebook or script."""
    for text in _texts(value):
        try:
            found = [node for node in ast.walk(ast.parse(text)) if getattr(node, "name", None) == name]
        except SyntaxError:
            continue
        for node in reversed(found):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    raise UsageError(f"the source of {name} is not known: define it in a notebook or a file")


def _texts(value: Any) -> Iterator[str]:
    """Yield sources that may define a class or function, the likeliest first."""
    functions = [value, *vars(value).values()] if isinstance(value, type) else [value]
    codes = [getattr(f, "__code__", None) for f in functions if getattr(f, "__module__", None) == "__main__"]
    files = [code.co_filename for code in codes if code]
    files += [str(getattr(sys.modules["__main__"], "__file__", None) or "")]
    files += [file for file in reversed(list(linecache.cache)) if "ipykernel_" in file or "<ipython" in file]
    for file in dict.fromkeys(files):
        yield "".join(linecache.getlines(file))


class _PartsLoader(SourceFileLoader):
    """Reads a file without writing beside it."""

    def path_stats(self, path: Any) -> Any:
        """Say that there is no cache."""
        raise OSError


def load_classes(path: str | Path) -> None:
    """Run the file that holds the classes of a notebook, and make them known under their old names.

    A class of the same name that the running notebook or script defines stays.
    """
    loader = _PartsLoader("__main__", str(path))
    spec = spec_from_loader("__main__", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    main = sys.modules["__main__"]
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == "__main__" and not is_defined_here(f"__main__.{name}"):
            setattr(main, name, value)
            _LOADED[name] = Path(path)
