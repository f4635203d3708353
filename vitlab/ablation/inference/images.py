"""Compare two arms image by image: where one is right and the other wrong."""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from vitlab.ablation.file.arms import Arm
from vitlab.ablation.inference.measured import CellResults
from vitlab.ablation.inference.words import Section, Table, chance, signed, span
from vitlab.runs.matching import is_there
from vitlab.runs.same_images import same_images
from vitlab.stats import cut, mcnemar, seeds_and_images

NOTE = "McNemar's exact test is about these two checkpoints: it generalizes to other images, not to other seeds."
JOINT = (
    "Seeds and images together: the interval generalizes to other seeds and to other images of the same kind. No "
    "verdict uses it or McNemar's p: neither is adjusted for multiple comparisons."
)


def compared(results: CellResults) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return two tables of arms whose predictions are on the same images as their baseline's.

    Returns:
        A row for each arm and seed, with McNemar's test; and each arm's difference to its baseline in accuracy, with
        the uncertainty of seeds and images together.
    """
    pairs, joint = [], []
    read, data = cache(partial(_predictions, results)), cache(partial(_data, results))  # a baseline has many arms
    for arm, baseline in _compared(results):
        gains = []  # of each seed: (images,) right with the arm less right with the baseline
        for seed in results.ablation.seeds:
            a, b = (read(x.name, seed) for x in (arm, baseline))
            if a is None or b is None:
                continue
            facts = (data(arm.name, seed), data(baseline.name, seed))
            if same_images(results.ablation.evaluate, (a, b), facts) is False:  # cells share their data if unknown
                continue
            right, other = a["target"] == a["prediction"], b["target"] == b["prediction"]
            only, less = int((right & ~other).sum()), int((other & ~right).sum())
            row = {"arm": arm.name, "baseline": baseline.name, "seed": seed, "n_images": len(a)}
            pairs.append({**row, "only_arm": only, "only_baseline": less, "p": mcnemar(only, less)})
            gains.append(right.to_numpy(float) - other)
        if len(gains) > 1 and len({len(gain) for gain in gains}) == 1 and len(gains[0]) > 1:
            value, low, high = seeds_and_images(np.stack(gains), results.ablation.stats.ci)
            low, high = cut(low, high, within=(-1.0, 1.0))  # where differences of accuracies end
            row = {"arm": arm.name, "baseline": baseline.name, "n": len(gains), "n_images": len(gains[0])}
            joint.append({**row, "difference": value, "difference_low": low, "difference_high": high})
    return pairs, joint


def _predictions(results: CellResults, arm: str, seed: int) -> pd.DataFrame | None:
    path = _path(results, arm, seed)
    if path is None or not is_there(path):
        return None
    table = pd.read_parquet(path)  # a regression has no right or wrong
    if "target" not in table:
        return None
    kept = [name for name in ("index", "path", "target", "prediction") if name in table]
    return table[kept].sort_values("index", kind="stable", ignore_index=True)


def _data(results: CellResults, arm: str, seed: int) -> dict[str, Any]:
    run = results.cells[arm, seed].run
    return run.read("data.json") if run else {}


def _path(results: CellResults, arm: str, seed: int) -> Path | None:
    cell = results.cells.get((arm, seed))
    return cell.run.predictions(results.ablation.evaluate) if cell and cell.run else None


def section(results: CellResults, rows: list[dict[str, Any]], together: list[dict[str, Any]]) -> list[Section]:
    """Return the section on single images; it lists the pairs that could not be compared."""
    there = {(row["arm"], row["seed"]) for row in rows}
    lost = [
        (arm.name, baseline.name, seed)
        for arm, baseline in _compared(results)
        for seed in results.ablation.seeds
        if {(arm.name, seed), (baseline.name, seed)} <= results.runs.keys() and (arm.name, seed) not in there
    ]
    if not rows and lost and not _has_answers(results):
        return []
    without = _reasons(results, lost)
    if not rows:
        return [Section("Image by image", without)] if lost else []
    table: Table = [["arm", "seed", "only arm right", "only baseline right", "images", "p, this pair"]]
    for row in rows:
        counts = [f"{row[key]:,}" for key in ("only_arm", "only_baseline", "n_images")]
        table.append([row["arm"], str(row["seed"]), *counts, chance(row["p"])])
    tables, sentences = [table], [NOTE]
    if together:
        head = ["arm", "n", "difference in accuracy", "interval over seeds and images"]
        lines = [[r["arm"], str(r["n"]), signed(r["difference"]), _span(r)] for r in together]
        tables, sentences = [[head, *lines], table], [JOINT, NOTE]
    return [Section("Image by image", sentences + without, tables)]


def _has_answers(results: CellResults) -> bool:
    """Return whether any predictions are right or wrong; those of a regression are not."""
    paths = [_path(results, arm, seed) for arm, seed in results.runs]
    tables = [path for path in paths if path and is_there(path)]
    return not tables or any("target" in pq.read_schema(path).names for path in tables)


def _reasons(results: CellResults, lost: Sequence[tuple[str, str, int]]) -> list[str]:
    """Return a sentence on the pairs that lack predictions, and one on those with other images."""
    without: list[str] = []
    other: list[str] = []
    for arm, baseline, seed in lost:
        there = [_predictions(results, name, seed) is not None for name in (arm, baseline)]
        (other if all(there) else without).append(f"{arm} s{seed}")
    found = [f"Left out, as there are no predictions of both: {', '.join(without)}."] if without else []
    return found + ([f"Left out, as their images are not those of the baseline: {', '.join(other)}."] if other else [])


def _span(row: dict[str, Any]) -> str:
    return span(row["difference_low"], row["difference_high"])


def _compared(results: CellResults) -> list[tuple[Arm, Arm]]:
    found = [(arm, results.ablation.baseline_of(arm)) for arm in results.ablation.arms]
    return [(arm, baseline) for arm, baseline in found if baseline is not None and baseline is not arm]
