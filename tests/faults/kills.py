"""Runs that are killed, at random moments or while a checkpoint is being written."""

import json
import os
import random
import signal
import time

import torch
from harness import TINY, Process, differences, finish, until

EPOCHS = 6 if os.environ.get("VITLAB_FAULTS_SHARE", "1") == "1" else 2  # of 35 steps
FIT = [*TINY, f"--trainer.max_epochs={EPOCHS}"]
OFTEN = ["--checkpoint.every_n_steps=2"]


def twin(folder):
    """Return a run that nobody has disturbed."""
    finish([*FIT, *OFTEN, "--name", "twin"], folder)
    return folder / "runs" / "twin"


def slowly():
    """Make every piece of a checkpoint take its time, so that kills hit the writing itself."""
    save = torch.save

    class Slow:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            self.file.write(data)
            self.file.flush()
            time.sleep(0.0005)
            return len(data)

        def flush(self):
            self.file.flush()

    torch.save = lambda content, file, **how: save(content, Slow(file), **how)


def usable(run):
    """Return whether the newest checkpoint of a run is whole and the directory can be read."""
    from vitlab.runs.directory import RunDir
    from vitlab.runs.manifest import damage

    last = run / "checkpoints" / "last.ckpt"
    if last.is_file():
        if damage(last) is not None:
            return False
        torch.load(last, weights_only=True)
    if (run / "run.json").is_file():
        json.loads((run / "run.json").read_text())
    RunDir(run).rows()
    return True


def length(path):
    """Return the bytes of a file, 0 if there is none."""
    return path.stat().st_size if path.is_file() else 0


def start_or_resume(run, before=None):
    """Continue a run, or start it where it was killed before it had written its configuration."""
    words = [*FIT, *OFTEN, "--name", run.name]
    words += ["--resume"] if (run / "config.yaml").is_file() else []
    return Process(words, run.parents[1], before)


def kill_at_random(folder, name, kills, seconds, seed):
    """Kill one run ``kills`` times, up to ``seconds`` after its first step or its start, and let it finish.

    Returns the number of kills that hit a live process, of moments at which the run was unusable, and the run.
    """
    draw = random.Random(seed)
    run = folder / "runs" / name
    done = unusable = 0
    while done < kills:
        rows = length(run / "metrics.jsonl")
        process = start_or_resume(run)
        if draw.random() < 0.75:  # the others hit the start
            until(lambda before=rows: length(run / "metrics.jsonl") > before, process)
        time.sleep(draw.uniform(0, seconds))
        process.send(signal.SIGKILL)
        code = process.wait()
        if code == -signal.SIGKILL:
            done += 1
            unusable += not usable(run)
        elif code == 0:  # it was quicker: begin the next run under the same name
            return done, unusable, run
        else:
            raise AssertionError(f"attempt {done + 1} ended with {code}: {process.output()}")
    end = start_or_resume(run)
    assert end.wait(240) == 0, end.output()
    return done, unusable, run


def random_kills(folder, kills=50, seconds=1.2, chain=10, seed=0):
    """Kill runs at random moments, each up to ``chain`` times; return kills, unusable and diverged runs, and runs."""
    whole = twin(folder)
    killed = unusable = diverged = runs = 0
    while killed < kills:
        done, bad, run = kill_at_random(folder, f"run{runs}", min(chain, kills - killed), seconds, seed * 1000 + runs)
        killed, unusable, runs = killed + done, unusable + bad, runs + 1
        diverged += bool(differences(run, whole))
    return {"kills": killed, "runs": runs, "unusable": unusable, "diverged": diverged}


def _is_writing(run):
    return any((run / "checkpoints").glob(".writing*"))


def kills_in_writing(folder, kills=20, seed=1):
    """Kill a run while a checkpoint is being written; return kills, torn ``last.ckpt`` and other files left behind."""
    draw = random.Random(seed)
    run = folder / "runs" / "writing"
    whole = twin(folder)
    done = torn = 0
    while done < kills:
        process = start_or_resume(run, slowly)
        for _ in range(draw.randrange(1, 4)):  # of the first few checkpoints, one
            until(lambda: not _is_writing(run), process)
            until(lambda: _is_writing(run), process, every=0.0005)
        time.sleep(draw.uniform(0, 0.06))
        hit = _is_writing(run)
        process.send(signal.SIGKILL)
        code = process.wait()
        assert code == -signal.SIGKILL, process.output()
        if hit and _is_writing(run):  # the kill came before the rename
            done += 1
            torn += not usable(run)
    end = start_or_resume(run)
    assert end.wait(240) == 0, end.output()
    left = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert left == ["best.ckpt", "last.ckpt", "manifest.json", "previous.ckpt"], left
    return {"kills": done, "torn": torn, "diverged": int(bool(differences(run, whole)))}
