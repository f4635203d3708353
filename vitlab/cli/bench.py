"""``vitlab bench``: the door to ``benchmarks/bench``, which is beside the package in a checkout and not part of it."""

import importlib
import sys

from vitlab.errors import UsageError
from vitlab.shipped import HOME

_FOLDER = HOME / "benchmarks"


def main(argv: list[str]) -> int:
    """Run ``vitlab bench`` of this checkout and return its exit code."""
    if not (_FOLDER / "bench" / "command.py").is_file():
        raise UsageError(
            "`vitlab bench` is not part of the installed package: run it from a checkout of vitlab's repository, "
            "after `pip install -e .`"
        )
    if str(_FOLDER) not in sys.path:
        sys.path.insert(0, str(_FOLDER))
    return importlib.import_module("bench.command").main(argv)
