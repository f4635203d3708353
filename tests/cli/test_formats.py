"""Every command that prints a table prints it for programs, too, and what it says fits the terminal."""

import contextlib
import csv
import importlib
import io
import json
import sys

import pytest

from vitlab.cli import doctor
from vitlab.cli.main import COMMANDS, main
from vitlab.jobs.terminal import LOG, close_log, log_to, open_terminal, say

PRINT = {  # commands that print a table, and what of them
    **{name: [name] for name in ("results", "models", "bench", "posbench", "data", "predict", "embed", "doctor")},
    **{name: [name] for name in ("verify", "validate", "test", "cv")},
    **{f"runs {word}": ["runs", word] for word in ("list", "show", "diff", "clean")},
    **{f"ablate {word}": ["ablate", word] for word in ("plan", "status", "report", "verify", "list", "compare")},
}
NO_TABLE = {"fit", "pack", "analyze", "look", "export", "submit", "completion"}  # they write files, or text


def test_every_command_is_listed_as_printing_a_table_or_not():
    assert {words[0] for words in PRINT.values()} | NO_TABLE == set(COMMANDS)


@pytest.mark.parametrize("words", PRINT.values(), ids=PRINT)
def test_every_command_that_prints_a_table_takes_json_and_csv(words, capsys):
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    said = capsys.readouterr().out
    assert "--json" in said and "--csv" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_fits_a_narrow_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 8
    assert [line for line in lines if len(line) > (100 if line.startswith("  vitlab ") else 80)] == []


def test_a_header_wraps_at_the_width_of_a_terminal_and_not_in_a_pipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    line = "W&B    offline, as no account is known on this machine; upload it with `wandb sync runs/digits`"
    open_terminal()
    say(line, wrap=True)
    assert capsys.readouterr().out == f"{line}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    say(line, wrap=True)
    broken = "W&B    offline, as no account is known on this machine;\n       upload it with `wandb sync runs/digits`\n"
    assert capsys.readouterr().out == broken
    say(line)
    assert capsys.readouterr().out == f"{line}\n"


def test_an_epoch_is_a_row_on_a_terminal_and_names_its_numbers_in_a_pipe_and_in_the_log(tmp_path, capsys, monkeypatch):
    line, row = "epoch   1/2  val/loss 0.5000", "epoch  val/loss\n  1/2    0.5000"
    open_terminal()
    log_to(tmp_path / "train.log")
    LOG.info(line, extra={"on_terminal": row})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    LOG.info(line, extra={"on_terminal": row})
    close_log()
    assert capsys.readouterr().out == f"{line}\n{row}\n"
    assert [text.partition(" epoch")[2] for text in (tmp_path / "train.log").read_text().splitlines()] == [line[5:]] * 2


def test_the_checks_of_doctor_are_rows(monkeypatch, capsys):
    found = [doctor.Checked("ok", "python", "3, they say"), doctor.Checked("wrong", "disk", "is full")]
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter(found),))
    assert main(["doctor", "--csv"]) == 1
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [tuple(row.values()) for row in rows] == [tuple(one) for one in found]


def test_saved_benchmarks_are_rows_and_are_written_as_well_as_printed(capsys):
    assert main(["bench", "table", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"model", "contender", "ratio"} <= rows[0].keys()


def test_measurements_are_printed_for_programs_or_written_to_a_file(here, monkeypatch, capsys):
    monkeypatch.setitem(
        importlib.import_module("bench.command")._RUN,
        "limit",
        lambda options: ([{"model": "vit", "gflop": 1 / 3}], [], ["a note"]),
    )
    main(["bench", "limit", "--rounds", "3", "--json"])
    printed = json.loads(capsys.readouterr().out)
    main(["bench", "limit", "--rounds", "3", "--json", "limit.json"])
    assert "| model |" in capsys.readouterr().out
    written = json.loads((here / "limit.json").read_text())["rows"]
    assert [row["model"] for row in printed] == [row["model"] for row in written]
