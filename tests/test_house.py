"""The house: who may import whom, and how long things may get."""

import ast
import re
import sys
from collections import defaultdict
from functools import cache
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
    "pretraining": {*NETWORK, "optim", "data", "tasks"},
    "callbacks": NETWORK,
    "analysis": {*NETWORK, "data"},
    "config": {*NETWORK, *BESIDE, "tasks", "pretraining"},
    "jobs": {*NETWORK, *BESIDE, "tasks", "config"},
    "look": {*NETWORK, "analysis", "callbacks", "data", "config", "jobs"},
    "ablation": {"config", "jobs", "tasks", "models", "analysis"},
    "run": {"config", "jobs", "data", "analysis", "look"},
    "api": {"run", "config", "jobs", "ablation"},
    "position_bench": {*NETWORK, "optim", "tasks", "analysis", "config"},
    "cli": {"run", "api", "config", "jobs", "models", "data", "analysis", "ablation", "look", "position_bench"},
}
GROUND = {
    "class_metrics",
    "class_paths",
    "interface",
    "errors",
    "lazy",
    "notebook",
    "objects",
    "packed_batch",
    "ranges",
    "resized",
    "runs",
    "shipped",
    "named_kwargs",
    "stats",
    "tables",
}  # every room may stand on it
ROOMS = {*FLOORS, *GROUND}
TORCH_ALONE = {"layers", "tokenizers", "models", "optim"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


def imports_of(path: Path, everywhere: bool = True) -> set[str]:
    names = set()
    for node in nodes(path) if everywhere else tree(path).body:
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


def in_a_circle(uses: dict[str, set[str]]) -> list[str]:
    reach = {}
    for start in uses:
        seen, todo = set(), [start]
        while todo:
            new = uses.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        reach[start] = seen
    return sorted(name for name in reach if name in reach[name])


def test_no_files_import_each_other_in_a_circle():
    known = {name_of(path) for path in FILES}
    assert not in_a_circle({name_of(p): modules_of(p) & known for p in FILES if p.name != "__init__.py"})


def test_no_rooms_import_each_other_in_a_circle_not_even_inside_functions():
    uses = defaultdict(set)
    for path in FILES:
        room = "vitlab" if path == PACKAGE / "__init__.py" else room_of(path)  # the face of the package is a room
        uses[room] |= rooms_of_imports(path) - {room}
    assert not in_a_circle(uses)


def rooms_of_imports(path: Path) -> set[str]:
    """Return the rooms that a file imports, anywhere in it; `vitlab` where it takes a name from the package's face."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "vitlab":
            names |= {f"vitlab.{alias.name}" if alias.name in ROOMS else "vitlab" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return {name.split(".")[:2][-1] for name in names if name.split(".")[0] == "vitlab"}


def modules_of(path: Path) -> set[str]:
    """Return what a file imports, anywhere in it, for type checkers too: modules by their whole names."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


ONE_IDEA = {  # names that functions of several homes may share: each does the same as the others
    "main",  # of a command or a process: takes words, returns the exit code
    "fit",  # the library's, and the job that it and the command run
}


def test_every_idea_has_one_home_and_two_ideas_have_two_names():
    homes = defaultdict(list)
    for path in FILES:
        for node in tree(path).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                homes[node.name].append(name_of(path))
    assert not {name: found for name, found in homes.items() if len(found) > 1 and name not in ONE_IDEA}


ONE_SOURCE = {  # what decides a fact: the files that may hold it
    r"json\.dumps\([^\n]*indent": {  # how a record is written: by write_json, whole and synced
        *("runs/atomic.py", "runs/fence.py", "runs/standing.py"),  # standing: a cache that may be lost, below it
        *("config/help.py", "tables.py"),  # text of a page or a terminal
        *("position_bench/cells.py", "position_bench/submission.py"),
    },
    r"str\(error\) *(?:$|\)|:| and)|in str\(error\)": {  # jobs/train: why a training ended early
        *("jobs/train/endings.py", "jobs/train/facts.py"),  # facts: which flag a refused size came from
    },
    r"1 if .*mode == .m[ai][nx].|-1 if .*mode": {"ablation/file/spec.py"},  # which metric is better
    r"now\(datetime\.UTC\)": {"runs/records.py"},  # the time, as records have it
    r"has_key\(\)": {"jobs/train/wandb.py", "cli/doctor.py"},  # which mode W&B has
}


@pytest.mark.parametrize("pattern", ONE_SOURCE)
def test_a_fact_has_one_source(pattern):
    paths = [path.relative_to(PACKAGE).as_posix() for path in FILES if re.search(pattern, path.read_text(), re.M)]
    if "error" in pattern:
        paths = [path for path in paths if path.startswith("jobs/train/")]
    assert set(paths) <= ONE_SOURCE[pattern]


ONE_FILE = {"analyses", "arms", "arrays", "attention", "findings", "report", "subject", "verify"}


def test_the_name_of_a_file_says_what_it_is_about():
    names = [path.stem for path in FILES]
    assert not {name for name in ONE_FILE if names.count(name) > 1}


def test_a_small_file_with_one_user_lives_with_it_or_says_why_it_stands_alone():
    texts = {path: path.read_text() for path in FILES}
    users = defaultdict(set)
    for path in FILES:
        for name in modules_of(path):
            users[name].add(path)
    for path, text in texts.items():
        first = (ast.get_docstring(tree(path)) or "").partition("\n")[0]
        if path.stem.startswith("__") or text.count("\n") >= 60 or "alone" in first:
            continue
        name = name_of(path)
        is_listed = any(f'"{name}' in other for other in texts.values())  # a command, a class path, a public name
        if not is_listed:
            assert len({user for user in users[name] if user.stem != "__init__"} - {path}) != 1, f"merge {path}"


def test_no_two_files_of_tests_share_a_name_which_pytest_cannot_collect():
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", [p for p in FILES if room_of(p) in TORCH_ALONE], ids=lambda p: p.stem)
def test_the_network_imports_torch_alone(path):
    outside = {name.split(".")[0] for name in imports_of(path, everywhere=False)} - {"vitlab"}
    assert outside <= {"torch"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_are_short_enough_to_read_at_once(path):
    text = path.read_text()
    assert text.count("\n") <= 500, "a file is one idea: split it"
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if path.name == "vit.py" and node.name == "__init__":
                continue
            lines = node.end_lineno - node.lineno + 1 - len((ast.get_docstring(node) or "").splitlines())
            assert lines <= 60, f"{node.name}, line {node.lineno}: a function fits a screen"


def test_a_class_has_a_name_of_its_own():
    homes = defaultdict(list)
    for path in FILES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name_of(path))
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_commands_in_messages_take_the_path_of_a_run_as_a_shell_does():
    """``vitlab fit --resume my runs/first`` would continue another run, if any."""
    raw = re.compile(r"vitlab [a-z]+[^`\n]*\{(job\.)?(run|self)\.path\}[^`\n]*`")
    found = [f"{path}: {line.strip()}" for path in FILES for line in path.read_text().splitlines() if raw.search(line)]
    assert found == []
