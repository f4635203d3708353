"""The same workers as array jobs of SLURM: each is ``vitlab ablate run FILE`` on a node of its own.

Nothing is trained where they are submitted, not even a probe. Warned of its time limit, a worker lets its cells save,
ends with 75, and its script requeues it.
"""

import dataclasses
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitlab.ablation.execution.cells import Say
from vitlab.ablation.execution.commands import command
from vitlab.ablation.execution.process import VITLAB
from vitlab.ablation.file.spec import Ablation
from vitlab.errors import UsageError, did_you_mean, trusting
from vitlab.jobs.sbatch import REQUEUE, Site, ask_sbatch, attempts_text, check_text
from vitlab.runs.atomic import write_text

OWN = ("array_parallelism", *(field.name for field in dataclasses.fields(Site)))
SBATCH = (  # options of sbatch that may stand beside them; others belong under `sbatch`
    *("account", "chdir", "clusters", "comment", "constraint", "cpus_per_gpu", "dependency", "exclude", "exclusive"),
    *("export", "gres", "hold", "licenses", "mail_type", "mail_user", "mem", "mem_per_cpu", "mem_per_gpu", "nice"),
    *("nodelist", "oversubscribe", "partition", "prefer", "qos", "reservation", "tmp", "wckey"),
)
SCRIPT = """\
#!/bin/bash
# {title}
# Written by `vitlab ablate run`. Each worker takes cells that no other worker has, until none is left.
{header}
{setup}
{check}
# Slurm warns the worker: its cells save, and it exits with 75. This shell survives its own signal.
ended=
trap 'ended=1' TERM
{attempts}srun --cpus-per-task={cpus} {words}
code=$?
{requeue}"""


def needs_submission(ablation: Ablation) -> bool:
    """Return whether the cells run on SLURM and this machine is not one of its nodes."""
    return ablation.run.executor == "slurm" and "SLURMD_NODENAME" not in os.environ


def task_command(ablation: Ablation, more: Sequence[str] = ()) -> list[str]:
    """Return the command of one task of the array; it takes cells that other tasks have not claimed."""
    own = command(ablation) if not ablation.run.command else VITLAB
    trust = ["--trust_command"] if ablation.run.command else []
    return [*own, "ablate", "run", str(ablation.file.path.resolve()), *more, *trust]


def _given(ablation: Ablation) -> dict[str, Any]:
    """Return ``run.slurm`` by the names of this module; submitit's begin with ``slurm_``."""
    given = {str(key).removeprefix("slurm_"): value for key, value in ablation.run.slurm.items()}
    return {{"gpus_per_node": "gpus"}.get(key, key): value for key, value in given.items()}


def site(ablation: Ablation) -> tuple[Site, int]:
    """Return the settings of a task and its number of GPUs; refuse unknown keys of ``run.slurm``."""
    given = _given(ablation)
    for key in given:
        if key not in (*OWN, *SBATCH):
            hint = did_you_mean(key, (*OWN, *SBATCH)) or "; other options of sbatch go under `sbatch: {}`"
            raise ablation.file.mistake(f"run/slurm/{key}", f"`run.slurm` has no setting `{key}`{hint}")
    if "time" not in given:
        text = '`run.slurm` must have a `time`, the limit of one attempt, as in time: "04:00:00"'
        raise ablation.file.mistake("run/slurm", text)
    most = given.get("array_parallelism")
    if most is not None and (type(most) is not int or most < 1):
        text = f"`array_parallelism` must be a whole number of at least 1, got {most!r}"
        raise ablation.file.mistake("run/slurm", f"`run.slurm`: {text}")
    own = {key: value for key, value in given.items() if key in OWN and key != "array_parallelism"}
    more = {key: value for key, value in given.items() if key in SBATCH}
    gpus = own.get("gpus", 1)
    try:
        if own.get("nodes", 1) != 1:
            raise ValueError(f"`nodes` must be 1, got {own['nodes']!r}: a cell trains on one device")
        found = Site(**{**own, "gpus": gpus or 1, "sbatch": {**more, **(own.get("sbatch") or {})}})
    except ValueError as error:
        raise ablation.file.mistake("run/slurm", f"`run.slurm`: {error}") from error
    return found, gpus


def task_count(ablation: Ablation, cells: int) -> int:
    """Return how many tasks to submit for so many cells: as the file says, but never more than they take.

    `array_parallelism` is a number of tasks, `run.workers` one of cells at a time, of all tasks together.
    """
    per_task = max(1, site(ablation)[1] * ablation.run.per_gpu)
    most, workers = _given(ablation).get("array_parallelism"), ablation.run.workers
    if not most:
        most = math.ceil((cells if workers == "auto" else int(workers)) / per_task)
    return max(1, min(math.ceil(cells / per_task), most))


def batch_script(ablation: Ablation, tasks: int, more: Sequence[str] = ()) -> str:
    """Return the batch script for so many workers, to be passed to `sbatch`."""
    asked, gpus = site(ablation)
    own: dict[str, Any] = {"ntasks-per-node": 1, "array": f"0-{tasks - 1}"} | ({} if gpus else {"gpus-per-node": None})
    return SCRIPT.format(
        title=f"{ablation.name}: {tasks} workers",
        header=asked.header(ablation.name, _folder(ablation) / "%A_%a.out", **own),
        setup="\n".join(["", *asked.setup, ""]) if asked.setup else "",
        cpus=asked.cpus_per_task,
        check=check_text(asked, VITLAB, [ablation.file.path.resolve()]),
        words=shlex.join(task_command(ablation, more)),
        attempts=attempts_text(ablation.directory, _folder(ablation)),
        requeue=REQUEUE.format(script=_folder(ablation) / "workers.sbatch"),
    )


def submit_workers(ablation: Ablation, tasks: int, more: Sequence[str], say: Say) -> None:
    """Submit the workers that are not in the queue yet, in several arrays if the cluster limits their size.

    Arrays are chained: each starts after the previous one has started.

    Raises:
        UsageError: There is no SLURM here, or it refused the job.
    """
    if shutil.which("sbatch") is None:
        raise UsageError("`run.executor: slurm`: there is no sbatch on this machine; submit on a login node")
    queue = _ask("squeue", "--noheader", "--me", "--array", f"--name={ablation.name}", "--format=%i").split()
    if len(queue) >= tasks:
        say(f"{len(queue)} workers are in the queue already, such as {queue[0]}; nothing submitted")
        return
    tasks -= len(queue)
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", _ask("scontrol", "show", "config"), re.MULTILINE)
    most = max(1, int(found[1])) if found else tasks
    path = _folder(ablation) / "workers.sbatch"
    write_text(path, batch_script(ablation, min(tasks, most), more))
    own, jobs = site(ablation)[0].sbatch.get("dependency"), list[str]()
    for first in range(0, tasks, most):
        chain = ",".join(filter(None, [own, f"after:{jobs[-1]}" if jobs else None]))
        own_words = [f"--array=0-{min(most, tasks - first) - 1}", *([f"--dependency={chain}"] if chain else [])]
        done = ask_sbatch(path, *own_words)
        if done.returncode:
            before = f"; submitted before: {', '.join(jobs)}" if jobs else ""
            raise UsageError(f"sbatch refused the job: {' '.join(done.stderr.split())}{before}")
        jobs.append(done.stdout.strip().split(";")[0])  # number;cluster where there are several
    say(f"submitted {tasks} workers as {', '.join(jobs)}; logs in {path.parent}; `scancel {' '.join(jobs)}` stops them")
    say(f"follow   {trusting(f'vitlab ablate status {shlex.quote(str(ablation.file.path))}')}")


def _folder(ablation: Ablation) -> Path:
    return ablation.directory / "slurm"


def _ask(*asked: str) -> str:
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""
