"""Compare two arms image by image: where one is right and the other wrong."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from vitlab.ablation.inference.measured import CellResults
from vitlab.ablation.inference.words import Section, Table, chance, signed, span
from vitlab.runs.directory import RunDir
from vitlab.runs.matching import is_there
from vitlab.runs.records import MeasuredSplit
from vitlab.runs.same_images import same_images
from vitlab.stats import NAN, cut, mcnemar, seeds_and_images

NOTE = "McNemar's exact test is about these two checkpoints: it generalizes to other images, not to other seeds."
JOINT = (
    "Seeds and images together: the interval generalizes to other seeds and to other images of the same kind. No "
    "verdict uses it or McNemar's p: neither is adjusted for multiple comparisons."
)


@dataclass
class Pairs:
    """Arms that predicted the same images as their baseline, and those that did not.

    Args:
        rows: A row for each arm and seed, with McNemar's test.
        joint: Each arm's difference to its baseline in accuracy, with the uncertainty of seeds and images together.
        without: Pairs of which one has no predictions, by arm and seed.
        other: Pairs whose images are not the same.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    joint: list[dict[str, Any]] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)


def pairs_of(results: CellResults) -> Pairs:
    """Return the comparison of each arm with its baseline, of every seed that both have finished."""
    found, runs, split = Pairs(), results.runs, results.ablation.evaluate
    read = cache(lambda arm, seed: _predictions(runs[arm, seed], split))  # a baseline has many arms
    data = cache(lambda arm, seed: runs[arm, seed].read("data.json"))
    for arm in results.ablation.arms:
        baseline = results.ablation.baseline_of(arm)
        if baseline is None or baseline is arm:
            continue
        gains = []  # of each seed: (images,) right with the arm less right with the baseline
        for seed in results.ablation.seeds:
            both = [(arm.name, seed), (baseline.name, seed)]
            if not {*both} <= runs.keys():
                continue
            a, b = (read(*cell) for cell in both)
            if a is None or b is None:
                found.without.append(f"{arm.name} s{seed}")
                continue
            if "target" not in a or "target" not in b:  # a regression has no right or wrong
                continue
            if same_images(split, (a, b), (data(*both[0]), data(*both[1]))) is False:  # cells share data if unknown
                found.other.append(f"{arm.name} s{seed}")
                continue
            right, other = a["target"] == a["prediction"], b["target"] == b["prediction"]
            only, less = int((right & ~other).sum()), int((other & ~right).sum())
            row = {"arm": arm.name, "baseline": baseline.name, "seed": seed, "n_images": len(a)}
            found.rows.append({**row, "only_arm": only, "only_baseline": less, "p": mcnemar(only, less)})
            gains.append(right.to_numpy(float) - other)
        if len(gains) > 1 and len({len(gain) for gain in gains}) == 1 and len(gains[0]) > 1:
            value, low, high = seeds_and_images(np.stack(gains), results.ablation.stats.ci)
            if high - low < 1e-9:  # as of arms that agree on each image, or whose seeds do on the difference alone
                low = high = NAN
            low, high = cut(low, high, within=(-1.0, 1.0))  # where differences of accuracies end
            row = {"arm": arm.name, "baseline": baseline.name, "n": len(gains), "n_images": len(gains[0])}
            found.joint.append({**row, "difference": value, "difference_low": low, "difference_high": high})
    return found


def _predictions(run: RunDir, split: MeasuredSplit) -> pd.DataFrame | None:
    """Return the predictions of a run, of classes sorted by image; None if there are none."""
    if not is_there(path := run.predictions(split)):
        return None
    table = pd.read_parquet(path)
    if "target" not in table:
        return table
    kept = [name for name in ("index", "path", "target", "prediction") if name in table]
    return table[kept].sort_values("index", kind="stable", ignore_index=True)


def section(found: Pairs) -> list[Section]:
    """Return the section on single images; it lists the pairs that could not be compared."""
    lost = []
    if found.without:
        lost.append(f"Left out, as there are no predictions of both: {', '.join(found.without)}.")
    if found.other:
        lost.append(f"Left out, as their images are not those of the baseline: {', '.join(found.other)}.")
    if not found.rows:
        return [Section("Image by image", lost)] if lost else []
    table: Table = [["arm", "seed", "only arm right", "only baseline right", "images", "p, this pair"]]
    for row in found.rows:
        counts = [f"{row[key]:,}" for key in ("only_arm", "only_baseline", "n_images")]
        table.append([row["arm"], str(row["seed"]), *counts, chance(row["p"])])
    tables, sentences = [table], [NOTE]
    if found.joint:
        head = ["arm", "n", "difference in accuracy", "interval over seeds and images"]
        lines = [
            [r["arm"], str(r["n"]), signed(r["difference"]), span(r["difference_low"], r["difference_high"])]
            for r in found.joint
        ]
        tables, sentences = [[head, *lines], table], [JOINT, NOTE]
    return [Section("Image by image", sentences + lost, tables)]
