import ast
from pathlib import Path

import pytest

import vitlab

PACKAGE = Path(vitlab.__file__).parent
ROOMS = ["layers", "tokenizers", "models", "optim"]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def neighbours(path: Path, known: set[str]) -> set[str]:
    """Return the modules that a file imports anywhere, for type checkers too; not those that examples name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= inside or {node.module}
    return (found & known) - {module_of(path)}


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen, todo = set(), list(graph[start])
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += graph[module]
    return seen


def graph_of(room: str) -> dict[str, set[str]]:
    paths = sorted((PACKAGE / room).rglob("*.py"))
    known = {module_of(path) for path in paths}
    return {module_of(path): neighbours(path, known) for path in paths}


@pytest.mark.parametrize("room", ROOMS)
def test_no_file_of_a_room_leads_back_to_itself(room):
    graph = graph_of(room)
    circles = {module: sorted(graph[module]) for module in graph if module in reachable(module, graph)}
    assert not circles


def test_a_circle_would_be_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert [module for module in graph if module in reachable(module, graph)] == ["a", "b", "c"]


def test_the_files_are_read():
    assert "vitlab.layers.norm" in graph_of("layers")["vitlab.layers.attention"]
