"""Exceptions that end a command early, and helpers for their one-line messages."""

import difflib
import errno
import os
import shlex
import shutil
import signal
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PARTS_FILE = "parts.py"  # in a run directory: the source of its classes, if they come from a notebook
TRUSTED: list[str] = []  # packages that the user has named on this command line, see vitlab/config/trust.py
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TIMED_OUT = "DataLoader timed out"  # torch's words for a loader that hangs


class UsageError(ValueError):
    """Wrong input: the command prints only the message and ends with exit code 2."""


class Stopped(BaseException):
    """A signal ended the run, or the guard of the command, because something hung.

    Args:
        number: The signal; SIGTERM where something hung.
        reason: What hung; empty of a signal.

    Example:
        >>> str(Stopped(15)), str(Stopped(15, "the loader hangs"))
        ('SIGTERM', 'the loader hangs')
    """

    said = False  # whether the message was printed
    when = "before training"  # which part of `vitlab fit` it ended

    def __init__(self, number: int, reason: str = "") -> None:
        super().__init__(number, reason)
        self.number, self.reason = number, reason

    def __str__(self) -> str:
        return self.reason or signal.Signals(self.number).name

    @property
    def by(self) -> str:
        """What follows the word stopped in a line: the signal, nothing where the guard has told what hung."""
        return "" if self.reason else f" by {self}"


class Diverged(FloatingPointError):
    """Loss, gradients or weights are not finite, as all processes have told each other."""


class RunFailed(RuntimeError):
    """A command ended for an outside reason, such as a full disk: it prints the message and ends with exit code 1."""

    said = False  # whether the message was printed


def exit_code(stopped: Stopped) -> int:
    """Return 130 for Ctrl-C, and 75 (try again later) for other signals."""
    return 130 if stopped.number == signal.SIGINT else 75


def escaped(path: str) -> str:
    """Return a path, or a name in it, as valid text: bytes that are not UTF-8 become escapes."""
    return os.fsencode(path).decode(errors="backslashreplace")


def printable(text: str) -> str:
    """Replace control characters and undecodable bytes, which file names may contain."""
    text = text.encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def one_line(error: object, limit: int = 400) -> str:
    """Return what an error says in one line of at most ``limit`` characters; its class if it says nothing.

    Example:
        >>> one_line(ValueError("two   words")), one_line(KeyboardInterrupt())
        ('two words', 'KeyboardInterrupt')
    """
    return (" ".join(str(error).split()) or type(error).__name__)[:limit]


def named_line(error: BaseException, limit: int = 400) -> str:
    """Return the class of an error and what it says in one line of at most ``limit`` characters.

    Example:
        >>> named_line(ValueError("two   words")), named_line(KeyboardInterrupt())
        ('ValueError: two words', 'KeyboardInterrupt')
    """
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")[:limit]


def what_failed(error: BaseException) -> str | None:
    """Return in one line which file the system could not read or write and why; None if no system call failed.

    Example:
        >>> what_failed(OSError(28, "No space left on device", "runs/first/results.json"))
        'runs/first/results.json: No space left on device'
        >>> what_failed(OSError(28, "No space left on device", "runs/first/results.json", None, "sent/results.json"))
        'sent/results.json: No space left on device'
        >>> what_failed(shutil.Error([("figures/a.svg", "sent/a.svg", "No space left on device")]))
        'sent/a.svg: No space left on device'
    """
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, shutil.Error) and isinstance(chain.args[0], list):  # files of a folder: source, copy, why
            return f"{chain.args[0][0][1]}: {chain.args[0][0][2]}"
        if isinstance(chain, OSError) and chain.strerror:
            is_of_target = chain.filename2 and chain.errno in _FULL  # of a copy
            place = chain.filename2 if is_of_target else chain.filename
            return f"{place}: {chain.strerror}" if place else chain.strerror
        chain = chain.__cause__ or chain.__context__
    return None


@contextmanager
def named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Inside a ``with`` block, errors of the system name this file if they name none, as those of write and fsync.

    Example:
        >>> try:
        ...     with named("runs/first/results.json"):
        ...         raise OSError(28, "No space left on device")
        ... except OSError as error:
        ...     print(what_failed(error))
        runs/first/results.json: No space left on device
    """
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:
            error.filename = os.fspath(path)
        raise


def before_again(number: int | None) -> str:
    """Return what must happen to a disk before a command is repeated, by the number of its error.

    Example:
        >>> before_again(28), before_again(13)
        ('make room', 'see that it can be read and written')
    """
    return "make room" if number is None or number in _FULL else "see that it can be read and written"


MISTAKES = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    RuntimeError,
    AssertionError,
)  # what a wrong part raises


def in_own_code(error: BaseException) -> str | None:
    """Return the innermost line of the user's own code that an error went through, with the error; else None.

    Own is what :func:`is_own` says.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(Path(frame.filename))]
    if not frames:
        return None
    return f"{frames[-1].filename}, line {frames[-1].lineno}, `{frames[-1].line}`: {named_line(error)}"


def with_place(error: Exception) -> str:
    """Return an error of code that is imported, with the file and the line where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    file, line = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (frame.filename, frame.lineno)
    return f"{named_line(error)} ({file}, line {line})"


def is_own(file: Path) -> bool:
    """Return whether a file is the user's: neither of this package, nor of Python's library, nor installed.

    Example:
        >>> is_own(Path(__file__))
        False
    """
    others = (Path(__file__).parent, Path(sysconfig.get_path("stdlib")))
    is_installed = {"site-packages", "dist-packages"} & set(file.parts)
    return file.is_file() and not is_installed and not any(other in file.parents for other in others)


def lost_loader(error: Exception) -> str | None:
    """Return a line about a loader that has lost a process or lacks shared memory; None for what a process has raised.

    Example:
        >>> lost_loader(RuntimeError("DataLoader worker (pid 7) exited"))
        'DataLoader worker (pid 7) exited: out of memory, or hanging. Use fewer workers (--data.num_workers)'
    """
    what = one_line(error, 10_000)
    if any(words in what for words in ("shared memory(shm)", "unable to write to file </torch_", "Bus error")):
        full = "shared memory (/dev/shm), through which the loader's processes pass batches, is full"
        return f"{full}: enlarge it (in a container: --shm-size=8g), or use fewer processes (--data.num_workers)"
    if what.startswith(("DataLoader worker", _TIMED_OUT)):
        return f"{what.split('. ')[0].rstrip('.')}: out of memory, or hanging. Use fewer workers (--data.num_workers)"
    return None


def loader_timed_out(error: BaseException) -> bool:
    """Return whether torch ended the wait for a batch of a loader that hangs.

    Example:
        >>> loader_timed_out(RuntimeError("DataLoader timed out after 5 seconds"))
        True
    """
    return _TIMED_OUT in str(error)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ``'; did you mean "x"?'`` for the choice closest to ``word``, or an empty string."""
    names = {choice.casefold(): choice for choice in choices if choice != word}
    close = difflib.get_close_matches(word.strip().casefold(), list(names), n=1, cutoff=0.6)
    return f'; did you mean "{names[close[0]]}"?' if close else ""


def trust_words(names: Sequence[str] | None = None) -> list[str]:
    """Return the words that make another command of vitlab trust these packages, or what this one does.

    Example:
        >>> trust_words(["mine", "ours"])
        ['--trust_imports', 'mine,ours']
    """
    trusted = TRUSTED if names is None else names
    return ["--trust_imports", ",".join(trusted)] if trusted else []


def trust_also(*names: str) -> str:
    """Return the flag that trusts these packages beside those that the command line names already.

    Example:
        >>> trust_also("mine", "ours")
        '--trust_imports mine,ours'
    """
    return " ".join(trust_words(list(dict.fromkeys([*TRUSTED, *names]))))


def defined_elsewhere(name: str) -> str:
    """Return the sentence that a class was defined in a notebook or script, which this process does not run.

    Example:
        >>> defined_elsewhere("Net").partition(":")[0]
        'Net was defined in a notebook or script'
    """
    return (
        f"{name} was defined in a notebook or script: define it here too or, if you trust the run, "
        f"add {trust_also(f'runs/NAME/{PARTS_FILE}')}"
    )


def trusting(command: str, folder: Path | None = None) -> str:
    """Return a command that is proposed to the user, with the words to trust what this one does.

    Args:
        command: The command.
        folder: The directory of the run that it is about, whose own classes of a notebook it needs, and no others.

    Example:
        >>> trusting("vitlab test first")
        'vitlab test first'
    """
    names = list(dict.fromkeys(TRUSTED))
    if folder and (folder / PARTS_FILE).is_file():
        packages = [name for name in names if not name.endswith(f"/{PARTS_FILE}")]
        names = [*packages, os.path.join(folder, PARTS_FILE)]
    return " ".join([command, *map(shlex.quote, trust_words(names))])


def preview(names: Iterable[object], most: int = 3) -> str:
    """Return the first names, and how many others there are.

    Example:
        >>> preview(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    texts = list(map(str, names))
    return ", ".join(texts[:most]) + (f" and {len(texts) - most:,} more" if len(texts) > most else "")


def megabytes(size: float) -> str:
    """Return a number of bytes as text."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def not_finite(lost: int, count: int, what: str = "outputs") -> str:
    """Return the sentence that numbers of ``lost`` of ``count`` images are not finite, and the way out."""
    return (
        f"the {what} of {lost:,} of {count:,} images are not finite, as of a network that has diverged or "
        "overflows in 16 bits: take an earlier checkpoint, or --trainer.precision=32-true"
    )
