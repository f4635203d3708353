"""The predictions of runs image by image, with small pictures, and a map of the images by their features."""

import importlib
import importlib.util
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from vitlab.analysis.features import features
from vitlab.analysis.pictures import LoadedImages, as_image
from vitlab.analysis.probes import principal
from vitlab.analysis.subject import Subject
from vitlab.data.base import ImageData
from vitlab.data.files.splits import SplitName
from vitlab.data.loading.order import fixed_order
from vitlab.errors import escaped
from vitlab.look.analysis_page import data_url
from vitlab.look.facts import Shown, SplitPredictions, share_images
from vitlab.runs.same_images import Facts, has_names, same_images

MOST, MISTAKES = 800, 200  # images that are listed: of a fixed random order, and mistakes beyond them
SIDE, COLUMNS = 32, 32  # of the small pictures, in pixels, and of their sheet


def listed(shown: Sequence[Shown]) -> dict[str, Any] | None:
    """Return the predictions of runs on the images of the first that has any, for the page; None if there are none.

    Runs without a network have no map and no pictures.

    Example:
        >>> from vitlab.runs.directory import RunDir
        >>> table = pd.DataFrame({"index": [0, 1], "target": [0, 1], "prediction": [0, 0], "probability": [0.9, 0.6]})
        >>> listed([Shown("a", RunDir("runs/a"), {}, ("val", table))])["runs"]["a"]["prediction"]
        [0, 0]
    """
    measured = [(one, *one.predictions) for one in shown if one.predictions]
    if not measured:
        return None
    main, split, first = measured[0]
    if not len(first) or int(first["index"].min()) < 0:  # of several processes, whose images are unknown
        return None
    same = [
        (one, table.sort_values("index", ignore_index=True))
        for one, _, table in measured
        if one is main or share_images(main, one)
    ]
    base = same[0][1]
    kept = _kept(base, [table for _, table in same])
    index = base["index"].to_numpy()[kept]
    targets = base["target"].to_numpy()[kept].astype(int).tolist()
    runs: dict[str, dict[str, Any]] = {}
    for one, table in same:
        part = table.iloc[kept]
        runs[one.name] = {
            "prediction": part["prediction"].astype(int).tolist(),
            "probability": [None if p != p else round(float(p), 4) for p in part["probability"]],
            "maps": _maps(one.subject, split, index),
        }
    sheet = _sheet(next((one.subject for one, _ in same if one.subject), None), split, index)
    most = max(max(classes) for classes in (targets, *(run["prediction"] for run in runs.values())))
    return {
        "split": split, "count": len(base), "index": index.tolist(), "runs": runs, "target": targets, "sheet": sheet,
        "columns": COLUMNS, "without": [one.name for one, *_ in measured if one.name not in runs],
        "classes": main.names_of_classes(most),
    }  # fmt: skip


def _kept(base: pd.DataFrame, tables: list[pd.DataFrame]) -> np.ndarray:
    """Return the rows that are listed: a fixed random sample, and mistakes of any run that are not in it."""
    order = fixed_order(len(base))
    wrong = np.any([(table["target"] != table["prediction"]).to_numpy() for table in tables], axis=0)
    return np.sort(np.concatenate([order[:MOST], order[MOST:][wrong[order[MOST:]]][:MISTAKES]]))


def has_images(subject: Subject, found: SplitPredictions, facts: Facts) -> bool | None:
    """Return whether the data of a run still has the images that were predicted, at their places.

    Paths tell, or else hashes; images of which neither is known are taken for the same.

    Args:
        subject: The network, with its data as it is now.
        found: The split, and what was predicted.
        facts: What data.json says of the data as it was.

    Returns:
        None if the files of the data are missing, or if several processes predicted, whose images have no places.
    """
    (split, table), data = found, subject.data
    index = table["index"].to_numpy()
    if not len(index) or index.min() < 0:
        return None
    try:
        data.build(split)
    except (NotImplementedError, AttributeError):  # of data that was rebuilt without files; pictures have no splits
        return None
    images = data.splits[split]
    if index.max() >= len(images):
        return False
    now, known = table[["index", "target"]], dict[str, Any]()
    if images.names:
        now = now.assign(path=[escaped(images.names[i]) for i in index])
    if not (has_names(now) and has_names(table)) and not isinstance(data, LoadedImages):
        hashes = {name: {"hash": _hash_of(data, name)} for name in {split, "val"} & {*(facts.get("splits") or ())}}
        known = {"data": type(data).__name__, "splits": hashes, "split_rule": data.split_rule()}
    return same_images(split, (table, now), (facts, known)) is not False


def _hash_of(data: ImageData, split: SplitName) -> str:
    data.build("test" if split == "test" else "train")
    return data.splits[split].split_hash


def _maps(subject: Subject | None, split: SplitName, index: np.ndarray) -> dict[str, Any]:
    """Return places of the images by the features that the head reads, by the name of the projection."""
    if subject is None or len(index) < 3:
        return {}
    try:
        values, _ = features(subject.net, subject.prepared(subject.data.splits[split].take(index)))
    except ValueError:  # a network without features before its last layer
        return {}
    if not values.isfinite().all():  # of a network that diverged
        return {}
    places, shares = principal(values, count=2)
    said = f"first two principal components, {float(shares.sum()):.0%} of the variance"
    found = {"PCA": {"xy": _rounded(places), "said": said}}
    if importlib.util.find_spec("umap"):
        reducer = importlib.import_module("umap").UMAP(random_state=0)
        places = torch.from_numpy(np.asarray(reducer.fit_transform(values.numpy()), dtype=np.float64))
        found["UMAP"] = {"xy": _rounded(places), "said": "UMAP: near is alike; distances between groups mean nothing"}
    return found


def _rounded(places: Tensor) -> list[list[float]]:
    span = float(places.abs().max()) or 1.0
    return [[round(float(v) / span, 4) for v in row] for row in places]


def _sheet(subject: Subject | None, split: SplitName, index: np.ndarray) -> str:
    """Return pictures of a network on a sheet, ``COLUMNS`` in a row, as a data URL; empty without any."""
    if subject is None:
        return ""
    pixels = subject.pixels_of(subject.data.splits[split].take(index))
    sheet = Image.new("RGB", (COLUMNS * SIDE, -(-len(pixels) // COLUMNS) * SIDE), "gray")
    for i, one in enumerate(pixels):
        image = as_image(one).convert("RGB")
        longest = max(image.size)
        width, height = (max(1, round(side * SIDE / longest)) for side in image.size)
        small = image.resize((width, height), Image.Resampling.NEAREST if longest <= SIDE else Image.Resampling.LANCZOS)
        left, top = (SIDE - width) // 2, (SIDE - height) // 2
        sheet.paste(small, (i % COLUMNS * SIDE + left, i // COLUMNS * SIDE + top))
    sheet.save(file := io.BytesIO(), "JPEG", quality=80)
    return data_url(file.getvalue(), "jpeg")
