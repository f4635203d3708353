"""The identity of a cell: everything that could change its numbers, and nothing else."""

import ast
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vitlab.config.keys import flatten, key_of
from vitlab.errors import UsageError
from vitlab.notebook import imported_names
from vitlab.runs.find import file_of_weights
from vitlab.runs.machine import installed_versions
from vitlab.runs.manifest import file_digest
from vitlab.shipped import HERE, LIBRARIES

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
ASIDE = ("ablation", "look")  # rooms whose code runs beside cells, and draws what they left; all others count
COMMANDS = ("cli/fit.py", "cli/evaluate.py", "cli/analyze.py")  # those of a cell, of all that the command line has
COMPUTING = ("torch", "torchvision", "timm", "lightning", "numpy")  # libraries whose versions can change a number


def json_digest(content: Any) -> str:
    """Return the first ten hexadecimal digits of the hash of a JSON value."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved config under dotted keys, without keys that cannot change a number."""
    return {name: value for name, value in flatten(config).items() if key_of(name).identity}


def code_digest(package: Path = HERE, own: Sequence[str] = ()) -> str:
    """Return the hash of the code that a cell runs; comments, docstrings, layout and how to read analyses do not count.

    Args:
        package: Folder of vitlab.
        own: Packages and files of the user's, which are located but not imported; files beside them that they import
            count too.

    Raises:
        UsageError: One of the user's has no source here, so that nobody could tell whether it changed.
    """
    files = [(path, path.relative_to(package)) for path in sorted(package.rglob("*.py"))]
    files = [(path, name) for path, name in files if _runs_in_a_cell(name)]
    mine = [file for name in own for file in _files_of(name)]
    files += mine + _imported_by(path for path, _ in mine)
    return _digest_of(tuple((str(name), path.read_text()) for path, name in files))


@lru_cache(4)
def _digest_of(files: tuple[tuple[str, str], ...]) -> str:
    """Return the hash of files of Python, given as names and texts; vitlab's are ten megabytes of syntax trees."""
    text = "\n".join(f"{name}\n{_dumped(text)}" for name, text in files)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _files_of(name: str) -> list[tuple[Path, Path]]:
    """Return the source files of a package, a folder of modules, a module or a notebook, with their names."""
    if name.endswith(".py"):  # the classes of a notebook
        found = [(Path(name), Path(Path(name).name))]
    else:
        top = name.partition(".")[0]
        spec = PathFinder.find_spec(top, [*sys.path, os.getcwd()]) or find_spec(top)
        folders = dict.fromkeys(map(Path, (spec and spec.submodule_search_locations) or ()))  # several without __init__
        found = [(path, path.relative_to(folder.parent)) for folder in folders for path in sorted(folder.rglob("*.py"))]
        if spec and spec.origin and not folders:
            found = [(path, Path(path.name)) for path in [Path(spec.origin)]]  # whatever the folder is called
    found = [(path, shown) for path, shown in found if path.suffix == ".py" and path.is_file()]
    if not found:
        raise UsageError(f"`trust_imports`: there is no source of {name}, neither installed nor in {os.getcwd()}")
    return found


def _imported_by(paths: Iterable[Path]) -> list[tuple[Path, Path]]:
    """Return the files beside those of the user's, or in the current folder, that they import, and what these import.

    Installed packages are left out; :func:`versions_in_use` knows those that compute.
    """
    left = list(paths)
    seen = {path.resolve() for path in left}
    found: list[tuple[Path, Path]] = []
    while left:
        path = left.pop(0)
        package = path.resolve().parent
        top = next(folder for folder in (package, *package.parents) if not (folder / "__init__.py").is_file())
        for root in dict.fromkeys((top, Path.cwd())):
            if {"site-packages", "dist-packages"} & {*root.parts}:
                continue
            for name in _imports_of(path, package.relative_to(top).parts):
                for file in (root.joinpath(*name).with_suffix(".py"), root.joinpath(*name, "__init__.py")):
                    if file.is_file() and file.resolve() not in seen:
                        seen.add(file.resolve())
                        found.append((file, file.relative_to(root)))
                        left.append(file)
    return found


def _imports_of(path: Path, package: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the modules that a file of ``package`` may import, and their packages, without Python's and vitlab's."""
    names = imported_names(path.read_text(), package)
    parts = [name[:length] for name in names for length in range(1, len(name) + 1)]
    return [name for name in dict.fromkeys(parts) if name[0] not in (HERE.name, *sys.stdlib_module_names)]


def _runs_in_a_cell(name: Path) -> bool:
    return name.as_posix() in COMMANDS if name.parts[0] == "cli" else name.parts[0] not in ASIDE


@lru_cache(1)
def versions_in_use() -> str:
    """Return the versions that a cell runs with, as part of its identity: of Python and the libraries that compute.

    Example:
        >>> versions_in_use().split(", ")[0].startswith("python ")
        True
    """
    found = {"python": platform.python_version(), **installed_versions(COMPUTING)}
    return ", ".join(f"{name} {text}" for name, text in found.items())


def initial_weights_digest(source: str) -> str:
    """Return the hash of a cell's initial weights: of their files, or of the name of downloaded ones.

    Raises:
        UsageError: There are no such weights.
    """
    if source.startswith("hf:") and (folder := Path(source.removeprefix("hf:"))).is_dir():
        return json_digest({path.name: _of_file(path, path.stat().st_mtime_ns) for path in _files_of_weights(folder)})
    if source.startswith(LIBRARIES):
        return json_digest(source)
    path = file_of_weights(source)
    return _of_file(path, path.stat().st_mtime_ns)


def _files_of_weights(folder: Path) -> list[Path]:
    """Return the files of a network of transformers: what it is, and its weights."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin"))


@lru_cache(64)
def _of_file(path: Path, changed: int) -> str:
    return file_digest(path)[:10]


@lru_cache(1024)
def _dumped(text: str) -> str:
    """Return what counts of a file of Python; that of vitlab's takes a second or two, in each process once."""
    nodes: list[ast.AST] = [tree := ast.parse(text)]
    for node in nodes:  # all but what is in expressions, where none of these can be
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
        if isinstance(node, ast.FunctionDef):  # how an analysis is read, in a report
            node.decorator_list = [d for d in node.decorator_list if not ast.unparse(d).startswith("Analysis(")]
        nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    return ast.dump(tree)
