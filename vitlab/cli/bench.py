"""``vitlab bench``: speed, memory and numerics, measured so that a busy machine does not decide."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vitlab.cli.arguments import CommandParser
from vitlab.errors import UsageError, did_you_mean

_SPEED = "{ratio:.2f} [{min:.2f}, {max:.2f}]"
_COLUMNS = {
    "model": {
        "model": "{model}",
        "mode": "{mode}",
        "dtype": "{dtype}",
        "batch": "{batch}",
        "who": "{contender}",
        "speed [min, max]": _SPEED,
        "95 %": "{interval[0]:.2f} to {interval[1]:.2f}",
        "relative to": "{base}",
        "img/s (best)": "{images_per_second:.1f} ({best_images_per_second:.1f})",
        "share of canary": "{share_of_canary:.0%}",
        "memory MiB": "{memory:.0f}",
        "logits differ": "{logit_difference:.0e}",
        "rounds": "{rounds}",
    },
    "attention": {
        "B, A, L": "{B}, {A}, {L}",
        "dtype": "{dtype}",
        "mode": "{mode}",
        "speed of sdpa to products": _SPEED,
        "rule": "{rule}",
        "rule loses > 10 %": "{loses}",
    },
    "limit": {
        "model": "{model}",
        "GFLOP an image": "{gflop:.2f}",
        "fp32 fwd / train img/s": "{fp32_fwd:.1f} / {fp32_train:.1f}",
        "bf16 fwd / train img/s": "{bf16_fwd:.1f} / {bf16_train:.1f}",
    },
    "numerics": {
        "model": "{model}",
        "images": "{images}",
        "logits off by": "{logits:.1e}",
        "plain way": "{plain_logits:.1e}",
        "gradients off by": "{gradients:.1e}",
        "plain way's": "{plain_gradients:.1e}",
        "passes": "{passes}",
    },
    "overhead": {
        "loop": "{loop}",
        "ms a step": "{step_ms:.3f}",
        "added ms": "{added_ms:.3f} [{least_ms:.3f}, {most_ms:.3f}]",
    },
    "loader": {"loader": "{loader}", "img/s": "{images_per_second:.0f}", "speed": _SPEED},
}
_TEXT = {
    "model": "img/s of networks against each other, with memory",
    "attention": "the two kernels of attention, and where the rule that chooses is wrong",
    "limit": "what products and copies allow",
    "numerics": "short ways against float64; exit code 1 if they differ",
    "overhead": "what the Trainer and a task add to a step",
    "loader": "img/s of loaders for small images",
}


def main(argv: list[str]) -> int:
    """Run ``vitlab bench`` and return its exit code: 1 if numerics differ or a ratio is far below its goal."""
    options = _parse(argv)
    import torch

    from vitlab.bench.machine import facts
    from vitlab.bench.report import machine_line

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
    text = "\n\n".join([*head, *_tables(options.what, rows), "\n".join(lines)])
    sys.stdout.write(text.rstrip() + "\n")
    if options.json:
        path = Path(options.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        path.with_suffix(".md").write_text(text.rstrip() + "\n")
    return 1 if failures else 0


def _tables(what: str, rows: list[dict[str, Any]]) -> list[str]:
    from vitlab.bench.report import table

    kinds = {row.get("table", what): None for row in rows}
    return [table([row for row in rows if row.get("table", what) == kind], _COLUMNS[kind]) for kind in kinds]


Found = tuple[list[dict[str, Any]], list[str], list[str]]  # rows, failures, notes


def _model(options: argparse.Namespace) -> Found:
    from vitlab.bench import model, overhead, report

    cases = model.SUITES[options.suite]
    if options.models:
        batch = options.batch or 8
        cases = [model.Case(m, mode, d, batch) for m in options.models for d in options.dtype for mode in options.mode]
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for case in cases:
        case = case._replace(batch=options.batch or case.batch)
        try:
            found = model.measure(
                case, options.peers, options.rounds, options.budget / len(cases), options.device, options.compile
            )
        except model.Unequal as error:
            failures.append(f"{case.model} {case.mode} is not timed: {error}")
            continue
        for row in found:
            if options.memory and options.device == "cpu" and "compiled" not in row["contender"]:
                row["memory"] = model.memory(case, row["contender"])
        rows += found
        failures += model.too_slow(found)
    missing = sorted({peer for row in rows for peer in row["missing"]})
    notes = [f"not installed, not measured: {', '.join(missing)}"] if missing else []
    if options.suite == "cpu-quick" and not options.models:
        rows += [{**row, "table": "overhead"} for row in overhead.measure(3, 10)]
    if options.baseline:
        before = json.loads(Path(options.baseline).read_text())["rows"]
        notes += [f"changed: {text}" for text in report.changes([row for row in rows if "model" in row], before)]
    return rows, failures, notes


def _attention(options: argparse.Namespace) -> Found:
    from vitlab.bench import attention

    return attention.measure(options.rounds, options.budget, options.device), [], []


def _limit(options: argparse.Namespace) -> Found:
    from vitlab.bench import limit

    rates, rows = limit.measure(options.rounds, options.device)
    return rows, [], [f"{row['what']}: {row['rate']:.1f} {row['unit']}" for row in rates]


def _numerics(options: argparse.Namespace) -> Found:
    from vitlab.bench import numerics

    rows = numerics.measure()
    text = "{model} on {images}: logits off by {logits:.1e}, gradients by {gradients:.1e}, the limit is {limit:.0e}"
    note = "relative to float64 the plain way: largest difference by largest logit, and norms of all gradients"
    return rows, [text.format(**row) for row in rows if not row["passes"]], [note]


def _overhead(options: argparse.Namespace) -> Found:
    from vitlab.bench import overhead

    return overhead.measure(options.rounds, options.budget), [], []


def _loader(options: argparse.Namespace) -> Found:
    from vitlab.bench import loader

    return loader.measure(options.rounds, options.budget), [], []


_RUN: dict[str, Callable[[argparse.Namespace], Found]] = {
    "model": _model,
    "attention": _attention,
    "limit": _limit,
    "numerics": _numerics,
    "overhead": _overhead,
    "loader": _loader,
}


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        "vitlab bench",
        description="Measure. Contenders take turns, so ratios hold on a busy machine too.\n\n"
        + "\n".join(f"  {name:<10} {text}" for name, text in _TEXT.items()),
        epilog="example: vitlab bench model --suite cpu-quick --json benchmarks/quick.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=list(_TEXT), help="what to measure")
    parser.add_argument("--suite", default="cpu-quick", choices=["cpu-quick", "cpu-full", "gpu"], help="which cases")
    parser.add_argument("--models", type=_words, help="instead of a suite: names of `vitlab models`, or cifar_vit")
    parser.add_argument("--mode", type=_words, default=["fwd", "train"], help="with --models (default: fwd,train)")
    parser.add_argument("--dtype", type=_words, default=["fp32"], help="with --models (default: fp32; or fp32,bf16)")
    parser.add_argument("--batch", type=int, help="images a step (default: the suite's, or 8)")
    parser.add_argument(
        "--peers",
        type=_words,
        default=["timm", "torchvision", "vit_pytorch", "transformers"],
        help="libraries to compare with, where installed (default: all of them)",
    )
    parser.add_argument("--compile", action="store_true", help="let compiled networks take part too")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure memory too")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads of torch (default: torch's own choice)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each case (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=60, help="seconds for all cases (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the result there, and as Markdown beside it")
    parser.add_argument("--baseline", metavar="FILE", help="an earlier --json: list ratios outside its intervals")
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
    if options.rounds < 3:
        raise UsageError(f"`--rounds` must be at least 3, got {options.rounds}")
    if options.baseline and not Path(options.baseline).is_file():
        raise UsageError(f"there is no file {options.baseline}")


def _words(text: str) -> list[str]:
    return [word.strip().replace("-", "_") for word in text.split(",")]
