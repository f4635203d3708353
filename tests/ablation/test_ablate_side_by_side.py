"""Several ablations on one page."""

import json
import shutil
from pathlib import Path

import pytest

from vitlab.cli.ablate import main
from vitlab.errors import UsageError

PUBLISHED = Path(__file__).parents[2] / "experiments"


def test_ablations_are_listed_and_compared_by_their_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for word in ("list", "compare"):
        with pytest.raises(UsageError, match="vitlab ablate"):
            main([word, *(["mine"] if word == "compare" else [])])
    place = tmp_path / "runs/ablations/mine"
    (place / "none/s0-1").mkdir(parents=True)
    (place / "none/s0-1/done.json").write_text(json.dumps({"ended": "2026-01-02"}))
    (place / "report").mkdir()
    probe = PUBLISHED / "position_embeddings/results/probe"
    shutil.copy(probe / "summary.csv", place / "report/summary.csv")
    assert main(["list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["mine", "1", "1", "2026-01-02", "no", "no"]
    other = str(PUBLISHED / "tokenizers/results/digits")
    assert main(["compare", "mine", other]) == 0
    page = capsys.readouterr().out
    assert "| mine | learned | 3/3 | 0.9853 | 0.9351 to 1.0000 | 0.7442 | 0.0017 | higher |" in page
    assert "not tested against each other" in page and f"| {other} |" in page and "## Claims" in page
    means = [float(row.split("|")[4]) for row in page.split("## acc1\n")[1].split("\n## ")[0].splitlines()[3:] if row]
    assert means == sorted(means, reverse=True)
