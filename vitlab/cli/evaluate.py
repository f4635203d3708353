"""``vitlab validate``, ``test`` and ``verify``: measure a run, or its files; everything comes from its directory."""

import argparse
import sys
from typing import TYPE_CHECKING

from vitlab.config.arguments import CommandParser
from vitlab.config.options import POLICIES
from vitlab.config.trust import add_trust
from vitlab.errors import printable
from vitlab.runs.directory import find_directory, find_run

if TYPE_CHECKING:
    from vitlab.jobs.evaluate import Command


def validate(argv: list[str]) -> int:
    """Run ``vitlab validate RUN``."""
    return _main("validate", argv)


def test(argv: list[str]) -> int:
    """Run ``vitlab test RUN``."""
    return _main("test", argv)


def verify(argv: list[str]) -> int:
    """Run ``vitlab verify RUN``; the exit code is 1 if a file is damaged."""
    parser = run_parser("verify", "Read the files of a run, and compare them with their checksums where they have one.")
    run = find_directory(parser.parse_args(argv).run)
    from vitlab.jobs.verify import verify

    found = verify(run)
    lines = [f"whole    {name}" if reason is None else f"DAMAGED  {name}: {reason}" for name, reason in found.items()]
    damaged = sum(reason is not None for reason in found.values())
    lines.append(f"{run.path}: {len(found)} files, {damaged or 'none'} damaged")
    sys.stdout.write("".join(printable(line) + "\n" for line in lines))
    return int(damaged > 0)


def run_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return a parser whose first argument is a run."""
    parser = CommandParser(f"vitlab {command}", description=description, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="run directory, its name, a checkpoint in it, or last")
    add_trust(parser)
    return parser


def _main(command: "Command", argv: list[str]) -> int:
    options, rest = _parser(command).parse_known_args(argv)
    run, checkpoint = find_run(options.run)
    from vitlab.jobs.evaluate import evaluate
    from vitlab.jobs.terminal import open_terminal, say
    from vitlab.jobs.train.close import in_words

    open_terminal(options.quiet)
    found = evaluate(
        command,
        run,
        checkpoint,
        rest,
        options.resize,
        not options.no_antialias,
        options.quiet,
        options.with_training_images,
    )
    if found:
        for sentence in found.sentences:
            say(sentence)
        values = {k if k == "n" else f"{found.split}/{k}": v for k, v in found.values.items()}
        say(in_words(values, "images") or f"{run.path} logs nothing of this split")
        if found.predictions.empty:
            say("no predictions/*.parquet: a module of your own says nothing of single images")
        say(f"run   {run.path} ({checkpoint.name})")
    return 0


def _parser(command: "Command") -> argparse.ArgumentParser:
    split = "val" if command == "validate" else "test"
    parser = run_parser(command, f"Measure a run on its {split} split: results.json, predictions/{split}.parquet.")
    parser.add_argument(
        "--resize", choices=POLICIES, help="how to carry positions to another image size (the usual way)"
    )
    parser.add_argument("--no_antialias", action="store_true", help="interpolate positions without smoothing")
    parser.add_argument(
        "--with_training_images", action="store_true",
        help="measure a split that was changed since the training although it holds training images",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="print nothing but mistakes")
    parser.epilog = "Any --trainer.*, --model.* or --data.* argument changes a value of the run's configuration."
    return parser
