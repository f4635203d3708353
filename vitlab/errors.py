"""Why a command ends early: a user's mistake, told in one line, or a signal."""

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """Wrong input: the command prints the message alone and ends with exit code 2."""


class Stopped(BaseException):
    """A signal ended the run; ``args`` holds its number."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ``'; did you mean "x"?'`` for the choice closest to ``word``, or nothing where none is close."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""
