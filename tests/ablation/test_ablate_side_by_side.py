"""Several ablations on one page."""

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.ablation.made_up import give
from vitlab.ablation.file.spec import read_ablation
from vitlab.ablation.inference.findings import find
from vitlab.ablation.inference.looks import Looks
from vitlab.ablation.inference.measured import CellResults
from vitlab.cli.ablate import main
from vitlab.errors import UsageError

PUBLISHED = Path(__file__).parents[2] / "experiments"


def test_ablations_are_listed_and_compared_by_their_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for word in ("list", "compare"):
        with pytest.raises(UsageError, match="vitlab ablate"):
            main([word, *(["mine"] if word == "compare" else [])])
    place = tmp_path / "runs/ablations/mine"
    for name, answer in (
        ("mine", 'there is no ablation, file or folder "mine"'),
        ("position_embeddings/probe", "`vitlab ablate report position_embeddings/probe`"),
    ):
        with pytest.raises(UsageError, match=answer):
            main(["compare", name])
    place.mkdir(parents=True)
    with pytest.raises(UsageError, match="mine has no report: `vitlab ablate report FILE`"):  # which may lie anywhere
        main(["compare", "mine"])
    (place / "cv.yaml").touch()
    with pytest.raises(UsageError, match=r"`vitlab ablate report runs/ablations/mine/cv\.yaml`"):
        main(["compare", "mine"])
    (place / "none/s0-1").mkdir(parents=True)
    (place / "none/s0-1/done.json").write_text(json.dumps({"ended": "2026-01-02"}))
    (place / "report").mkdir()
    probe = PUBLISHED / "position_embeddings/results/probe"
    shutil.copy(probe / "summary.csv", place / "report/summary.csv")
    assert main(["list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["mine", "1", "1", "2026-01-02", "no", "no"]
    assert main(["list", "--json"]) == 0
    row = {"ablation": "mine", "arms": 1, "cells": 1, "ended": "2026-01-02", "registered": False, "report": False}
    assert json.loads(capsys.readouterr().out) == [row]
    other = str(PUBLISHED / "tokenizers/results/digits")
    assert main(["compare", "mine", other]) == 0
    page = capsys.readouterr().out
    read_ablation(str(PUBLISHED / "position_embeddings/probe.yaml")).directory.symlink_to(place)
    assert main(["compare", "position_embeddings/probe"]) == 0 and "learned" in capsys.readouterr().out
    assert "| mine | learned | 3/3 | 0.9853 | 0.9351 to 1.0000 | 0.7442 | 0.0017 | higher |" in page
    assert "not tested against each other" in page and f"| {other} |" in page and "## Claims" in page
    means = [float(row.split("|")[4]) for row in page.split("## acc1\n")[1].split("\n## ")[0].splitlines()[3:] if row]
    assert means == sorted(means, reverse=True)
    assert main(["compare", "mine", other, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    learned = next(row for row in rows if row["ablation"] == "mine" and row["arm"] == "learned")
    assert learned["mean"] == pytest.approx(0.9853, abs=5e-5) and learned["n"] == 3


def test_names_that_look_like_numbers_stay_names_in_json(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = ["kind,arm,rate,metric,n,planned,mean,is_claimed,baseline,line", "arm,010,1e-1,loss,3,3,9.5,False,010,01"]
    Path("mine").mkdir()
    Path("mine/summary.csv").write_text("\n".join(lines))
    assert main(["compare", "mine", "--json"]) == 0
    row = {"ablation": "mine", "kind": "arm", "arm": "010", "rate": "1e-1", "metric": "loss", "n": 3, "planned": 3}
    row |= {"mean": 9.5, "is_claimed": False, "baseline": "010", "line": "01"}
    assert json.loads(capsys.readouterr().out) == [row]


def test_means_are_in_the_order_of_numbers_and_other_tables_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [f"arm,{name},loss,{n},3,{mean}" for name, n, mean in (("a", 3, 9.5), ("b", 0, ""), ("c", 2, 10.25))]
    Path("mine").mkdir()
    Path("mine/summary.csv").write_text("\n".join(["kind,arm,metric,n,planned,mean", *lines, "arm,d,loss,1,3,-1"]))
    assert main(["compare", "mine"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| mine")]
    assert [(row[1], row[3]) for row in rows] == [("c", "10.2500"), ("a", "9.5000"), ("d", "-1.0000"), ("b", "-")]
    Path("mine/summary.csv").write_text("x,y\n1,2\n")
    with pytest.raises(UsageError, match="is not of `vitlab ablate report`: it has no column `kind`"):
        main(["compare", "mine"])


def test_small_numbers_are_not_shown_as_zeros(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/summary.csv").write_text("kind,arm,metric,n,planned,mean,adjusted_p\narm,a,loss,3,3,5.25e-6,1e-9\n")
    assert main(["compare", "mine"]) == 0
    assert "| 0.000005250 |" in (page := capsys.readouterr().out) and "| < 0.0001 |" in page


def test_a_claim_is_shown_with_the_p_of_its_verdict_and_keeps_its_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    head = "kind,claim,metric,mean,n,planned,adjusted_p,equivalence_p,excess_p,verdict"
    claims = [("a ~ b within 1", "supported"), ("a ~ c within 1", "refuted"), ("a > d | e=f", "equivalent")]
    claims += [("a > b", "supported")]
    Path("mine/report").mkdir(parents=True)  # as of evidence, whose report lies in it
    lines = [f"claim,{text},,,5,5,0.1,0.2,0.3,{word}" for text, word in claims]
    Path("mine/report/summary.csv").write_text("\n".join([head, *lines]))
    assert main(["compare", "mine"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| mine")]
    assert [row[1:] for row in rows] == [
        ["`a ~ b within 1`", "-", "5/5", "0.2000", "supported |"],
        ["`a ~ c within 1`", "-", "5/5", "0.3000", "refuted |"],
        ["`a > d \\| e=f`", "-", "5/5", "0.2000", "equivalent |"],
        ["`a > b`", "-", "5/5", "0.1000", "supported |"],
    ]


def test_where_less_is_better_the_least_mean_comes_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("{}\n")
    content = {"name": "mine", "base": "base.yaml", "baseline": {"variant": "a"}}
    content |= {"metric": {"primary": "mae", "mode": "min"}}
    content |= {"axes": {"variant": {name: {"model.lr": float(i)} for i, name in enumerate("abc")}}, "seeds": 1}
    Path("mine.yaml").write_text(yaml.safe_dump(content))
    numbers = {(name, 0): {"mae": value} for name, value in (("a", 3.0), ("b", 2.0), ("c", 10.0))}
    results = give(CellResults(read_ablation("mine.yaml"), []), numbers)
    place = tmp_path / "runs/ablations/mine/report"
    place.mkdir(parents=True)
    find(results, Looks((), 1, ())).table().to_csv(place / "summary.csv", index=False)
    assert main(["compare", "mine.yaml"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| mine")]
    assert [row[1] for row in rows] == ["b", "a", "c"]


@pytest.mark.rare
def test_the_tables_of_an_ablation_are_printed_for_programs_too(lab, monkeypatch, capsys):
    lab.change(arms=("none", "learned"), workers=1)
    assert lab("run")[0] == 0
    monkeypatch.chdir(lab.path)
    assert main(["status", "toy.yaml", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["arm"], row["seed"], row["state"]) for row in rows] == [
        (arm, seed, "done") for arm in ("none", "learned") for seed in (0, 1)
    ]
    assert main(["plan", "toy.yaml", "--json", "--trust_command"]) == 0
    arms = json.loads(capsys.readouterr().out)
    assert [row["arm"] for row in arms] == ["none", "learned"] and arms[0]["unlike"] == ""
    main(["verify", "toy.yaml", "--json"])
    assert json.loads(capsys.readouterr().out)[-1]["cells"] == 4
    assert main(["report", "toy.yaml", "--csv"]) == 0
    shown = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    with next(Path("runs").rglob("report/summary.csv")).open() as file:
        kept = list(csv.DictReader(file))
    assert [(row["kind"], row["arm"]) for row in shown] == [(row["kind"], row["arm"]) for row in kept]
    means = [(float(a["mean"]), float(b["mean"])) for a, b in zip(shown, kept, strict=True) if b["mean"]]
    assert means and all(a == pytest.approx(b, abs=1e-9) for a, b in means)
