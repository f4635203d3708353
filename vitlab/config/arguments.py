"""The arguments of the commands: the parser of their own, and how others are found among the words."""

import argparse
from itertools import pairwise
from typing import NoReturn

from vitlab.errors import UsageError


class CommandParser(argparse.ArgumentParser):
    """A parser that answers a mistake with one line."""

    def error(self, message: str) -> NoReturn:
        """Raise the mistake as :class:`UsageError`."""
        raise UsageError(f"{message}; see `{self.prog} --help`")


def values_of(args: list[str], *names: str) -> list[str]:
    """Return what arguments give to a flag, under any of its ``names`` and in both spellings, in their order."""
    found = []
    for word, after in pairwise([*args, ""]):
        flag, equals, value = word.partition("=")
        if flag.startswith("-") and flag.lstrip("-") in names:
            found.append(value if equals else after)
    return found


def config_paths(args: list[str]) -> list[str]:
    """Return the config files among the arguments."""
    return values_of(args, "c", "config")
