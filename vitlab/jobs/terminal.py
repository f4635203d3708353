"""What reaches the terminal and train.log: vitlab's own lines and warnings that matter."""

import logging
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vitlab.errors import printable
from vitlab.tables import wrapped

LOG = logging.getLogger("vitlab")
LIGHTNING = ("lightning", "lightning.pytorch", "lightning.fabric")  # loggers with handlers of their own
REQUESTED = ("callbacks.model_summary", "callbacks.early_stopping", "profilers.profiler")  # loggers of Lightning
REPORT = 40  # lines of a profiler's report to show; AdvancedProfiler writes thousands

KNOWN_WARNINGS = (
    r"You're using the WeightAveraging callback, but loading a checkpoint outside",  # it already holds the average
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning 2.6 with torch 2.13 and later
    r"You're resuming from a checkpoint that ended before the epoch ended",  # vitlab prints that itself
    r"Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided",  # by test
    r"The `srun` command is available on your system but is not used",  # one process on a login node is fine
    r"The number of training batches \(\d+\) is smaller than the logging",  # the last step is always logged
    r"The '\w+_dataloader' does not have many workers",  # data in memory needs none
    r"Consider setting `persistent_workers=True` in '(predict|test)_dataloader'",  # which is read once
    r"You requested to overfit but enabled val dataloader shuffling",  # no validation of vitlab shuffles
    r"The CUDA Graph is empty",  # torch's own, while it begins to record kernels
    r"`precision=bf16` is supported for historical reasons",  # the lines of a run name what it stands for
)


def open_terminal(quiet: bool = False) -> None:
    """Send vitlab's lines, requested reports and warnings of libraries to the terminal."""
    LOG.setLevel(logging.DEBUG)
    LOG.propagate = False
    terminal = _Terminal(sys.stdout)
    terminal.setFormatter(_Printable())
    terminal.setLevel(logging.WARNING if quiet else logging.INFO)
    _quiet_lightning()
    for logger in _shown():
        logger.handlers[:] = [handler for handler in logger.handlers if not isinstance(handler, _Terminal)] + [terminal]
    warnings.formatwarning = _warning  # type: ignore[assignment]  # Lightning's begins with a path of its own


@contextmanager
def terminal_as_it_was() -> Iterator[None]:
    """Leave loggers, and the filters and the form of warnings, as they were; handlers that others add stay."""
    handlers = {logger: logger.handlers.copy() for logger in _shown()}
    levels = [(handler, handler.level) for handler in _handlers_of_lightning()]
    level, propagate, form = LOG.level, LOG.propagate, warnings.formatwarning
    with warnings.catch_warnings():
        try:
            yield
        finally:
            for logger, those in handlers.items():
                added = [one for one in logger.handlers if one not in those and not isinstance(one, _Terminal | _Log)]
                logger.handlers[:] = those + added  # as by a module of the user's that was imported
            for handler, before in levels:
                handler.setLevel(before)
            LOG.setLevel(level)
            LOG.propagate, warnings.formatwarning = propagate, form


@contextmanager
def lightning_quieted() -> Iterator[None]:
    """Keep Lightning's messages and known warnings from the terminal, and leave loggers and filters as they were."""
    with terminal_as_it_was():
        _quiet_lightning()
        yield


def _shown() -> list[logging.Logger]:
    return [LOG, *(logging.getLogger(f"lightning.pytorch.{name}") for name in REQUESTED)]


def _handlers_of_lightning() -> list[logging.Handler]:
    return [handler for name in LIGHTNING for handler in logging.getLogger(name).handlers]


def _quiet_lightning() -> None:
    for handler in _handlers_of_lightning():
        handler.setLevel(max(handler.level, logging.WARNING))
    for message in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message)


def _warning(message: Warning | str, *place: object) -> str:
    return f"warning: {printable(' '.join(str(message).split()))}\n"


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Escape control characters, which names in a foreign run may contain."""
        text = super().format(record)
        if sys.stdout.isatty():  # what was made for it, where pipes and train.log get a longer line
            text = getattr(record, "on_terminal", text)
        lines = text.expandtabs(1).split("\n")
        if record.name.endswith(".profiler") and len(lines) > REPORT:
            lines[REPORT:] = [f"... {len(lines) - REPORT:,} more lines are in train.log"]
        lines = [printable(line) for line in lines]
        if getattr(record, "wrap", False) and sys.stdout.isatty():
            lines = [wrapped(line, max(60, shutil.get_terminal_size().columns)) for line in lines]
        return "\n".join(lines)


class _Terminal(logging.StreamHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Skip the line: the reader of the pipe has left, as in ``| head -1``, or the terminal was closed."""


class _Log(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Skip the line; a full disk is reported on the terminal."""


def log_to(path: Path, said: Iterable[str] = ()) -> None:
    """Also append every line to a file, with Lightning's messages and the traceback of a failure.

    Args:
        path: The file.
        said: Lines that the terminal has shown before.
    """
    handler = _Log(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for text in said:
        handler.handle(LOG.makeRecord(LOG.name, logging.INFO, __file__, 0, text, (), None))
    for name in ("vitlab", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).addHandler(handler)


def close_log() -> None:
    """Close the files that :func:`log_to` opened."""
    for name in ("vitlab", "lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        for handler in [h for h in logger.handlers if isinstance(h, _Log)]:
            logger.removeHandler(handler)
            with suppress(OSError):  # what the file lacks, the terminal has shown; an error here would hide another
                handler.close()


def say(text: str, wrap: bool = False) -> None:
    """Print a line; with ``wrap``, a terminal shows it broken at its width. Pipes and train.log get it whole."""
    LOG.info(text, extra={"wrap": wrap})


def print_error(text: str) -> None:
    """Print an error, also with ``--quiet``."""
    LOG.error(text)
