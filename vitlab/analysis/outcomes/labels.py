"""Training images whose label a cross-validated network doubts: confident learning."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from numpy.typing import NDArray
from PIL import Image

from vitlab.analysis.catalogue import Analysis
from vitlab.analysis.figures import GALLERY, gallery
from vitlab.analysis.pictures import as_image
from vitlab.analysis.subject import Finding, Subject
from vitlab.data.files.splits import SplitName
from vitlab.errors import UsageError
from vitlab.models.walk import all_finite
from vitlab.runs.directory import RunDir

PLAN = "cv.yaml"  # in the folder of a cross-validation
PAGE = 240  # images on the page
_BOTH: tuple[SplitName, ...] = ("train", "val")


@Analysis(
    reading="The training images whose label the folds of a cross-validation doubt most, each judged by the network "
    "that was not trained on it: look whether the label is wrong.",
    limits="Which label is right: ambiguous images are doubted, too, and an error that all images of a kind share is "
    "not.",
)
def analyze_labels(subject: Subject) -> Finding:
    """Rank the images of a cross-validation by how much their label is doubted: confident learning.

    See :func:`confident_classes`; among doubted images, and among others, the probability of the label less that of the
    suggested class decides.

    Example:
        >>> analyze_labels(subject)
        Traceback (most recent call last):
            ...
        vitlab.errors.UsageError: labels needs a cross-validation: `vitlab cv`, then analyze runs/ablations/cv-CONFIG
    """
    if subject.folds is None:
        raise UsageError("labels needs a cross-validation: `vitlab cv`, then analyze runs/ablations/cv-CONFIG")
    held_out, names = held_out_predictions(Path(subject.folds))
    given = held_out["target"].to_numpy().astype(np.int64)
    probabilities = np.stack(held_out["probabilities"].to_list())
    all_finite(torch.from_numpy(probabilities))
    confident = confident_classes(probabilities, given)
    doubted = (confident >= 0) & (confident != given)
    rows, others = np.arange(len(given)), probabilities.copy()
    others[rows, given] = -1
    best = np.where(doubted, confident, others.argmax(axis=1))
    table = pd.DataFrame(
        {
            "image": held_out["path"], "label": [names[k] for k in given], "suggested": [names[k] for k in best],
            "doubted": doubted, "probability_of_label": probabilities[rows, given],
            "probability_of_suggested": probabilities[rows, best], "fold": held_out["fold"],
        }
    )  # fmt: skip
    table["margin"] = table["probability_of_label"] - table["probability_of_suggested"]
    order = np.lexsort([table["margin"], ~doubted])
    table = table.iloc[order].reset_index(drop=True)
    count, n = int(doubted.sum()), len(table)
    share = estimated_errors(confident, given, len(names))
    agreed = (probabilities.argmax(axis=1) == given).mean()
    note = (
        f"{count:,} of {n:,} images doubted; about {share:.1%} of the labels are wrong, if the networks, which agree "
        f"with {agreed:.1%} of them, err at random; each image is judged by the fold of {len(set(table['fold']))} "
        "that was not trained on it"
    )
    shown = table.head(max(GALLERY, min(count, PAGE)))
    pictures = _pixels(subject, shown["image"].tolist())
    rows_shown = [row for _, row in shown.iterrows()]
    leaves = [(_encoded(pixels), _caption(row)) for pixels, row in zip(pictures, rows_shown, strict=True)]
    return Finding(table, gallery(pictures, [_title(row) for row in rows_shown]), note, leaves)


def confident_classes(probabilities: NDArray[Any], given: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the class of each image of which its network is confident; -1 where there is none.

    Confident is a probability of at least the mean that images of the class have for their own class; of several such
    classes the likeliest counts (Northcutt et al. 2021, arXiv:1911.00068, equations 1 and 2).

    Args:
        probabilities: ``(n, K)`` of networks that were not trained on the image.
        given: ``(n,)`` labels.

    >>> p = np.array([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.95, 0.05], [0.3, 0.7]])
    >>> confident_classes(p, np.array([0, 0, 1, 1, 1]))
    array([ 0, -1,  1,  0,  1])
    """
    own = [probabilities[given == k, k] for k in range(probabilities.shape[1])]
    thresholds = np.array([values.mean() if len(values) else np.inf for values in own])
    above = probabilities >= thresholds - 1e-9
    return np.where(above.any(axis=1), np.where(above, probabilities, -1).argmax(axis=1), -1)


def estimated_errors(confident: NDArray[np.int64], given: NDArray[np.int64], classes: int) -> float:
    """Return the share of wrong labels by the confident joint: its rows are scaled to the number of images of a label.

    >>> estimated_errors(np.array([0, 0, 0, 1, 1, -1]), np.array([0, 0, 0, 0, 1, 1]), 2)
    0.16666666666666666
    """
    joint = np.zeros((classes, classes))
    there = confident >= 0
    np.add.at(joint, (given[there], confident[there]), 1)
    totals, rows = np.bincount(given, minlength=classes), joint.sum(axis=1)
    wrong = np.where(rows > 0, (rows - np.diag(joint)) / np.maximum(rows, 1) * totals, 0)
    return float(wrong.sum() / totals.sum())


def held_out_predictions(folder: Path) -> tuple[pd.DataFrame, list[str]]:
    """Return the predictions of all folds of a cross-validation for the images that each has held out, and the classes.

    Args:
        folder: Folder of the cross-validation; of a fold that was trained twice the newest run counts.

    Raises:
        UsageError: A fold is not finished, its images have no names, or their targets are not classes.
    """
    parts, names = [], None
    for fold in [folder / name for name in _planned(folder)]:
        runs = list(fold.glob("*/predictions/val.parquet"))
        if not runs:
            raise UsageError(f"{fold} has no predictions: let `vitlab cv` finish first")
        file = max(runs, key=lambda found: found.stat().st_mtime_ns)
        part, known = pd.read_parquet(file), RunDir(file.parent.parent).data.get("class_names")
        if not {"path", "target", "probabilities"} <= {*part} or not known:
            what = "has no names of images" if "path" not in part else "is about other targets than classes"
            raise UsageError(f"labels needs images with names and classes, and {file} {what}")
        if names not in (None, known):
            raise UsageError(f"the folds of {folder} have different classes")
        names = list(known)
        parts.append(part.assign(fold=fold.name))
    assert names is not None
    held_out = pd.concat(parts, ignore_index=True)
    if len(twice := held_out.loc[held_out["path"].duplicated(), "path"]):
        raise UsageError(f"{folder}: {twice.iloc[0]} is held out by two folds")
    return held_out, names


def _planned(folder: Path) -> list[str]:
    """Return the names of the folds of a cross-validation."""
    try:
        return list(yaml.safe_load((folder / PLAN).read_text())["axes"]["fold"])
    except (OSError, yaml.YAMLError, TypeError, KeyError) as error:
        raise UsageError(f"{folder / PLAN} does not list folds, as `vitlab cv` writes it: {error!r:.80}") from None


def _pixels(subject: Subject, names: Sequence[str]) -> list[NDArray[np.float32]]:
    """Return the images with these names, of the training and validation split of the subject, for display."""
    places: dict[str, tuple[SplitName, int]] = {}
    for split in _BOTH:
        for i, name in enumerate(subject.images(split).names):
            places[os.fsencode(name).decode(errors="backslashreplace")] = split, i  # as tables of predictions name it
    found: dict[str, NDArray[np.float32]] = {}
    wanted = [name for name in names if name in places]
    for split in _BOTH:
        mine = sorted((places[name][1], name) for name in wanted if places[name][0] == split)
        if mine:
            shown = subject.pixels_of(subject.images(split).take(np.array([i for i, _ in mine])))
            found |= dict(zip((name for _, name in mine), shown, strict=True))
    if missing := [name for name in names if name not in found]:
        raise UsageError(f"{subject.name} does not have the image {missing[0]} of the cross-validation")
    return [found[name] for name in names]


def _encoded(pixels: NDArray[np.float32]) -> bytes:
    """Return an ``(H, W, C)`` image as PNG, small ones enlarged without smoothing."""
    image = as_image(pixels)
    if (times := 96 // image.width) > 1:
        image = image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    image.save(file := io.BytesIO(), "png")
    return file.getvalue()


def _caption(row: "pd.Series[Any]") -> dict[str, str]:
    """Return what the page says of an image, by name."""
    label = f"{row['label']} {row['probability_of_label']:.2f}"
    return {
        "name": row["image"], "label": label,
        "suggested": f"{row['suggested']} {row['probability_of_suggested']:.2f}",
    }  # fmt: skip


def _title(row: "pd.Series[Any]") -> str:
    return f"{row['label'][:14]}\n{row['suggested'][:14]}? {row['probability_of_suggested']:.2f}"
