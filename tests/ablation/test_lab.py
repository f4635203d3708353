"""The laboratory from Python: what it returns is what the command prints."""

import json
import os
import shutil
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from tests.ablation.made_up import built
from vitlab.ablation.evidence import bundle
from vitlab.ablation.execution import probe, resolve, status
from vitlab.ablation.execution.progress import running_text
from vitlab.ablation.lab import Lab
from vitlab.ablation.report import write
from vitlab.errors import UsageError
from vitlab.runs.directory import RunDir

pytestmark = pytest.mark.slow  # whole runs


@pytest.fixture
def toy(lab, monkeypatch):
    monkeypatch.chdir(lab.path)
    return Lab("toy.yaml", trust_command=True)


def test_python_goes_silently_from_plan_to_verdict(toy, lab, tmp_path, monkeypatch, capfd):
    plan = toy.plan()
    assert list(plan.arms["arm"]) == ["none", "learned", "rope2d"]
    assert not plan.is_refused and "6 cells (6 missing)" in str(plan)
    assert not lab.counts()
    done = toy.run()
    assert set(done.cells["state"]) == {"done"} and not done.failed and not done.interrupted
    monkeypatch.setattr(write, "figures", lambda *found: {"dots": write.Drawn("any", Figure(), [])})
    report = toy.report()
    assert list(report.arms["arm"]) == ["none", "learned", "rope2d"]
    assert report.arms["difference"].iloc[1] == pytest.approx(0.2, abs=0.05)
    (verdict,) = report.verdicts
    assert report.claims["verdict"].tolist() == [verdict.word]
    assert str(report).startswith(f"**{verdict.word}**: `learned > none`")
    assert report.results["value"].notna().all() and len(report.results) == 12  # acc1 and loss of six cells
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # it stays the same laboratory
    assert str(toy.status()) == str(done) and toy.verify().is_green
    again = toy.report(output="copy", formats=("svg",))
    assert again.answers == report.answers and again.files == [lab.path / path for path in report.files]
    assert sorted(os.listdir("copy")) == ["figures", "report.md", "seeds.csv", "summary.csv", "tables.tex"]
    assert os.listdir() == ["copy"] and toy.export("evidence")[0].is_file()
    assert capfd.readouterr() == ("", "")


@pytest.mark.rare
def test_the_command_prints_what_python_returns(toy, lab):
    assert lab("plan")[1] == f"{toy.plan()}\n"
    assert lab("run")[0] == 0
    assert lab("status")[1] == f"{toy.status()}\n"
    assert lab("report")[1].splitlines() == [str(path) for path in toy.report().files]
    assert lab("run", "--dry_run", "--only", "pos_embed=learned")[1].splitlines()[1:] == []


def test_failed_cells_are_named_and_the_conditions_of_a_run_are_kept(toy, lab, monkeypatch):
    monkeypatch.setenv("TOY", '{"learned 1": "fail"}')
    said = []
    status = toy.run(only=["pos_embed=learned"], say=said.append)
    assert [name.split("-")[0] for name in status.failed] == ["learned/s1"]
    assert status.cells.groupby("arm")["state"].apply(list).to_dict() == {
        "none": ["missing", "missing"],
        "learned": ["done", "failed"],
        "rope2d": ["missing", "missing"],
    }
    assert "the toy broke" in status.cells["note"].max()
    assert any(line.startswith("failed   learned/s1") for line in said)
    with pytest.raises(UsageError, match=r"got pos_embed=lerned; the levels of pos_embed are none, learned, rope2d$"):
        toy.run(only=["pos_embed=lerned"])
    with pytest.raises(UsageError, match=r"AXIS=LEVEL, got pos=learned; the axes are pos_embed$"):
        toy.run(only=["pos=learned"])
    for workers in (0, -1):
        with pytest.raises(UsageError, match=f"`workers` must be a whole number, 1 or more, .* got {workers}$"):
            toy.run(workers=workers)


@pytest.mark.rare
def test_the_last_lines_say_what_is_possible_and_what_is_late(lab):
    lab.change(arms=("none", "learned"), seeds=1)
    code, out = lab("run", toy={"none 0": "fail", "learned 0": "fail"})
    assert code == 1 and out.splitlines()[-1] == "next     vitlab ablate status toy.yaml"
    code, out = lab("run", "--retry_failed")
    assert code == 0 and out.splitlines()[-1] == "next     vitlab ablate report toy.yaml"
    assert lab("register")[1].rstrip().endswith("; 2 cells were done before")


def test_the_status_of_evidence_names_an_arm_that_was_never_built(toy, lab, monkeypatch):
    lab.change(arms=("none", "learned"))
    ablation = Lab("toy.yaml").ablation
    arms = [built({}, ablation.arms[1])]
    evidence = replace(ablation, home=lab.path / "ev", is_evidence=True)
    monkeypatch.setattr(bundle, "load_bundle", lambda folder: (evidence, arms))
    (lab.path / "ev").mkdir()
    status = Lab(lab.path / "ev").status()
    assert [(row["arm"], row["state"]) for row in status.rows] == [
        (arm, "missing") for arm in ("none", "learned") for _ in range(2)
    ]


def test_cells_of_other_code_are_told_before_there_is_a_plan_and_counted_once_after(lab, finished, monkeypatch):
    shutil.copytree(finished, lab.path, dirs_exist_ok=True)
    monkeypatch.chdir(lab.path)
    monkeypatch.setattr(write, "figures", lambda *found: {})
    monkeypatch.setattr(write, "panels", lambda *found: {})
    toy = Lab("toy.yaml", trust_command=True)
    for module in (probe, resolve, status):
        monkeypatch.setattr(module, "code_digest", lambda *words, **own: "c0de")
    words = r"4 cells of toy were finished with other code or versions: `vitlab ablate plan toy\.yaml`, then `.*_stale`"
    with pytest.raises(UsageError, match=words):
        toy.report(accept_stale=True)
    with pytest.raises(UsageError, match=words):
        toy.verify()
    assert "4 with other code" in str(toy.status())
    toy.plan()
    assert str(toy.status()).splitlines()[-1].split() == ["all", "4", "stale"]
    assert toy.report(accept_stale=True).results["value"].notna().all()


def test_stale_cells_of_a_tuned_ablation_are_not_said_to_be_reported_as_no_stale_candidate_is_chosen(
    lab, finished, monkeypatch
):
    shutil.copytree(finished, lab.path, dirs_exist_ok=True)
    monkeypatch.chdir(lab.path)
    with (lab.path / "toy.yaml").open("a") as file:
        file.write("tune: {model.lr: [0.001, 0.2], seeds: [100]}\n")
    toy = Lab("toy.yaml", trust_command=True)
    for module in (probe, resolve, status):
        monkeypatch.setattr(module, "code_digest", lambda *words, **own: "c0de")
    words = r"^4 cells of toy were finished with other code or versions: that code verifies them, and `.* run .*`"
    for accept in (False, True):
        with pytest.raises(UsageError, match=words):
            toy.report(accept_stale=accept)
    toy.plan()  # cells with the values of a candidate are counted, too
    with pytest.raises(UsageError, match=words):
        toy.verify()


def test_a_missing_file_and_a_report_without_cells_are_one_line_each(toy):
    with pytest.raises(UsageError, match="no cell of toy is done; start with `vitlab ablate run"):
        toy.report()
    with pytest.raises(
        UsageError, match=r'`ablate position_embedding/probe`.*did you mean "position_embeddings/probe"'
    ):
        Lab("position_embedding/probe")


def test_the_time_left_of_a_resumed_cell_counts_the_epochs_of_its_present_work(tmp_path):
    run, claim = RunDir(tmp_path / "run"), tmp_path / "claim.json"
    rows = [{"step": 10 * (epoch + 1), "epoch": epoch, "attempt": 1} for epoch in range(30)]
    run.path.mkdir()
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(run.metrics, (time.time() - 600,) * 2)
    claim.write_text(json.dumps({"host": "h", "pid": 1, "started": time.time() - 60}))
    resolved = built({"trainer": {"max_epochs": 40}})
    cell = SimpleNamespace(claim=claim, run=run, resolved=resolved)
    assert running_text(cell) == "host h, pid 1, 60 s, step 300, epoch 30/40"
    with run.metrics.open("a") as file:
        file.write("".join(json.dumps({**row, "epoch": 30 + i, "attempt": 2}) + "\n" for i, row in enumerate(rows[:2])))
    assert running_text(cell).endswith("epoch 32/40, about 240 s left")
    with run.metrics.open("a") as file:  # the epoch that has begun is not done
        file.write(json.dumps({"step": 310, "epoch": 32, "attempt": 2, "seconds_left": 456.7}) + "\n")
    assert running_text(cell).endswith("epoch 33/40, about 457 s left")
