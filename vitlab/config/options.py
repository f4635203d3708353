"""Options of ``vitlab fit`` that belong to the run, not to its configuration."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

from vitlab.config.arguments import CommandParser, grid_of
from vitlab.config.trust import add_trust
from vitlab.errors import UsageError
from vitlab.runs.directory import RUNS

Policy = Literal["interpolate", "rescale", "extrapolate"]
POLICIES = get_args(Policy)


@dataclass
class FitOptions:
    """Options of ``vitlab fit`` besides the configuration.

    Args:
        name: Name of the run, whose directory is ``runs/NAME``; None makes one from date, config, seed and a hash.
        run_dir: Directory of the run, instead of ``name``.
        resume: Run to continue; ``auto`` takes the one that ``name`` or ``run_dir`` names.
        auto_resume: Whether to continue the run if it exists, else start it.
        init_from: Weights to start from: a run, a checkpoint, a file, ``vitlab:NAME``, or ``timm:NAME``, ``hf:NAME``,
            ``torchvision:NAME``.
        resize: With ``init_from``, how to resample positions for another grid; None is the method's default.
        init_grid: With ``init_from``, rows and columns of the token grid where the file lacks them.
        overwrite: Whether to delete the run directory if it exists.
        deadline: Seconds that a step, a validation batch or the loader may take, and 20 times its median, before the
            run counts as hanging; 0 for no limit.
        dry_run: Whether to build everything and write nothing.
        quiet: Whether to print errors only.
        start: State dict of the object that a Python caller gave as the model, its initial weights.
    """

    name: str | None = None
    run_dir: str | None = None
    resume: str | None = None
    auto_resume: bool = False
    init_from: str | None = None
    resize: Policy | None = None
    init_grid: Sequence[int] | None = None
    overwrite: bool = False
    deadline: float = 600.0
    dry_run: bool = False
    quiet: bool = False
    start: Mapping[str, Any] | None = None

    def check(self) -> None:
        """Refuse values that are wrong, in Python as on the command line.

        Raises:
            UsageError: ``resize`` is no way to resample positions, ``init_grid`` is no grid, or there are no weights
                that they are for.
        """
        check_resize(self.resize)
        given = self.init_grid
        sides = list(given) if isinstance(given, Sequence) else []
        if given is not None and (
            len(sides) != 2 or not all(isinstance(side, Integral) and side > 0 for side in sides)
        ):
            raise UsageError(f"`init_grid` must be rows and columns of tokens, whole numbers above 0, got {given!r}")
        for name in ("resize", "init_grid") if not self.init_from else ():
            if (value := getattr(self, name)) is not None:
                raise UsageError(f"`{name}` goes with init_from, initial weights: leave it out, got {value!r}")


class TypedOptions(FitOptions):
    """The options of a command line, and which help it asks for."""

    help: str | None = None


def check_resize(resize: str | None) -> None:
    """Refuse a word that names no way to resample positions.

    >>> check_resize("interpolate"), check_resize(None)
    (None, None)
    """
    if resize is not None and resize not in POLICIES:
        raise UsageError(f"`resize` must be one of {', '.join(POLICIES)}, got {resize!r}")


def check_topk(topk: int) -> None:
    """Refuse a number of classes per image below one.

    >>> check_topk(5)
    """
    if not isinstance(topk, Integral) or isinstance(topk, bool) or topk < 1:
        raise UsageError(f"`topk` must be a whole number, 1 or more, got {topk}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds of at least 0, got {text}")
    return seconds


def options_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of a run."""
    parser = CommandParser("vitlab fit", add_help=False)
    add = parser.add_argument
    add("-h", "--help", nargs="?", const="common", metavar="KEY", help="show this page; --help=KEY explains a key")
    add("--help_all", action="store_const", const="all", dest="help", help=argparse.SUPPRESS)
    add("--name", help=f"name of the run, in {RUNS}/NAME (default: date, config, seed, hash)")
    add("--run_dir", help="directory of the run, instead of --name")
    add("--resume", nargs="?", const="auto", metavar="RUN", help="continue a run exactly from its last checkpoint")
    add("--auto_resume", action="store_true", help="continue the run of --name if it exists, else start it")
    add("--init_from", metavar="WEIGHTS", help="start a new run from the weights of a run, a checkpoint or a file")
    add(
        "--resize",
        choices=POLICIES,
        help="with --init_from: how to resample positions for another image size (default: the method's own)",
    )
    add(
        "--init_grid",
        type=grid_of,
        metavar="ROWS,COLUMNS",
        help="with --init_from: token grid of its positions, if the file does not state it",
    )
    add("--overwrite", action="store_true", help="delete the run directory if it exists")
    add(
        "--deadline",
        type=_seconds,
        default=600.0,
        help="stop when a step, a validation batch or the loader takes longer than this many seconds and 20 times its "
        "median (default: 600; 0: no limit)",
    )
    add("--dry_run", action="store_true", help="check and build everything, print the header; do not train or write")
    add("--quiet", action="store_true", help="print errors only")
    add_trust(parser)
    return parser
