"""Two processes that are stopped leave in good order: none is taken for lost, and none is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[2] / "configs" / "vit.yaml"
TWO = ["fit", "--config", str(CONFIG), "--trainer.logger=false", "--trainer.max_epochs=200", "--name", "two"]
TWO += ["--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.log_every_n_steps=1"]

# The first process takes its time to leave, as one does that still sends its records; the second is slow to come.
SCRIPT = """
import os, sys, threading, time
if "LOCAL_RANK" in os.environ:
    time.sleep({late})
from vitlab.cli import training
from vitlab.cli.main import main

close = training.close_log
def linger():
    close()
    print("threads", [thread.name for thread in threading.enumerate()], flush=True)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        time.sleep({linger})
training.close_log = linger
sys.exit(main())
"""


def stop_two(folder, ready, **seconds):
    """Send SIGTERM to the first of two processes once ``ready``; return its exit code, the output, who is left."""
    (folder / "script.py").write_text(SCRIPT.format(**seconds))
    outside = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "NODE_RANK", "PL_GLOBAL_SEED")}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "script.py", *TWO],
            cwd=folder,
            env={**outside, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    until = time.monotonic() + 120
    while not ready(process.pid) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    code = process.wait(120)
    left = members(process.pid)
    if left:
        os.killpg(process.pid, signal.SIGKILL)
    return code, (folder / "log").read_text(), left


def members(session):
    """Return the living processes of a session."""
    words = ["ps", "-o", "pid=,stat=", "-s", str(session)]
    found = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    return [line for line in found.splitlines() if line.split()[1][0] != "Z"]


@pytest.mark.slow
def test_a_process_that_leaves_first_is_not_taken_for_lost(tmp_path):
    run = tmp_path / "runs" / "two"
    code, said, left = stop_two(tmp_path, lambda _: (run / "metrics.jsonl").exists(), late=0, linger=7)
    assert code == 75, said
    assert "stopped by SIGTERM; continue" in said
    assert "has ended" not in said and "Traceback" not in said
    assert said.count("threads") == 2 and "_watch" not in said  # a thread in C++ at the end aborts the process
    assert not left
    assert json.loads((run / "run.json").read_text())["status"] == "preempted"


@pytest.mark.slow
def test_a_process_on_its_way_is_not_left_behind(tmp_path):
    code, said, left = stop_two(tmp_path, lambda pid: len(members(pid)) == 2, late=8, linger=0)
    assert code == 75, said
    assert "stopped by SIGTERM before the first step" in said and "Traceback" not in said
    assert not left
