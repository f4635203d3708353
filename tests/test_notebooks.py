"""The notebooks run from top to bottom, and are stored without what they print."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_six():
    names = [
        "1_attention",
        "2_position_embeddings",
        "3_vision_transformer",
        "4_tokens_to_token",
        "5_your_first_ablation",
        "6_your_own_parts",
    ]
    assert [path.stem for path in NOTEBOOKS] == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path):
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, f"{cell['id']}: clear all outputs"
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_vitlab_alone_is_imported(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = [line.strip() for cell in cells for line in "".join(cell["source"]).splitlines()]
    assert [line for line in lines if line.startswith(("import vitlab", "from vitlab"))] == ["import vitlab"]
    assert not any("VisionTransformer(" in line for line in lines)  # `create_model` is the documented way


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_page_of_a_notebook_has_all_that_it_says_now(path):
    page = (FOLDER.parent / "docs" / "notebooks" / f"{path.stem}.md").read_text()
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
    places = [page.find(cell) for cell in cells]
    assert -1 not in places and places == sorted(places), "`make pages` writes docs/notebooks/ anew"
    assert page.count(f"]({path.stem}_") == len(list((FOLDER.parent / "docs/notebooks").glob(f"{path.stem}_[0-9]*.*")))


SELDOM = [pytest.param(path, marks=pytest.mark.rare) for path in [*NOTEBOOKS[1:4], *NOTEBOOKS[5:]]]


@pytest.mark.slow
@pytest.mark.parametrize("path", [NOTEBOOKS[0], *SELDOM], ids=["1", "2", "3", "4", "6"])
def test_a_notebook_runs(path):  # the fifth starts twenty processes: `make notebooks`
    pytest.importorskip("nbmake", reason="pip install -e '.[notebooks]'")
    command = [sys.executable, "-m", "pytest", "--nbmake", "-p", "no:cacheprovider", "--timeout=600", str(path)]
    before = sorted(FOLDER.iterdir())
    result = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert "1 passed" in result.stdout
    assert sorted(FOLDER.iterdir()) == before  # it writes somewhere else
