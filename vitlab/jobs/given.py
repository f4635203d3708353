"""Use a configuration and a checkpoint instead of a run, as LightningCLI does."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vitlab.config.parser import user_mistakes
from vitlab.data.record import TRAINED_ON
from vitlab.models.weights_file import check_readable
from vitlab.runs.directory import RunDir
from vitlab.runs.manifest import check_whole
from vitlab.shipped import find_file


@contextmanager
def run_of_checkpoint(config: str, checkpoint: Path) -> Iterator[RunDir]:
    """Yield the run of a checkpoint if the configuration is that run's, else a temporary run.

    Facts about the data come from the checkpoint's run or from the checkpoint itself.

    Args:
        config: File or shipped name of a configuration.
        checkpoint: File of a checkpoint.
    """
    path, own = Path(find_file(config, "--config")), RunDir(checkpoint.parent.parent)
    check_whole(checkpoint)
    if own.config.is_file() and own.config.samefile(path):
        yield own
        return
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(folder)
        shutil.copyfile(path, run.config)
        for name in ("data.json", "model.json", TRAINED_ON):
            if (own.path / name).is_file():
                shutil.copyfile(own.path / name, run.path / name)
        if not (run.path / "data.json").is_file():
            run.write("data.json", _data_of(checkpoint))
        yield run


def _data_of(checkpoint: Path) -> dict[str, Any]:
    unknown: dict[str, Any] = {"class_names": [], "mean": [], "std": []}
    if checkpoint.suffix == ".safetensors":
        return unknown
    with user_mistakes():
        check_readable(checkpoint)
    parts = torch.load(checkpoint, map_location="meta", weights_only=True, mmap=True).values()
    return next((part for part in parts if isinstance(part, dict) and unknown.keys() <= part.keys()), unknown)
