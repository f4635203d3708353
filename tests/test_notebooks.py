"""The notebooks run from top to bottom and are stored with what they print; their pages are as new as they are."""

import base64
import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

FOLDER = Path(__file__).parents[1] / "notebooks"
PAGES = FOLDER.parent / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ANSWERS = {"jupyter": {"source_hidden": True}, "tags": ["answers"]}  # folded


def test_the_notebooks_are_six_in_the_order_of_reading():
    names = [
        "1_attention",
        "2_position_embeddings",
        "3_vision_transformer",
        "4_tokens_to_token",
        "5_your_first_ablation",
        "6_your_own_parts",
    ]
    assert [path.stem for path in NOTEBOOKS] == names


@pytest.fixture(scope="module")
def render():
    spec = importlib.util.spec_from_file_location("render", FOLDER.parent / "docs" / "render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored_and_small(path):
    notebook = json.loads(path.read_text())
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == [*range(1, len(counts) + 1)], "`make pages` runs it from top to bottom"
    for cell in notebook["cells"]:
        assert cell["metadata"] == (ANSWERS if cell["id"] == "answers" else {})
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error" and output.get("name") != "stderr", cell["id"]
    assert (
        path.stat().st_size < 350_000
    )  # all six are read in a browser, and each `make pages` adds them to the history
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_ends_with_three_exercises_and_asserts_the_answers(path):
    cells = json.loads(path.read_text())["cells"]
    place = [cell["id"] for cell in cells].index("answers")
    questions, answers = ("".join(cells[i]["source"]) for i in (place - 1, place))
    assert questions.startswith("## Exercises") and len(cells) - place <= 2
    assert re.findall(r"^(\d)\. ", questions, re.M) == ["1", "2", "3"]
    parts = re.split(r"^# \d\. ", answers, flags=re.M)
    assert len(parts) == 4 and all("assert " in part for part in parts[1:])
    assert "all three as answered" in str(cells[place]["outputs"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_and_its_notebook_are_up_to_date_with_the_cells(path, render):
    notebook = json.loads(path.read_text())
    assert notebook["metadata"]["vitlab"]["made_from"] == render.digest(notebook), "`make pages` runs it anew"
    files = render.page_of(notebook, path.name)
    stored = [PAGES / f"{path.stem}.md", *PAGES.glob(f"{path.stem}_[0-9]*.*")]
    assert {place.name: place.read_bytes() for place in stored} == files, "`make pages` writes docs/notebooks/ anew"
    next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")["source"] += ["# later"]
    assert render.digest(notebook) != notebook["metadata"]["vitlab"]["made_from"]
    assert render.page_of(notebook, path.name) != files


def test_running_again_keeps_stored_outputs_unless_they_say_something_else(render):
    def said(text):
        return {"output_type": "stream", "name": "stdout", "text": text}

    def drawn(*gray):
        packed = io.BytesIO()
        Image.fromarray(np.array([gray], dtype=np.uint8)).save(packed, "png")
        return {"output_type": "display_data", "data": {"image/png": base64.b64encode(packed.getvalue()).decode()}}

    plan = "rope2d    17,860      0.209    -             {}\ntime     about {} min for 6 cells"
    for one, other, expected in (
        (said("written into /tmp/vitlab-8pge7z1a"), said("written into /var/folders/x/vitlab-7mef_q5v"), True),
        (said("differ by 2e-07"), said("differ by 9.1e-08"), True),
        (said("differ by 2e-07"), said("differ by 2e-03"), False),
        (said(plan.format(1594, 3.5)), said(plan.format(4051, 1.1)), True),
        (said(plan.format(1594, 3.5)), said(plan.format(1594, 3.5).replace("17,860", "17,861")), False),
        (said("96.2%"), said("96.3%"), False),
        (drawn(0, 200), drawn(3, 198), True),
        (drawn(0, 200), drawn(0, 120), False),
        (drawn(0, 200), drawn(0, 200, 0), False),
        (said("0"), drawn(0), False),
    ):
        assert render.same(one, other) is expected, (one, other)


def test_every_figure_and_formula_of_the_articles_has_its_counterpart():
    index = (PAGES / "index.md").read_text()
    named = ["patchify", "tokenize", "class (prediction) token", "position embedding", "self-attention", "multi-head"]
    named += ["single head with the skip of the values", "MLP", "encoder", "head", "soft split", "token transformer"]
    named += ["Token-to-Token module", "2,500, 650, 175", "sines and cosines", "the permutation"]
    rows = [line for line in index.splitlines() if line.startswith("| ") and "](" in line]
    for name in named:
        assert any(name in row.split(" | ")[0] for row in rows), name
    links = [re.findall(r"\[([^\]]+)\]\(([^)#]+)#?([^)]*)\)", row) for row in rows]
    assert all(links) and len(rows) > 30
    for title, file, anchor in [link for row in links for link in row]:
        assert (PAGES / file).exists(), file
        if anchor:
            heading = re.search(r'"(.+)"', title)[1]
            assert re.search(rf"^##+ {re.escape(heading)}$", (PAGES / file).read_text(), re.M), heading
            assert anchor == re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-"), anchor
        elif not file.endswith(".md"):
            assert f"]({file})" in (PAGES / f"{file.rsplit('_', 1)[0]}.md").read_text(), file


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_import_only_the_top_level_of_vitlab(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = [line.strip() for cell in cells for line in "".join(cell["source"]).splitlines()]
    assert [line for line in lines if line.startswith(("import vitlab", "from vitlab"))] == ["import vitlab"]
    assert not any("VisionTransformer(" in line for line in lines)  # `create_model` is the documented way


SELDOM = [pytest.param(path, marks=pytest.mark.rare) for path in [*NOTEBOOKS[:4], *NOTEBOOKS[5:]]]


@pytest.mark.slow
@pytest.mark.parametrize("path", SELDOM, ids=["1", "2", "3", "4", "6"])
def test_a_notebook_runs(path):  # the fifth starts twenty processes: `make notebooks`
    pytest.importorskip("nbmake", reason="pip install -e '.[notebooks]'")
    command = [sys.executable, "-m", "pytest", "--nbmake", "-p", "no:cacheprovider", "--timeout=600", str(path)]
    before = sorted(FOLDER.iterdir())
    result = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert "1 passed" in result.stdout
    assert sorted(FOLDER.iterdir()) == before  # it writes somewhere else
