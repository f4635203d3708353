"""``python -m vitlab`` is the ``vitlab`` command."""

import atexit
import os
import sys
import threading
from typing import NoReturn

from vitlab.cli.main import main


def run() -> NoReturn:
    """Run the command line and end the process as Python would, but for freeing every object of torch one by one.

    That takes a CPU second and more, and the memory goes with the process anyway.
    """
    code = main()
    try:
        threading._shutdown()  # type: ignore[attr-defined] # waits for threads, as Python does first
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # a full disk, or whoever read it has gone
        code = code or 1
    finally:
        os._exit(code)


if __name__ == "__main__":
    run()
