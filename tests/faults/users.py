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
from contextlib import suppress
from pathlib import Path

from forked import Python
from harness import TINY, differences, until
from kills import usable
from report import commit

OFTEN = ["--trainer.max_epochs=3", "--data.subset=0.3", "--checkpoint.every_n_steps=2"]
LOGGED = [word for word in TINY if word != "--trainer.logger=false"]  # which is W&B's, offline
BARE = [word for word in TINY if not word.startswith("--trainer.callbacks")]  # FSDP2 keeps no EMA
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
    "two processes (fsdp2), sharded checkpoints": (
        [*BARE, *CPU, "--trainer.devices=2", "--trainer.strategy=fsdp2"],
        4,
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

    def __init__(self, scenario, words, folder, python):
        self.folder, self.scenario, self.python = folder, scenario, python
        self.name = f"launch{time.monotonic_ns()}"
        facts = os.environ | {"VITLAB_LAUNCH": self.name, "VITLAB_PYTHON": str(python.path), "OMP_NUM_THREADS": "1"}
        line = [python.path, *(TORCHRUN if "torchrun" in scenario else ("-m", "vitlab")), *words]
        if "SLURM" in scenario:
            line, facts = submitted(words, folder, facts)
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                line, cwd=folder, env=facts, start_new_session=True, stdout=log, stderr=subprocess.STDOUT
            )
        until(self.ranks, seconds=30, every=0.005)

    def ranks(self):
        """Return the processes of the run, without what has started them."""
        return [pid for pid, words in self.python.alive(self.name).items() if "torch.distributed" not in words]

    def running(self):
        return self.process.poll() is None

    def kill(self, draw):
        """Kill one process, or all of them at once; where a node is lost, also the script."""
        ranks = self.ranks()
        for pid in (
            draw.choice([ranks, *([rank] for rank in ranks)]) if "SLURM" not in self.scenario and ranks else ranks
        ):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if "SLURM" in self.scenario:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return bool(ranks) or "SLURM" in self.scenario

    def end(self, seconds=300):
        """Return the exit code, once all processes are gone; None if one hangs."""
        if until(lambda: not self.running() and not self.python.alive(self.name), seconds=seconds, every=0.02):
            return self.process.wait()
        for pid in (*self.ranks(), self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return None

    def output(self):
        return (self.folder / "log").read_text()


def submitted(words, folder, facts):
    """Return the line that starts the script which `vitlab submit` has written, with stand-ins for Slurm's commands."""
    sys.path.append(str(Path(__file__).parents[1] / "cli"))
    from test_submit import SITE, STAND_INS

    name, desk = words[words.index("--name") + 1], folder / "bin"
    desk.mkdir(exist_ok=True)
    for command, body in {**STAND_INS, "vitlab": f'exec {facts["VITLAB_PYTHON"]} -m vitlab "$@"'}.items():
        (desk / command).write_text(f"#!/bin/bash\n{body}\n")
        (desk / command).chmod(0o755)
    facts |= {"PATH": f"{desk}:{os.environ['PATH']}", "DESK": str(folder), "SLURM_JOB_ID": "4711", "TASKS": "2"}
    facts |= {"MASTER_PORT": str(random.randrange(20000, 60000))}
    script, given = folder / "runs" / "slurm" / f"{name}.sbatch", [word for word in words if word != "--auto_resume"]
    if not script.is_file():
        line = [facts["VITLAB_PYTHON"], "-m", "vitlab", "submit", *given, "--slurm", SITE, "--nodes=1", "--gpus=2"]
        subprocess.run(line, cwd=folder, env=facts | {"VITLAB_LAUNCH": "none"}, check=True, capture_output=True)
    return ["bash", script], facts


def chain(scenario, folder, name, draw, seconds, kills, python):
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
        process = process if one_launch and process else Started(scenario, words, folder, python)
        time.sleep(draw.uniform(0, 0.8 * seconds))
        if not process.running():
            break
        hit += process.kill(draw)
        if not one_launch:
            code = process.end(90)
            unusable += not usable(run) if run.is_dir() else 0
            if code is None:
                return hit, [f"hung after a kill: {process.output()[-600:]}"], unusable, run
    last = process if one_launch and process else Started(scenario, words, folder, python)
    code = last.end()
    return hit, [] if code == 0 else [f"exit {code}: {last.output()[-600:]}"], unusable, run


def collect(kept, minutes, names=(), seed=None, once=False):
    """Kill runs of the scenarios in turn for some minutes; add the figures to those in the file ``kept``.

    With ``once`` one run of each, which is killed twice.
    """
    draw = random.Random(seed)
    figures = json.loads(kept.read_text()) if kept.is_file() else {}
    until_then = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="kills") as place, Python() as python:
        twins = {}
        while time.monotonic() < until_then and not (once and len(twins) == len(names)):
            fewest = sorted(names or SCENARIOS, key=lambda name: figures.get(name, {}).get("runs", 0))
            scenario, folder = fewest[0], Path(place) / str(abs(hash(fewest[0])))
            folder.mkdir(exist_ok=True)
            known = figures.setdefault(scenario, {"kills": 0, "runs": 0, "unusable": 0, "dead": [], "diverged": []})
            if scenario not in twins:
                started = time.monotonic()
                _, dead, _, run = chain(scenario, folder, "twin", draw, 0, 0, python)
                assert not dead, dead
                twins[scenario] = run, time.monotonic() - started
            twin, seconds = twins[scenario]
            name = f"run{known['runs']}-{draw.randrange(10**6)}"
            kills = 2 if once else SCENARIOS[scenario][1]
            hit, dead, unusable, run = chain(scenario, folder, name, draw, seconds, kills, python)
            extra = [path.name for path in run.parent.iterdir() if path.name not in seen(folder, run.name)]
            known["kills"] += hit
            at = known.setdefault("at", {})
            at[commit()] = at.get(commit(), 0) + hit
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
    parser.add_argument("--once", action="store_true", help="one run of each scenario, killed twice")
    options = parser.parse_args()
    names = [name for name in SCENARIOS if not options.only or any(word in name for word in options.only)]
    figures = collect(options.kept, options.minutes, names, once=options.once)
    for name, found in figures.items():
        sys.stdout.write(f"{name}: {found}\n")
    return int(any(found["dead"] or found["unusable"] or found["diverged"] for found in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
