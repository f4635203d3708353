"""``vitlab results``: tabulate finished runs, averaged over seeds."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitlab.cli.lines import note, show, show_rows
from vitlab.config.arguments import CommandParser, add_formats
from vitlab.errors import UsageError
from vitlab.jobs.results import check_record, markdown, record, rows_in_full, without_accuracy
from vitlab.runs.atomic import write_text
from vitlab.runs.directory import RUNS, RunDir
from vitlab.runs.find import all_runs, find_directory, run_called
from vitlab.tables import marks, replace_section


def main(argv: list[str]) -> int:
    """Run ``vitlab results`` and return its exit code."""
    parser = CommandParser(
        "vitlab results",
        description="Tabulate runs that `vitlab test` has measured: one row per command, averaged over its seeds.",
        epilog="examples: vitlab results; vitlab results runs/a runs/b; vitlab results runs/* --keep results.jsonl",
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN|FILE.jsonl", help="run (default: all), or a file that --keep wrote"
    )
    parser.add_argument("--keep", metavar="FILE.jsonl", help="append the records of the runs to FILE.jsonl")
    parser.add_argument("--into", metavar="FILE.md", help="write the table between {} and {}".format(*marks("results")))
    add_formats(parser)
    options = parser.parse_args(argv)
    records = [record for text in options.runs for record in _read(text)] or _tested()
    if options.keep and not options.keep.endswith(".jsonl"):
        raise UsageError(f"`--keep` must end with .jsonl, got {options.keep}")
    if options.keep:
        known = list(_read(options.keep)) if Path(options.keep).is_file() else []
        new = [record for record in records if record not in known]
        write_text(Path(options.keep), "".join(json.dumps(record) + "\n" for record in [*known, *new]))
    if options.into:
        replace_section(markdown(records), Path(options.into), "results")
    elif options.form:
        show_rows(rows_in_full(records), options.form)
    else:
        show(markdown(records))
    return 0


def _tested() -> list[dict[str, Any]]:
    runs = all_runs()
    found = [run for run in runs if "acc1" in run.measured("test")]
    stale = {run.path: now.text for run in runs if (now := run.standing("test")).is_stale}
    others = {run.path: text for run in runs if (text := without_accuracy(run))}
    if not found:
        first = next((f"; the test result of {path} was {text}" for path, text in stale.items()), None)
        other = next((f"; {path}{text}" for path, text in others.items()), None)
        way_on = first or other or "; run `vitlab test RUN` first"
        raise UsageError(f"no run in {RUNS}/ has an accuracy on its test split{way_on}")
    for path, why in {**{path: f": its test result was {text}" for path, text in stale.items()}, **others}.items():
        note(f"left out {path}{why}")
    return [_told(run) for run in found]


def _told(run: RunDir) -> dict[str, Any]:
    """Return the record of a run; say so if it is of another checkpoint than the one a test would measure."""
    one, now = record(run), run.standing("test")
    if now.text:
        note(f"note     {run.path}: {now.text}")
    return one


def _read(text: str) -> Iterator[dict[str, Any]]:
    file = Path(text)
    if not text.endswith(".jsonl") or (not file.is_file() and run_called(text)):
        yield _told(find_directory(text))
        return
    try:
        yield from map(check_record, map(json.loads, file.read_text().splitlines()))
    except FileNotFoundError:
        way_out = f"`vitlab results RUN --keep {shlex.quote(text)}` writes it"
        raise UsageError(f"there is no file {text}, and no run of this name; {way_out}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{text} cannot be read as records: {error}") from error
