"""``vitlab ablate``: plan, run and report the comparison that a file describes; ``vitlab cv``: cross-validation."""

import argparse
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from vitlab.ablation.side_by_side import ablation_rows, compare_ablations, compared_rows, list_ablations
from vitlab.api import ablate
from vitlab.cli.lines import note, show, show_found, show_rows
from vitlab.config.arguments import CommandParser, KeepLines, add_formats, add_print, flags_of, positive
from vitlab.config.trust import add_trust
from vitlab.errors import UsageError, trusting, what_failed
from vitlab.tables import records

if TYPE_CHECKING:
    from vitlab.api import Lab

WORDS = {
    "plan": "resolve every arm; show cells, progress, fairness, the smallest detectable effect and the time",
    "run": "train the cells that are not done; rerun to continue",
    "status": "show the progress; only reads files",
    "report": "write tables, figures and verdicts from the cells that are done",
    "register": "freeze claims and protocol before the first cell; reports list every later change",
    "verify": "recompute every number from the stored predictions",
    "export": "write a folder from which others can verify and report",
    "list": "show the ablations in runs/ablations",
    "compare": "print arms and claims of several ablations side by side, from their reports",
}
STARTS = ("plan", "run")  # subcommands that start programs
OF_A_FILE = (*STARTS, "register")  # subcommands that refuse exported evidence
TABLES = ("plan", "status", "report", "verify", "list", "compare")  # subcommands that show a table
EPILOG = """examples:
  vitlab ablate plan experiments/position_embeddings/probe.yaml
  vitlab ablate run experiments/position_embeddings/probe.yaml --workers 2
  vitlab ablate report experiments/position_embeddings/probe.yaml -o report
"""


def main(argv: list[str]) -> int:
    """Run ``vitlab ablate`` and return its exit code."""
    options = _parser().parse_args(argv)
    if options.word == "list":
        show_rows(ablation_rows(), options.form) if options.form else show(list_ablations())
        return 0
    if options.word == "compare":
        files = options.files
        show_rows(compared_rows(files), options.form) if options.form else show(compare_ablations(files))
        return 0
    if bool(options.file) == bool(options.evidence):
        raise UsageError("`ablate report` takes a FILE, or --from DIR, a folder of `vitlab ablate export`, not both")
    lab = ablate(options.evidence or options.file, trust_command=options.trust_command)
    return DO[options.word](lab, options)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "vitlab ablate",
        usage="vitlab ablate [-h] COMMAND ...",  # Python 3.13 does not break a line between the words
        description="Compare variants over seeds, with statistics: one file, from question to verdict.",
        epilog=EPILOG,
        formatter_class=KeepLines,
    )
    parser.set_defaults(evidence=None, trust_command=False)  # for subcommands without these flags
    words = parser.add_subparsers(prog=parser.prog, dest="word", required=True, metavar="|".join(WORDS))
    for word, text in WORDS.items():
        sub = words.add_parser(word, help=text, description=text)
        if word == "compare":
            sub.add_argument(
                "files", metavar="ABLATION", nargs="+", help="a file, a name, or a folder with summary.csv"
            )
        if word in TABLES:
            add_formats(sub)
        if word in ("list", "compare"):
            continue
        text = "the YAML file of the ablation" + (
            "" if word in OF_A_FILE else ", or a folder of `vitlab ablate export`"
        )
        sub.add_argument("file", metavar="FILE", nargs="?" if word == "report" else None, help=text)
        if word in STARTS:
            sub.add_argument("--trust_command", action="store_true", help="allow the program that `run.command` names")
            sub.add_argument("--workers", type=positive, help="cells to train at a time (default: the file's)")
        if word == "plan":
            sub.add_argument("--check", action="store_true", help="build every arm; compare their initial weights")
        if word == "run":
            sub.add_argument("--only", metavar="AXIS=LEVEL", action="append", help="only the arms with this level")
            _add_switch(sub, "--fail_fast", "start no new cells after a failure")
            _add_switch(sub, "--retry_failed", "try the failed cells again")
            sub.add_argument("--tune_only", action="store_true", help="stop before the first measured seed")
            sub.add_argument("--dry_run", action="store_true", help="print the cells' commands, or the batch script")
        if word == "export":
            sub.add_argument("folder", metavar="DIR", help="a new folder")
        if word in ("verify", "export"):
            _add_switch(sub, "--allow_missing", "accept that planned cells, or predictions of candidates, are missing")
        if word == "verify":
            sub.add_argument(
                "--deep", action="store_true", help="evaluate the kept weights again, and retrain one cell"
            )
            sub.add_argument("--trust_command", action="store_true", help="allow the program that `run.command` names")
        if word == "report":
            sub.add_argument("--from", dest="evidence", metavar="DIR", help="a folder of `vitlab ablate export`")
            sub.add_argument("-o", "--output", metavar="DIR", help="copy report.md, summary.csv and the figures here")
            _add_switch(sub, "--accept_stale", "include cells of other versions of the code or of libraries")
            add_print(sub, "pdf,svg")
        add_trust(sub)
    return parser


def _add_switch(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """Add a switch; its spelling with a hyphen, that of 0.1.0, works and is hidden."""
    parser.add_argument(name, action="store_true", help=text)
    parser.add_argument(name.replace("_", "-"), dest=name.strip("-"), action="store_true", help=argparse.SUPPRESS)


def _plan(lab: "Lab", options: argparse.Namespace) -> int:
    plan = lab.plan(options.workers, options.check)
    show_found(plan, options.form)
    if plan.same_start is False:
        return 1
    return 2 if plan.is_refused else 0


def _run(lab: "Lab", options: argparse.Namespace) -> int:
    only = options.only or []
    if options.dry_run:
        if text := lab.commands(options.workers, only, show, options.fail_fast, options.tune_only):
            show(text)
        return 0
    status = lab.run(options.workers, only, options.fail_fast, options.retry_failed, show, options.tune_only)
    if not status.submitted:
        show(str(status))
        word = "report" if any(row["state"] == "done" for row in status.rows) else "status"
        command = f"vitlab ablate {'run' if options.tune_only else word} {quote(options.file)}"
        show(f"next     {trusting(command)}")
    return status.code or int(bool(status.failed))


def _status(lab: "Lab", options: argparse.Namespace) -> int:
    show_found(lab.status(), options.form)
    return 0


def _report(lab: "Lab", options: argparse.Namespace) -> int:
    from vitlab.analysis.typeset import formats_of

    report = lab.report(options.output, options.accept_stale, formats_of(options.format), options.width)
    if options.form:
        show_rows(records(report.summary), options.form)
        return 0
    for line in (*report.files, *filter(None, [report.sent])):
        show(str(line))
    return 0


def _register(lab: "Lab", options: argparse.Namespace) -> int:
    facts = lab.register()
    late = f"; {facts['cells_done']} cells were done before" if facts["cells_done"] else ""
    show(f"registered at {facts['time']}, commit {facts['commit']}, digest {facts['digest']}{late}")
    return 0


def _verify(lab: "Lab", options: argparse.Namespace) -> int:
    found = lab.verify(options.allow_missing, options.deep)
    show_found(found, options.form)
    return 0 if found.is_green else 1


def _export(lab: "Lab", options: argparse.Namespace) -> int:
    from vitlab.ablation.evidence.bundle import SUMS, seal_of
    from vitlab.ablation.evidence.chain import read_chain

    chain = read_chain(lab.ablation.directory)  # before there is a folder, which the repetition would refuse
    files = lab.export(options.folder, options.allow_missing)
    folder = quote(str(options.folder))
    show(f"{len(files)} files in {options.folder}; `vitlab ablate report --from {folder}` writes the report")
    if chain:
        show(chain.sentence())
    try:
        show(f"seal of the folder (sha256 of SHA256SUMS): {seal_of(Path(options.folder))}; keep it elsewhere")
    except OSError as error:
        show(f"no seal of the folder now: {what_failed(error)}; `sha256sum {folder}/{SUMS}` tells it")
    return 0


DO = {
    "plan": _plan,
    "run": _run,
    "status": _status,
    "report": _report,
    "register": _register,
    "verify": _verify,
    "export": _export,
}


FOLDS = """example:
  vitlab cv photos_t2t --data.root=photos --folds 5

Every other argument changes the config as in `vitlab fit`; --init_from=WEIGHTS starts every fold from these weights.
Run the command again to continue.
"""


def cv(argv: list[str]) -> int:
    """Run ``vitlab cv`` and return its exit code."""
    parser = CommandParser(
        "vitlab cv",
        usage="vitlab cv CONFIG [CONFIG ...] [options] [arguments of vitlab fit]",
        description="Split the images outside the test split into K folds. For each fold, train without it and measure "
        "on it. Report the mean with its interval. The runs form an ablation in runs/ablations/NAME.",
        epilog=FOLDS,
        formatter_class=KeepLines,
    )
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="config file or shipped name; later ones override")
    parser.add_argument(
        "--folds", type=int, metavar="K", help="folds to draw (default: those in the table's column fold, else 5)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of every fold (default: %(default)s)")
    parser.add_argument("--name", help="of the directory runs/ablations/NAME (default: cv- and the config's name)")
    text = "folds to train at a time (default: one per GPU, or half the cores)"
    parser.add_argument("--workers", type=positive, metavar="N", help=text)
    parser.add_argument("--retry_failed", action="store_true", help="try the failed folds again")
    add_formats(parser)
    options, rest = parser.parse_known_args(argv)
    from vitlab import cross_validate
    from vitlab.config.parser import settings

    if stray := next((flag for flag in flags_of(rest) if not flag.name or flag.value is None), None):
        parser.error(f"`{stray.words[0]}` is out of place: give configs first, then changes as --key=value")
    found = cross_validate(
        options.configs, settings(rest), options.folds, options.seed, options.name, options.workers,
        options.retry_failed, (lambda text: note(*text.split("\n"))) if options.form else show,
    )  # fmt: skip
    show_rows(found.rows, options.form) if options.form else show(f"{found}\n{found.file}")
    return found.status.code or int(bool(found.status.failed))
