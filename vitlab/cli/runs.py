"""``vitlab runs``: list, show and compare runs, and free the disk of what they no longer need."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from vitlab.cli.lines import note, show, show_rows
from vitlab.config.arguments import CommandParser, KeepLines, add_formats
from vitlab.errors import UsageError, megabytes, trusting
from vitlab.jobs.clean import WHAT, Item, remove, to_clean
from vitlab.jobs.listing import PARTS, Row, about, differences_of, head_metrics, list_runs
from vitlab.runs.directory import RunDir
from vitlab.runs.find import find_directory
from vitlab.runs.records import MEASURED_BY
from vitlab.tables import columns

WORDS = {
    "list": "list runs with their results",
    "show": "show one run: status, code, machine, data, changes, numbers, files",
    "diff": "show how two runs differ",
    "clean": "show which files of the runs can go and what that frees; ask, then remove them",
}
EPILOG = """examples:
  vitlab runs list --where model.pos_embed=rope2d --where 'test.acc1>0.9' --sort test.acc1
  vitlab runs list runs/ablations/probe --columns model.pos_embed,seed --csv
  vitlab runs diff first second
  vitlab runs clean --what resume --where 'started<2026-01-01'
"""
WIDE = 48  # letters of a cell
MARKS = {"other": "*", "unknown": "?", "stale": "stale"}
NOTES = {
    "*": "measured with another checkpoint of the run than the one used now",
    "?": "not known whether the present checkpoint gave it; `vitlab runs show RUN` compares",
    "stale": "measured before the run went on; {} measures again",
}


def main(argv: list[str]) -> int:
    """Run ``vitlab runs`` and return its exit code."""
    options = _parser().parse_args(argv)
    return {"list": _list, "show": _show, "diff": _diff, "clean": _clean}[options.word](options)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "vitlab runs",
        description="List, show and compare runs, and free the disk of what they no longer need.",
        epilog=EPILOG,
        formatter_class=KeepLines,
    )
    words = parser.add_subparsers(dest="word", required=True, metavar="|".join(WORDS))
    subs = {word: words.add_parser(word, help=t, description=t) for word, t in WORDS.items()}
    for word in ("list", "clean"):
        add = subs[word].add_argument
        add("places", nargs="*", metavar="RUN|FOLDER", help="runs, or folders with runs below (default: runs/)")
        add("--where", action="append", default=[], metavar="KEY=VALUE", help="only runs for which this holds; "
            "also !=, <, <=, >, >=, and patterns as rope*. KEY is one of the configuration, status, started, "
            "test.acc1, ...; if given several times, all must hold")  # fmt: skip
    add = subs["list"].add_argument
    add("--sort", metavar="KEY", help="sort by this, from low to high (default: by start)")
    add("--reverse", action="store_true", help="from high to low")
    add("--columns", metavar="KEY,KEY", default="", help="show these, too")
    subs["show"].add_argument("run", nargs="?", default="last", metavar="RUN", help="run (default: last)")
    subs["diff"].add_argument("a", metavar="A", help="a run")
    subs["diff"].add_argument("b", metavar="B", help="another")
    what = "; ".join(f"{name}: {text}" for name, text in WHAT.items())
    subs["clean"].add_argument("--what", choices=list(WHAT), default="spare", help=f"{what} (default: spare)")
    subs["clean"].add_argument("--yes", action="store_true", help="remove without asking")
    for sub in subs.values():
        add_formats(sub)
    return parser


def _list(options: argparse.Namespace) -> int:
    more = [name.strip() for name in options.columns.split(",") if name.strip()]
    rows, damaged = list_runs(options.places, options.where, options.sort, more, options.reverse)
    for path, text in damaged.items():
        note(f"left out {path}: {text}")
    if options.form:
        show_rows(rows, options.form)
        return 0
    if not rows:
        raise UsageError("no run matches; `vitlab runs list` lists all of them")
    asked = [*more, *(text for text in [options.sort] if text)]
    shown = dict.fromkeys(["run", "status", "started", "seed", "config", "changed", *head_metrics(rows), *asked])
    cells = [[_cell(row, name) for name in shown] for row in rows]
    numbers = [i for i, name in enumerate(shown) if any(isinstance(row.get(name), float) for row in rows)]
    show(columns([list(shown), *cells], right=numbers))
    text = " ".join(cell for row in cells for cell in row if cell[-1:] in ("*", "?") or cell == "stale")
    again = {_command(name) for row in cells for cell, name in zip(row, shown, strict=True) if cell == "stale"}
    for mark, meaning in NOTES.items():
        if mark in text:
            show(f"{mark} {meaning.format(' or '.join(sorted(again)))}")
    return 0


def _cell(row: Row, name: str) -> str:
    split, _, metric = name.partition(".")
    mark = MARKS.get(row.get(split, ""), "") if metric and split in MEASURED_BY else ""
    value = row.get(name)
    if value is None:
        return mark if mark == "stale" else "-"
    if name == "started":
        return str(value)[:16].replace("T", " ")
    return f"{_short(value)}{mark}"


def _command(name: str) -> str:
    """Return the command that measures a metric of a split."""
    command = "validate" if name.startswith("val.") else "test"
    return f"`{trusting(f'vitlab {command} RUN')}`"


def _line(value: Any, digits: int = 6) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float) else " ".join(str(value).split())


def _short(value: Any) -> str:
    """Return a value as a cell of a table; a dash for none."""
    text = "-" if value is None else _line(value, digits=5) or "-"
    return text if len(text) <= WIDE else f"{text[: WIDE - 1]}…"


def _show(options: argparse.Namespace) -> int:
    run = find_directory(options.run)
    found = about(run)
    if options.form:
        rows = [{"part": part, "key": key, "value": v} for part in PARTS for key, v in found[part].items()]
        show_rows([{"run": str(run.path), **found}] if options.form == "json" else rows, options.form)
        return 0
    show(str(run.path))
    for part in PARTS:
        values = {key: _line(value) for key, value in found[part].items()}
        cells = [["", key, text] for key, text in values.items() if part != "data" or len(text) <= 2 * WIDE]
        if part != "config" and cells:
            show(f"\n{part}\n{columns(cells)}")
    show(f"\n{len(found['config'])} values of its configuration: {run.config}, or --json")
    return 0


def _diff(options: argparse.Namespace) -> int:
    a, b = find_directory(options.a), find_directory(options.b)
    rows = differences_of(a, b)
    if options.form:
        show_rows(rows, options.form)
        return 0
    if not rows:
        show(f"{a.path} and {b.path} do not differ in configuration, code, data or numbers")
        return 0
    names = [run.name if a.name != b.name else str(run.path) for run in (a, b)]
    for part in PARTS:
        mine = [row for row in rows if row["part"] == part]
        if mine:
            table = [["", part, *names, "difference" if part == "numbers" else ""]]
            for row in mine:
                signed = f"{row['difference']:+.5g}" if "difference" in row else ""
                table.append(["", row["key"], _short(row["a"]), _short(row["b"]), signed])
            show(columns(table) + "\n")
    return 0


def _clean(options: argparse.Namespace) -> int:
    if options.what == "runs" and not options.places and not options.where:
        raise UsageError("`--what runs` deletes whole runs: name them, or choose them with --where")
    rows, damaged = list_runs(options.places, options.where)
    if damaged and options.what == "runs":
        path, text = next(iter(damaged.items()))
        note(f"left out {path}: {text}")
    items, kept = to_clean([RunDir(row["path"]) for row in rows], options.what)
    freed = sum(item.frees for item in items)
    if options.form:
        show_rows([item.row() for item in items], options.form)
    else:
        _say_items(items)
    for path, text in kept.items():
        note(f"kept     {path}: {text}")
    if not items:
        note("nothing can go" + (f" ({WHAT[options.what]})" if not kept else ""))
        return 0
    if not _agreed(f"remove {len(items)} and free {megabytes(freed)}?", options.yes):
        return 0
    freed, kept = remove(items)
    for path, text in kept.items():
        note(f"kept     {path}: {text}")
    note(f"freed {megabytes(freed)}")
    return 1 if kept else 0


def _say_items(items: Sequence[Item]) -> None:
    if items:
        cells = [[str(item.path), megabytes(item.frees), item.why] for item in items]
        show(columns([["path", "frees", "what it is"], *cells], right=[1]))
    for item in items:
        if item.named:
            loses = "loses" if len(item.named) == 1 else "lose"
            show(f"note: {', '.join(item.named)} {loses} the checkpoint of the measurement, {item.path}")


def _agreed(question: str, yes: bool) -> bool:
    if yes:
        return True
    if not sys.stdin.isatty():
        note(f"{question} Nothing was removed: add --yes")
        return False
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().casefold() in ("y", "yes"):
        return True
    note("nothing was removed")
    return False
