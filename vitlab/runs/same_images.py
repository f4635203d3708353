"""Whether predictions of two runs are of the same images."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

Facts = Mapping[str, Any]  # of data.json


def same_images(split: str, tables: tuple[pd.DataFrame, pd.DataFrame], facts: tuple[Facts, Facts]) -> bool | None:
    """Return whether two runs predicted the same images; None if their paths and hashes do not tell.

    Places within a split tell nothing: splits of equal counts per class have the same ones.

    Args:
        split: The split, of the same name in both runs.
        tables: The predictions of both, with ``index``, ``target`` and, of files, ``path``.
        facts: What data.json says of the data of both.

    Example:
        >>> a = pd.DataFrame({"path": ["/x/cat/1.png", "/x/dog/7.png"], "index": [0, 1], "target": [0, 1]})
        >>> b = a.assign(path=["/home/y/cat/1.png", "/home/y/dog/7.png"])
        >>> same_images("val", (a, b), ({}, {})), same_images("val", (a, b.assign(path=["1.png", "8.png"])), ({}, {}))
        (True, False)
    """
    a, b = (table.sort_values("index", kind="stable", ignore_index=True) for table in tables)
    if not all(np.array_equal(a[column], b[column]) for column in ("index", "target")):
        return False
    if (a["index"] < 0).any():  # of several processes, whose images are unknown
        return False
    if has_names(a) and has_names(b):
        return _below_root(a["path"].tolist()) == _below_root(b["path"].tolist())
    hashes = [_hash(one, split) for one in facts]
    if all(hashes):
        return hashes[0] == hashes[1]
    held_back = [_of_held_back(one) for one in facts]  # training holds a test split back: data.json has no hash of it
    return held_back[0] == held_back[1] if split == "test" and all(held_back) else None


def has_names(table: pd.DataFrame) -> bool:
    """Return whether paths name images: those of arrays are numbers of rows, of the library ``datasets`` SPLIT/ROW.

    Example:
        >>> [has_names(pd.DataFrame({"path": [path]})) for path in ("cat/1.png", "17", "test/17")]
        [True, False, False]
    """
    return "path" in table and not table["path"].str.fullmatch(r"([^/]+/)?\d+").all()


def _hash(facts: Facts, split: str) -> Any:
    return ((facts.get("splits") or {}).get(split) or {}).get("hash")


def _of_held_back(facts: Facts) -> tuple[Any, ...] | None:
    """Return what determines a test split that has no hash: the data, by their validation split, and the rule."""
    rule = {key: value for key, value in (facts.get("split_rule") or {}).items() if key not in ("subset", "even_folds")}
    return (facts.get("data"), known, rule) if (known := _hash(facts, "val")) else None


def _below_root(paths: list[str]) -> list[str]:
    """Return paths without the folder that all are in, if all are absolute: runs may have been on two machines."""
    if not all(os.path.isabs(path) for path in paths):
        return paths
    root = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    return [os.path.relpath(path, root) for path in paths]
