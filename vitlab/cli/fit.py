"""``vitlab fit``: train a model in a run directory of its own, or continue a run."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from vitlab.config.arguments import refuse_unknown
from vitlab.config.environment import idle_variables, with_environment
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


class _Options(FitOptions):
    help = False
    help_all = False


def main(argv: list[str]) -> int:
    """Run ``vitlab fit`` and return its exit code."""
    options, rest = options_parser().parse_known_args(argv, _Options())
    if options.help or options.help_all:
        from vitlab.config.help import print_fit_help

        return print_fit_help(options_parser(), EXAMPLES, options.help_all)
    with second_interrupt_ends():
        return _train(options, rest)


def _train(options: FitOptions, rest: list[str]) -> int:
    """Train, and return the exit code."""
    try:
        with _stop_on_signals():
            return _fit(options, rest)
    except RunFailed:
        return 1
    except Stopped as stopped:
        if not stopped.said:
            sys.stderr.write(f"vitlab: stopped by {signal.Signals(stopped.args[0]).name} before or after training\n")
        return exit_code(stopped)


@contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Raise :class:`Stopped` on a signal, also while libraries load; training installs handlers that save first."""
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
    resumed = run_to_continue(options)  # a wrong name or flag fails before the heavy imports
    refuse_unknown(rest)
    with quick_imports():
        from vitlab.jobs.train.fit import fit

    for sentence in [] if options.quiet else idle_variables(rest, resumed is not None):
        sys.stderr.write(f"vitlab: {sentence}\n")
    fit(rest if resumed else with_environment(rest), options)
    return 0
