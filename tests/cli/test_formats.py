"""Every command that prints a table prints it for programs, too."""

import csv
import importlib
import io
import json

import pytest

from vitlab.cli import doctor
from vitlab.cli.main import COMMANDS, main

PRINT = {  # commands that print a table, and what of them
    **{name: [name] for name in ("results", "models", "bench", "posbench", "data", "predict", "embed", "doctor")},
    **{name: [name] for name in ("verify", "validate", "test", "cv")},
    **{f"runs {word}": ["runs", word] for word in ("list", "show", "diff", "clean")},
    **{f"ablate {word}": ["ablate", word] for word in ("plan", "status", "report", "verify", "list", "compare")},
}
NO_TABLE = {"fit", "pack", "analyze", "look", "export", "submit", "completion"}  # they write files, or text


def test_every_command_is_said_to_print_a_table_or_not():
    assert {words[0] for words in PRINT.values()} | NO_TABLE == set(COMMANDS)


@pytest.mark.parametrize("words", PRINT.values(), ids=PRINT)
def test_a_command_that_prints_a_table_takes_json_and_csv(words, capsys):
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    said = capsys.readouterr().out
    assert "--json" in said and "--csv" in said


def test_checks_of_the_machine_are_rows(monkeypatch, capsys):
    found = [doctor.Checked("ok", "python", "3, they say"), doctor.Checked("wrong", "disk", "is full")]
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter(found),))
    assert main(["doctor", "--csv"]) == 1
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [tuple(row.values()) for row in rows] == [tuple(one) for one in found]


def test_saved_benchmarks_are_rows_and_a_file_is_written_beside_what_is_printed(tmp_path, capsys):
    assert main(["bench", "table", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"model", "contender", "ratio"} <= rows[0].keys()


def test_what_is_measured_is_printed_for_programs_or_written_into_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(
        importlib.import_module("bench.command")._RUN,
        "limit",
        lambda options: ([{"model": "vit", "gflop": 1 / 3}], [], ["a note"]),
    )
    main(["bench", "limit", "--rounds", "3", "--json"])
    printed = json.loads(capsys.readouterr().out)
    main(["bench", "limit", "--rounds", "3", "--json", "limit.json"])
    assert "| model |" in capsys.readouterr().out
    written = json.loads((tmp_path / "limit.json").read_text())["rows"]
    assert [row["model"] for row in printed] == [row["model"] for row in written]
