"""``vitlab validate`` and ``test`` measure a run, ``verify`` checks its files; all they need is its directory."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from vitlab.cli.lines import note, show, show_rows
from vitlab.config.arguments import CommandParser, add_formats, parse_around_keys
from vitlab.config.options import POLICIES
from vitlab.config.trust import add_trust
from vitlab.errors import UsageError, printable
from vitlab.lazy import quick_imports
from vitlab.objects import as_yaml
from vitlab.runs.directory import RunDir
from vitlab.runs.find import find_directory, find_run
from vitlab.runs.matching import is_there, matching
from vitlab.runs.records import SPLIT_OF, EvaluationCommand
from vitlab.tables import metrics_text

_SHOWN = 10  # classes
_VERIFY = "Read checkpoints, weights, records and predictions of a run, and compare them with their checksums, if any."


def validate(argv: list[str]) -> int:
    """Run ``vitlab validate RUN``."""
    return _main("validate", argv)


def test(argv: list[str]) -> int:
    """Run ``vitlab test RUN``."""
    return _main("test", argv)


def verify(argv: list[str]) -> int:
    """Run ``vitlab verify RUN``; the exit code is 1 if a file is damaged."""
    parser = run_parser("verify", _VERIFY)
    add_formats(parser)
    options = parser.parse_args(argv)
    run = find_directory(options.run)
    found = _check_files(run)
    damaged = sum(reason is not None for reason in found.values())
    if options.form:
        rows = [{"file": name, "whole": reason is None, "reason": reason} for name, reason in found.items()]
        show_rows(rows, options.form)
        return int(damaged > 0)
    lines = [f"whole    {name}" if reason is None else f"DAMAGED  {name}: {reason}" for name, reason in found.items()]
    lines.append(f"{run.path}: {len(found)} files, {damaged or 'none'} damaged")
    show(*map(printable, lines))  # a file with a line break in its name is one line
    return int(damaged > 0)


def _check_files(run: RunDir) -> dict[str, str | None]:
    """Return what is wrong with each file that later commands read, None for an intact one."""
    import pandas as pd

    from vitlab.config.yaml_files import read_yaml
    from vitlab.data.record import TRAINED_ON, read_numbers
    from vitlab.models.weights_file import read_weights
    from vitlab.runs.manifest import damage
    from vitlab.runs.records import RECORDS, read_record

    found = {f"checkpoints/{path.name}": damage(path) for path in matching(run.checkpoints, "*.ckpt")}
    reads: dict[str, Callable[[], Any]] = {
        f"weights/{path.name}": partial(read_weights, path) for path in matching(run.weights, "*.safetensors")
    }
    reads |= {name: partial(read_record, run.path / name) for name in RECORDS}
    reads |= {"config.yaml": partial(read_yaml, run.config), "metrics.jsonl": run.rows}
    reads |= {TRAINED_ON: partial(read_numbers, run.path / TRAINED_ON)}
    tables = matching(run.path / "predictions", "*.parquet")
    reads |= {f"predictions/{path.name}": partial(pd.read_parquet, path) for path in tables}
    for name, read in reads.items():
        if is_there(run.path / name):
            try:
                read()
                found[name] = None
            except (ValueError, OSError) as error:
                found[name] = str(error)
    return found


def run_parser(command: str, description: str, or_checkpoint: bool = False) -> argparse.ArgumentParser:
    """Return a parser whose first argument is a run; ``or_checkpoint`` also allows a checkpoint with its config."""
    parser = CommandParser(f"vitlab {command}", description=description)
    text = "run directory, run name, checkpoint in a run, or last"
    parser.add_argument("run", metavar="RUN", help=text, nargs="?" if or_checkpoint else None)
    if or_checkpoint:
        add = parser.add_argument
        add("--ckpt_path", metavar="FILE", help="checkpoint to use instead of RUN; or best or last, of RUN")
        add("-c", "--config", metavar="FILE", help="with --ckpt_path: config of the checkpoint", action="append")
    add_trust(parser)
    return parser


@contextmanager
def chosen_checkpoint(options: argparse.Namespace) -> Iterator[tuple[RunDir, Path, str]]:
    """Yield the run and the checkpoint that the arguments name, and a line that says which they are."""
    run, file, config = options.run, options.ckpt_path, options.config
    if run is None and file is None:
        raise UsageError("give a RUN, or --config FILE with --ckpt_path FILE")
    if config is None:
        way_out = "give its configuration too: --config FILE --ckpt_path FILE"
        directory, checkpoint = find_run(run or file, way_out)
        if run and file:
            checkpoint = _checkpoint_of(directory, file)
        yield directory, checkpoint, f"run   {directory.path} ({checkpoint.name})"
        return
    if run or not file or len(config) > 1:
        raise UsageError("`--config` goes with a checkpoint: give one --config FILE with --ckpt_path FILE, and no RUN")
    if not Path(file).is_file():
        raise UsageError(f"`--ckpt_path`: there is no file {file}")
    from vitlab.jobs.restore import run_of_checkpoint

    with run_of_checkpoint(config[0], Path(file)) as directory:
        is_saved = directory.path == RunDir.around(Path(file)).path
        line = f"run   {directory.path} ({Path(file).name})"
        yield directory, Path(file), line if is_saved else f"from  {config[0]} and {file}; not saved in a run"


def _checkpoint_of(run: RunDir, text: str) -> Path:
    """Return the checkpoint of a run that ``--ckpt_path`` names: by its name, or as a file."""
    path = Path(f"{run.checkpoints / text.removesuffix('.ckpt')}.ckpt")
    owner, checkpoint = find_run(text if Path(text).is_file() and not path.is_file() else str(path))
    if not owner.path.samefile(run.path):
        raise UsageError(
            f"`--ckpt_path {text}` is a checkpoint of {owner.path}, not of {run.path}: leave out {run.path}"
        )
    return checkpoint


def _main(command: EvaluationCommand, argv: list[str]) -> int:
    options, rest = parse_around_keys(_parser(command), argv)
    with chosen_checkpoint(options) as (run, checkpoint, line):
        with quick_imports():
            from vitlab.jobs.evaluate import Conditions, evaluate
            from vitlab.jobs.terminal import open_terminal, say

        open_terminal(options.quiet)
        conditions = Conditions(rest, options.resize, not options.no_antialias, options.with_training_images)
        found = evaluate(command, run, checkpoint, conditions, options.quiet)
    if not found:  # not rank 0
        return 0
    for sentence in found.sentences:
        note(sentence) if options.form else say(sentence)
    if options.form:
        row = {"run": str(run.path), "checkpoint": checkpoint.name, "split": found.split, **found.values}
        show_rows([row | {"recall": found.recall, "changes": found.changes}], options.form)
    else:
        text = metrics_text(found.values, split=found.split) or f"{run.path} logs no metrics on this split"
        changed = " ".join(f"{key}={as_yaml(value)}" for key, value in found.changes.items())
        say(f"variation with {changed}: {text}" if changed else text)
        if found.recall:
            say(_recall(found.recall))
        if found.predictions.empty:
            say("no predictions/*.parquet: the task returns no predictions for single images")
        say(line)
    if found.unsaved:
        note(f"vitlab: {found.unsaved}")
    return 1 if found.unsaved else 0


def _recall(classes: dict[str, float]) -> str:
    """Return the recall of each class, or of the worst ones, as text."""
    shown = sorted(classes.items(), key=lambda item: item[1])[:_SHOWN]
    which = f", lowest {_SHOWN} of {len(classes):,} classes:" if len(classes) > _SHOWN else ":"
    return f"recall{which} " + ", ".join(f"{printable(name)} {value:.4f}" for name, value in shown)


def _parser(command: EvaluationCommand) -> argparse.ArgumentParser:
    split = SPLIT_OF[command]
    text = f"Measure a run on its {split} split: results.json, predictions/{split}.parquet."
    parser = run_parser(command, text, or_checkpoint=True)
    parser.add_argument(
        "--resize",
        choices=POLICIES,
        help="how to resample positions for another image size (default: the method's own)",
    )
    parser.add_argument("--no_antialias", action="store_true", help="interpolate positions without antialiasing")
    parser.add_argument(
        "--with_training_images", action="store_true",
        help="measure a split that changed after training even if it now holds training images",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    add_formats(parser)
    parser.epilog = "Any --trainer.*, --model.* or --data.* argument changes a value of the run's configuration."
    return parser
