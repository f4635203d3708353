"""Runs that are killed as users run them: loggers on, from the first millisecond, in one process or several.

``python tests/faults/users.py KEPT.json --minutes 20`` adds its figures to those of earlier calls.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import TINY, Process, differences, until
from kills import usable
from ranks import children, launch, session

OFTEN = ["--trainer.max_epochs=3", "--data.subset=0.5", "--checkpoint.every_n_steps=3"]
LOGGED = [word for word in TINY if word != "--trainer.logger=false"]  # which is W&B's, offline
CPU = ["--trainer.accelerator=cpu"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=3", "-m", "vitlab"]
SCENARIOS = {  # words of `vitlab`, and how often a run is killed before it may come to its end
    "one process, W&B on": (LOGGED, 8),
    "photos, two workers, W&B on": ([*LOGGED, "--data.num_workers=2", "--data.img_size=16"], 6),
    "two processes (ddp)": ([*TINY, *CPU, "--trainer.devices=2", "--trainer.strategy=ddp"], 3),
    "three processes (ddp)": (
        [*TINY, *CPU, "--trainer.devices=3", "--data.batch_size=36", "--trainer.strategy=ddp"],
        3,
    ),
    "torchrun, two processes, --max_restarts=3": ([*TINY, *CPU], 3),
    "the SLURM script, two tasks": ([*TINY, *CPU, "--trainer.strategy=ddp"], 3),
}


def photos(folder):
    """Write a folder of images of three classes, once."""
    from PIL import Image

    for i in range(0 if (folder / "photos").is_dir() else 240):
        path = folder / "photos" / f"class{i % 3}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((20, 20), 20 + 60 * (i % 3)).convert("RGB").save(path)
    return str(folder / "photos")


class Started:
    """A run on its way, however it was started; ``kill`` hits it, and ``end`` waits for its exit code."""

    def __init__(self, scenario, words, folder):
        self.folder, self.scenario = folder, scenario
        self.forked = not any(word in scenario for word in ("processes", "SLURM"))
        if self.forked:
            self.process = Process(words, folder)
        elif "SLURM" in scenario:
            self.process = submitted(words, folder)
        else:
            self.process = launch(words, folder, TORCHRUN if "torchrun" in scenario else ("-m", "vitlab"))

    def running(self):
        return self.process.running() if self.forked else self.process.poll() is None

    def kill(self, draw):
        """Kill the process, one of several, or all of them at once."""
        if self.forked:
            return self.process.send(signal.SIGKILL)
        found = [pid for pid in children(self.process.pid) if pid != self.process.pid]
        ranks = found if "torchrun" in self.scenario else [*found, self.process.pid]
        if "SLURM" in self.scenario:  # a node is lost
            return os.killpg(self.process.pid, signal.SIGKILL)
        for pid in draw.choice([ranks, *([rank] for rank in ranks)]) if ranks else ():
            os.kill(pid, signal.SIGKILL)
        return None

    def end(self, seconds=300):
        """Return the exit code, once all processes are gone; None if one hangs."""
        if self.forked:
            return self.process.wait(seconds)
        gone = until(
            lambda: self.process.poll() is not None and not session(self.process.pid), seconds=seconds, every=0.2
        )
        if not gone:
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait() if gone else None

    def output(self):
        return self.process.output() if self.forked else (self.folder / "log").read_text()


def submitted(words, folder):
    """Start the script that `vitlab submit` has written, with stand-ins for Slurm's commands."""
    sys.path.append(str(Path(__file__).parents[1] / "cli"))
    from test_submit import SITE, STAND_INS

    name, desk = words[words.index("--name") + 1], folder / "bin"
    desk.mkdir(exist_ok=True)
    for command, body in {**STAND_INS, "vitlab": f'exec {sys.executable} -m vitlab "$@"'}.items():
        (desk / command).write_text(f"#!/bin/bash\n{body}\n")
        (desk / command).chmod(0o755)
    facts = {"PATH": f"{desk}:{os.environ['PATH']}", "DESK": str(folder), "SLURM_JOB_ID": "4711", "TASKS": "2"}
    facts |= {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(random.randrange(20000, 60000))}
    script, given = folder / "runs" / "slurm" / f"{name}.sbatch", [word for word in words if word != "--auto_resume"]
    if not script.is_file():
        line = [sys.executable, "-m", "vitlab", "submit", *given, "--slurm", SITE, "--nodes=1", "--gpus=2"]
        subprocess.run(line, cwd=folder, env=os.environ | facts, check=True, capture_output=True)
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            ["bash", script], cwd=folder, env=os.environ | facts, start_new_session=True, stdout=log, stderr=log
        )


def chain(scenario, folder, name, draw, seconds, kills):
    """Kill one run at random moments from its first millisecond on; let it finish.

    ``seconds`` is how long an undisturbed one takes. Returns the kills that hit, dead ends with what was said, moments
    at which the directory was unusable, and the run.
    """
    words = [*SCENARIOS[scenario][0], *OFTEN, "--name", name, "--auto_resume"]
    if "photos" in scenario:
        words += ["--data=ImageFolder", f"--data.root={photos(folder)}"]
    run, hit, unusable = folder / "runs" / name, 0, 0
    one_launch = "torchrun" in scenario  # which starts its processes again by itself
    process = None
    for _ in range(kills):
        process = process if one_launch and process else Started(scenario, words, folder)
        time.sleep(draw.uniform(0, 0.8 * seconds))
        if not process.running():
            break
        process.kill(draw)
        hit += 1
        if not one_launch:
            code = process.end(90)
            unusable += not usable(run) if run.is_dir() else 0
            if code is None:
                return hit, [f"hung after a kill: {process.output()[-600:]}"], unusable, run
    last = process if one_launch and process else Started(scenario, words, folder)
    code = last.end()
    return hit, [] if code == 0 else [f"exit {code}: {last.output()[-600:]}"], unusable, run


def collect(kept, minutes, names=(), seed=None):
    """Kill runs of the scenarios in turn for some minutes; add the figures to those in the file ``kept``."""
    draw = random.Random(seed)
    figures = json.loads(kept.read_text()) if kept.is_file() else {}
    until_then = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="kills") as place:
        twins = {}
        while time.monotonic() < until_then:
            fewest = sorted(names or SCENARIOS, key=lambda name: figures.get(name, {}).get("runs", 0))
            scenario, folder = fewest[0], Path(place) / str(abs(hash(fewest[0])))
            folder.mkdir(exist_ok=True)
            known = figures.setdefault(scenario, {"kills": 0, "runs": 0, "unusable": 0, "dead": [], "diverged": []})
            if scenario not in twins:
                Process(["--version"], folder).wait()  # what all import is imported once
                started = time.monotonic()
                _, dead, _, run = chain(scenario, folder, "twin", draw, 0, 0)
                assert not dead, dead
                twins[scenario] = run, time.monotonic() - started
            twin, seconds = twins[scenario]
            name = f"run{known['runs']}-{draw.randrange(10**6)}"
            hit, dead, unusable, run = chain(scenario, folder, name, draw, seconds, SCENARIOS[scenario][1])
            extra = [path.name for path in run.parent.iterdir() if path.name not in seen(folder, run.name)]
            known["kills"] += hit
            known["runs"] += 1
            known["unusable"] += unusable
            known["dead"] += dead + [f"another directory: {one}" for one in extra]
            known["diverged"] += [] if dead or not differences(run, twin) else [str(differences(run, twin)[:5])]
            known["attempts"] = known.get("attempts", 0) + json.loads((run / "run.json").read_text()).get("attempts", 0)
            kept.write_text(json.dumps(figures, indent=1))
    return figures


def seen(folder, name):
    """Return the names that may stand in runs/: those of runs that were asked for."""
    known = folder / "names"
    names = {*(known.read_text().split() if known.is_file() else ()), name, "twin", "slurm", ".launch"}
    known.write_text(" ".join(names))
    return names


def main():
    """Collect, and print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kept", type=Path)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--only", action="append", default=[], help="scenarios whose name holds this")
    options = parser.parse_args()
    names = [name for name in SCENARIOS if not options.only or any(word in name for word in options.only)]
    figures = collect(options.kept, options.minutes, names)
    for name, found in figures.items():
        sys.stdout.write(f"{name}: {found}\n")
    return int(any(found["dead"] or found["unusable"] or found["diverged"] for found in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
