"""``vitlab bench``: speed, memory and numerics, measured side by side so that a busy machine affects all alike."""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vitlab.config.arguments import CommandParser, KeepLines, add_formats
from vitlab.errors import UsageError, did_you_mean
from vitlab.tables import formatted

_TEXT = {
    "model": "img/s and memory of networks, ours against peers",
    "attention": "the two attention kernels, and where the rule that picks one is wrong",
    "linear": "two libraries of linear layers, and where the rule is wrong",
    "limit": "upper bounds: matrix products and memory copies",
    "numerics": "fast paths against a float64 reference; exit code 1 if they differ",
    "overhead": "time that the Trainer and a task add to a step",
    "loader": "img/s from memory and from packed files, against loaders with workers",
    "ddp": "img/s of two processes that average gradients, against one",
    "table": "no measurement: make the speed table of benchmarks/README.md from saved runs",
}


def main(argv: list[str]) -> int:
    """Run ``vitlab bench`` and return its exit code: 1 if numerics differ or a ratio is far below its goal."""
    options = _parse(argv)
    if options.what == "table":
        return _saved_table(options)
    import torch

    from bench.report import machine_line, tables
    from vitlab.runs.machine import facts

    if options.threads:
        torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"bench": options.what, "machine": facts(options.device)}
    rows, failures, notes = _RUN[options.what](options)
    result |= {"rows": rows, "failures": failures, "notes": notes}
    noise = [row["noisy"] for row in rows if "noisy" in row]
    if any(noise):
        notes.append(
            "the machine was busy with other work (the canary's time spread by more than 15 %): "
            "trust the ratios, not the images per second"
        )
    head = [f"`vitlab bench {' '.join(argv)}`", machine_line(result["machine"])]
    lines = [*(f"- {note}" for note in notes), *(f"- FAILS: {failure}" for failure in failures)]
    text = "\n\n".join([*head, *tables(options.what, rows), "\n".join(lines)])
    if options.form:
        sys.stderr.write("".join(f"{line}\n" for line in (head[1], *lines)))
        sys.stdout.write(formatted(rows, options.form))
    else:
        sys.stdout.write(text.rstrip() + "\n")
    if options.json_file:
        path = Path(options.json_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        path.with_suffix(".md").write_text(text.rstrip() + "\n")
    return 1 if failures else 0


Measured = tuple[list[dict[str, Any]], list[str], list[str]]  # rows, failures, notes


def _model(options: argparse.Namespace) -> Measured:
    from bench import model, overhead, report

    cases = [case for case in model.SUITES[options.suite] if case.dtype in (options.dtype or case.dtype)]
    if options.models:
        grid = itertools.product(options.models, options.dtype or ["fp32"], options.mode)
        cases = [model.Case(m, mode, dtype, options.batch or 8) for m, dtype, mode in grid]
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for case in cases:
        case = case._replace(batch=options.batch or case.batch)
        try:
            found = model.measure(
                case,
                options.peers,
                options.rounds,
                options.budget / len(cases),
                options.device,
                options.compile,
                options.t2t_repo,
            )
        except model.Unequal as error:
            failures.append(f"{case.model} {case.mode} is not timed: {error}")
            continue
        if options.memory and options.device == "cpu":
            model.add_memory(found, case, options.t2t_repo)
        rows += found
        failures += model.too_slow(found)
    missing = sorted({peer for row in rows for peer in row["missing"]})
    notes = [f"not installed, not measured: {', '.join(missing)}"] if missing else []
    if options.suite == "cpu-quick" and not options.models:
        added = overhead.measure(5, 15)
        failures += overhead.too_much(added)
        rows += [{**row, "table": "overhead"} for row in added]
    if options.baseline:
        before = json.loads(Path(options.baseline).read_text())["rows"]
        notes += [f"changed: {text}" for text in report.changes([row for row in rows if "model" in row], before)]
    return rows, failures, notes


def _attention(options: argparse.Namespace) -> Measured:
    from bench import attention

    return attention.measure(options.rounds, options.budget, options.device), [], []


def _linear(options: argparse.Namespace) -> Measured:
    from bench import linear

    return linear.measure(options.rounds, options.budget), [], []


def _limit(options: argparse.Namespace) -> Measured:
    from bench import limit

    rates, rows = limit.measure(options.rounds, options.device)
    return rows, [], [f"{row['what']}: {row['rate']:.1f} {row['unit']}" for row in rates]


def _numerics(options: argparse.Namespace) -> Measured:
    from bench import numerics

    rows = numerics.measure()
    text = "{model} on {images}: logits off by {logits:.1e}, gradients by {gradients:.1e}, the limit is {limit:.0e}"
    note = "relative to a plain float64 implementation: largest difference by largest logit, and norms of all gradients"
    return rows, [text.format(**row) for row in rows if not row["passes"]], [note]


def _overhead(options: argparse.Namespace) -> Measured:
    from bench import overhead

    rows = overhead.measure(options.rounds, options.budget)
    return rows, list(overhead.too_much(rows)), []


def _loader(options: argparse.Namespace) -> Measured:
    from bench import loader

    return loader.measure(options.rounds, options.budget), [], []


def _ddp(options: argparse.Namespace) -> Measured:
    from bench import ddp

    note = "each of the two processes does the work of the one: 1 is ideal; sharing the memory costs the second row"
    return ddp.measure(options.rounds, options.budget), [], [note]


_RUN: dict[str, Callable[[argparse.Namespace], Measured]] = {
    "model": _model,
    "attention": _attention,
    "linear": _linear,
    "limit": _limit,
    "numerics": _numerics,
    "overhead": _overhead,
    "loader": _loader,
    "ddp": _ddp,
}


def _saved_table(options: argparse.Namespace) -> int:
    from bench.saved import speed_rows, speed_table
    from vitlab.tables import replace_section

    if options.form:
        sys.stdout.write(formatted(speed_rows(Path(options.saved)), options.form))
        return 0
    text = speed_table(Path(options.saved))
    if options.readme:
        replace_section(text, Path(options.readme), "speed")
    else:
        sys.stdout.write(text + "\n")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        "vitlab bench",
        description="Measure speed, memory and numerics. Contenders take turns, so ratios hold on a busy machine.\n\n"
        + "\n".join(f"  {name:<10} {text}" for name, text in _TEXT.items()),
        epilog="example: vitlab bench model --suite cpu-quick --json benchmarks/quick.json",
        formatter_class=KeepLines,
    )
    parser.add_argument("what", metavar="WHAT", choices=list(_TEXT), help="what to measure: a word of the list above")
    parser.add_argument("--suite", default="cpu-quick", choices=["cpu-quick", "cpu-full", "gpu"], help="which cases")
    parser.add_argument("--models", type=_words, help="instead of a suite: names of `vitlab models`, or cifar_vit")
    parser.add_argument("--mode", type=_words, default=["fwd", "train"], help="with --models (default: fwd,train)")
    parser.add_argument("--dtype", type=_words, help="fp32,bf16 or one (default: the suite's, or fp32)")
    parser.add_argument("--batch", type=int, help="images per step (default: the suite's, or 8)")
    parser.add_argument(
        "--peers",
        type=_words,
        default=["timm", "torchvision", "vit_pytorch", "transformers"],
        help="libraries to compare a usual ViT with, where installed (default: all of them)",
    )
    parser.add_argument("--t2t-repo", metavar="DIR", help="clone of the official T2T-ViT, to measure it too")
    parser.add_argument("--compile", action="store_true", help="also measure compiled networks")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure memory too")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads of torch (default: torch's own choice)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each case (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=60, help="seconds for all cases (default: %(default)s)")
    add_formats(parser, "write the result to FILE, and as Markdown beside it")
    parser.add_argument("--baseline", metavar="FILE", help="an earlier --json: list ratios outside its intervals")
    parser.add_argument(
        "--saved", metavar="DIR", default="benchmarks", help="table: where saved runs are (%(default)s)"
    )
    parser.add_argument("--readme", metavar="FILE", help="table: write it between the <!-- speed --> marks of FILE")
    options = parser.parse_args(argv)
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    from vitlab.models.sizes import SIZES

    choices = {"models": [*SIZES, "cifar_vit"], "mode": ["fwd", "train"], "dtype": ["fp32", "bf16"]}
    choices["peers"] = ["timm", "torchvision", "vit_pytorch", "transformers"]
    for name, known in choices.items():
        for word in getattr(options, name) or []:
            if word not in known:
                raise UsageError(f"`--{name}` takes {', '.join(known)}, got {word}{did_you_mean(word, known)}")
    if options.t2t_repo:
        from bench.official import check_repo

        check_repo(options.t2t_repo)
    for name, least in (("rounds", 3), ("batch", 1), ("threads", 1)):
        if (value := getattr(options, name)) is not None and value < least:
            raise UsageError(f"`--{name}` must be at least {least}, got {value}")
    if options.baseline and not Path(options.baseline).is_file():
        raise UsageError(f"`--baseline`: there is no file {options.baseline}")


def _words(text: str) -> list[str]:
    return [word.strip().replace("-", "_") for word in text.split(",")]
