"""Hand in the cells of a method, and check what others hand in."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.class_paths import name_and_args
from vitlab.config.trust import import_class
from vitlab.errors import UsageError
from vitlab.position_bench.answers import scores_of
from vitlab.position_bench.cells import Bench, read_cell
from vitlab.position_bench.methods import Method, method_text
from vitlab.position_bench.protocol import TASKS, best_rate, evidence_of, images_of_task, rates_left, tuned_on
from vitlab.position_bench.running import CellRunner
from vitlab.runs.atomic import atomic_folder, write_text
from vitlab.runs.manifest import file_digest
from vitlab.runs.records import read_json

FACTS = ("card", "cost")
MANIFEST = "MANIFEST.json"


def answers_kept(protocol: str | None = None) -> dict[str, Any]:
    """Return the right answers of each task: published with the evidence, so that no images are needed.

    Raises:
        UsageError: Nothing is published under this protocol.
    """
    path = evidence_of(protocol) / "answers.npz"
    if not path.is_file():
        raise UsageError(f"`--protocol {protocol}`: nothing is published under it that verify and submit could read")
    with np.load(path) as kept:
        return {name: kept[name] for name in TASKS}


def problems_of(bench: Bench, label: str, answers: dict[str, Any]) -> list[str]:
    """Return what is wrong with the cells of a method, a line each.

    Found are missing seeds, another protocol (other data, another recipe), another source of the method if its class is
    imported or trusted, another learning rate than the one that the validation images chose, predictions or scores that
    were edited, and scores that were added.

    Args:
        bench: The folder.
        label: The method.
        answers: The right answers of each task.
    """
    folder = bench.folder / label
    left = [of for cell, of in bench.cells().items() if not bench.path(label, cell).is_file()]
    found = [f"{training}, seed {seed}: is missing" for training, seed in left]
    found += [f"{name}.json: is missing" for name in FACTS if not bench.path(label, name).is_file()]
    records: dict[Path, dict[str, Any]] = {}
    damaged = []
    for path in sorted(p for p in folder.glob("*.json") if p.name != MANIFEST):
        try:
            records[path] = read_cell(path)
        except UsageError:
            damaged.append(f"{path.name}: is damaged")
    if damaged:
        return [*found, *damaged]
    if (method := bench.method_kept(label)) is not None and bench.is_of_other_code(label, method):
        found.append(f"card.json: the cells were trained with another source of {method_text(method)}")
    for path, kept in records.items():
        if kept.get("protocol") != bench.digest:
            found.append(f"{path.name}: was trained under another protocol: other data or another recipe")
        if "scores" in kept:
            found += _of_cell(bench, label, path, kept, answers)
    for training in bench.protocol["tuning"]["rates"]:
        found += _of_rates(bench.protocol["tuning"], training, records)
    listed = read_json(folder / MANIFEST)
    present = {path.name: file_digest(path) for path in _files(folder) if path.name in listed}
    return found + [f"{name}: differs from {MANIFEST}" for name in listed if listed[name] != present.get(name)]


def _of_rates(tuning: dict[str, Any], training: str, records: dict[Path, dict[str, Any]]) -> list[str]:
    """Return what is wrong with the learning rate of a training, by the records of a method."""
    rows = [kept for path, kept in records.items() if path.name.startswith("tune-") and "validation" in kept]
    tried = {kept["rate"]: kept["validation"] for kept in rows if kept["training"] == training}
    used = {kept["rate"] for kept in records.values() if "scores" in kept and tuned_on(kept["training"]) == training}
    left = rates_left(tuning, training, tried)
    if set(left) & set(tuning["rates"][training]):
        return [f"{training}: learning rates of the grid were not tried"]
    best = best_rate(tried)
    if used - {best}:
        rates = ", ".join(f"{rate:g}" for rate in sorted(used))
        return [f"{training}: trained at {rates}, and {best:g} is best in validation"]
    if left:
        return [f"{training}: the best learning rate {best:g} lies at the border of those tried"]
    return []


def _of_cell(bench: Bench, label: str, path: Path, kept: dict[str, Any], answers: dict[str, Any]) -> list[str]:
    arrays = path.with_suffix(".npz")
    if path.stem != f"{kept['training']}-{kept['seed']}":
        return [f"{path.name}: is of {kept['training']}, seed {kept['seed']}"]
    if not arrays.is_file() or file_digest(arrays) != kept.get("predictions"):
        return [f"{arrays.name}: the predictions were edited or are missing"]
    predictions = bench.predictions(label, path.stem)
    due = {task for task, (_, training) in TASKS.items() if training == kept["training"]}
    due -= set(kept["not_applicable"])
    if set(predictions) != due:
        return [f"{path.name}: has predictions of {', '.join(sorted(predictions))}, not of {', '.join(sorted(due))}"]
    for task, classes in predictions.items():
        count = images_of_task(bench.protocol, task)
        if classes.shape[-1] != min(count, len(answers[task])):
            return [f"{path.name}: {task} has {classes.shape[-1]} predictions, of {count}"]
    scores = scores_of(predictions, answers)
    if set(kept["scores"]) != set(scores):
        return [f"{path.name}: has scores of {', '.join(sorted(kept['scores']))}, not of {', '.join(sorted(due))}"]
    return [
        f"{path.name}: {task} is {kept['scores'][task]}, and its predictions give {score}"
        for task, score in scores.items()
        if abs(kept["scores"][task] - score) > 1e-9
    ]


def retrain(bench: Bench, label: str, method: Method) -> list[str]:
    """Train the cell ``few-0`` of a submission again, and return a line if its predictions are others.

    Predictions that nothing was trained for fit their scores: only this finds them.

    Raises:
        UsageError: The class of the method is not trusted, or cannot be imported or trained.
    """
    cell = "few-0"
    kept = bench.record(label, cell)
    if kept is None:
        return ["few, seed 0: is missing"]
    import_class("pos_embed", name_and_args("pos_embed", method)[0])  # before photos are decoded
    again = Bench(bench.folder / label / "again", bench.data, bench.protocol, bench.say)
    try:
        CellRunner(again, method, label).run_cell("few", 0, kept["rate"])
        mine, theirs = (each.predictions(label, cell) for each in (again, bench))
    finally:
        shutil.rmtree(again.folder, ignore_errors=True)
    share = min(float((mine[task] == theirs[task]).mean()) for task in mine)
    return [] if share == 1 else [f"{cell}: trained again, {share:.1%} of the predictions are the same"]


def write_submission(bench: Bench, label: str, target: Path, answers: dict[str, Any]) -> list[Path]:
    """Write the folder that a pull request would add: cells, card and digests of all files.

    Raises:
        UsageError: ``verify`` refuses the cells, or the folder exists.
    """
    if problems := problems_of(bench, label, answers):
        raise UsageError(f"{label} cannot be submitted: {problems[0]}")
    if target.exists():
        raise UsageError(f"{target} exists: remove it or give another folder")
    with atomic_folder(target) as work:
        for path in _files(bench.folder / label):
            shutil.copyfile(path, work / path.name)
        files = {path.name: file_digest(path) for path in _files(work)}
        write_text(work / MANIFEST, json.dumps(files, indent=1, sort_keys=True) + "\n")
    return sorted(target.iterdir())


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix in (".json", ".npz", ".txt") and p.name != MANIFEST)
