"""A command's process ends quickly, but not before its threads, exit functions and last words."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import atexit, threading, vitlab.__main__ as command
def main():
    atexit.register(print, "exit function")
    threading.Timer(0.1, print, ["thread"]).start()
    print("words")
    return 3
command.main = main
command.run()
"""


def run(stdout):
    return subprocess.run([sys.executable, "-c", SCRIPT], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)


def test_the_process_waits_for_threads_and_exit_functions_and_keeps_its_exit_code():
    ended = run(subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert ended.stdout.split() == ["words", "thread", "exit", "function"]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_output_that_cannot_be_written_is_a_failure():
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-m", "vitlab", "--version"]
        assert subprocess.run(line, stdout=full, stderr=subprocess.DEVNULL, timeout=60).returncode == 1


@pytest.mark.parametrize(("set_before", "expected"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_threads_on_a_busy_machine_wait_without_spinning_unless_told_otherwise(set_before, expected):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | set_before
    script = "import os, sys, vitlab.__main__; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert told.stdout.split() == [expected, "False"], told.stderr
