"""Load the initial weights of a new run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitlab.config.parser import user_mistakes
from vitlab.errors import UsageError
from vitlab.jobs.restore import misfit
from vitlab.jobs.terminal import say
from vitlab.jobs.train.job import Job
from vitlab.models.create import load_timm
from vitlab.models.load import load_weights, network_args
from vitlab.runs.directory import find_run
from vitlab.runs.manifest import check_whole

GIVEN = "the object given to vitlab.fit"  # as `init_from` of run.json


def load_given_weights(job: Job, state: Mapping[str, Any]) -> None:
    """Load the weights of the object that a Python caller gave as the model."""
    try:
        job.task.load_state_dict(state)
    except RuntimeError as error:
        raise misfit(None, error) from error
    say(f"init   weights of {GIVEN}, and not of `seed_everything`: give the class to draw new ones")


def load_initial_weights(job: Job, source: str, resize: str | None, grid: str | None) -> None:
    """Load weights of another model into the network, and print what was changed to make them fit."""
    if source == GIVEN:
        raise UsageError(f"{job.run.path} has no checkpoint yet, and its weights were those of an object: fit it again")
    how = {"resize": resize or "usual", "grid": [int(side) for side in grid.split(",")] if grid else None}
    with user_mistakes():
        if source.startswith("timm:"):
            sentences = load_timm(job.task.net, source, network_args(job.task.hparams), **how)
        else:
            path = Path(source) if Path(source).is_file() else find_run(source)[1]
            check_whole(path)
            sentences = load_weights(job.task.net, path, **how)  # type: ignore[arg-type]
    for sentence in [f"weights of {source}", *sentences]:
        say(f"init   {sentence}")
