"""The core is an evening: eight files from `vitlab fit` to the loss, and a training that reads build, train, close."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES, LINES = 8, 1600
STAYS, RETURNS = 12, 2
PAGE = (ROOT / "docs" / "reading.md").read_text()
STEPS = re.findall(r"^\| \[`(vitlab/\S+)`\]\(\.\./\1\) \|", PAGE, flags=re.M)


def imports_of(file):
    """Return the files of vitlab that a file imports, anywhere in it; names of a room by the file that defines them."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vitlab"):
            found |= {file_of(node.module, alias.name) for alias in node.names}
    return found - {None}


def file_of(module, name):
    """Return the file that defines a name of a module, through the ``__init__`` of a room."""
    place = ROOT / module.replace(".", "/")
    for path in (place / f"{name}.py", place.with_suffix(".py")):
        if path.is_file():
            return path.relative_to(ROOT).as_posix()
    if not (face := place / "__init__.py").is_file():
        return None
    for node in ast.parse(face.read_text()).body:
        if isinstance(node, ast.ImportFrom) and any((one.asname or one.name) == name for one in node.names):
            return file_of(node.module, name)
    return None


def test_the_reading_path_is_short_enough_for_an_evening():
    lines = sum((ROOT / step).read_text().count("\n") for step in STEPS)
    assert STEPS and len(STEPS) <= FILES
    assert lines < LINES, f"{lines} lines: what the way to the loss does not need stands beside it"
    assert f"fewer than {LINES:,} lines" in PAGE


@pytest.mark.parametrize("number", range(1, len(STEPS)))
def test_each_file_of_the_path_is_imported_by_an_earlier_one_or_by_code_that_picks_it_by_name(number):
    before = STEPS[:number]
    near = set().union(*map(imports_of, before))
    assert STEPS[number] in near or STEPS[number] in set().union(*map(imports_of, near))


def test_the_path_goes_from_the_command_to_attention_and_the_readme_leads_to_it():
    assert (STEPS[0], STEPS[-1]) == ("vitlab/cli/fit.py", "vitlab/layers/attention.py")
    assert "def step_loss" in (ROOT / "vitlab/tasks/base.py").read_text()
    assert "docs/reading.md" in (ROOT / "README.md").read_text()


def visits(file, function):
    """Return the files of vitlab whose functions a function calls, one a stay, in the order in which it is read.

    Functions of the same file are read where they are called, methods too, those of other files by name.
    """
    tree = ast.parse((ROOT / file).read_text())
    own = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    home = next((c for c in tree.body if isinstance(c, ast.ClassDef) and c.name == function.partition(".")[0]), None)
    own |= {f"{home.name}.{node.name}": node for node in home.body if isinstance(node, ast.FunctionDef)} if home else {}
    known = {
        alias.asname or alias.name: file_of(node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vitlab")
        for alias in node.names
    }
    stays, entered = [], []

    def enter(name):
        if name not in entered:  # a function that calls itself
            entered.append(name)
            read(own[name])
            entered.remove(name)

    def read(node):
        if isinstance(node, ast.Name) and node.id in own:
            enter(node.id)
        elif home and isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            if (method := f"{home.name}.{node.attr}") in own:
                enter(method)
        elif isinstance(node, ast.Name) and (place := known.get(node.id)) and stays[-1:] != [place]:
            stays.append(place)
        annotations = (node.args, node.returns) if isinstance(node, ast.FunctionDef) else ()
        for child in ast.iter_child_nodes(node):
            if child not in annotations:
                read(child)

    enter(function)
    return stays


WAYS = [("vitlab/jobs/train/fit.py", "fit"), ("vitlab/ablation/execution/worker.py", "process_cell")]
WAYS += [  # of a checkpoint: to disk
    ("vitlab/callbacks/checkpoint.py", "Checkpoint.save"),
    ("vitlab/runs/generations.py", "BackgroundCheckpointIO.save_checkpoint"),
    ("vitlab/runs/generations.py", "rotate"),
    ("vitlab/runs/generations.py", "sweep"),
]
WAYS += [  # and back
    ("vitlab/runs/shards.py", "read_checkpoint"),
    *(
        ("vitlab/jobs/checkpoint.py", name)
        for name in ("checkpoint_to_resume", "checkpoint_facts", "load_checkpoint", "save_weights")
    ),
]


@pytest.mark.parametrize(("file", "function"), WAYS, ids=[name for _, name in WAYS])
def test_training_a_cell_and_saving_a_checkpoint_read_without_jumping_back_and_forth(file, function):
    stays = visits(file, function)
    assert 0 < len(stays) <= STAYS
    assert len(stays) - len({*stays}) <= RETURNS, stays


def test_a_training_reads_in_the_order_build_train_close():
    stays = [Path(place).stem for place in visits("vitlab/jobs/train/fit.py", "fit")]
    order = [stays.index(step) for step in ("build", "start", "endings", "close")]
    assert order == sorted(order)
