"""Command-line arguments that rebuild a run for training or evaluation."""

import inspect
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import yaml

from vitlab.class_paths import with_current_paths
from vitlab.config.arguments import config_paths, without_flags
from vitlab.config.explain import read_yaml
from vitlab.config.parser import class_at
from vitlab.config.trust import may_import
from vitlab.errors import UsageError
from vitlab.runs.directory import RunDir

NO_OUTPUT = ("--trainer.logger=false", "--trainer.profiler=null", "--trainer.enable_checkpointing=false")

_FORMER = {"crop_mode": "box", "color_profile": "ignore"}  # what was the way before there was the option


def stored_config(run: RunDir) -> dict[str, Any] | None:
    """Return the configuration of a run; None if it is missing or damaged."""
    with suppress(UsageError):
        content: dict[str, Any] = with_current_paths(read_yaml(run.config))
        if all(isinstance(content.get(part), dict) for part in ("trainer", "model", "data")):  # else it is truncated
            content["data"].get("init_args", {}).update(former_ways(run))
            return content
    return None


def former_ways(run: RunDir) -> dict[str, Any]:
    """Return arguments of the data that an older run does not state and that had another default when it was trained.

    A run, unlike a recipe, states all arguments that its data set takes. Without `data.crop_mode` it is of a time when
    photos were cut before they were resized, and without `data.color_profile` of one when ICC profiles were ignored.
    """
    with suppress(UsageError):
        data = read_yaml(run.config).get("data") if (run.path / "run.json").is_file() else None
        given = data.get("init_args") if isinstance(data, dict) else None
        if isinstance(data, dict) and isinstance(given, dict) and (missing := _FORMER.keys() - given.keys()):
            path = str(data.get("class_path"))
            taken = inspect.signature(class_at(path)).parameters if may_import(path) else ()
            told = {"crop_mode": "crop_pct", "color_profile": "max_pixels"}  # stated by every such run
            return {key: value for key, value in _FORMER.items() if key in missing & {*taken} and told[key] in given}
    return {}


def _former_words(run: RunDir) -> list[str]:
    return [f"--data.{key}={value}" for key, value in former_ways(run).items()]


def training_args(run: RunDir | None, words: list[str], auto: bool) -> list[str]:
    """Return the arguments of a training; a resumed run uses its own stored configuration.

    Args:
        run: The run to resume; None for a new one.
        words: The arguments as given.
        auto: Whether the arguments are those of the run's first start, as with --auto_resume.
    """
    if run is None:
        return words
    given = config_paths(words)
    if stored_config(run):
        if auto and given:
            words = without_flags(words, "c", "config")
        config = ["--config", str(run.config)] if auto or not given else []
        return [*config, *_former_words(run), *words] if config else [*words, *_former_words(run)]
    if not given:
        way_on = f"give one with `vitlab fit --config FILE --run_dir {run.path} --auto_resume`"
        raise UsageError(f"{run.config} is missing or damaged: {way_on}")
    return words


def evaluation_args(run: RunDir, rest: Sequence[str], alone: bool = False) -> list[str]:
    """Return the arguments that rebuild task and data of ``run`` without other output, if ``alone`` on one device."""
    if config_paths(list(rest)):
        raise UsageError(f"the configuration comes from {run.config}; change single values with --key=value")
    devices = one_device(run) if alone else []
    start = ["--config", str(run.config), *_former_words(run), *_without_callbacks(run)]
    return [*start, *devices, *rest, *NO_OUTPUT]


def _without_callbacks(run: RunDir) -> list[str]:
    """Return arguments that drop callbacks of Lightning, which evaluation does not need, and untrusted ones."""
    from lightning.pytorch import callbacks

    given = (yaml.safe_load(run.config.read_text()).get("trainer") or {}).get("callbacks")
    listed = given if isinstance(given, list) else [given]
    paths = [str(one.get("class_path") if isinstance(one, dict) else one) for one in listed]
    own = [may_import(path) and path[:10] != "lightning." and not hasattr(callbacks, path) for path in paths]
    kept = [one for one, is_own in zip(listed, own, strict=True) if is_own]
    return [] if len(kept) == len(listed) else [f"--trainer.callbacks={json.dumps(kept or None)}"]


def one_device(run: RunDir) -> list[str]:
    """Return arguments for one device of this machine, which may differ from the one that trained."""
    trainer = yaml.safe_load(run.config.read_text()).get("trainer") or {}
    accelerator = "cpu" if trainer.get("accelerator") == "cpu" else "auto"
    settings = {"accelerator": accelerator, "devices": 1, "num_nodes": 1, "strategy": "auto"}
    return [f"--trainer.{key}={value}" for key, value in settings.items()]
