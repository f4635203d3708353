"""Rebuild a trained run from its directory, or from a configuration and a checkpoint."""

import inspect
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch.callbacks import Callback

from vitlab.config.parser import VitlabCLI, class_at, user_mistakes
from vitlab.config.trust import check_import
from vitlab.data.base import ImageData
from vitlab.data.photos import Photos
from vitlab.data.record import TRAINED_ON
from vitlab.interface import answering
from vitlab.jobs.checkpoint import load_checkpoint
from vitlab.jobs.rebuild import evaluation_args, former_ways
from vitlab.models.weights_file import check_readable
from vitlab.runs.directory import RunDir
from vitlab.runs.manifest import check_whole
from vitlab.shipped import find_file
from vitlab.tasks.base import Task
from vitlab.tasks.regressor import Standardized


class Rebuilt(ImageData):
    """Data rebuilt from a run's data.json: enough to preprocess other images and to interpret outputs.

    Args:
        targets: Kind, names and statistics of the targets.
        arrays: Whether images are arrays of floats.
        **data: Passed to :class:`ImageData`.
    """

    def __init__(self, targets: dict[str, Any], arrays: bool = False, **data: Any) -> None:
        super().__init__(**data)
        self.targets, self.arrays = targets, arrays


def restore(
    run: RunDir, checkpoint: Path, rest: Sequence[str] = (), callbacks: Sequence[Callback] = (), **trainer: Any
) -> VitlabCLI:
    """Build task, data and trainer of ``run`` with the weights of ``checkpoint``.

    The files that the run was trained on are not needed: classes, mean and std come from its data.json.

    Args:
        run: The run.
        checkpoint: One of its checkpoints or weight files.
        rest: Command-line arguments that change values of its configuration.
        callbacks: Callbacks that the command adds to the trainer's.
        **trainer: Trainer arguments that override the configuration.
    """
    facts: dict[str, Any] = dict(run.data)
    with tempfile.TemporaryDirectory() as folder:
        config = RunDir(folder)
        config.config.write_text(yaml.safe_dump(_without_files(run, facts), sort_keys=False))
        cli = VitlabCLI(evaluation_args(config, list(rest)), callbacks, **trainer)
    with user_mistakes():
        if isinstance(cli.datamodule, ImageData):
            cli.datamodule.load_state_dict(facts)
        load_checkpoint(cli.model, checkpoint)
    cli.model.eval()
    return cli


def _without_files(run: RunDir, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with data that can be built without its files."""
    content = yaml.safe_load(run.config.read_text())
    path = content["data"]["class_path"]
    check_import(path)
    cls = class_at(path if "." in path else f"vitlab.data.{path}")
    arguments = {**(content["data"].get("init_args") or {}), **former_ways(run)}
    if issubclass(cls, Photos):
        names = inspect.signature(ImageData).parameters.keys() - {"fold"}  # of a table it may name its rows
        given = {"img_size": 224, "in_chans": 3, **{key: arguments[key] for key in arguments if key in names}}
        read = {key: facts[key] for key in ("in_chans", "img_size", "crop_pct", "color_profile") if key in facts}
        known = {name: facts.get(name) for name in ("native_size", "class_names")}
        known |= {"targets": facts.get("targets", {"kind": "class"}), "arrays": facts.get("arrays", False)}
        arguments = {**given, **read, **known}
        content["data"]["class_path"] = f"{Rebuilt.__module__}.{Rebuilt.__name__}"
    elif "download" in inspect.signature(cls).parameters or "download" in arguments:
        arguments["download"] = True  # skips the search for its files, which are never read
    content["data"]["init_args"] = arguments
    return content


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


def network_of(task: Any) -> Any:
    """Return what maps images to outputs in their own units: the network of a task of vitlab, or see `answering`."""
    if isinstance(task, Standardized):
        return task.network_in_units()
    return task.net if isinstance(task, Task) else answering(task)
