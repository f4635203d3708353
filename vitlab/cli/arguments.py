"""The parser of every command's own arguments."""

import argparse
from typing import NoReturn

from vitlab.errors import UsageError


class CommandParser(argparse.ArgumentParser):
    """A parser that answers a mistake with one line."""

    def error(self, message: str) -> NoReturn:
        """Raise the mistake as :class:`UsageError`."""
        raise UsageError(f"{message}; see `{self.prog} --help`")
