"""The matrix of phases: one that hangs in C++, a signal or none, one to three processes, one of them lost or stopped.

What hangs hangs where Python's handlers of signals do not run: the main thread waits in C++ for a key that nobody
sets. The threads that write checkpoints and finish W&B sleep.
"""

import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from forked import Python
from harness import TINY, until

WORDS = [word for word in TINY if word != "--quiet"]
FIT = [*WORDS, "--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--data.subset=0.2", "--data.batch_size=36"]
SIGNALS = {"SIGTERM": [15], "Ctrl-C twice": [2, 2], "none": []}
RANKS = {"1": (1, None), "2": (2, None), "3": (3, None), "3, one killed": (3, 9), "3, one stopped": (3, 19)}
PHASES = {  # how many processes it can have; the variable of its limit
    "rendezvous": ([*RANKS][1:], "JOIN"),
    "download": ([*RANKS], "DOWNLOAD"),
    "data set-up": ([*RANKS], "DATA"),
    "first step, as when compiling": ([*RANKS], "START"),
    "draining a checkpoint": ([*RANKS], "SAVE"),
    "finishing W&B": ([*RANKS][:3], "WANDB"),
    "packing": ([*RANKS][:1], "PACK"),
}
LIMIT = 4  # seconds of the phase where no signal comes
PATIENCE = 2  # seconds after which a process of the run that is stopped is lost: before the limit, so that it is named


def cells(share=1.0, seed=0):
    """Return all cells, or a random share of each phase, at least one."""
    found = []
    for phase, (ranks, _) in PHASES.items():
        every = [(phase, sent, number) for sent in SIGNALS for number in ranks]
        count = len(every) if share == 1 else max(1, round(share * len(every)))
        found += every if share == 1 else random.Random(f"{seed}{phase}").sample(every, count)
    return found


def hang(*words, **more):
    """Tell that the phase is reached, and wait in C++ for ever."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    Path(f"reached-{os.environ.get('LOCAL_RANK', '0')}").touch()
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(hours=1)).get("never")


def sleep(*words, **more):
    """Tell that the phase is reached, and sleep for ever in a thread."""
    Path("reached-0").touch()
    time.sleep(3600)


def before():
    """Make the phase that VITLAB_HANGS names hang, in a process of the run."""
    import torch
    import wandb

    from vitlab.data import Digits
    from vitlab.data.pack import write
    from vitlab.runs import guard
    from vitlab.runs.generations import BackgroundCheckpointIO
    from vitlab.tasks import Classifier

    rank, last = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ["VITLAB_RANKS"]) - 1
    Path(f"pid-{rank}").write_text(f"{os.getpid()} {os.environ['VITLAB_CLIENT']}")
    guard.SILENT = 0.5
    match os.environ["VITLAB_HANGS"]:
        case "rendezvous" if rank == last:
            torch.distributed.init_process_group = hang
        case "rendezvous":
            init = torch.distributed.init_process_group

            @functools.wraps(init)
            def told(*words, **more):
                Path(f"reached-{rank}").touch()
                init(*words, **more)

            torch.distributed.init_process_group = told
        case "download":
            Digits.prepare_data = hang
        case "data set-up":
            Digits.read = hang
        case "first step, as when compiling":
            Classifier.training_step = hang
        case "draining a checkpoint":
            BackgroundCheckpointIO._write = sleep
        case "finishing W&B":
            wandb.finish = sleep
        case "packing":
            write.encoded = hang


def words_of(phase, ranks, folder):
    """Return the words of the command."""
    if phase == "packing":
        from users import photos

        return ["pack", photos(folder), "packed", "--size", "16", "--num_workers", "0"]
    words = FIT if phase != "finishing W&B" else [word for word in FIT if word != "--trainer.logger=false"]
    more = [f"--trainer.devices={ranks}", "--trainer.strategy=ddp"] if ranks > 1 else []
    return [*words, *more, "--name", "a"]


def run(cell, folder, python):
    """Run a cell; return what happened, and what is wrong if anything is."""
    phase, sent, which = cell
    ranks, harm = RANKS[which]
    folder.mkdir(parents=True)
    launch = f"launch{time.monotonic_ns()}"
    facts = os.environ | {"VITLAB_LAUNCH": launch, "VITLAB_PYTHON": str(python.path), "OMP_NUM_THREADS": "1"}
    facts |= {"VITLAB_BEFORE": "phases:before", "VITLAB_HANGS": phase, "VITLAB_RANKS": str(ranks)}
    facts |= {"WANDB_MODE": "offline", "VITLAB_RANK_TIMEOUT": str(PATIENCE)}
    if sent == "none":
        facts[f"VITLAB_{PHASES[phase][1]}_TIMEOUT"] = str(LIMIT)
    line = [python.path, "-m", "vitlab", *words_of(phase, ranks, folder)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            line, cwd=folder, env=facts, start_new_session=True, stdout=log, stderr=subprocess.STDOUT
        )
    everywhere = phase in ("rendezvous", "data set-up", "first step, as when compiling")
    must = [folder / f"reached-{rank}" for rank in range(ranks if everywhere else 1)]
    pids = [folder / f"pid-{rank}" for rank in range(ranks)]
    try:
        if not until(lambda: all(path.exists() for path in [*must, *pids]), seconds=90, every=0.02):
            return {"code": None, "seconds": 0}, f"{cell}: the phase was not reached: {(folder / 'log').read_text()}"
        time.sleep(1.0)
        number = [[int(word) for word in path.read_text().split()] for path in pids]
        started = time.monotonic()
        if harm:
            for pid in number[-1]:
                with suppress(ProcessLookupError):
                    os.kill(pid, harm)
            time.sleep(0.3 if sent != "none" else 0)
        for each in SIGNALS[sent]:
            started = time.monotonic()
            for pid, _ in number if each == signal.SIGINT else number[:1]:  # a terminal interrupts all
                with suppress(ProcessLookupError):
                    os.kill(pid, each)
            time.sleep(0.6 if each == signal.SIGINT and started else 0)
        started = started if sent != "Ctrl-C twice" else time.monotonic() - 0.6
        until(lambda: process.poll() is not None, seconds=60, every=0.02)
        found = {"code": process.poll(), "seconds": round(time.monotonic() - started, 1)}
        until(lambda: not python.alive(launch), seconds=10, every=0.05)
        left = {} if harm == signal.SIGSTOP else python.alive(launch)
        return found, judge(cell, found, left, (folder / "log").read_text())
    finally:
        for pid in (*python.alive(launch), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def judge(cell, found, left, said):
    """Return what is wrong with the end of a cell, None if nothing is."""
    phase, sent, which = cell
    code, most = {"SIGTERM": ({75}, 10), "Ctrl-C twice": ({130}, 1), "none": ({75}, LIMIT + 10)}[sent]
    if phase == "finishing W&B" and sent == "none":
        code = {0}  # the training is done
    if "one" in which and sent == "none":
        code, most = {1, 75}, LIMIT + 20
        if "process 2" not in said and "processes 1 to 2" not in said:
            return f"{cell}: nobody is named: {said[-400:]}"
    if "one" in which and sent == "SIGTERM":
        code = {75, 1}  # 1 where the loss is noticed first
    if found["code"] not in code or found["seconds"] > most:
        return f"{cell}: exit {found['code']} after {found['seconds']} s: {said[-600:]}"
    if "Traceback" in said or "frame #" in said:
        return f"{cell}: a traceback: {said[-1500:]}"
    if left:
        return f"{cell}: {len(left)} processes are left"
    if "waiting for" not in said:
        return f"{cell}: no line says what is waited for: {said[-600:]}"
    return None


def matrix(folder, chosen, python):
    """Run cells, one after the other; return what was found for each, and what is wrong."""
    found, wrong = {}, []
    for i, cell in enumerate(chosen):
        found[cell], problem = run(cell, folder / str(i), python)
        wrong += [problem] if problem else []
        if __name__ == "__main__":
            sys.stdout.write(f"{cell}: {found[cell]} {problem or ''}\n")
            sys.stdout.flush()
    return found, wrong


def main():
    """Run the cells that hold all the given words: WORD ..."""
    chosen = [cell for cell in cells() if all(word in str(cell) for word in sys.argv[1:])]
    with tempfile.TemporaryDirectory(prefix="phases") as place, Python() as python:
        found, wrong = matrix(Path(place), chosen, python)
    sys.stdout.write(f"{len(found)} cells, {len(wrong)} wrong\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
