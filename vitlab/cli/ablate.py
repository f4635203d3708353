"""``vitlab ablate``: plan, run and report a comparison that one file describes."""

import argparse
import os
import shlex
import sys

from vitlab.ablation.file import spec
from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.work.cells import Cell, cells_of
from vitlab.ablation.work.process import worker_count
from vitlab.ablation.work.resolve import known, resolve
from vitlab.ablation.work.status import status_lines
from vitlab.analysis import ANALYSES
from vitlab.config.arguments import CommandParser
from vitlab.errors import UsageError, did_you_mean
from vitlab.shipped import find_file

WORDS = {
    "plan": "resolve every arm; show the grid, what is done, fairness, the smallest effect it can show, the time",
    "run": "work off the cells that are not done; again continues",
    "status": "show how far it is; reads files alone",
    "report": "write tables, figures and verdicts from what is done",
}
EPILOG = """examples:
  vitlab ablate plan experiments/position_embeddings/probe.yaml
  vitlab ablate run experiments/position_embeddings/probe.yaml --workers 2
  vitlab ablate report experiments/position_embeddings/probe.yaml -o experiments/position_embeddings
"""


def main(argv: list[str]) -> int:
    """Run ``vitlab ablate`` and return its exit code."""
    options = _parser().parse_args(argv)
    ablation = spec.read(find_file(options.file, f"ablate {options.word}", "experiments"))
    for i, name in enumerate(ablation.analyses):
        if name not in ANALYSES:
            hint = did_you_mean(name, ANALYSES) or f"; there are {', '.join(ANALYSES)}"
            raise ablation.file.mistake(f"analyses/{i}", f'no analysis called "{name}"{hint}')
    return {"plan": _plan, "run": _run, "status": _status, "report": _report}[options.word](ablation, options)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "vitlab ablate",
        description="Compare variants with seeds and statistics: one file, from question to verdict.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    words = parser.add_subparsers(dest="word", required=True, metavar="|".join(WORDS))
    for word, text in WORDS.items():
        sub = words.add_parser(word, help=text, description=text, allow_abbrev=False)
        sub.add_argument("file", metavar="FILE", help="the YAML file of the ablation")
        if word in ("plan", "run"):
            sub.add_argument("--workers", type=_positive, help="cells at a time (default: as the file says)")
        if word == "plan":
            sub.add_argument("--check", action="store_true", help="build every arm: do arms of one seed start alike?")
        if word == "run":
            sub.add_argument("--only", metavar="AXIS=LEVEL", action="append", help="only the arms with this level")
            sub.add_argument("--fail-fast", action="store_true", help="start no new cells after a failure")
            sub.add_argument("--retry-failed", action="store_true", help="try the failed cells again")
            sub.add_argument("--dry_run", action="store_true", help="print each cell's commands or the batch script")
        if word == "report":
            sub.add_argument("-o", "--output", metavar="DIR", help="copy report.md, summary.csv and the figures here")
            sub.add_argument("--accept-stale", action="store_true", help="take cells that other code has trained")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return number


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _workers(ablation: Ablation, options: argparse.Namespace) -> int:
    return worker_count(options.workers or ablation.run["workers"], ablation.run["per_gpu"])


def _plan(ablation: Ablation, options: argparse.Namespace) -> int:
    from vitlab.ablation.verdict.plan import plan_lines

    workers = _workers(ablation, options)
    lines, violated = plan_lines(ablation, resolve(ablation, workers), workers)
    _say("\n".join(lines))
    if options.check:
        from vitlab.ablation.work.check import check_lines

        lines, is_alike = check_lines(ablation)
        _say("\n".join(lines))
        if not is_alike:
            return 1
    return 2 if violated else 0


def _run(ablation: Ablation, options: argparse.Namespace) -> int:
    from vitlab.ablation.verdict.audit import flags
    from vitlab.ablation.work.run import Run

    workers = _workers(ablation, options)
    _say(f"{ablation.name}: {len(ablation.arms)} arms x {len(ablation.seeds)} seeds, {workers} at a time; resolving")
    resolved = resolve(ablation, workers)
    unfair = flags(ablation, resolved)
    for name, words in unfair.items():
        _say(f"note     {name}: {'; '.join(words)}")
    if unfair and ablation.match["on_violation"] == "fail":
        raise UsageError(f"{ablation.file.path}: arms that do not match, and `match.on_violation` is fail")
    cells = _selected(ablation, cells_of(ablation, resolved), options.only or [])
    if options.dry_run:
        if ablation.run["executor"] == "slurm":
            from vitlab.ablation.work.slurm import script

            _say(script(ablation, str(ablation.file.path), workers))
            return 0
        return _show_commands(cells)
    if options.retry_failed:
        for cell in cells:
            cell.beside(".failed.json").unlink(missing_ok=True)
    if ablation.run["executor"] == "slurm" and "SLURM_ARRAY_JOB_ID" not in os.environ:
        from vitlab.ablation.work.slurm import submit

        return submit(ablation, str(ablation.file.path), workers, _say)
    code = Run(cells, workers, _say, options.fail_fast).work_off()
    _say("\n".join(status_lines(ablation, list(resolved))))
    _say(f"next     vitlab ablate report {options.file}")
    return code or int(any(cell.failure() for cell in cells))


def _selected(ablation: Ablation, cells: list[Cell], only: list[str]) -> list[Cell]:
    for text in only:
        axis, _, level = text.partition("=")
        if level not in ablation.axes.get(axis, {}):
            raise UsageError(f"`--only` takes AXIS=LEVEL, got {text}; the axes are {', '.join(ablation.axes)}")
        cells = [cell for cell in cells if cell.arm.levels[axis] == level]
    return cells


def _show_commands(cells: list[Cell]) -> int:
    from vitlab.ablation.work.worker import analyze_words, evaluate_words, fit_words, write_overrides

    for cell in cells:
        commands = [analyze_words(cell)] if cell.missing_analyses() else []
        if not cell.is_done():
            write_overrides(cell)
            commands = [fit_words(cell), evaluate_words(cell), *commands]
        if commands:
            _say("\n".join([f"# {cell.name}", *map(shlex.join, commands)]))
    return 0


def _status(ablation: Ablation, options: argparse.Namespace) -> int:
    _say("\n".join(status_lines(ablation, known(ablation))))
    return 0


def _report(ablation: Ablation, options: argparse.Namespace) -> int:
    from vitlab.ablation.report.report import write_report

    resolved = [arm for arm in known(ablation) if arm]
    if not any(cell.is_done() or cell.stale() for cell in cells_of(ablation, resolved)):
        raise UsageError(f"no cell of {ablation.name} is done; start with `vitlab ablate run {options.file}`")
    paths = write_report(ablation, resolved, options.output, options.accept_stale)
    for path in paths:
        _say(str(path))
    if ablation.wandb and ablation.wandb.get("mode") != "disabled":
        from vitlab.ablation.report.wandb import send_report

        project, mode = ablation.wandb.get("project", "vitlab"), ablation.wandb.get("mode")
        _say(send_report(ablation.name, project, mode, ablation.directory, paths[0], paths[2]))
    return 0
