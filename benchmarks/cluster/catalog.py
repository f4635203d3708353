"""What a cluster does to jobs: time limits, preemption, cancellation, dead and silent nodes, arrays, several nodes.

Every job trains as `vitlab submit` and `vitlab ablate run` let it, a step every two seconds so that it is still at work
when something happens to it. What is right: each step is recorded once, and the final weights are, to the bit, those of
a job that nothing happened to.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from safetensors.torch import load_file

from cluster.daemons import Cluster, wait_for

PACE = '''
import os
import time

from lightning.pytorch.callbacks import Callback


class Pace(Callback):
    """Sleeps after each step, for as many seconds as the environment says; numbers are those of a run without it."""

    def on_train_batch_end(self, *args):
        time.sleep(float(os.environ.get("PACE", "0")))
'''
RECIPE = {
    "seed_everything": 0,
    "trainer": {
        "max_epochs": 7,
        "accelerator": "cpu",
        "strategy": "auto",
        "logger": False,
        "log_every_n_steps": 1,
        "callbacks": ["pace.Pace"],
    },
    "model": {
        "class_path": "Classifier",
        "init_args": {"patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2, "mlp_ratio": 2.0},
    },
    "data": {"class_path": "Digits", "init_args": {"batch_size": 32, "subset": 0.25, "num_workers": 0}},
}
STEPS = 7 * 9  # of a job: two minutes at the pace
SITE = {"nodes": 1, "gpus": 1, "cpus_per_task": 1, "time": "2:00", "warn_seconds": 25}
ABLATION = """\
name: array
base: recipe.yaml
axes:
  pos_embed: {none: {model.pos_embed: none}, learned: {model.pos_embed: learned}}
seeds: 2
baseline: {pos_embed: none}
metric: {primary: acc1}
claims: [learned > none]
trust_imports: pace
"""
SLURM = """\
run:
  executor: slurm
  slurm: {time: "2:00", warn_seconds: 25, gpus: 0, cpus_per_task: 1, array_parallelism: 2, partition: low}
"""
LONG = 1800.0  # seconds after which a job counts as lost


class Seen(NamedTuple):
    """A row of the table.

    Args:
        what: What happened to the jobs.
        jobs: Their number.
        starts: How often they were started, all together.
        found: What was found.
        must: What had to be found.
    """

    what: str
    jobs: int
    starts: int
    found: str
    must: str


class Lab:
    """A folder from which jobs are submitted to a cluster.

    Args:
        cluster: Where they run; None if nothing is submitted.
        folder: Holds recipe, sites and runs.
    """

    cluster: Cluster

    def __init__(self, cluster: Cluster | None, folder: Path) -> None:
        if cluster:
            self.cluster = cluster
        self.folder = folder
        folder.mkdir()
        (folder / "pace.py").write_text(PACE)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
        own = {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
        own["MASTER_ADDR"] = "127.0.0.1"  # no name server knows the nodes `a` and `b`
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        known = cluster.environment if cluster else dict(os.environ)
        self.environment = known | own | {"PATH": path, "VITLAB_JOIN_TIMEOUT": "300"}

    def run(self, *words: str, pace: float = 2.0, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command in this folder, or in another one."""
        environment, place = self.environment | {"PACE": str(pace)}, folder or self.folder
        return subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, check=False)

    def submit(self, name: str, *words: str, pace: float = 2.0, seed: int = 0, **site: object) -> str:
        """Submit a run and return the number of its job.

        Raises:
            RuntimeError: It was refused.
        """
        done = self.try_to_submit(name, *words, f"--seed_everything={seed}", pace=pace, **site)
        found = re.search(r"^job +(\d+)", done.stdout)
        if not found:
            raise RuntimeError(done.stdout + done.stderr)
        return found[1]

    def try_to_submit(
        self, name: str, *words: str, pace: float = 2.0, **site: object
    ) -> subprocess.CompletedProcess[str]:
        """Submit a run with values of its own in the settings of the cluster."""
        (self.folder / f"{name}-site.yaml").write_text(yaml.safe_dump(SITE | site))
        own = ["--slurm", f"{name}-site.yaml", "--config", "recipe.yaml", "--name", name, "--trust_imports", "pace"]
        return self.run("vitlab", "submit", "fit", *own, *words, pace=pace)

    def undisturbed(self, seed: int, *words: str, **site: object) -> str:
        """Return the name of a run of the same words that nothing happens to, which is trained when first asked for."""
        name = f"still-{seed}-{site.get('nodes', 1)}x{site.get('gpus', 1)}"
        if not (self.folder / "runs" / name).exists():
            job = self.submit(name, *words, pace=0.0, seed=seed, **{**site, "time": "60:00"})
            self.wait(job, "COMPLETED")
        return name

    def wait(self, job: str, state: str, seconds: float = LONG) -> float:
        """Wait for the state of a job; one that ends otherwise is told at once.

        Raises:
            RuntimeError: It ended otherwise.
            TimeoutError: It did not end.
        """

        def reached() -> bool:
            found = self.cluster.state(job)
            if found in ("FAILED", "CANCELLED", "COMPLETED", "TIMEOUT") and found != state:
                logs = sorted((self.folder / "runs" / "slurm").glob(f"*-{job}.out"))
                raise RuntimeError(f"job {job} is {found}:\n" + "".join(log.read_text()[-3000:] for log in logs))
            return found == state

        return wait_for(reached, seconds, f"job {job} to be {state}")

    def begin(self, name: str, *words: str, steps: int = 10, **site: object) -> str:
        """Submit a run that nothing but the scenario disturbs, and return its job once it has recorded some steps."""
        job = self.submit(name, *words, **{"time": "30:00", **site})
        wait_for(lambda: len(self.steps(name)) >= steps, 600, f"{steps} steps of {name}")
        return job

    def wait_for_both_nodes(self) -> None:
        """Wait until both nodes are idle again."""
        wait_for(lambda: self.cluster.states() == ["idle", "idle"], 120, "the node to be back")

    def wait_for_requeue(self, job: str) -> None:
        """Wait until Slurm has given up the node of a job and put it into the queue again."""
        wait_for(lambda: self.restarts([job]) > 0, 180, "Slurm to miss the node")

    def steps(self, name: str) -> list[int]:
        """Return the recorded steps of a run's training, in the order of the rows."""
        path = self.folder / "runs" / name / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        return [row["step"] for row in rows if any(key.startswith("train/") for key in row)]

    def restarts(self, jobs: list[str]) -> int:
        """Return how often Slurm has started jobs again, all together."""
        return sum(int(self.cluster.job(job).get("Restarts", 0)) for job in jobs)

    def right(self, name: str, still: str) -> bool:
        """Return whether a run has each step once and the weights of an undisturbed one."""
        ours, theirs = (load_file(self.folder / "runs" / n / "weights" / "last.safetensors") for n in (name, still))
        steps = self.steps(name)
        once = steps == sorted(set(steps)) == self.steps(still)
        return once and ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def seen(lab: Lab, what: str, runs: dict[str, str], jobs: list[str], extra: str = "", must: str = "") -> Seen:
    """Return the row of jobs that are through.

    Args:
        lab: Where they were.
        what: What happened to them.
        runs: Their runs, each with an undisturbed one.
        jobs: Their numbers.
        extra: What was found besides.
        must: What had to be found besides.
    """
    equal = sum(lab.right(name, still) for name, still in runs.items())
    found = [f"{equal} of {len(runs)} equal", extra], [f"{len(runs)} of {len(runs)} equal", must]
    return Seen(what, len(jobs), len(jobs) + lab.restarts(jobs), *(", ".join(filter(None, texts)) for texts in found))


def time_limits(lab: Lab, count: int = 20) -> Seen:
    """Jobs that need more time than their limit."""
    runs = {f"limit-{i}": lab.undisturbed(i % 4) for i in range(count)}
    jobs = [lab.submit(name, seed=i % 4) for i, name in enumerate(runs)]
    for job in jobs:
        lab.wait(job, "COMPLETED")
    requeued = sum(lab.restarts([job]) > 0 for job in jobs)
    extra, must = (f"{n} of {count} warned, saved and requeued" for n in (requeued, count))
    return seen(lab, "time limit of two minutes", runs, jobs, extra, must)


def preemption(lab: Lab) -> Seen:
    """A job of higher priority takes both nodes."""
    still = lab.undisturbed(0)
    job = lab.begin("low", sbatch={"partition": "low"})
    words = ["--parsable", "--partition=high", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap=sleep 20"]
    high = lab.run("sbatch", *words).stdout.strip()
    lab.wait(high, "RUNNING", 120)
    lab.wait(job, "COMPLETED")
    extra = f"requeued {lab.restarts([job])} time"
    return seen(lab, "preempted by a partition of higher priority", {"low": still}, [job], extra, "requeued 1 time")


def cancellation(lab: Lab) -> Seen:
    """A job is canceled, stays so, and its script is submitted again."""
    still = lab.undisturbed(0)
    job = lab.begin("canceled")
    lab.cluster.ask("scancel", job)
    lab.wait(job, "CANCELLED", 120)
    time.sleep(30)
    stays = lab.cluster.state(job) == "CANCELLED" and lab.restarts([job]) == 0
    again = lab.run("sbatch", "--parsable", "runs/slurm/canceled.sbatch").stdout.strip()
    lab.wait(again, "COMPLETED")
    must = "stays canceled until `sbatch runs/slurm/NAME.sbatch`"
    extra = must if stays else "was started again by itself"
    return seen(lab, "`scancel`", {"canceled": still}, [job, again], extra, must)


def dead_daemon(lab: Lab) -> Seen:
    """The slurmd of a job's node is killed and starts again; the job goes on meanwhile."""
    still = lab.undisturbed(0)
    job = lab.begin("daemon")
    node = lab.cluster.job(job)["NodeList"]
    lab.cluster.daemons[node].kill()
    lab.cluster.daemons[node].wait()
    time.sleep(5)
    lab.cluster.start_node(node)
    lab.wait(job, "COMPLETED")
    extra = f"requeued {lab.restarts([job])} times"
    return seen(lab, "slurmd killed, started again after 5 s", {"daemon": still}, [job], extra, "requeued 0 times")


def crashed_node(lab: Lab) -> Seen:
    """All processes of a node are killed at once; Slurm notices and starts the job on the other node."""
    still = lab.undisturbed(0)
    job = lab.begin("crash", "--checkpoint.every_minutes=0.1", steps=20)
    node = lab.cluster.job(job)["NodeList"]
    lab.cluster.signal_node(node, signal.SIGKILL)
    lab.cluster.daemons[node].wait()
    lab.wait_for_requeue(job)
    lab.wait(job, "COMPLETED")
    lab.cluster.start_node(node)
    lab.wait_for_both_nodes()
    return seen(lab, "node crashed: all its processes killed", {"crash": still}, [job])


def silent_node(lab: Lab) -> Seen:
    """A node stops for minutes; Slurm starts the job on the other node, and then the first wakes up beside it."""
    still = lab.undisturbed(0)
    job = lab.begin("silent", "--checkpoint.every_minutes=0.1", steps=20)
    node = lab.cluster.job(job)["NodeList"]
    lab.cluster.signal_node(node, signal.SIGSTOP)
    lab.wait_for_requeue(job)
    wait_for(lambda: lab.cluster.state(job) == "RUNNING", 120, "the job to start again")
    time.sleep(45)
    lab.cluster.signal_node(node, signal.SIGCONT)
    lab.wait(job, "COMPLETED")
    lab.wait_for_both_nodes()
    return seen(lab, "node silent, awake again beside the second attempt", {"silent": still}, [job])


def array(lab: Lab) -> Seen:
    """The workers of an ablation reach their time limit in the middle of cells."""
    for name, text, pace in (("local", ABLATION, 0.0), ("array", ABLATION + SLURM, 2.0)):
        folder = lab.folder / name
        folder.mkdir()
        (folder / "array.yaml").write_text(text.replace("recipe.yaml", str(lab.folder / "recipe.yaml")))
        words = ["ablate", "run", str(folder / "array.yaml"), "--trust_imports", "pace"]
        done = lab.run("vitlab", *words, pace=pace, folder=folder)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
    job = re.search(r"submitted 2 workers as (\d+)", done.stdout)
    if not job:
        raise RuntimeError(done.stdout + done.stderr)
    cells = {name: _cells(lab.folder / name) for name in ("local", "array")}
    wait_for(lambda: len(_cells(lab.folder / "array")) == len(cells["local"]), LONG, "the cells of the array")
    cells["array"] = _cells(lab.folder / "array")
    tasks = [f"{job[1]}_{i}" for i in range(2)]
    for task in tasks:
        lab.wait(task, "COMPLETED", 600)
    equal = sum(cells["array"].get(name) == value for name, value in cells["local"].items())
    found = f"{equal} of {len(cells['local'])} cells equal"
    return Seen("array of two workers over their time limit", 2, 2 + lab.restarts(tasks), found, "4 of 4 cells equal")


def _cells(folder: Path) -> dict[str, object]:
    """Return the numbers of each cell that is trained and measured."""
    found = {}
    for path in sorted((folder / "runs" / "ablations" / "array").rglob("results.json")):
        record = json.loads((path.parent / "run.json").read_text())
        if record["status"] == "done":
            result = json.loads(path.read_text())["val"]
            found[path.parent.parent.name + path.parent.name] = {name: result[name] for name in ("loss", "acc1", "n")}
    return found


def two_nodes(lab: Lab) -> Seen:
    """Four processes on two nodes reach their time limit."""
    words, site = ["--trainer.strategy=ddp"], {"nodes": 2, "gpus": 2}
    still = lab.undisturbed(0, *words, **site)
    job = lab.submit("wide", *words, "--trainer.max_epochs=7", **site)
    lab.wait(job, "COMPLETED")
    extra = "requeued" if lab.restarts([job]) else "never warned"
    return seen(lab, "two nodes x two processes over the time limit", {"wide": still}, [job], extra, "requeued")


def lacking_node(lab: Lab) -> Seen:
    """Nodes that cannot read the config, and nodes on which vitlab does not start, end a job before it trains."""
    (lab.folder / "away.yaml").write_text("{}")
    site: dict[str, object] = {"nodes": 2, "time": "30:00"}
    jobs = {
        "config": lab.submit("config", "--config", "away.yaml", **site, sbatch={"hold": True}),
        "absent": lab.submit("absent", **site, setup=["export PATH=/usr/bin:/bin"]),
    }
    (lab.folder / "away.yaml").unlink()
    lab.cluster.ask("scontrol", "release", jobs["config"])
    told = 0
    for name, job in jobs.items():
        lab.wait(job, "FAILED", 300)
        log = (lab.folder / "runs" / "slurm" / f"{name}-{job}.out").read_text()
        lines = re.findall(r"^vitlab: node [ab]: (?:cannot read away.yaml|`vitlab` does not start).*$", log, re.M)
        code = lab.cluster.job(job)["ExitCode"]
        told += len(lines) == 2 and code == "2:0" and not (lab.folder / "runs" / name).exists()
    counts = (told, lab.restarts([*jobs.values()])), (2, 0)
    texts = [f"{n} of 2 ended with 2 and a line from each node, requeued {again} times" for n, again in counts]
    return Seen("nodes without the config, without vitlab", 2, 2, *texts)


def torchrun(lab: Lab) -> Seen:
    """Two machines without Slurm: network namespaces that only a cable joins, and the lines of docs/cluster.md."""
    recipe = ["-m", "vitlab", "fit", "--config", "recipe.yaml", "--trust_imports", "pace", "--trainer.strategy=ddp"]
    alone = lab.run("torchrun", "--nproc_per_node=2", *recipe, "--name", "alone", "--trainer.devices=2", pace=0.0)
    if alone.returncode:
        raise RuntimeError(alone.stdout + alone.stderr)
    spaces = [f"vitlab-{os.getpid()}-{i}" for i in range(2)]
    cable = [f"vl{os.getpid() % 100000}{end}" for end in "ab"]
    words = [*recipe, "--name", "apart", "--trainer.devices=1", "--trainer.num_nodes=2"]
    join = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=10.77.0.1", "--master_port=29500"]
    try:
        for space in spaces:
            _ip("netns", "add", space)
        _ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for i, (space, end) in enumerate(zip(spaces, cable, strict=True)):
            _ip("link", "set", end, "netns", space)
            _ip("-n", space, "addr", "add", f"10.77.0.{i + 1}/24", "dev", end)
            for name in ("lo", end):
                _ip("-n", space, "link", "set", name, "up")
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", space, "torchrun", *join, f"--node_rank={i}", *words],
                cwd=lab.folder,
                env=lab.environment | {"GLOO_SOCKET_IFNAME": end, "PACE": "0"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for i, (space, end) in enumerate(zip(spaces, cable, strict=True))
        ]
        codes = [rank.wait(600) for rank in ranks]
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
    if any(codes):
        raise RuntimeError(f"torchrun ended with {codes}")
    return seen(lab, "no Slurm: torchrun on two machines (network namespaces)", {"apart": "alone"}, [])._replace(
        starts=2
    )


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`ip {' '.join(words)}`, which needs root: {done.stderr}")


REFUSED: dict[str, tuple[dict[str, object], list[str]]] = {
    "unknown partition": ({"sbatch": {"partition": "nosuch"}}, []),
    "more GPUs than a node has": ({"gpus": 64}, ["--data.batch_size=64", "--trainer.strategy=ddp"]),
    "time below the guard": ({"time": "1:00"}, []),
    "a config that is not there": ({}, ["--config", "nosuch.yaml"]),
}


def refusals(lab: Lab) -> list[Seen]:
    """What cannot run is refused when it is submitted, in one line and with Slurm's words."""
    rows = []
    for what, (site, words) in REFUSED.items():
        done = lab.try_to_submit(f"refused-{len(rows)}", *words, **site)
        lines = [line for line in done.stderr.splitlines() if line]
        said = f": {lines[0]}" if len(lines) == 1 else f", {len(lines)} lines"
        rows.append(Seen(what, 0, 0, f"exit {done.returncode}{said}", "exit 1 or 2 with one line"))
    return rows


CATALOG: dict[str, Callable[[Lab], Seen]] = {
    each.__name__: each
    for each in (
        time_limits,
        preemption,
        cancellation,
        dead_daemon,
        crashed_node,
        silent_node,
        array,
        two_nodes,
        lacking_node,
        torchrun,
    )
}
