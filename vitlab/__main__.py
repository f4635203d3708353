"""``python -m vitlab`` is the ``vitlab`` command."""

import atexit
import os
import sys
import threading
import time
from typing import NoReturn

from vitlab.cli.main import main
from vitlab.runs import interrupt

# Read when torch is loaded. Threads that spin while they wait for each other starve beside another busy process.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def run() -> NoReturn:
    """Run the command line and end the process, without freeing torch's objects one by one.

    Freeing them takes a CPU second or more, and the system frees the memory anyway.
    """
    code = main()
    if code in (75, 130) or interrupt.HURRY.is_set():
        threading.Thread(target=_end_soon, args=(code,), daemon=True).start()
    try:
        threading._shutdown()  # type: ignore[attr-defined] # waits for threads, as Python does first
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # a full disk or a closed pipe
        code = code or 1
    finally:
        os._exit(code)


def _end_soon(code: int) -> None:
    """End the process although a library, such as W&B, still waits for its server."""
    time.sleep(3.0)
    os._exit(code)


if __name__ == "__main__":
    run()
