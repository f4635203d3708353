"""``python -m vitlab`` is the ``vitlab`` command."""

import atexit
import os
import sys
import threading
from typing import NoReturn

from vitlab.cli.main import main


def run() -> NoReturn:
    """Run the command line and end the process, without freeing torch's objects one by one.

    Freeing them takes a CPU second or more, and the system frees the memory anyway.
    """
    code = main()
    try:
        threading._shutdown()  # type: ignore[attr-defined] # waits for threads, as Python does first
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # a full disk or a closed pipe
        code = code or 1
    finally:
        os._exit(code)


if __name__ == "__main__":
    run()
