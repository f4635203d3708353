"""``vitlab fit``: train a model in a run directory of its own, or continue a run."""

import os
import sys
from functools import partial

from vitlab.config.arguments import refuse_unknown
from vitlab.config.environment import with_environment
from vitlab.config.options import FitOptions, TypedOptions, options_parser
from vitlab.jobs.train.choose import run_to_continue
from vitlab.lazy import quick_imports
from vitlab.runs.interrupt import until_stopped

EXAMPLES = """examples:
  vitlab fit --config configs/t2t.yaml --model.pos_embed=sincos2d --seed_everything=1
  vitlab fit --config configs/t2t.yaml --name first --trainer.max_epochs=5
  vitlab fit --resume first
"""


def main(argv: list[str]) -> int:
    """Run ``vitlab fit`` and return its exit code."""
    options, rest = options_parser().parse_known_args(argv, TypedOptions())
    if options.help:
        from vitlab.config.help import print_fit_help

        return print_fit_help(options_parser(), EXAMPLES, options.help)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else C++ prints its stack after the line on a lost process
    return until_stopped(partial(_fit, options, rest))


def _fit(options: FitOptions, rest: list[str]) -> int:
    resumed = run_to_continue(options)  # a wrong name or flag fails before the heavy imports
    refuse_unknown(rest)
    with quick_imports():
        from vitlab.jobs.train.fit import fit

    words, idle = with_environment(rest, resumed is not None)
    for sentence in [] if options.quiet else idle:
        sys.stderr.write(f"vitlab: {sentence}\n")
    fit(words, options)
    return 0
