"""What belongs to a run rather than to its configuration: the options of ``vitlab fit``."""

import argparse
import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from vitlab.config.arguments import CommandParser
from vitlab.config.trust import add_trust
from vitlab.runs.directory import RUNS

Policy = Literal["interpolate", "rescale", "extrapolate"]
POLICIES = get_args(Policy)


@dataclass
class FitOptions:
    """What ``vitlab fit`` is told beside the configuration.

    Args:
        name: Name of the run, whose directory is ``runs/NAME``; None makes one from date, config, seed and a hash.
        run_dir: Directory of the run, instead of ``name``.
        resume: Run to continue; ``auto`` takes the one that ``name`` or ``run_dir`` says.
        auto_resume: Whether to continue the run if it is there, and to start it if not.
        init_from: Weights to start from: a run, a checkpoint, a file, or ``timm:NAME``.
        resize: With ``init_from``, how to resample positions for another grid; None is the method's own way.
        init_grid: With ``init_from``, rows and columns of the tokens that a file does not say, as ``14,14``.
        overwrite: Whether to delete the run directory if it exists.
        deadline: Seconds that a step, a validation batch or the loader may take, and 20 times its median, before the
            run counts as hanging; 0 for no limit.
        dry_run: Whether to build everything and write nothing.
        quiet: Whether to print errors alone.
    """

    name: str | None = None
    run_dir: str | None = None
    resume: str | None = None
    auto_resume: bool = False
    init_from: str | None = None
    resize: Policy | None = None
    init_grid: str | None = None
    overwrite: bool = False
    deadline: float = 600.0
    dry_run: bool = False
    quiet: bool = False


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds of at least 0, got {text}")
    return seconds


def _grid(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*,[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"must be rows and columns of tokens, such as 14,14, got {text}")
    return text


def options_parser() -> argparse.ArgumentParser:
    """Return the parser of what belongs to the run rather than to its configuration."""
    parser = CommandParser("vitlab fit", allow_abbrev=False, add_help=False)
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this page; --help_all shows every argument of the trainer too")
    add("--help_all", action="store_true", help=argparse.SUPPRESS)
    add("--name", help=f"name of the run: its directory is {RUNS}/NAME (default: date, config, seed, hash)")
    add("--run_dir", help="directory of the run, instead of --name")
    add("--resume", nargs="?", const="auto", metavar="RUN", help="continue a run exactly where its last checkpoint is")
    add("--auto_resume", action="store_true", help="start the run of --name, or continue it if it is there")
    add("--init_from", metavar="WEIGHTS", help="start a new run from the weights of a run, a checkpoint or a file")
    add(
        "--resize",
        choices=POLICIES,
        help="with --init_from: how to resample positions for another image size (default: the method's own way)",
    )
    add(
        "--init_grid",
        type=_grid,
        metavar="ROWS,COLUMNS",
        help="with --init_from: tokens that its positions were trained on, where the file does not say it",
    )
    add("--overwrite", action="store_true", help="delete the run directory if it exists")
    add(
        "--deadline",
        type=_seconds,
        default=600.0,
        help="seconds that a step, a validation batch or the loader may take, and 20 times its median (600; 0: any)",
    )
    add("--dry_run", action="store_true", help="check and build everything, show the header, train and write nothing")
    add("--quiet", action="store_true", help="print errors only")
    add_trust(parser)
    return parser
