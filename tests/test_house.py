"""The house: who may import whom, and how long things may get."""

import ast
import sys
from pathlib import Path

import pytest

import vitlab

PACKAGE = Path(vitlab.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
NETWORK = {"layers", "tokenizers", "models"}
BESIDE = {"optim", "data", "callbacks", "analysis"}
FLOORS = {  # room: the rooms of vitlab that it may import from, beside itself and the ground
    "layers": set(),
    "tokenizers": {"layers"},
    "models": {"layers", "tokenizers"},
    "optim": set(),
    "data": set(),
    "runs": set(),
    "tasks": {*NETWORK, "optim"},
    "callbacks": NETWORK,
    "analysis": {*NETWORK, "data"},
    "config": {*NETWORK, *BESIDE, "tasks"},
    "jobs": {*NETWORK, *BESIDE, "tasks", "config"},
    "look": {*NETWORK, "analysis", "data", "config", "jobs"},
    "ablation": {"config", "jobs", "models", "analysis"},
    "bench": {*NETWORK, *BESIDE, "tasks"},
    "run": {"config", "jobs", "data", "analysis"},
    "api": {"run", "config", "jobs", "ablation"},
    "cli": {"run", "api", "config", "jobs", "models", "data", "analysis", "bench", "ablation", "look"},
}
GROUND = {
    "classes",
    "contract",
    "errors",
    "lazy",
    "lightning_overhead",
    "notebook",
    "objects",
    "packed",
    "ranges",
    "runs",
    "shipped",
    "signature",
    "stats",
    "tables",
}  # every room may stand on it
TORCH_ALONE = {"layers", "tokenizers", "models", "optim"}


def imports_of(path: Path, everywhere: bool = True) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else tree.body
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
    return names


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    allowed = FLOORS.get(room, set()) | {room} | GROUND
    inside = {name.split(".")[1] for name in imports_of(path) if name.startswith("vitlab.")}
    assert inside <= allowed, f"{room} must not import {inside - allowed}"


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_files_import_each_other_in_a_circle():
    known = {name_of(path) for path in FILES}
    uses = {name_of(path): modules_of(path) & known for path in FILES if path.name != "__init__.py"}
    reach = {}
    for start in uses:
        seen, todo = set(), [start]
        while todo:
            new = uses.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        reach[start] = seen
    assert not sorted(name for name in reach if name in reach[name])


def modules_of(path: Path) -> set[str]:
    """Return what a file imports, anywhere in it, for type checkers too: modules by their whole names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_no_two_files_of_tests_share_a_name_which_pytest_cannot_collect():
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", [p for p in FILES if room_of(p) in TORCH_ALONE], ids=lambda p: p.stem)
def test_the_network_imports_torch_alone(path):
    outside = {name.split(".")[0] for name in imports_of(path, everywhere=False)} - {"vitlab"}
    assert outside <= {"torch"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_and_a_function_can_be_read_at_once(path):
    text = path.read_text()
    assert text.count("\n") <= 500, "a file is one idea: split it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if path.name == "vit.py" and node.name == "__init__":
                continue
            lines = node.end_lineno - node.lineno + 1 - len((ast.get_docstring(node) or "").splitlines())
            assert lines <= 60, f"{node.name}, line {node.lineno}: a function fits a screen"
