"""The same workers as an array job of SLURM: each is ``vitlab ablate run FILE`` on a node of its own."""

import inspect
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.work.resolve import command
from vitlab.errors import UsageError, did_you_mean


def worker_words(ablation: Ablation, file: str) -> list[str]:
    """Return the command of one task of the array; it finds its cells by the claims of the others."""
    own = command(ablation) if not ablation.run.command else [sys.executable, "-m", "vitlab"]
    return [
        *own,
        "ablate",
        "run",
        str(Path(file).resolve()),
        "--workers",
        "1",
        *(["--trust_command"] if ablation.run.command else []),
    ]


def parameters(ablation: Ablation, workers: int) -> dict[str, Any]:
    """Return what submitit is told: ``run.slurm``, its keys with the prefix that submitit gives to SLURM's own."""
    given = dict(ablation.run.slurm)
    width = int(given.pop("array_parallelism", workers))
    hours = given.pop("time", None)
    named = {f"slurm_{k}" if not k.startswith("slurm_") else k: v for k, v in given.items()}
    named |= {"name": ablation.name, "slurm_array_parallelism": width}
    return {**named, "slurm_time": str(hours)} if hours else named


def script(ablation: Ablation, file: str, workers: int) -> str:
    """Return a batch script that does what :func:`submit` submits; `sbatch` takes it as it is."""
    from submitit.slurm import slurm

    settings = {k.removeprefix("slurm_"): v for k, v in _checked(ablation, workers).items()}
    settings["job_name"] = settings.pop("name")
    return slurm._make_sbatch_string(
        command=shlex.join(worker_words(ablation, file)),
        folder=ablation.directory / "slurm",
        map_count=settings["array_parallelism"],
        **settings,
    )


def _checked(ablation: Ablation, workers: int) -> dict[str, Any]:
    """Return the settings; refuse those that submitit does not know."""
    try:
        from submitit.slurm import slurm
    except ImportError as error:
        raise UsageError("`run.executor: slurm` needs submitit: pip install 'vitlab[slurm]'") from error
    known = {*inspect.signature(slurm._make_sbatch_string).parameters, "name"} - {"command", "folder", "map_count"}
    settings = parameters(ablation, workers)
    for key in settings:
        if (name := key.removeprefix("slurm_")) not in known:
            hint = did_you_mean(name, known) or "; see `additional_parameters` of submitit for what it does not know"
            raise ablation.file.mistake(f"run/slurm/{name}", f"`run.slurm` has no setting `{name}`{hint}")
    return settings


def submit(ablation: Ablation, file: str, workers: int, say: Callable[[str], None]) -> None:
    """Submit the workers."""
    settings = _checked(ablation, workers)
    import submitit

    executor = submitit.AutoExecutor(folder=ablation.directory / "slurm")
    if executor.cluster != "slurm":
        raise UsageError("`run.executor: slurm`: there is no SLURM on this machine (no `sbatch`); use executor: local")
    executor.update_parameters(**settings)
    words = worker_words(ablation, file)
    jobs = executor.map_array(subprocess.check_call, [words] * settings["slurm_array_parallelism"])
    say(f"submitted {len(jobs)} workers as {jobs[0].job_id.split('_')[0]}; follow: `vitlab ablate status {file}`")
