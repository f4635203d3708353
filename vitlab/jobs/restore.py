"""Restore the trained network of a run from its directory, without the files that it was trained on."""

import inspect
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import get_loader
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

from vitlab.config.explain import user_mistakes
from vitlab.config.parser import VitlabCLI, class_at
from vitlab.config.trust import check_import
from vitlab.config.yaml_files import read_own, yaml_text
from vitlab.data.base import ImageData
from vitlab.data.photos import Photos
from vitlab.data.record import TRAINED_ON
from vitlab.errors import UsageError
from vitlab.interface import answering, answers_itself
from vitlab.jobs.checkpoint import load_checkpoint
from vitlab.jobs.stored import check_code, evaluation_args, former_ways
from vitlab.jobs.terminal import say
from vitlab.models.weights_file import check_readable
from vitlab.notebook import check_classes
from vitlab.runs.directory import RunDir
from vitlab.runs.manifest import check_whole
from vitlab.runs.shards import read_checkpoint
from vitlab.shipped import find_file
from vitlab.tasks.base import Task
from vitlab.tasks.regressor import Standardized

ON_CPU = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto")


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
    """Build task, data and trainer of ``run``, for one device unless ``rest`` asks for others, with its weights.

    The files that the run was trained on are not needed: classes, mean and std come from its data.json.

    Args:
        run: The run.
        checkpoint: One of its checkpoints or weight files.
        rest: Command-line arguments that change values of its configuration.
        callbacks: Callbacks that the command adds to the trainer's.
        **trainer: Trainer arguments that override the configuration.

    Raises:
        UsageError: A class of it is not the one that it was trained with.
    """
    check_code(run)
    with tempfile.TemporaryDirectory() as folder:
        config = RunDir(folder)
        config.config.write_text(yaml_text(_without_files(run, run.data)))
        args = evaluation_args(config, list(rest), alone=True)
        cli = VitlabCLI(args, callbacks, default_root_dir=str(run.path), **trainer)
    with user_mistakes():
        load_data_state(cli.datamodule, run, checkpoint)
        load_checkpoint(cli.model, checkpoint)
    cli.model.eval()
    return cli


def load_data_state(data: Any, run: RunDir, checkpoint: Path) -> None:
    """Give data classes and statistics of a run; data of the user's own the state that a checkpoint has of them.

    A refusal names the run, which may be one of several.
    """
    if isinstance(data, ImageData):
        try:
            data.load_state_dict(run.data)
        except ValueError as error:
            raise UsageError(f"{run.path}: {error}") from error
    elif is_overridden("load_state_dict", data, L.LightningDataModule):
        if checkpoint.suffix == ".safetensors":
            say(f"note   {checkpoint} has weights alone: {type(data).__name__} stays as it is built")
        elif (state := read_checkpoint(checkpoint, map_location="cpu").get(type(data).__qualname__)) is not None:
            data.load_state_dict(state)


def _without_files(run: RunDir, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with data that can be built without its files."""
    read_own(run.config)  # refuses a damaged one
    content = get_loader("yaml")(run.config.read_text()) or {}  # as it is read again
    data = content.get("data")
    data = content["data"] = {"class_path": data} if isinstance(data, str) else data
    if not isinstance(data, dict) or not isinstance(path := data.get("class_path"), str):
        raise UsageError(f"{run.config} names no class of `data`: it is damaged, or a part of a configuration")
    check_import(path)
    cls = class_at(path if "." in path else f"vitlab.data.{path}")
    arguments = {**(data.get("init_args") or {}), **former_ways(run)}
    if issubclass(cls, Photos):
        names = inspect.signature(ImageData).parameters.keys() - {"fold"}  # of a table it may name its rows
        given = {"img_size": 224, "in_chans": 3, **{key: arguments[key] for key in arguments if key in names}}
        stored = ("in_chans", "img_size", "crop_pct", "color_profile", "value_range")
        read = {key: facts[key] for key in stored if key in facts}
        known = {name: facts.get(name) for name in ("native_size", "class_names")}
        known |= {"targets": facts.get("targets", {"kind": "class"}), "arrays": facts.get("arrays", False)}
        arguments = {**given, **read, **known}
        data["class_path"] = f"{Rebuilt.__module__}.{Rebuilt.__name__}"
    elif "download" in inspect.signature(cls).parameters or "download" in arguments:
        arguments["download"] = True  # skips the search for its files, which are never read
    data["init_args"] = arguments
    return content


@contextmanager
def run_of_checkpoint(config: str, checkpoint: Path) -> Iterator[RunDir]:
    """Yield the run of a checkpoint if the configuration is that run's, else a temporary run.

    Facts about the data come from the checkpoint's run or from the checkpoint itself.

    Args:
        config: File or shipped name of a configuration.
        checkpoint: File of a checkpoint.
    """
    path, own = Path(find_file(config, "--config")), RunDir.around(checkpoint)
    check_whole(checkpoint)
    if own.config.is_file() and own.config.samefile(path):
        yield own
        return
    check_classes(own.path, path)
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
    if answers_itself(task) or not isinstance(task, Task):
        return answering(task)
    return task.network_in_units() if isinstance(task, Standardized) else task.net
