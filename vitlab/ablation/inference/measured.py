"""The results of the cells of an ablation, as tables."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd

from vitlab.ablation.execution.cells import Cell, Resolved, cells_of, metrics_of, table_of
from vitlab.ablation.execution.identity import json_digest
from vitlab.ablation.execution.tuning import Tuning, tuning_of
from vitlab.ablation.file.arms import Arm
from vitlab.ablation.file.spec import Ablation
from vitlab.analysis import ANALYSES
from vitlab.errors import one_line
from vitlab.runs.directory import RunDir
from vitlab.runs.matching import is_there
from vitlab.runs.records import split_metrics


@dataclass
class CellResults:
    """The numbers of the finished cells."""

    ablation: Ablation
    resolved: list[Resolved]  # the measured arms, with their tuned values
    known: list[Resolved] = field(default_factory=list)  # all arms, untuned
    runs: dict[tuple[str, int], RunDir] = field(default_factory=dict)  # (arm, seed)
    states: dict[tuple[str, int], str] = field(default_factory=dict)
    cells: dict[tuple[str, int], Cell] = field(default_factory=dict)
    numbers: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)  # metrics, including those of analyses

    notes: dict[tuple[str, int], str] = field(default_factory=dict)  # problems of damaged cells
    mixed: list[str] = field(default_factory=list)  # cells that read other images than their arm's probe
    _rows: dict[tuple[str, int], list[dict[str, Any]]] = field(default_factory=dict, repr=False)

    @cached_property
    def tuning(self) -> Tuning:
        """The tuning of its arms."""
        return tuning_of(self.ablation, self.known)

    def arm(self, name: str) -> Resolved | None:
        """Return the measured arm of a name; None if it is not measured."""
        return next((arm for arm in self.resolved if arm.arm.name == name), None)

    def rows(self, arm: str, seed: int) -> list[dict[str, Any]]:
        """Return what the run of a cell logged, which is read once; nothing of a cell without a run."""
        if (arm, seed) not in self._rows:
            self._rows[arm, seed] = run.rows() if (run := self.runs.get((arm, seed))) else []
        return self._rows[arm, seed]

    def values(self, arm: Arm, metric: str) -> list[float]:
        """Return a metric of every finished seed of an arm, in the order of the seeds."""
        return [value for _, value in self.by_seed(arm.name, metric)]

    def by_seed(self, arm: str, metric: str) -> list[tuple[int, float]]:
        """Return (seed, value) of every finished seed of an arm whose value is a number."""
        pairs = []
        for seed in self.ablation.seeds:
            value = self.numbers.get((arm, seed), {}).get(metric)
            if isinstance(value, int | float) and math.isfinite(value):
                pairs.append((seed, float(value)))
        return pairs

    def no_numbers(self, arm: str, metric: str) -> dict[int, Any]:
        """Return what stands in the place of a number, such as NaN, in finished seeds of an arm, by seed."""
        there, found = {seed for seed, _ in self.by_seed(arm, metric)}, {}
        for seed in self.ablation.seeds:
            if seed not in there and metric in (numbers := self.numbers.get((arm, seed), {})):
                found[seed] = numbers[metric]
        return found

    def metrics(self) -> list[str]:
        """Return the metrics of the file: the primary one, then the others."""
        return [self.ablation.primary, *self.ablation.secondary]

    def seeds(self) -> list[int]:
        """Return the seeds that can be compared: in a metric, two arms have them settled, or the one of a claim."""
        had, primary = self.had(), self.ablation.primary
        counts = [Counter(itertools.chain(*arms.values())) for arms in had.values()]
        alone = {
            seed
            for claim in self.ablation.claims
            if isinstance(claim.b, float) and not claim.over
            for arm in self.ablation.arms
            if {**claim.where, claim.axis: claim.a}.items() <= arm.levels.items()
            for seed in had[claim.metric or primary][arm.name]
        }
        return [s for s in self.ablation.seeds if s in alone or any(count[s] > 1 for count in counts)]

    def is_settled(self, arm: str, seed: int, metric: str) -> bool:
        """Return whether a value is there or will never be: a seed that diverged does so each time."""
        return metric in self.numbers.get((arm, seed), {}) or self.states.get((arm, seed)) == "diverged"

    def had(self) -> dict[str, dict[str, list[int]]]:
        """Return of each metric that is compared the settled seeds of each arm."""
        metrics = [*self.metrics(), *(claim.metric for claim in self.ablation.claims if claim.metric)]
        return {
            metric: {
                arm.name: [seed for seed in self.ablation.seeds if self.is_settled(arm.name, seed, metric)]
                for arm in self.ablation.arms
            }
            for metric in dict.fromkeys(metrics)
        }

    def table(self) -> pd.DataFrame:
        """Return the tidy table: one row per cell and metric, and one per cell without results."""
        rows = []
        for (name, seed), cell in self.cells.items():
            state = self.states[name, seed]
            head = {"ablation": self.ablation.name, "cell": cell.name, **cell.arm.levels, "seed": seed}
            found = self.numbers.get((name, seed), {})
            numbers = split_metrics(found)
            step = max((row["step"] for row in self.rows(name, seed)), default=0)
            for metric, value in sorted(numbers.items()) or [(self.ablation.primary, math.nan)]:
                n = None if self.ablation.is_analyzed(metric) else found.get("n")  # modules of one's own count none
                row = {**head, "split": self.ablation.split_of(metric), "metric": metric, "value": value}
                rows.append({**row, "step": step, "n_images": n, "status": state})
        return pd.DataFrame(rows).astype({"n_images": "Int64"} if rows else {})


def collect(ablation: Ablation, resolved: list[Resolved], accept_stale: bool = False) -> CellResults:
    """Return the results of all finished cells, including stale ones if accepted."""
    results = CellResults(ablation, [], resolved)
    results.resolved = results.tuning.measured(resolved)
    for cell in cells_of(ablation, results.resolved):
        key = (cell.arm.name, cell.seed)
        state = cell.state()
        results.cells[key], results.states[key] = cell, state
        if state == "done" and (text := unreadable(cell.run, ablation)):
            state = results.states[key] = "damaged"
            results.notes[key] = text
        elif state == "damaged":
            results.notes[key] = cell.damage()
        elif text := cell.outlived():
            results.notes[key] = text
        elif state == "done" and json_digest(cell.run.read("data.json")) != cell.parts["data"]:
            results.mixed.append(cell.name)
        run = cell.stale() if state == "stale" and accept_stale else cell.run if state == "done" else None
        if run:
            results.runs[key] = run
            results.numbers[key] = {**run.measured(ablation.evaluate), **metrics_of(run, ablation.analyses)}
    return results


def unreadable(run: RunDir, ablation: Ablation) -> str:
    """Return a message about a damaged table of a finished run, or one of other weights; empty if all are well.

    Raises:
        OSError: The file system does not answer, so this is unknown.
    """
    path = run.predictions(ablation.evaluate)
    try:
        if is_there(path) and (now := run.standing(ablation.evaluate, pd.read_parquet(path).attrs)).is_stale:
            return f"{path}: {now.text}"
        for name in ablation.analyses:
            path = run.path / "analysis" / f"{name}.csv"
            metrics_of(run, (name,)) if ANALYSES[name].metrics else table_of(run, name)
    except (ValueError, OSError, KeyError, TypeError) as error:  # of pandas and of Arrow
        if isinstance(error, OSError) and error.errno:  # the system's; Arrow's have no number
            raise
        return f"{path} is damaged: {one_line(error)}"
    return ""
