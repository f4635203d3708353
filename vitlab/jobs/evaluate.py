"""Measure a run on its validation or test split."""

import errno
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd
import torch

from vitlab.callbacks.console import EvaluationConsole
from vitlab.callbacks.predictions import Predictions
from vitlab.class_metrics import by_class, classes_of_table, confusion, over_classes
from vitlab.config.explain import user_mistakes
from vitlab.config.keys import key_as_typed, key_of
from vitlab.config.options import Policy, check_resize
from vitlab.config.parser import VitlabCLI, settings
from vitlab.config.yaml_files import read_own
from vitlab.data.base import ImageData, protocol_of
from vitlab.data.record import TRAINED_ON, Trained, measured, read_numbers
from vitlab.errors import MISTAKES, UsageError, escaped, what_failed
from vitlab.interface import class_names, has_grid, path_of
from vitlab.jobs.checkpoint import (
    checkpoint_facts,
    load_checkpoint,
    load_outside,
    load_resized,
    misfit,
    needs_more_than_net,
)
from vitlab.jobs.restore import load_data_state
from vitlab.jobs.stored import PLACES, evaluation_args, has_images_of, naming_place_of_data
from vitlab.jobs.train.endings import explain_mismatch, in_step
from vitlab.jobs.train.wandb import add_result
from vitlab.layers.pos_embed import PosEmbed
from vitlab.models.walk import all_finite
from vitlab.models.weights_file import check_readable
from vitlab.runs.atomic import alone_in, atomic_write
from vitlab.runs.directory import RunDir
from vitlab.runs.launch import lost_peer
from vitlab.runs.openings import note_opening
from vitlab.runs.records import MEASURED_BY, SPLIT_OF, EvaluationCommand, metrics_and_n, split_metrics
from vitlab.runs.shards import has_shards
from vitlab.runs.standing import checksum
from vitlab.shipped import card_beside
from vitlab.tables import counted


@dataclass(frozen=True)
class Conditions:
    """How a run is measured, where that is not as it was trained.

    Args:
        arguments: Command-line arguments that change values of its configuration.
        resize: How to resample positions for another grid; None is the method's default.
        antialias: Whether bicubic interpolation smooths when the grid shrinks.
        with_training_images: Whether a split that changed since the training may contain training images.
        alone: Whether to use one device, however many the training used.

    Raises:
        UsageError: ``resize`` is no way to resample positions.
    """

    arguments: Sequence[str] = ()
    resize: Policy | None = None
    antialias: bool = True
    with_training_images: bool = False
    alone: bool = False

    def __post_init__(self) -> None:
        check_resize(self.resize)


@dataclass
class Measured:
    """The metrics and predictions of a run on a split.

    Args:
        split: The split, ``val`` or ``test``; another name where it changed and contains training images.
        values: Metrics by name, with the number of images as ``n``.
        predictions: One row per image.
        sentences: What was changed to make the weights fit.
        recall: Recall of each class that has images.
        changes: What was changed against the run's own conditions; the result is then stored as a variation.
        unsaved: Why the result could not be saved in the run; None if it was.
    """

    split: str
    values: dict[str, float]
    predictions: pd.DataFrame
    sentences: list[str]
    recall: dict[str, float]
    changes: dict[str, Any]
    unsaved: str | None = None


def evaluate(
    command: EvaluationCommand,
    run: RunDir,
    checkpoint: Path,
    conditions: Conditions,
    quiet: bool = False,
    keep: bool = True,
    around: Callable[[Any], AbstractContextManager[None]] = nullcontext,
) -> Measured | None:
    """Measure a run and save the result in its directory; only rank 0 returns it.

    Args:
        command: What to measure: ``validate`` or ``test``.
        run: The run.
        checkpoint: Which of its weights to use.
        conditions: What to change against the training.
        quiet: Whether to hide the progress.
        keep: Whether to save the result; that of an exported file is not.
        around: Gives the context in which a task is measured, as of :func:`~vitlab.jobs.quantize.answered_by`.

    Raises:
        UsageError: The weights do not fit, or the checkpoint was replaced by a training during the measurement.
    """
    split = SPLIT_OF[command]
    _ = run.stored  # refuses a damaged file before the work
    predictions, console = Predictions(), EvaluationConsole(quiet)
    trained = Trained(run.data, read_numbers(run.path / TRAINED_ON), split, conditions.with_training_images)
    with user_mistakes():
        check_readable(checkpoint)
    facts = checkpoint_facts(checkpoint)
    changes = {key: value for key, value in settings(list(conditions.arguments)) if _can_change_result(key)}
    with naming_place_of_data(run, conditions.arguments), user_mistakes(), measured(trained):
        args = evaluation_args(run, conditions.arguments, conditions.alone)
        cli = VitlabCLI(args, [predictions, console], default_root_dir=str(run.path))
        loaded = _load(cli, run, checkpoint, conditions)
        changes |= loaded.changes
        if cli.trainer.is_global_zero and run.exists():
            note_opening(run.path, split, checkpoint.name, changes)
        with around(cli.model):
            _run(cli, command, loaded.path)
    values = {k.removeprefix(f"{split}/"): float(v) for k, v in cli.trainer.callback_metrics.items()}
    table = predictions.table(getattr(cli.trainer, f"{split}_dataloaders"), values.get("n"))
    if not cli.trainer.is_global_zero:
        return None
    all_finite(torch.tensor(table.filter(regex="^(prediction|probability)").to_numpy(dtype=float)))
    if checksum(checkpoint) != facts["sha256"]:
        raise UsageError(f"{checkpoint} was replaced while it was measured, as its training goes on; measure it again")
    moved = {key for key in changes if key_as_typed(key) in PLACES}
    if moved and has_images_of(cli.datamodule, run, split):
        changes = {key: value for key, value in changes.items() if key not in moved}
    values, recall = _add_class_means(table, class_names(cli.datamodule), values)
    table = _with_paths(table, cli.datamodule.splits.get(split) if isinstance(cli.datamodule, ImageData) else None)
    seen = trained.accuracy_of_others(table)
    name = f"{split} with training images" if trained.changed else split
    facts |= {**loaded.facts, **protocol_of(cli.datamodule), "overrides": changes}
    is_export = card_beside(checkpoint).is_file()
    result = {**values, **seen, **recall, **facts}
    told = [*loaded.sentences, *trained.sentences(seen, len(table)), *_of_other_training(cli.datamodule, run, changes)]
    told += _of_absent_classes(cli.model, table)
    told += [] if changes else unlike(run.stored.get(name) or {}, result)
    unsaved = _save(run, name, result, table) if keep and not is_export else None
    told += [f"not saved in {run.path}: {checkpoint.name} is an export, and no checkpoint of it"] if is_export else []
    return Measured(name, values, table, told, recall.get("recall", {}), changes, unsaved)


def _of_other_training(data: Any, run: RunDir, changes: Mapping[str, Any]) -> list[str]:
    """Return a warning if the images that data have for training are not those of the run, as in another folder.

    A training split that the measurement has not read, beside a given test split, is not read for this alone.
    """
    known = run.data.get("splits", {}).get("train", {}).get("hash")
    is_asked_for = any(key.startswith("data") for key in changes)
    if is_asked_for or known is None or not isinstance(data, ImageData):
        return []
    if "train" not in data.splits and not data.has_test_split:
        with suppress(ValueError, OSError):  # it cannot be read any more
            data.build("train")
    now = data.splits["train"].split_hash if "train" in data.splits else known
    what = f"the training split is now {now}, and the run was trained on {known}"
    return [] if now == known else [f"measured on other data than the run's: {what}"]


def unlike(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a warning if the same weights gave another number on the same images, by more than devices round.

    That is by 5 % of a metric, by .01, and by more than three of the images.

    Example:
        >>> weights = {"sha256": "e3b0", "n": 359.0}
        >>> unlike({"acc1": 0.861, **weights}, {"acc1": 0.128, **weights})[0][:66]
        'acc1 is 0.1280, and these weights gave 0.8610 before on this split'
        >>> unlike({"acc1": 0.861, **weights}, {"acc1": 0.858, **weights})
        []
    """
    facts = [{name: result.get(name) for name in ("sha256", "n", "images")} for result in (before, now)]
    if "sha256" not in before or len({json.dumps(each) for each in facts}) > 1:  # a tuple is a list in a file
        return []
    old, new = split_metrics(before), split_metrics(now)
    least = max(0.01, 3 / max(1.0, now.get("n") or 1.0))
    for name in sorted(old.keys() & new.keys()):
        if abs(old[name] - new[name]) > max(least, 0.05 * max(abs(old[name]), abs(new[name]))):
            why = "a part of yours may hold random numbers that are not saved, or its code or the images have changed"
            return [f"{name} is {new[name]:.4f}, and these weights gave {old[name]:.4f} before on this split: {why}"]
    return []


class _Loaded(NamedTuple):
    """How the weights of a checkpoint get into the network.

    Args:
        path: The checkpoint, if Lightning is to load it; None if that is done.
        sentences: What was changed to make the weights fit.
        facts: What the result tells of that.
        changes: Flags by which another measurement does the same.
    """

    path: Path | None
    sentences: Sequence[str] = ()
    facts: Mapping[str, Any] = MappingProxyType({})
    changes: Mapping[str, Any] = MappingProxyType({})


def _load(cli: VitlabCLI, run: RunDir, checkpoint: Path, conditions: Conditions) -> _Loaded:
    """Load the weights of a checkpoint and the state of the data where Lightning cannot."""
    if conditions.resize or _has_moved(cli.model, run):
        sentences = _load_resized(cli, run, checkpoint, conditions)
        moved = [sentence for sentence in sentences if sentence.startswith("positions")]
        changes = _way_to_resize(cli.model.net.pos_embed, moved, conditions)
        return _Loaded(None, sentences, {"resized": moved[-1]} if moved else {}, changes)
    if checkpoint.suffix == ".safetensors" or has_shards(checkpoint):  # not Lightning's
        load_checkpoint(cli.model, checkpoint)
        if not needs_more_than_net(cli.model):  # else it has all
            load_outside(cli.model, checkpoint)
        load_data_state(cli.datamodule, run, checkpoint)
        return _Loaded(None)
    if isinstance(data := cli.datamodule, ImageData) and run.data.get("data") != type(data).__name__:
        load_data_state(data, run, checkpoint)  # which Lightning gives only to data of the same class
    return _Loaded(checkpoint)


def _load_resized(cli: VitlabCLI, run: RunDir, checkpoint: Path, conditions: Conditions) -> list[str]:
    """Load weights into the network of another grid, and the state of the data; return what was done."""
    if not has_grid(cli.model):
        raise UsageError(f"`--resize` only supports networks of vitlab, got {path_of(cli.model)}")
    load_data_state(cli.datamodule, run, checkpoint)
    sentences = load_resized(cli.model, checkpoint, conditions.resize or "usual", conditions.antialias)
    load_outside(cli.model, checkpoint)
    return sentences


def _way_to_resize(pos_embed: PosEmbed, sentences: Sequence[str], conditions: Conditions) -> dict[str, Any]:
    """Return the flags that resample positions as those of the loaded weights were; nothing if none were resampled."""
    if not sentences or not re.search(r" from \d+ x \d+ to \d", sentences[-1]):
        return {}
    policy = conditions.resize or pos_embed.usual_policy(pos_embed.state_dict())  # None in a list: each has its own
    return {**({"resize": policy} if policy else {}), **({} if conditions.antialias else {"no_antialias": True})}


def _can_change_result(key: str) -> bool:
    """Return whether a setting may change what is measured: how it is computed, as on how many devices, does not."""
    name = key_as_typed(key)
    if name in ("data.root", "seed_everything"):  # another value may read other images
        return True
    return key_of(name).identity and not name.startswith(("trainer.accelerator", "trainer.strategy"))


def _add_class_means(
    table: pd.DataFrame, names: Sequence[str], values: dict[str, float]
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the metrics with the means over classes added, and the recall of each class that has images.

    Classes of data that name none are called by their numbers.
    """
    names = names or [str(k) for k in range(classes_of_table(table))]
    if "target" not in table or not all(table[of].between(0, len(names) - 1).all() for of in ("target", "prediction")):
        return values, {}
    matrix = confusion(table["target"].to_numpy(), table["prediction"].to_numpy(), len(names))
    found = by_class(matrix)["recall"]
    n = {"n": values.pop("n")} if "n" in values else {}
    return {**values, **over_classes(matrix), **n}, {
        "recall": {k: float(v) for k, v in zip(names, found, strict=True) if v == v}
    }


def _of_absent_classes(task: Any, table: pd.DataFrame) -> list[str]:
    """Return a remark where means of torchmetrics over classes, as of its F1Score, stand beside those of vitlab."""
    metrics = getattr(getattr(task, "val_meter", None), "metrics", {})
    macro = [name for name, metric in metrics.items() if getattr(metric, "average", None) == "macro"]
    absent = classes_of_table(table) - table["target"].nunique() if macro and "target" in table else 0
    rule = "a class that is predicted for others counts with 0, and in acc1_macro and f1_macro not at all"
    return [f"{', '.join(macro)}: {counted(absent, 'class')} without images; {rule}"] if absent > 0 else []


def _with_paths(table: pd.DataFrame, images: Any) -> pd.DataFrame:
    """Add the path of each image to the predictions, where images have one."""
    names = getattr(images, "names", None)
    if not names or not len(table):
        return table
    table.insert(1, "path", [escaped(names[i]) for i in table["index"]])
    return table


def _run(cli: VitlabCLI, command: EvaluationCommand, path: Path | None) -> None:
    measure = getattr(cli.trainer, command)
    try:
        measure(cli.model, datamodule=cli.datamodule, ckpt_path=path, weights_only=True, verbose=False)
    except FileNotFoundError as error:
        if path is None or str(path) not in str(error):
            raise
        raise OSError(errno.EIO, "it cannot be opened now", str(path)) from error  # Lightning: not found
    except MISTAKES as error:
        if lost_peer(error):  # no fault of the images
            raise
        if "loading state_dict" in str(error) and isinstance(error, RuntimeError):
            raise misfit(path, error) from error
        sentence = explain_mismatch(error, cli.model, cli.datamodule, SPLIT_OF[command]) if in_step(error) else None
        if sentence is None:
            raise
        raise UsageError(sentence) from error


def _has_moved(task: Any, run: RunDir) -> bool:
    known = (run.path / "model.json").is_file()  # else the weights must fit as they are
    return known and has_grid(task) and list(task.net.grid_size) != run.model["grid"]


def _save(run: RunDir, split: str, result: dict[str, Any], predictions: pd.DataFrame) -> str | None:
    """Save a result; return why that failed, as in a read-only run: the numbers are still printed."""
    try:
        _write(run, split, result, predictions)
    except OSError as error:
        return f"the result could not be saved in {run.path}: {what_failed(error) or error}"
    return None


def _write(run: RunDir, split: str, result: dict[str, Any], predictions: pd.DataFrame) -> None:
    if result["overrides"] or split not in MEASURED_BY:  # other conditions: stored beside the run's own result
        with alone_in(run.path):
            kept = run.stored.get("variations", [])
            others = [r for r in kept if (r["split"], r["overrides"]) != (split, result["overrides"])]
            found = {**run.read("results.json"), "variations": [*others, {"split": split, **result}]}
            run.write("results.json", found)
    else:
        if len(predictions):
            predictions.attrs = {name: result[name] for name in ("checkpoint", "sha256")}  # kept in the file
            with atomic_write(run.predictions(split)) as beside:  # before the result
                predictions.to_parquet(beside, index=False)
        run.update("results.json", **{split: result})
        numbers = {f"{split}/{k}": v for k, v in metrics_and_n(result).items()}
        add_result(run, read_own(run.config), numbers | {f"{split}/weights": result["checkpoint"]})
