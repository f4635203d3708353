"""``vitlab results``: finished runs as one table, the seeds of a command together."""

import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitlab.cli.arguments import CommandParser
from vitlab.errors import UsageError
from vitlab.run_dir import RunDir, find_directory, write_text

_FREE = ("seed_everything", "name", "run_dir", "trainer.logger", "data.root", "data.num_workers")  # change no number
_BEGIN, _END = "<!-- results -->", "<!-- /results -->"


def main(argv: list[str]) -> int:
    """Run ``vitlab results`` and return its exit code."""
    parser = CommandParser(
        "vitlab results",
        description="A table of runs that `vitlab test` has measured: one line a command, its seeds together.",
        epilog="examples: vitlab results runs/a runs/b; vitlab results runs/* --keep results.jsonl",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN|FILE.jsonl", help="run, or records that --keep has written")
    parser.add_argument("--keep", metavar="FILE.jsonl", help="add the records of the runs to a file")
    parser.add_argument("--into", metavar="FILE.md", help=f"write the table between {_BEGIN} and {_END}")
    options = parser.parse_args(argv)
    records = [record for text in options.runs for record in _read(text)]
    if options.keep:
        known = list(_read(options.keep)) if Path(options.keep).is_file() else []
        new = [record for record in records if record not in known]
        write_text(Path(options.keep), "".join(json.dumps(record) + "\n" for record in [*known, *new]))
    table = markdown(records)
    if options.into:
        _write_into(Path(options.into), table)
    else:
        sys.stdout.write(table)
    return 0


def record(run: RunDir) -> dict[str, Any]:
    """Return what a table says of one run; a run without a test result is refused."""
    import yaml

    results, facts, model, data = (run.read(f"{name}.json") for name in ("results", "run", "model", "data"))
    measured = results.get("test")
    if not measured or "acc1" not in measured:
        raise UsageError(f"{run.path} has no accuracy on its test split; run `vitlab test {run.path}` first")
    config = yaml.safe_load(run.config.read_text())
    network = config["model"]["init_args"]
    overrides = run.path / "overrides.yaml"
    return {
        "command": _command(facts["argv"], yaml.safe_load(overrides.read_text()) if overrides.is_file() else None),
        "seed": facts["seed"],
        "acc1": measured["acc1"],
        "n": int(measured["n"]),
        "tokenizer": network["tokenizer"],
        "pos_embed": network["pos_embed"],
        "parameters": model["parameters"],
        "macs": model["macs"],
        "data": data["data"],
        "train_n": data["splits"]["train"]["n"],
        "epochs": config["trainer"]["max_epochs"],
        "hardware": f"{facts['world_size']} x {facts['devices'][0]}",
        "commit": f"{(facts['commit'] or 'unknown')[:7]}{'+' if facts['dirty'] else ''}",
    }


def markdown(records: list[dict[str, Any]]) -> str:
    """Return the table of records, commands in the order of their first run."""
    groups: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for one in records:
        same = tuple(one[key] for key in ("command", "data", "train_n", "epochs", "parameters"))
        groups.setdefault(same, {})[one["seed"]] = one  # of two runs of a seed the later one
    heads = ["command", "tokens", "positions", "parameters", "MACs", "data", "epochs", "seeds", "test accuracy"]
    lines = [[*heads, "measured on"], ["---"] * (len(heads) + 1)]
    lines += [_line(list(group.values())) for group in groups.values()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _line(runs: list[dict[str, Any]]) -> list[str]:
    first, values = runs[0], [run["acc1"] for run in runs]
    places = sorted({f"{run['hardware']}, commit {run['commit']}" for run in runs})
    return [
        f"`{first['command']}`",
        first["tokenizer"],
        first["pos_embed"],
        f"{first['parameters'] / 1e6:.2f} M",
        f"{first['macs'] / 1e6:.1f} M",
        f"{first['data']}, {first['train_n']:,} images",
        str(first["epochs"]),
        str(len(runs)),
        f"{_accuracy(values)} of {first['n']:,}",
        "; ".join(places),
    ]


def _accuracy(values: list[float]) -> str:
    from vitlab.ablation.stats import interval

    mean = f"{100 * statistics.mean(values):.1f} %"
    if len(values) < 2:
        return mean
    low, high = interval(values)
    return f"{mean} [{100 * low:.1f}, {100 * high:.1f}]"


def _command(argv: list[str], overrides: dict[str, Any] | None) -> str:
    """Return how the run was started, without what only names it or says where its images lie."""
    configs = [value for option, value in itertools.pairwise(argv) if option in ("--config", "-c")]
    configs += [word.partition("=")[2] for word in argv if word.startswith("--config=")]
    changed = {key: value for key, value in (overrides or {}).items() if key not in _FREE}
    words = [f"--config {name}" for name in configs] + [f"--{key}={value}" for key, value in changed.items()]
    return " ".join(["vitlab fit", *words])


def _read(text: str) -> Iterator[dict[str, Any]]:
    if not text.endswith(".jsonl"):
        yield record(find_directory(text))
        return
    try:
        yield from map(json.loads, Path(text).read_text().splitlines())
    except (OSError, ValueError) as error:
        raise UsageError(f"{text} cannot be read as records: {error}") from error


def _write_into(path: Path, table: str) -> None:
    text = path.read_text() if path.is_file() else ""
    before, begin, rest = text.partition(f"{_BEGIN}\n")
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise UsageError(f"{path} needs the lines {_BEGIN} and {_END}; the table goes between them")
    write_text(path, f"{before}{begin}{table}{end}{after}")
