"""The core stands alone: without analyses, ablations and pages it trains, measures and exports."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vitlab

PACKAGE = Path(vitlab.__file__).parent
BESIDE = ("analysis", "ablation", "look", "position_bench", "pretraining")  # rooms that the core does not need
NEEDS = {
    "ablation": {"analysis"},
    "look": {"analysis"},
    "position_bench": {"analysis"},
}  # the others need the core alone
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
}
RUN = """
import importlib.util
import sys
sys.meta_path = [one for one in sys.meta_path if "editable" not in getattr(one, "__module__", "")]  # has all rooms
from vitlab.cli.main import main
assert not [room for room in sys.argv[2:] if importlib.util.find_spec(f"vitlab.{room}")]
small = ["--model.depth=1", "--data.subset=0.1", "--trainer.max_epochs=1", "--trainer.logger=false", "--quiet"]
assert main(["fit", "--help"]) == 0
assert main(["fit", "--config", "vit", "--name", "a", *small]) == 0
assert main(["test", "a"]) == 0
assert main(["export", "a", "--to", "safetensors"]) == 0
assert main(["runs", "show", "a"]) == 0
import vitlab
assert vitlab.Run("a").test()["acc1"] == vitlab.Run("a").results["test"]["acc1"]
assert vitlab.__file__.startswith(sys.argv[1]), vitlab.__file__
"""


def test_nothing_of_the_core_imports_the_rooms_beside_it_when_it_is_imported():
    pattern = re.compile(rf"^from vitlab\.({'|'.join(BESIDE)})\b|^import vitlab\.({'|'.join(BESIDE)})\b", re.M)
    users = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if pattern.search(path.read_text())}
    own = {user for user in users if user.split("/")[0] not in BESIDE}
    subjects = {f"jobs/{name}.py" for name in ("find_subject", "subject_of_run", "subject_without_run", "view")}
    assert own == {"cli/ablate.py", "cli/analyze.py", "jobs/analyze.py", *subjects}  # their doors


def imported_at_once(module: str) -> set[str]:
    """Return the modules of vitlab that a module imports when it is imported itself, and no core can do without."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    nodes = ast.parse(
        (path / "__init__.py" if (path / "__init__.py").is_file() else path.with_suffix(".py")).read_text()
    ).body
    names = {module.rpartition(".")[0]}
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name in MODULES}


@pytest.mark.rare
@pytest.mark.parametrize("room", BESIDE)
def test_a_room_beside_the_core_needs_none_of_the_others(room):
    todo = [name for name in MODULES if name.startswith(f"vitlab.{room}")]
    seen = set(todo)
    while todo:
        todo += (new := imported_at_once(todo.pop()) - seen)
        seen |= new
    assert {name.split(".")[1] for name in seen if "." in name} & {*BESIDE} == {room} | NEEDS.get(room, set())


def test_pretraining_has_one_door():
    users = {path for path in PACKAGE.rglob("*.py") if "vitlab.pretraining" in path.read_text()}
    names = {str(path.relative_to(PACKAGE)) for path in users}
    inside = {name for name in names if name.startswith("pretraining/")}
    assert names - inside == {
        "__init__.py",
        "config/parser.py",
        "tasks/__init__.py",
    }  # the face, the door, the old home


@pytest.mark.slow
def test_the_core_trains_measures_and_exports_without_the_rooms_beside_it(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "vitlab")  # with what is compiled, which is seconds
    shutil.copytree(PACKAGE.parent / "configs", tmp_path / "configs")
    for room in BESIDE:
        shutil.rmtree(tmp_path / "vitlab" / room)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", RUN, str(tmp_path), *BESIDE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "best.safetensors" in done.stdout and "test/acc1" in done.stdout
