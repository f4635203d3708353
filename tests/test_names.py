"""What vitlab and its rooms offer: names that are there, that type checkers see, and that cost nothing until used."""

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import vitlab

ROOMS = ["ablation", "analysis", "callbacks", "data", "layers", "models", "optim", "pretraining", "tasks", "tokenizers"]
ROOT = Path(__file__).parents[1]
PACKAGES = ["vitlab", *(f"vitlab.{room}" for room in ROOMS)]


def shown_to_type_checkers(package):
    """Return the public names that the file of a package imports or defines outside of functions."""
    names = set()
    for node in ast.walk(ast.parse(Path(package.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("vitlab"):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef) and node.col_offset == 0 and not node.name.startswith("_"):
            names.add(node.name)
    return names - {"UsageError", "did_you_mean", "lazy"}


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_there_and_known_to_type_checkers(name):
    package = importlib.import_module(name)
    for public in package.__all__:
        assert getattr(package, public) is not None
    assert set(package.__all__) <= set(dir(package))
    defined = {key for key in ("ANALYSES", "names_of") if key in vars(package)}
    rooms = {*ROOMS, "look", "stats"} if package is vitlab else set()
    assert shown_to_type_checkers(package) | defined == {*package.__all__, *rooms}


@pytest.mark.rare
@pytest.mark.slow
def test_every_subpackage_is_an_attribute_of_vitlab():
    assert {*ROOMS, "stats"} <= set(dir(vitlab))
    code = (
        "import vitlab; print(vitlab.layers.Attention, vitlab.stats.holm, vitlab.ablation.Lab, vitlab.optim.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "vitlab.layers.attention.Attention" in done.stdout, done.stderr


SCRIPTS = [path for room in ("benchmarks", "docs", "examples") for path in (ROOT / room).rglob("*.py")]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_imports_from_vitlab_is_there(path):
    """Before, the measurement of checkpoints imported a function that had another name, and no test ran it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vitlab":
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                assert hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}"), name


@pytest.mark.parametrize(
    ("package", "wrong", "right"),
    [
        ("vitlab", "creat_model", "create_model"),
        ("vitlab", "layer", "layers"),
        ("vitlab.analysis", "Subjekt", "Subject"),
    ],
)
def test_a_wrong_name_gets_the_closest(package, wrong, right):
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match=f'has no attribute {wrong!r}; did you mean "{right}"'):
        getattr(module, wrong)


def test_a_list_of_names_needs_no_torch():
    code = "import sys, vitlab, vitlab.models, vitlab.analysis, vitlab.callbacks, vitlab.ablation\n"
    code += "vitlab.SIZES, vitlab.analysis.ANALYSES, dir(vitlab), dir(vitlab.models); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.rare
def test_a_strict_type_checker_knows_every_name_and_refuses_a_wrong_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import vitlab\n"
        "from vitlab.analysis import rollout\n"
        "from vitlab.layers import Attention\n"
        "from vitlab.models import SIZES, VisionTransformer\n"
        "reveal_type(vitlab.layers.PosEmbed((3, 5)))\n"
        "reveal_type(vitlab.models.attention_maps)\n"
        "reveal_type(Attention(dim=8, num_heads=2))\n"
        "reveal_type(VisionTransformer(**SIZES['vit_s16']))\n"
        "reveal_type(rollout)\n"
        "vitlab.fitt\n"
        "vitlab.layers.Atention\n"
        "Attention(dim=8, num_heads='two')\n"
        "vitlab.Classifier(num_classes=3, depth='two')\n"
        "reveal_type(vitlab.create_model('t2t_vit_14', pos_embed='rope2d'))\n"
    )
    words = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", str(script)]
    said = subprocess.run(words, cwd=Path(vitlab.__file__).parents[1], capture_output=True, text=True).stdout
    seen = {int(line.split(":")[1]): line for line in said.splitlines() if "Revealed type is" in line}
    parts = ["pos_embed.base.PosEmbed", "def (", "layers.attention.Attention", "vit.VisionTransformer", "Tensor"]
    for line, part in enumerate(parts, start=5):
        assert part in seen[line]
    wrong = {line.split(":")[1] for line in said.splitlines() if ": error:" in line and "script.py" in line}
    assert wrong == {"10", "11", "12", "13"}
    assert "vit.VisionTransformer" in seen[14]
