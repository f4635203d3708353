"""What belongs to a run rather than to its configuration: the options of ``vitlab fit``."""

import argparse

from vitlab.config.arguments import CommandParser
from vitlab.config.trust import add_trust
from vitlab.runs.directory import RUNS

POLICIES = ("interpolate", "rescale", "extrapolate")


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
