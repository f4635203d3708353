"""``vitlab fit``: train a model in a run directory of its own, or continue a run."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from vitlab.config.arguments import refuse_unknown
from vitlab.config.environment import with_environment
from vitlab.config.options import FitOptions, options_parser
from vitlab.errors import RunFailed, Stopped, exit_code
from vitlab.lazy import quick_imports
from vitlab.runs.choose import run_to_continue
from vitlab.runs.interrupt import second_interrupt_ends

EXAMPLES = """examples:
  vitlab fit --config configs/t2t.yaml --model.pos_embed=sincos2d --seed_everything=1
  vitlab fit --config configs/t2t.yaml --name first --trainer.max_epochs=5
  vitlab fit --resume first
"""


class _Words(FitOptions):
    help = False
    help_all = False


def main(argv: list[str]) -> int:
    """Run ``vitlab fit`` and return its exit code."""
    options, rest = options_parser().parse_known_args(argv, _Words())
    if options.help or options.help_all:
        from vitlab.config.help import print_fit_help

        return print_fit_help(options_parser(), EXAMPLES, options.help_all)
    with second_interrupt_ends():
        return _leaving(options, rest)


def _leaving(options: FitOptions, rest: list[str]) -> int:
    """Train, and return the exit code that says how it ended."""
    try:
        with _signals_stop():
            return _fit(options, rest)
    except RunFailed:
        return 1
    except Stopped as stopped:
        if not stopped.said:
            sys.stderr.write(f"vitlab: stopped by {signal.Signals(stopped.args[0]).name} outside of training\n")
        return exit_code(stopped)


@contextmanager
def _signals_stop() -> Iterator[None]:
    """Let signals raise :class:`Stopped`, while libraries are imported as while data is read; training does better."""
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
        numbers.remove(signal.SIGHUP)
    before = {n: signal.signal(n, _stop) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def _fit(options: FitOptions, rest: list[str]) -> int:
    goes_on = run_to_continue(options)  # a wrong name is answered before anything heavy is imported, a wrong flag too
    refuse_unknown(rest)
    with quick_imports():
        from vitlab.jobs.train.fit import fit

    fit(rest if goes_on else with_environment(rest), options)
    return 0
