"""The arguments of the commands: the parser of their own, and how others are found among the words."""

import argparse
import json
import os
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NoReturn

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


def without(args: list[str], *names: str) -> list[str]:
    """Return the arguments without a flag, under any of its ``names``, and its values."""
    kept = []
    for before, word in pairwise(["", *args]):
        flags = [part.partition("=")[0].lstrip("-") if part.startswith("-") else "" for part in (before, word)]
        if flags[1] not in names and (flags[0] not in names or "=" in before):
            kept.append(word)
    return kept


def config_paths(args: list[str]) -> list[str]:
    """Return the config files among the arguments."""
    return values_of(args, "c", "config")


def as_words(values: Mapping[str, Any] | None) -> list[str]:
    """Return dotted keys and values as the arguments of a command line that mean the same.

    >>> as_words({"model.pos_embed": "rope2d", "data.img_size": [32, 64], "trainer.logger": False})
    ['--model.pos_embed=rope2d', '--data.img_size=[32, 64]', '--trainer.logger=false']
    """
    return [f"--{key}={_as_word(value)}" for key, value in (values or {}).items()]


def _as_word(value: Any) -> str:
    import yaml

    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and yaml.safe_load(value or "''") == value and "\n" not in value:
        return value
    return json.dumps(value)  # which is YAML too
