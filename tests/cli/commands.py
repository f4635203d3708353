"""Commands of vitlab in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"
T2T = ["--config", str(CONFIGS / "t2t.yaml"), "--trainer.logger=false"]


def start(arguments, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words, pipes = (
        [sys.executable, "-m", "vitlab", *arguments],
        {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
    )
    return subprocess.Popen(words, cwd=cwd, env=environment, text=True, **pipes)


def finish(arguments, cwd):
    """Run a command to its end, which must be a good one, and return what it said."""
    process = start(arguments, cwd)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output
