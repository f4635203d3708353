"""What a verification says of cells that a test makes up, without a training."""

import json
from types import SimpleNamespace

import pytest

from vitlab.ablation.evidence import verify
from vitlab.ablation.evidence.chain import append
from vitlab.ablation.evidence.verify import Verified, verify_evidence
from vitlab.runs.directory import RunDir


@pytest.fixture
def ablation(tmp_path):
    return SimpleNamespace(directory=tmp_path, evaluate="val", is_evidence=False, analyses=(), arms=())


def cell_of(ablation, name, torch="0", state="done"):
    run = RunDir(ablation.directory / name)
    run.write("run.json", {"versions": {"torch": torch}})
    return SimpleNamespace(
        name=name, ablation=ablation, run=run, state=lambda: state, outlived=lambda: "", limit="", parts={"data": "x"}
    )


def part(ablation, cells, **more):
    return verify._Part(Verified(), ablation, cells, cells, **more)


def record(ablation, name, predictions="1"):
    hashes = {"result": "2", "metrics": "3", "predictions": predictions}
    append(ablation.directory, "cell", cell=name, split="val", hashes=hashes)


@pytest.mark.parametrize("has_chain", [False, True])
def test_the_cells_that_other_versions_trained_than_most_are_named(ablation, has_chain):
    """In a note where no chain says that all cells of an ablation have the same, as of an older version."""
    cells = [cell_of(ablation, f"a/s{i}", torch) for i, torch in enumerate("1001")]
    cells.append(cell_of(ablation, "b/s0"))
    if has_chain:
        record(ablation, "a/s0")
    looked = part(ablation, cells, done=cells)
    looked.compare_environments()
    said = ["trained with torch 1, the rest with torch 0"]
    assert looked.found.problems == ({"a/s0": said, "a/s3": said} if has_chain else {})
    assert looked.found.notes == ([] if has_chain else ["trained in other environments than the rest: a/s0, a/s3"])
    same = part(ablation, cells, done=cells[1:3])
    same.compare_environments()
    assert same.found == Verified()


@pytest.mark.parametrize(("is_evidence", "prefix"), [(True, ""), (False, ""), (True, "tune/")])
def test_a_recorded_cell_that_is_gone_is_missing_unless_evidence_is_of_another_plan(ablation, is_evidence, prefix):
    ablation.is_evidence = is_evidence
    for name in ("a/s0", "a/s1", "b/s0", "b/s0"):
        record(ablation, name)
    cell_of(ablation, "b/s0").run.write("done.json", {})
    looked = part(ablation, [], prefix=prefix)
    looked.found.missing = {f"{prefix}a/s1": "stale"}
    looked._count_again()
    gone = "measured and recorded, but its folder is gone"
    is_elsewhere = is_evidence and not prefix
    assert looked.found.missing == {f"{prefix}a/s1": gone} | ({} if is_elsewhere else {f"{prefix}a/s0": gone})
    others = ["recorded, but not in this plan and not exported: a/s0"] if is_elsewhere else []
    assert looked.found.notes == others


@pytest.mark.parametrize(
    ("prefix", "predictions", "bare", "untold"),
    [
        ("tune/", "1", ["tune/a/s0"], []),
        ("", "1", [], []),
        ("tune/", None, [], ["tune/a/s0"]),
        ("", None, [], ["a/s0"]),
    ],
)
def test_a_cell_without_predictions_may_have_lost_or_never_had_them(
    ablation, monkeypatch, prefix, predictions, bare, untold
):
    record(ablation, "a/s0", predictions)
    asked = []
    monkeypatch.setattr(verify, "_check", lambda cell, is_bare: asked.append(is_bare) or ([], 0))
    looked = part(ablation, [cell_of(ablation, "a/s0")], prefix=prefix)
    looked.look_at_cells()
    assert (looked.bare, looked.untold, asked) == (bare, untold, [bool(bare or untold)])
    assert [cell.name for cell in looked.done] == ["a/s0"] and looked.found.checked == 1


def test_candidates_without_predictions_and_another_logistic_regression_are_told(ablation, monkeypatch, tmp_path):
    tune = SimpleNamespace(**{**vars(ablation), "directory": tmp_path / "tune"})
    candidates = [cell_of(tune, f"a-try{i}/s0") for i in range(4)]
    for cell in candidates[1:]:
        path = cell.run.predictions("val")
        path.parent.mkdir()
        path.touch()
    trials = [SimpleNamespace(stopped=int(cell is candidates[3]), cells=[cell]) for cell in candidates]
    tuning = SimpleNamespace(cells=[], candidates=candidates, trials=trials, given_up={})
    monkeypatch.setattr(verify, "Tuning", lambda *asked: tuning)
    monkeypatch.setattr(verify, "_check", lambda cell, is_bare: ([], 0 if is_bare else 2))
    wrong = ["n is 5, fitted again it is 7"]
    monkeypatch.setattr(verify.linear, "check", lambda *asked: (3, wrong, "a note"))
    found = verify_evidence(ablation, [])
    assert found.missing == {"tune": "1 of 3 candidates have no predictions"}
    assert found.problems == {"linear.json": wrong} and (found.checked, found.numbers) == (3, 2 * 2 + 3)
    assert found.notes == ["a note"] and not found.is_green
    monkeypatch.setattr(verify.linear, "check", lambda *asked: (0, [], ""))
    found = verify_evidence(ablation, [], allow_missing=True)
    assert found.notes == ["missing, as allowed: tune (1 of 3 candidates have no predictions)"]
    assert found.is_green and json.loads(json.dumps(found.rows)) == [
        {"cell": "all", "problem": "", "cells": 3, "numbers": 4}
    ]
