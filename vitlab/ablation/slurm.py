"""The same workers as an array job of SLURM: each is ``vitlab ablate run FILE`` on a node of its own."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitlab.ablation.resolve import command
from vitlab.ablation.spec import Ablation
from vitlab.errors import UsageError


def worker_words(ablation: Ablation, file: str) -> list[str]:
    """Return the command of one task of the array; it finds its cells by the claims of the others."""
    own = command(ablation) if not ablation.run["command"] else [sys.executable, "-m", "vitlab"]
    return [*own, "ablate", "run", str(Path(file).resolve()), "--workers", "1"]


def parameters(ablation: Ablation, workers: int) -> dict[str, Any]:
    """Return what submitit is told: ``run.slurm``, its keys with the prefix that submitit gives to SLURM's own."""
    given = dict(ablation.run["slurm"])
    width = int(given.pop("array_parallelism", workers))
    hours = given.pop("time", None)
    named = {f"slurm_{k}" if not k.startswith("slurm_") else k: v for k, v in given.items()}
    named |= {"name": ablation.name, "slurm_array_parallelism": width}
    return {**named, "slurm_time": str(hours)} if hours else named


def describe(ablation: Ablation, file: str, workers: int) -> list[str]:
    """Return what would be submitted, as comments of a shell."""
    settings = parameters(ablation, workers)
    lines = [f"# {key}: {value}" for key, value in settings.items()]
    return [f"# {settings['slurm_array_parallelism']} tasks of: {shlex.join(worker_words(ablation, file))}", *lines]


def submit(ablation: Ablation, file: str, workers: int, say: Callable[[str], None]) -> int:
    """Submit the workers and return the exit code."""
    try:
        import submitit
    except ImportError as error:
        raise UsageError("`run.executor: slurm` needs submitit: pip install 'vitlab[slurm]'") from error
    executor = submitit.AutoExecutor(folder=ablation.directory / "slurm")
    if executor.cluster != "slurm":
        raise UsageError("`run.executor: slurm`: there is no SLURM on this machine (no `sbatch`); use executor: local")
    settings = parameters(ablation, workers)
    executor.update_parameters(**settings)
    words = worker_words(ablation, file)
    jobs = executor.map_array(subprocess.check_call, [words] * settings["slurm_array_parallelism"])
    say(f"submitted {len(jobs)} workers as {jobs[0].job_id.split('_')[0]}; follow: `vitlab ablate status {file}`")
    return 0
