"""The weights that a new run starts from."""

import tempfile
from pathlib import Path

from safetensors.torch import save_file

from vitlab.config.options import Policy
from vitlab.config.parser import user_mistakes
from vitlab.jobs.terminal import say
from vitlab.jobs.train.job import Job
from vitlab.models.create import timm_model
from vitlab.models.load import load_weights
from vitlab.runs.directory import find_run
from vitlab.runs.manifest import check_whole


def load_initial_weights(job: Job, source: str, resize: Policy | None) -> None:
    """Start from the weights of another model, and say what was changed to make them fit."""
    with tempfile.TemporaryDirectory() as folder, user_mistakes():
        if source.startswith("timm:"):
            path = _fetch_timm(source.removeprefix("timm:"), Path(folder))
        else:
            path = Path(source) if Path(source).is_file() else find_run(source)[1]
            check_whole(path)
        sentences = load_weights(job.task.net, path, resize or "usual")
    for sentence in [f"weights of {source}", *sentences]:
        say(f"init   {sentence}")


def _fetch_timm(name: str, folder: Path) -> Path:
    state = timm_model(name, pretrained=True).state_dict()
    save_file({key: value.contiguous() for key, value in state.items()}, folder / "timm.safetensors")
    return folder / "timm.safetensors"
