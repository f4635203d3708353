"""Runs of two processes that lose one."""

import json
import os
import signal
import subprocess
import sys
import time

from harness import TINY, until

TWO = [word for word in TINY if word != "--quiet"] + ["--trainer.devices=2", "--trainer.strategy=ddp"]


def launch(words, folder, program=("-m", "vitlab")):
    """Start a command, in a session of its own, as a shell would."""
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, *program, *words],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def children(pid):
    """Return the processes that a process has started and that run this program."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    return [int(p) for p in found if "vitlab" in _words(p)]


def _words(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""


def session(pid):
    """Return the living processes of a session."""
    found = subprocess.run(
        ["ps", "-o", "pid=,stat=", "-s", str(pid)], capture_output=True, text=True, check=False
    ).stdout
    return [line for line in found.splitlines() if line.split()[1][0] not in "Z"]


def lose_a_rank(folder, number, which=1, name="two"):
    """Send a signal to one of two processes; return seconds until all had ended, and what was left."""
    process = launch([*TWO, "--trainer.max_epochs=2000", "--checkpoint.every_n_steps=5", "--name", name], folder)
    rows = folder / "runs" / name / "metrics.jsonl"
    assert until(
        lambda: (rows.exists() and rows.read_text().count("\n") > 8) or process.poll() is not None, seconds=120
    )
    assert process.poll() is None, (folder / "log").read_text()
    other = children(process.pid)[0]
    started = time.monotonic()
    os.kill((process.pid, other)[which], number)
    if number == signal.SIGSTOP and which == 0:
        until(lambda: not _running(other), seconds=120)
        seconds = time.monotonic() - started
        os.kill(process.pid, signal.SIGKILL)
    else:
        until(lambda: process.poll() is not None and not session(process.pid), seconds=120)
        seconds = time.monotonic() - started
    process.wait(60)
    time.sleep(1.5)
    orphans = session(process.pid)
    if orphans:
        os.killpg(process.pid, signal.SIGKILL)
    status = json.loads((folder / "runs" / name / "run.json").read_text())["status"]
    return {"seconds": round(seconds, 1), "said": (folder / "log").read_text(), "orphans": orphans, "status": status}


def _running(pid):
    words = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(words.strip()) and words.strip()[0] != "Z"
