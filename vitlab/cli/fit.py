"""``vitlab fit``: train a model in a run directory of its own, or continue a run."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vitlab.cli.arguments import CommandParser, config_paths
from vitlab.cli.launch import agree, launched_rank
from vitlab.cli.trust import add_trust
from vitlab.errors import Stopped, UsageError
from vitlab.run_dir import RUNS, RunDir, check_name, default_name, find_directory

# Configurations that differ in these keys alone are one experiment: a run may be resumed with the other.
FREE_KEYS = (
    *(f"trainer.{key}" for key in ("accelerator", "devices", "num_nodes", "strategy", "logger", "log_every_n_steps")),
    *(f"data.{key}" for key in ("num_workers", "root", "download")),
)

POLICIES = ("interpolate", "rescale", "extrapolate")

EXAMPLES = """examples:
  vitlab fit --config configs/t2t.yaml --model.pos_embed=sincos2d --seed_everything=1
  vitlab fit --config configs/t2t.yaml --name first --trainer.max_epochs=5
  vitlab fit --resume first
"""


def options_parser() -> argparse.ArgumentParser:
    """Return the parser of what belongs to the run rather than to its configuration."""
    parser = CommandParser("vitlab fit", allow_abbrev=False, add_help=False)
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this page; --help_all shows every argument of the trainer too")
    add("--help_all", action="store_true", help=argparse.SUPPRESS)
    add("--name", help=f"name of the run: its directory is {RUNS}/NAME (default: date, config, seed, hash)")
    add("--run_dir", help="directory of the run, instead of --name")
    add("--resume", nargs="?", const="auto", metavar="RUN", help="continue a run exactly where its last checkpoint is")
    add("--init_from", metavar="WEIGHTS", help="start a new run from the weights of a run, a checkpoint or a file")
    add(
        "--resize",
        choices=POLICIES,
        help="with --init_from: how to carry positions to another image size (the usual way)",
    )
    add("--overwrite", action="store_true", help="delete the run directory if it exists")
    add("--dry_run", action="store_true", help="check and build everything, show the header, train and write nothing")
    add("--quiet", action="store_true", help="print nothing but mistakes")
    add_trust(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run ``vitlab fit`` and return its exit code."""
    options, rest = options_parser().parse_known_args(argv)
    if options.help or options.help_all:
        from vitlab.cli.help import print_fit_help

        return print_fit_help(options_parser(), EXAMPLES, options.help_all)
    try:
        with _signals_stop():
            return _fit(options, rest)
    except Stopped as stopped:
        sys.stderr.write(f"vitlab: stopped by {signal.Signals(stopped.args[0]).name} outside of training\n")
        return exit_code(stopped)


@contextmanager
def _signals_stop() -> Iterator[None]:
    """Let signals raise :class:`Stopped`, while libraries are imported as while data is read; training does better."""
    before = {n: signal.signal(n, _stop) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def exit_code(stopped: Stopped) -> int:
    """Return 130 for Ctrl-C; 75, which means try again, for what a cluster sends."""
    return 130 if stopped.args[0] == signal.SIGINT else 75


def _fit(options: argparse.Namespace, rest: list[str]) -> int:
    run = resumed_run(options) if options.resume else None
    from vitlab.cli.terminal import open_terminal
    from vitlab.cli.training import FitCLI, train

    if run and not config_paths(rest):
        rest = ["--config", str(run.config), *rest]

    started = time.perf_counter()
    open_terminal(options.quiet)
    cli = FitCLI(rest, options, run)
    if "--print_config" in rest:
        return 0
    return train(cli, started)


def resumed_run(options: argparse.Namespace) -> RunDir:
    """Return the run that ``--resume`` is to continue."""
    for flag in ("init_from", "overwrite"):
        if getattr(options, flag):
            raise UsageError(f"`--resume` continues a run as it is; leave out --{flag}")
    if options.resume != "auto":
        return find_directory(options.resume)
    if not options.name and not options.run_dir:
        raise UsageError("`--resume` needs to know the run: `--resume RUN`, `--resume last`, or --name")
    run = RunDir(options.run_dir or RUNS / check_name(options.name))
    if not run.config.is_file():
        raise UsageError(f"`--resume`: there is no run in {run.path}; leave --resume out to start one")
    return run


def choose_run(options: argparse.Namespace, configs: list[str], seed: Any, resolved: str) -> RunDir:
    """Return the directory of a new run; every process of one launch returns the same."""
    if inherited := os.environ.get("VITLAB_RUN_DIR"):
        return RunDir(inherited)
    if options.name and options.run_dir:
        raise UsageError("give --name or --run_dir, not both")
    if options.run_dir:
        run = RunDir(options.run_dir)
    elif options.name:
        run = RunDir(RUNS / check_name(options.name))
    else:
        run = RunDir(RUNS / agree(default_name(configs, seed, resolved)))
    if launched_rank() > 0:  # the first process sees to the rest
        return run
    if run.exists():
        if not options.overwrite:
            way_out = f"continue it with `--resume {run.path}`, or delete it with --overwrite"
            raise UsageError(f"the run directory {run.path} exists; {way_out}")
        if not run.config.is_file():
            raise UsageError(f"`--overwrite` deletes run directories only, and {run.path} holds no config.yaml")
    elif run.path.exists() and not run.path.is_dir():
        raise UsageError(f"`--run_dir` must be a directory, and {run.path} is a file")
    return run


def check_same_config(run: RunDir, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse to continue ``run`` with a configuration that would make it another experiment."""
    changed = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        longer = key in ("trainer.max_epochs", "trainer.max_steps") and before is not None and (after or 0) > before
        sharded = key == "trainer.strategy" and "fsdp2" in (before, after)  # it numbers the moments in its own order
        if (
            before != after
            and not longer
            and (sharded or not any(key == k or key.startswith(f"{k}.") for k in FREE_KEYS))
        ):
            changed.append(f"{key}: {before} -> {after}")
    if changed:
        raise UsageError(
            f"`--resume`: the configuration differs from that of {run.path} ({'; '.join(changed)}). "
            "Resume it without these changes, or start a new run with --init_from"
        )
