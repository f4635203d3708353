"""Classes that a notebook or script defines: their source is kept beside a run, and brings them back elsewhere."""

import ast
import inspect
import linecache
import symtable
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from vitlab.errors import PARTS_FILE, UsageError

_FILLING = ("add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update")
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class _Kept(NamedTuple):
    """A file of classes, as it was when it was loaded."""

    file: Path
    source: str


_LOADED: dict[tuple[str, type], _Kept] = {}  # names and classes that came from such a file


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
    files = {_loaded(name) for name in names}
    if len(files) == 1 and (kept := files.pop()):
        return kept.source
    own = _Collected()
    for name in names:
        own.add(name, of=name)
    brought = {name: kept for name in sorted(own.seen) if (kept := _loaded(name))}
    taken = list(_all_used(brought, "\n".join([*own.lines, *own.parts])))
    lines = [*own.lines, *(_text_of(kept.source, node) for kept, node in taken if not _is_part(node))]
    sources = [*_texts(), *(kept.source for kept in brought.values())]
    if any(module == "__future__" for module, _, _ in _imports(sources)):
        lines.insert(0, "from __future__ import annotations")
    parts = [*(_text_of(kept.source, node) for kept, node in taken if _is_part(node)), *own.parts]
    head = '"""Classes of the notebook or script that started the run; vitlab wrote this file."""'
    return "\n\n\n".join([f"{head}\n\n" + "\n".join(dict.fromkeys(lines)), *dict.fromkeys(parts)]) + "\n"


def _all_used(brought: dict[str, _Kept], own: str) -> Iterator[tuple[_Kept, ast.stmt]]:
    """Yield the file and the statement of all that classes from files use there, in its order.

    Args:
        brought: The classes and their files.
        own: Source of what the notebook or script defines beside them.

    Raises:
        UsageError: A name is defined in two ways.
    """
    texts = {name: (ast.unparse(node), "this notebook or script") for name, node in _nodes(own).items()}
    for name, kept in brought.items():
        used = _nodes_used(kept.source, name)
        for one, node in sorted(used.items(), key=lambda item: item[1].lineno):
            text, place = texts.setdefault(one, (ast.unparse(node), str(kept.file)))
            if without_docstrings(text) != without_docstrings(ast.unparse(node)):
                raise UsageError(
                    f"{name} of {kept.file} uses `{one}`, which {place} defines otherwise, and a run keeps one of a "
                    "name: give one of them another"
                )
            yield kept, node


def _is_part(node: ast.stmt) -> bool:
    """Return whether a statement defines a class or function, or gives it another name."""
    return isinstance(node, _DEFINITIONS) or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Name))


def _loaded(name: str) -> _Kept | None:
    """Return the file that the class of a name came from; None if the notebook or script defines it now."""
    found = vars(sys.modules["__main__"]).get(name)
    return _LOADED.get((name, found)) if isinstance(found, type) else None


def check_classes(folder: Path, config: Path | None = None) -> None:
    """Refuse to go on with a run where a class of its configuration is not the one that it was trained with.

    Comments and docstrings do not count.

    Args:
        folder: Its directory, which holds the source of the classes if they come from a notebook or script.
        config: The file of its configuration, if not config.yaml there; read only where there are such classes.

    Raises:
        UsageError: The notebook or script that runs now defines a class otherwise.
    """
    file = folder / PARTS_FILE
    if not file.is_file():
        return
    import yaml

    try:
        stated = yaml.safe_load((config or folder / "config.yaml").read_text())
    except (OSError, yaml.YAMLError):  # who reads it next says what is wrong
        return
    names = [name for name in names_in(stated) if is_defined_here(f"__main__.{name}")]
    try:
        kept = {name: _definitions(file.read_text(), name) for name in names}
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{file} is damaged: delete it to go on with {', '.join(names)} as defined here") from error
    for name in names:
        now = _definitions(source_of([name]), name) if kept[name] else {}
        if any(now.get(used) != text for used, text in kept[name].items()):
            raise UsageError(
                f"{name} is not the class that {folder} was trained with ({file}): give the new one another name, or "
                f"load the run in a fresh process, with `--trust_imports {file}`"
            )


def _definitions(source: str, name: str) -> dict[str, str]:
    """Return the code that defines a name in a module, and what this uses, by name; nothing if it is not defined.

    What the code itself changes while it runs, such as a list that it appends to, counts without its value; which
    submodules are imported does not count.
    """
    nodes = _nodes_used(source, name)
    changed = {one for node in nodes.values() for one in _changed_in(ast.unparse(node))}
    return {
        one: "" if one in changed and isinstance(node, ast.Assign) else without_docstrings(ast.unparse(node))
        for one, node in nodes.items()
        if "." not in one
    }


def _nodes_used(source: str, name: str) -> dict[str, ast.stmt]:
    """Return the statements that define a name in a module, and what this uses, by name."""
    nodes = _nodes(source)
    found: dict[str, ast.stmt] = {}
    left = [name]
    while left:
        if (one := left.pop()) in nodes and one not in found:
            found[one] = nodes[one]
            left += _names_used(ast.unparse(nodes[one]))
    return found


def _nodes(source: str) -> dict[str, ast.stmt]:
    """Return the statements that define names in a module."""
    nodes: dict[str, ast.stmt] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            nodes |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign):
            nodes |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, _DEFINITIONS):
            nodes[node.name] = node
    return nodes


def _changed_in(text: str) -> Iterator[str]:
    """Yield the names of values that a class or function declares global or, of a list or mapping, fills."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Global(names=names):
                yield from names
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in _FILLING:
                yield name
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                yield name


def _without_bodies(source: str) -> str:
    """Return code as far as it runs when it is defined: without what its functions do."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Pass()]
    return ast.unparse(tree)


def without_docstrings(source: str) -> str:
    """Return code without docstrings and comments, in one layout.

    >>> without_docstrings("def f(): # of mine\\n  'Return one.'\\n  return (1)")
    'def f():\\n    return 1'
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            del node.body[: ast.get_docstring(node, clean=False) is not None]
    return ast.unparse(tree)


def imported_names(source: str, package: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return what the imports of code in ``package`` may name, each as its parts: modules, and names that may be some.

    >>> imported_names("import a.b; from . import c; from ..d import e", ("top", "inner"))
    [('a', 'b'), ('top', 'inner'), ('top', 'inner', 'c'), ('top', 'd'), ('top', 'd', 'e')]
    """
    names: list[tuple[str, ...]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = (*start, *(node.module.split(".") if node.module else ()))
            names += [module, *((*module, alias.name) for alias in node.names)]
    return names


class _Collected:
    """What classes of the notebook or script use of it, in an order in which a module can define it."""

    def __init__(self) -> None:
        self.lines: list[str] = []  # imports and constants
        self.parts: list[str] = []  # classes, functions and their other names
        self.seen: set[str] = set()

    def add(self, name: str, of: str, is_changed: bool = False) -> None:
        """Add what defines a name that the class ``of`` uses, and all that this uses.

        What is changed by the code itself, and holds now what cannot be written, starts empty elsewhere.
        """
        main = vars(sys.modules["__main__"])
        if name in self.seen or name.partition(".")[0] not in main:
            return
        self.seen.add(name)
        if "." in name:
            self.lines += _submodule(name)
            return
        if _loaded(name):  # its file says what it uses
            return
        value = main[name]
        is_own, path = getattr(value, "__module__", None) == "__main__", str(getattr(value, "__qualname__", None))
        if is_own and path == name:
            self._define(name, value, of)
        elif is_own and main.get(path) is value:
            self.add(path, of)
            self.parts.append(f"{name} = {path}")
        elif line := _line_of(name, value):
            self.lines.append(line)
        elif is_changed and type(value) in (list, dict, set):
            self.lines.append(f"{name} = {type(value)()!r}")
        else:
            raise UsageError(
                f"{of} uses `{name}` of its notebook, a {type(value).__name__}, whose source cannot be kept: make it "
                f"an argument of {of}, or put the class into a file"
            )

    def _define(self, name: str, value: Any, of: str) -> None:
        _check_bases(value)
        text = _segment(name, value)
        changed = set(_changed_in(text))
        for used in _names_used(_without_bodies(text)):  # what a function uses may use it, too, in an annotation
            self.add(used, of, used in changed)
        self.parts.append(text)
        for used in _names_used(text):
            self.add(used, of, used in changed)


def _line_of(name: str, value: Any) -> str | None:
    """Return the import or the constant by which a module has a value; None if there is none."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
    home, path = getattr(value, "__module__", None), str(getattr(value, "__qualname__", None))
    if isinstance(home, str) and getattr(sys.modules.get(home), path, None) is value:
        return f"from {home} import {path}" + ("" if path == name else f" as {name}")
    return f"{name} = {value!r}" if _is_literal(value) else _import_of(name, value)


def _check_bases(value: Any) -> None:
    """Refuse a class that derives from one which the notebook has defined otherwise since: its own is not kept."""
    for base in getattr(value, "__mro__", ())[1:]:
        of, now = base.__qualname__, vars(sys.modules["__main__"]).get(base.__qualname__)
        if base.__module__ != "__main__" or not isinstance(now, type) or now is base:
            continue
        if without_docstrings(_segment(of, base)) != without_docstrings(_segment(of, now)):
            raise UsageError(
                f"{value.__name__} derives from {of} as it was before {of} changed: define what derives from {of} again"
            )


def _submodule(name: str) -> list[str]:
    """Return the import of a module that code names within another one, as in ``os.path``, if it needs its own."""
    root, _, inner = name.partition(".")
    path = f"{getattr(vars(sys.modules['__main__'])[root], '__name__', None)}.{inner}"
    stated = any(f"{module}.{one}.".startswith(f"{path}.") for module, one, _ in _imports(_texts()))
    return [f"import {path}"] if stated and path in sys.modules else []


def _import_of(name: str, value: Any) -> str | None:
    """Return the import by which the notebook or script has a value that does not say where it is from."""
    for module, one, bound in _imports(_texts()):
        one = name if one == "*" else one
        if bound in (name, "*") and getattr(sys.modules.get(module), one, None) is value:
            return f"from {module} import {one}" + ("" if one == name else f" as {name}")
    return None


def _imports(texts: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield what modules import: the module, what is taken from it, ``""`` for itself, and its name there."""
    for node in (node for text in texts for node in _statements(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name, alias.asname or alias.name) for alias in node.names)


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, RecursionError):
        return False


def _names_used(text: str) -> list[str]:
    """Return the names that a class or function takes from its module, with and without what follows their dots.

    Its own variables and arguments are not among them.
    """
    table = symtable.symtable(text, "parts", "exec")
    used = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
    tables = table.get_children()
    for table in tables:
        used |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
        tables += table.get_children()
    names = (ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name | ast.Attribute))
    return [name for name in dict.fromkeys(names) if name.partition(".")[0] in used]


@cache  # the file of a script may be edited while it runs
def _segment(name: str, value: Any) -> str:
    """Return the source of a class or function of the notebook or script: the definition that the object came from.

    A class without a method of its own does not tell its line: of definitions with its bases and values, the last one
    of the newest cell counts. It may stand before others, if its cell ran again or its condition held.
    """
    code = next(_codes(name, value), None)
    found: list[tuple[str, ast.stmt]] = []
    for text in [_text_in(code.co_filename)] if code else _texts():
        named = [node for node in _statements(text) if isinstance(node, _DEFINITIONS) and node.name == name]
        if code:
            named = [node for node in named if _first_line(node) <= code.co_firstlineno <= (node.end_lineno or 0)]
        found += [(text, node) for node in reversed(named)]
    if not found:
        raise UsageError(f"the source of {name} is not known: define it at the top level of a notebook or a file")
    text, node = max(found, key=lambda one: _likeness(value, one[1]))
    if isinstance(node, ast.FunctionDef) and hasattr(value, "__wrapped__") and not node.decorator_list:
        raise UsageError(f"{name} was wrapped after its definition, which is not kept: make the wrapper its decorator")
    return _text_of(text, node)


def _likeness(value: Any, node: ast.stmt) -> tuple[bool, int]:
    """Return how well a statement describes a class: whether its bases do, and how many more of its values than not."""
    if not (isinstance(value, type) and isinstance(node, ast.ClassDef)):
        return False, 0
    bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases] or ["object"]
    stated = [(one.targets[0], one.value) for one in node.body if isinstance(one, ast.Assign)]
    stated += [(one.target, one.value) for one in node.body if isinstance(one, ast.AnnAssign) and one.value]
    same = (_is_written(vars(value).get(ast.unparse(target), ...), given) for target, given in stated)
    return bases == [base.__name__ for base in value.__bases__], sum(same)


def _is_written(value: Any, node: ast.expr) -> int:
    """Return 1 for the code of a value, -1 for that of another one, and 0 for what must be run to know."""
    try:
        return 1 if repr(ast.literal_eval(node)) == repr(value) else -1
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return 0


def _codes(name: str, value: Any) -> Iterator[CodeType]:
    """Yield the code of a function, or of methods that the statement of a class defines."""
    for one in vars(value).values() if isinstance(value, type) else [value]:
        function = getattr(one, "fget", None) or one  # of a property
        if getattr(function, "__module__", None) == "__main__":
            code = getattr(inspect.unwrap(function), "__code__", None)  # hooks are wrapped
            if code and (code.co_qualname == name or code.co_qualname.startswith(f"{name}.")):
                yield code


@cache
def _statements(source: str) -> tuple[ast.stmt, ...]:
    """Return the statements of a module in its order, also those in its conditions and loops; none if it is no Python.

    Those in classes and functions define other names.
    """
    try:
        left: list[ast.AST] = [ast.parse(source)]
    except SyntaxError:
        return ()
    found = []
    while left:
        node = left.pop()
        if isinstance(node, ast.stmt):
            found.append(node)
        if not isinstance(node, _DEFINITIONS):
            left += reversed(list(ast.iter_child_nodes(node)))
    return tuple(found)


def _first_line(node: ast.stmt) -> int:
    """Return the number of the line where a statement or the first of its decorators begins."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


def _text_of(source: str, node: ast.stmt) -> str:
    """Return the text of a statement with its decorators; as Python writes it if it is indented."""
    if node.col_offset:
        return ast.unparse(node)
    return "\n".join(source.split("\n")[_first_line(node) - 1 : node.end_lineno])


def _texts() -> Iterator[str]:
    """Yield the sources of the script and of all cells of the notebook, the newest first."""
    files = [str(getattr(sys.modules["__main__"], "__file__", None) or "")]
    files += [file for file in reversed(list(linecache.cache)) if "ipykernel_" in file or "<ipython" in file]
    yield from map(_text_in, files)


def _text_in(file: str) -> str:
    return "".join(linecache.getlines(file))


class _PartsLoader(SourceFileLoader):
    """Reads a file without writing beside it."""

    def path_stats(self, path: Any) -> Any:
        """Say that there is no cache."""
        raise OSError


def load_classes(path: str | Path) -> None:
    """Run the file that holds the classes of a notebook, and make them known under their old names.

    A class of the same name that the running notebook or script defines stays.

    Raises:
        UsageError: A class of that name came from another such file, which defines it otherwise.
    """
    loader = _PartsLoader("__main__", str(path))
    spec = spec_from_loader("__main__", loader)
    assert spec is not None
    module, main = module_from_spec(spec), sys.modules["__main__"]
    sys.modules["__main__"] = module  # where `dataclass` looks for the names in annotations that are text
    try:
        loader.exec_module(module)
    finally:
        sys.modules["__main__"] = main
    source = Path(path).read_text()
    classes = {k: v for k, v in vars(module).items() if isinstance(v, type) and v.__module__ == "__main__"}
    for name in classes:
        if (other := _loaded(name)) and _definitions(other.source, name) != _definitions(source, name):
            raise UsageError(
                f"{path} and {other.file} define {name} in two ways, and a process has one class of a name: load their "
                "runs in two processes"
            )
    for name, value in classes.items():
        if not is_defined_here(f"__main__.{name}"):
            setattr(sys.modules["__main__"], name, value)
            _LOADED[name, value] = _Kept(Path(path), source)
