"""Why a command ends early: a user's mistake, told in one line, or a signal; and what such lines have in common."""

import difflib
import signal
from collections.abc import Iterable


class UsageError(ValueError):
    """Wrong input: the command prints the message alone and ends with exit code 2."""


class Stopped(BaseException):
    """A signal ended the run; ``args`` holds its number."""

    said = False  # whether the run has told it


class RunFailed(RuntimeError):
    """A training ended for a reason outside of the program, told in one line that has been printed."""


def exit_code(stopped: Stopped) -> int:
    """Return 130 for Ctrl-C; 75, which means try again, for what a cluster sends."""
    return 130 if stopped.args[0] == signal.SIGINT else 75


def printable(text: str) -> str:
    """Return text with a mark in place of control characters and of bytes that are no text, as file names have them."""
    text = text.encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ``'; did you mean "x"?'`` for the choice closest to ``word``, or nothing where none is close."""
    names = {choice.casefold(): choice for choice in choices if choice != word}
    close = difflib.get_close_matches(word.strip().casefold(), list(names), n=1, cutoff=0.6)
    return f'; did you mean "{names[close[0]]}"?' if close else ""
