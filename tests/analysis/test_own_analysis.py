"""An analysis is added in one place: the command, an ablation and its report, and `look` find it there."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vitlab
from vitlab.ablation import Lab
from vitlab.ablation.execution.identity import code_digest
from vitlab.ablation.inference.analyses import curve_rows, sections
from vitlab.ablation.inference.measured import metrics_of
from vitlab.ablation.report.drawings import panels
from vitlab.analysis import ANALYSES, Analysis, Curve, Finding
from vitlab.cli.main import main
from vitlab.config.trust import TRUSTED, trust
from vitlab.errors import UsageError, in_own_code
from vitlab.jobs.analyze import analyze
from vitlab.jobs.view import View
from vitlab.layers.pos_embed import PosEmbed
from vitlab.look.analysis_page import write_page
from vitlab.look.stored_analyses import findings_of
from vitlab.runs.directory import RunDir

MINE = """
import pandas as pd
from matplotlib.figure import Figure
from vitlab.analysis import Analysis, Curve, Finding, Subject
from vitlab.models.walk import block_tokens


@Analysis(
    reading="How long tokens are after each block.",
    limits="What `tokens` hold.",
    curve=Curve(x="layer", measures={"norm": "norm of a token"}, words="Mean norm of the tokens."),
    metrics=lambda table: {"last": float(table["norm"].iloc[-1])},
)
def analyze_norms(subject: Subject) -> Finding:
    images, _ = subject.labeled()
    norms = [float(x.norm(dim=-1).mean()) for x in block_tokens(subject.net, images)]
    return Finding(pd.DataFrame({"layer": range(len(norms)), "norm": norms}), Figure(), f"{len(images)} images")
"""
ABLATION = """
name: own
base: [base.yaml]
trust_imports: [mine_of_analysis]
axes: {model.pos_embed: [none, learned]}
baseline: {pos_embed: none}
metric: {primary: norms/last}
analyses: [norms]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine_of_analysis", raising=False)
    Path("mine_of_analysis.py").write_text(MINE)
    Path("own.yaml").write_text(ABLATION)
    Path("base.yaml").write_text("model: {depth: 2}\n")
    yield tmp_path
    ANALYSES._known.pop("norms", None)
    TRUSTED[:] = [name for name in TRUSTED if name != "mine_of_analysis"]


def test_one_file_of_the_user_adds_an_analysis_everywhere(here, small_subject, capsys):
    with pytest.raises(
        UsageError, match=r'own.yaml.*"norms": if it is in mine_of_analysis, add --trust_imports mine_o'
    ):
        Lab("own.yaml")
    assert main(["analyze", "norms", "nowhere"]) == 2
    assert 'no analysis called "norms"' in capsys.readouterr().err
    trust(["mine_of_analysis"])
    with pytest.raises(SystemExit):
        main(["analyze", "--help"])
    assert re.search("norms +What `tokens` hold.", capsys.readouterr().out)

    ablation, runs, finding = Lab("own.yaml").ablation, {}, ANALYSES["norms"].measure(small_subject())
    for i, arm in enumerate(("none", "learned")):
        runs[arm, 0] = run = RunDir(here / arm)
        later = Finding(finding.table.assign(norm=finding.table["norm"] + i), finding.figure)
        later.save(run.path / "analysis", "norms")
        run.write("analysis/notes.json", {"norms": {"note": "24 images"}})
    assert metrics_of(runs["none", 0], ablation.analyses) == {
        "norms/last": pytest.approx(finding.table["norm"].iloc[-1])
    }
    results = SimpleNamespace(ablation=ablation, runs=runs, cells={}, resolved=[])
    rows = curve_rows(results)
    assert [(row["arm"], row["x"]) for row in rows] == [
        (arm, x) for arm in ("none", "learned") for x in (0.0, 1.0, 2.0)
    ]
    (title, words, (table,)), *_ = sections(results, rows)
    assert (title, words[0]) == ("Analysis: norms", "Mean norm of the tokens.")
    assert table[0] == ["norm: arm", "n", "layer 0", "layer 1", "layer 2"]
    (drawn,) = panels(SimpleNamespace(results=results, curves=rows)).values()
    assert drawn[1].axes[0].get_ylabel() == "norm of a token"

    (shown,) = findings_of({"first": runs["none", 0]})
    assert (shown["name"], shown["how"]) == ("norms", "How long tokens are after each block.")
    assert "What <code>tokens</code> hold." in write_page(here, "first", [("norms", "24 images", b"")]).read_text()


@pytest.mark.slow
def test_analyses_of_the_package_are_found_without_importing_them(tmp_path):
    shutil.copytree(
        Path(vitlab.__file__).parent, tmp_path / "vitlab", ignore=shutil.ignore_patterns("__pycache__", "weights")
    )
    (tmp_path / "vitlab" / "analysis" / "views" / "norms.py").write_text(MINE)
    code = (
        "import sys; from vitlab.cli.main import main\n"
        "from vitlab.analysis import ANALYSES, names_of; assert names_of('norms') == ['norms'] == [*ANALYSES][29:]\n"
        "from vitlab.ablation import Lab; assert Lab('own.yaml').ablation.analyses == ('norms',)\n"
        "assert not {'torch', 'vitlab.analysis.views.norms'} & {*sys.modules}\n"
        "main(['analyze', '--help'])"
    )
    (tmp_path / "base.yaml").write_text("model: {depth: 2}\n")
    (tmp_path / "own.yaml").write_text(ABLATION.replace("trust_imports: [mine_of_analysis]\n", ""))
    words, env = [sys.executable, "-P", "-c", code], {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "norms           What `tokens` hold." in done.stdout, done.stderr


def test_what_an_analysis_measures_identifies_a_cell_and_its_description_does_not(tmp_path):
    digests = []
    for old, new in (("", ""), ("norm of a token", "length"), ("norm(dim=-1).mean", "norm(dim=-1).amax")):
        (tmp_path / "norms.py").write_text(MINE.replace(old, new))
        digests.append(code_digest(tmp_path))
    assert digests[0] == digests[1] != digests[2]


def test_names_of_custom_analyses_are_checked():
    with pytest.raises(ValueError, match=r"vitlab\.analysis\.cost already has an analysis called cost"):
        Analysis(reading="", limits="", name="cost")(lambda subject: None)
    for name in ("all", "Two words", "_x"):
        with pytest.raises(ValueError, match="lower-case letters, digits and _"):
            Analysis(reading="", limits="", name=name)(lambda subject: None)
    try:
        for limits in ("first", "second"):  # a cell of a notebook runs again
            Analysis(reading="", limits=limits, name="again")(lambda subject: None)
        assert ANALYSES["again"].limits == "second" and [*ANALYSES].count("again") == 1
    finally:
        ANALYSES._known.pop("again", None)


def test_the_record_s_defaults_draw_a_panel_for_each_measure_and_line():
    curve = Curve(measures={"a": "A", "b": "B"}, x="x", lines=("kind", "of"))
    rows = [{"measure": m, "line": line} for m in "ab" for line in ("one, two", "three, four", "five, six")]
    assert [title for title, _ in curve.panels(curve, rows)][:2] == ["kind: one\nof: two", "kind: three\nof: four"]
    assert len(curve.panels(curve, rows)) == 6


class OneGrid(PosEmbed):
    """A part of the user's own that fails at other image sizes, in words of its own."""

    policies = ("bilinear", "nearest")

    def forward(self, x):
        return x + torch.zeros(1, 16, 1)


@pytest.mark.slow
def test_an_analysis_that_a_part_of_the_users_cannot_do_stops_no_other(small_subject, monkeypatch, tmp_path):
    subject = small_subject(pos_embed=f"{__name__}.OneGrid")
    subject.net.pos_embed_resize = "nearest"
    monkeypatch.setattr("vitlab.jobs.analyze.subject_at", lambda *asked: (subject, tmp_path, {}))
    first, second = analyze(["resolution", "shift"], "a", View(), output=tmp_path / "out")
    line = str(first[1])
    assert (
        line.startswith(f"{__file__}, line ") and "`return x + torch.zeros(1, 16, 1)`: RuntimeError: The size" in line
    )
    assert not isinstance(second[1], UsageError) and (tmp_path / "out" / "shift.csv").is_file()
    assert subject.net.pos_embed_resize == "nearest"


def test_an_error_is_traced_to_the_users_own_code_alone():
    def raised(function):
        try:
            function()
        except Exception as error:
            return in_own_code(error.with_traceback(error.__traceback__.tb_next.tb_next))  # without this file's frames

    assert raised(lambda: json.loads("{")) is None
    assert raised(lambda: vitlab.create_model("nothing")) is None
