"""Real processes of vitlab that can be killed, started in a moment because what they import is imported once."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing import connection
from pathlib import Path

import torch
from safetensors.torch import load_file

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["imported"])  # which the server finds by PYTHONPATH alone
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
ONE_BY_ONE = threading.Lock()  # a start asks all other processes for their exit codes, which can be read once
CONFIGS = Path(__file__).parents[2] / "configs"
EMA = '[{"class_path": "EMA", "init_args": {"decay": 0.9}}]'
TINY = ["fit", "--config", str(CONFIGS / "vit.yaml"), "--trainer.logger=false", "--trainer.log_every_n_steps=1"]
TINY += ["--model.embed_dim=16", "--model.depth=2", "--model.num_heads=2", "--data.batch_size=32", "--quiet"]
TINY += ["--model.drop_path_rate=0.2", "--data.mixup=0.4", "--data.augment=crop-flip", f"--trainer.callbacks={EMA}"]


class Process:
    """A vitlab command in a process of its own.

    Args:
        arguments: Words of the command line.
        folder: Working directory.
        before: Called in the process first; a function of a module.
        environment: Environment variables to set.
    """

    def __init__(self, arguments, folder, before=None, environment=None):
        self.log = Path(folder) / f"log-{time.monotonic_ns()}"
        self.process = CONTEXT.Process(target=_run, args=(arguments, folder, self.log, before, environment or {}))
        with ONE_BY_ONE:
            self.process.start()
        self.pid = self.process.pid

    def running(self):
        with ONE_BY_ONE:
            return self.process.is_alive()

    def send(self, number):
        if self.running():
            os.kill(self.pid, number)

    def wait(self, seconds=120):
        """Return the exit code; negative for a signal, None for a process that has not ended."""
        connection.wait([self.process.sentinel], seconds)
        with ONE_BY_ONE:
            self.process.join(0)
            return self.process.exitcode

    def output(self):
        return self.log.read_text(errors="replace")


def _run(arguments, folder, log, before, environment):
    os.setpgid(0, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
    multiprocessing.set_start_method(None, force=True)  # as in a process that was started by itself
    os.environ.update(environment, OMP_NUM_THREADS="1", WANDB_MODE=environment.get("WANDB_MODE", "offline"))
    os.chdir(folder)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    sys.argv = ["vitlab", *arguments]
    torch.set_num_threads(1)
    if before is not None:
        before()
    from vitlab.cli.main import main

    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def finish(arguments, folder, code=0, **how):
    """Run a command to its end, which must be ``code``; return what it printed."""
    process = Process(arguments, folder, **how)
    ended = process.wait(240)
    assert ended == code, f"exit code {ended}: {process.output()}"
    return process.output()


def until(condition, process=None, seconds=60.0, every=0.002):
    """Wait for a condition, or for the end of a process; return whether the condition came true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        if process is not None and not process.running():
            return False
        time.sleep(every)
    return False


def curve(run):
    """The metrics of a run by step: the last word on each, without what depends on the clock."""
    rows = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # a row that a kill cut off stands alone and is written again
            continue
        kind = "val" if "val/loss" in row else "train"
        rows[kind, row["step"]] = {k: v for k, v in row.items() if "/" in k or k in ("lr", "grad_norm", "epoch")}
    return rows


def differences(one, other):
    """Return what differs between two finished runs: names of weights, and steps of the curve."""
    ours, theirs = (load_file(run / "weights" / "last.safetensors") for run in (one, other))
    weights = [name for name in theirs if name not in ours or not torch.equal(ours[name], theirs[name])]
    here, there = curve(one), curve(other)
    return weights + [str(key) for key in {*here, *there} if here.get(key) != there.get(key)]
