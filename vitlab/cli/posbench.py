"""``vitlab posbench``: measure a position embedding on seven tasks against published methods."""

import argparse
from pathlib import Path
from typing import Any

from vitlab.cli.lines import note, show, show_rows
from vitlab.config.arguments import CommandParser, add_formats
from vitlab.config.trust import add_trust
from vitlab.config.yaml_files import parse_yaml
from vitlab.errors import UsageError, preview
from vitlab.lazy import quick_imports

EPILOG = """METHOD is a name such as rope2d, or the class path of a PosEmbed of yours, with --trust_imports; with
arguments, it is '{class_path: mine.Rotation, init_args: {base: 50}}'. Cells that are complete in the folder are not
trained again: the same command continues. `vitlab posbench METHOD verify` checks the cells, and `vitlab posbench METHOD
submit` writes the folder that a pull request adds."""


def main(argv: list[str]) -> int:
    """Run ``vitlab posbench`` and return its exit code."""
    parser = CommandParser(
        "vitlab posbench",
        description="Train a position embedding on the terms of the published ones, and give a verdict for each task.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("methods", nargs="*", metavar="METHOD", help="position embeddings; then verify or submit, if wanted")
    add("--list", action="store_true", help="show where the published methods stand, and train nothing")
    add("--data", type=Path, metavar="DIR", help="folder that holds CIFAR-10, as torchvision leaves it")
    add("--folder", type=Path, default=Path("posbench"), metavar="DIR", help="where cells are kept (default: posbench)")
    add("--anchors", action="store_true", help="train none and learned here too, and compare with these")
    add("--protocol", metavar="FILE", help="another protocol, such as t2t or imagenet100, or a file of yours")
    add("--price", action="store_true", help="measure a few steps, say how long all cells would take, train nothing")
    add("--cells", action="store_true", help="train the cells, and compare nothing")
    add("--retrain", action="store_true", help="with verify: train a cell again and compare its predictions")
    add("--evidence", type=Path, metavar="DIR", help="write page, figure and evidence of the complete methods here")
    add("-o", "--output", type=Path, metavar="DIR", help="of submit: the folder to write (default: submission/METHOD)")
    add_formats(parser)
    add_trust(parser)
    options = parser.parse_args(argv)
    action = options.methods.pop() if options.methods[-1:] in (["verify"], ["submit"]) else "run"
    if not options.list and not options.evidence and not options.methods:
        raise UsageError("`vitlab posbench` needs a METHOD, such as rope2d or mymodule.MyEmbed, or --list")
    options.methods = [parse_yaml(word, "METHOD") if word.startswith("{") else word for word in options.methods]
    _refuse_format(options, action)
    with quick_imports():
        from vitlab.position_bench import bench
        from vitlab.position_bench.cells import Bench, published
        from vitlab.position_bench.methods import method_of
        from vitlab.position_bench.protocol import read_protocol
    if options.list:
        kept = published(options.protocol)
        show_rows(bench.list_rows(kept), options.form) if options.form else show(*bench.list_lines(kept))
        return 0
    own = Bench(options.folder, options.data, read_protocol(options.protocol), note if options.form else show)
    if options.price:
        from vitlab.position_bench.costs import price_lines

        for method in options.methods:
            show(*price_lines(method_of(method), own.protocol))
        return 0
    if options.evidence:
        from vitlab.position_bench.page import write_bench_page

        show(*map(str, write_bench_page(own, options.evidence)))
        return 0
    if action == "run" and not options.cells:
        return _judge(own, options)
    return max(_one(method, action, own, options) for method in options.methods)


def _refuse_format(options: argparse.Namespace, action: str) -> None:
    """Refuse ``--json`` and ``--csv`` where no table is printed."""
    flags = [f"--{name}" for name in ("price", "evidence", "cells") if getattr(options, name)]
    others = [*flags, *([action] if action != "run" else [])]
    if options.form and others and not options.list:
        raise UsageError(f"`--{options.form}` prints verdicts or --list as a table: leave it out with {others[0]}")


def _judge(own: Any, options: argparse.Namespace) -> int:
    """Print the verdicts on all methods, each when it is known, or one table for programs."""
    from vitlab.position_bench import bench

    rows: list[dict[str, Any]] = []
    is_lost = False
    for method in options.methods:
        judged = bench.posbench(
            method,
            data=options.data,
            folder=options.folder,
            anchors=options.anchors,
            protocol=options.protocol,
            say=own.say,
        )
        is_lost |= bool(judged.lost)
        if options.form:
            rows += bench.judged_rows(judged)
        else:
            show(*bench.judged_lines(judged))
    if options.form:
        show_rows(rows, options.form)
    return int(is_lost)


def _one(method: Any, action: str, own: Any, options: argparse.Namespace) -> int:
    from vitlab.position_bench import submission
    from vitlab.position_bench.methods import label_of, method_of
    from vitlab.position_bench.running import CellRunner

    if action == "run":
        return int(bool(CellRunner(own, method_of(method)).run()))
    label = label_of(method)
    if not (own.folder / label).is_dir():
        alike = sorted(path.name for path in own.folder.glob(f"{label}*") if path.is_dir())
        way_on = f"name one of {preview(alike, 8)}" if alike else f"train it first, without {action}"
        raise UsageError(f"{own.folder / label} does not exist: {way_on}")
    answers = submission.answers_kept(options.protocol)
    if action == "submit":
        target = options.output or Path("submission") / label
        show(*map(str, submission.write_submission(own, label, target, answers)))
        return 0
    problems = submission.problems_of(own, label, answers)
    if options.retrain and not problems:
        problems = submission.retrain(own, label, own.method_kept(label))
    for line in problems:
        note(f"vitlab: {line}")
    show(f"{label}: refused" if problems else f"{label}: all cells are there, and their predictions give their scores")
    return 1 if problems else 0
