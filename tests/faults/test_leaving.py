"""Two processes that are stopped leave in good order: none is taken for lost, and none is left behind."""

import json
import os
import signal

import pytest
from harness import until
from ranks import TWO, launch, session

# The first process takes its time to leave, as one does that still sends its records; the second is slow to come.
SCRIPT = """
import os, sys, threading, time
if "LOCAL_RANK" in os.environ:
    time.sleep(1)  # the first process knows of this one by then
    open("started", "w").close()
    time.sleep({late})
import vitlab.jobs.train.fit
training = sys.modules["vitlab.jobs.train.start"]
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
    """Send SIGTERM to the first of two once the file ``ready`` exists; return exit code, output, and who is left."""
    (folder / "script.py").write_text(SCRIPT.format(**seconds))
    process = launch([*TWO, "--trainer.max_epochs=2000", "--name", "two"], folder, ["script.py"])
    until(lambda: ready.exists() or process.poll() is not None, seconds=120)
    process.send_signal(signal.SIGTERM)
    code = process.wait(120)
    left = session(process.pid)
    if left:
        os.killpg(process.pid, signal.SIGKILL)
    return code, (folder / "log").read_text(), left


@pytest.mark.rare
def test_a_process_that_finishes_first_does_not_count_as_lost(tmp_path):
    run = tmp_path / "runs" / "two"
    code, said, left = stop_two(tmp_path, run / "metrics.jsonl", late=0, linger=7)
    assert code == 75, said
    assert "stopped by SIGTERM; continue" in said
    assert "has ended" not in said and "Traceback" not in said
    assert said.count("threads") == 2 and "_watch" not in said  # a thread in C++ at the end aborts the process
    assert not left
    assert json.loads((run / "run.json").read_text())["status"] == "preempted"


@pytest.mark.rare
def test_a_process_that_starts_late_is_stopped_with_the_others(tmp_path):
    code, said, left = stop_two(tmp_path, tmp_path / "started", late=8, linger=0)
    assert code == 75, said
    assert "stopped by SIGTERM" in said and "Traceback" not in said  # by the guard, if the other is too late
    assert not left
