"""The results of the cells of an ablation, as tables."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeGuard

import pandas as pd

from vitlab.ablation.execution.cells import Cell, Resolved, metrics_of, table_of
from vitlab.ablation.execution.tuning import Tuning
from vitlab.ablation.file.arms import Arm
from vitlab.ablation.file.spec import Ablation
from vitlab.analysis import ANALYSES
from vitlab.errors import one_line
from vitlab.runs.directory import RunDir
from vitlab.runs.matching import is_there
from vitlab.runs.records import split_metrics


@dataclass
class CellResult:
    """What a planned cell has given.

    Args:
        cell: The cell.
        state: Its state, which is damaged also where a table of it cannot be read.
        note: Why what lies there does not count; empty if it does, or nothing lies there.
        run: The run that its numbers are of, its own or an accepted stale one; None without numbers.
        numbers: Its metrics, including those of analyses.
    """

    cell: Cell
    state: str
    note: str = ""
    run: RunDir | None = None
    numbers: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """What its run logged, which is read once."""
        return self.run.rows() if self.run else []


@dataclass
class CellResults:
    """The results of the planned cells of an ablation, by arm and seed."""

    ablation: Ablation
    resolved: list[Resolved]  # the measured arms, with their tuned values
    known: list[Resolved] = field(default_factory=list)  # all arms, untuned
    cells: dict[tuple[str, int], CellResult] = field(default_factory=dict)

    @property
    def runs(self) -> dict[tuple[str, int], RunDir]:
        """The runs of the finished cells."""
        return {key: cell.run for key, cell in self.cells.items() if cell.run}

    @cached_property
    def tuning(self) -> Tuning:
        """The tuning of its arms."""
        return Tuning(self.ablation, self.known)

    def arm(self, name: str) -> Resolved | None:
        """Return the measured arm of a name; None if it is not measured."""
        return next((arm for arm in self.resolved if arm.name == name), None)

    def rows(self, arm: str, seed: int) -> list[dict[str, Any]]:
        """Return what the run of a cell logged; nothing of a cell without a run."""
        return cell.rows if (cell := self.cells.get((arm, seed))) else []

    def numbers(self, arm: str, seed: int) -> dict[str, Any]:
        """Return the metrics of a cell; none of a cell without a run."""
        return cell.numbers if (cell := self.cells.get((arm, seed))) else {}

    def has_diverged(self, arm: str, seed: int) -> bool:
        """Return whether the training of a cell has diverged, as it does each time."""
        return (cell := self.cells.get((arm, seed))) is not None and cell.state == "diverged"

    def values(self, arm: Arm, metric: str) -> list[float]:
        """Return a metric of every finished seed of an arm, in the order of the seeds."""
        return [value for _, value in self.by_seed(arm.name, metric)]

    def by_seed(self, arm: str, metric: str) -> list[tuple[int, float]]:
        """Return (seed, value) of every finished seed of an arm whose value is a number."""
        values = [(seed, self.numbers(arm, seed).get(metric)) for seed in self.ablation.seeds]
        return [(seed, float(value)) for seed, value in values if is_number(value)]

    def no_numbers(self, arm: str, metric: str) -> dict[int, Any]:
        """Return what stands in the place of a number, such as NaN, in finished seeds of an arm, by seed."""
        found = {seed: self.numbers(arm, seed) for seed in self.ablation.seeds}
        values = {seed: numbers[metric] for seed, numbers in found.items() if metric in numbers}
        return {seed: value for seed, value in values.items() if not is_number(value)}

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
        """Return whether a value is there or will never be."""
        return metric in self.numbers(arm, seed) or self.has_diverged(arm, seed)

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
        for found in self.cells.values():
            cell, numbers = found.cell, split_metrics(found.numbers)
            head = {"ablation": self.ablation.name, "cell": cell.name, **cell.arm.levels, "seed": cell.seed}
            step = max((row["step"] for row in found.rows), default=0)
            for metric, value in sorted(numbers.items()) or [(self.ablation.primary, math.nan)]:
                own = {} if self.ablation.is_analyzed(metric) else found.numbers  # modules of one's own count no images
                row = {**head, "split": self.ablation.split_of(metric), "metric": metric, "value": value}
                rows.append({**row, "step": step, "n_images": own.get("n"), "status": found.state})
        return pd.DataFrame(rows).astype({"n_images": "Int64"} if rows else {})


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value of a metric can be averaged: it is there, finite and no text."""
    return isinstance(value, int | float) and math.isfinite(value)


def collect(ablation: Ablation, resolved: list[Resolved], accept_stale: bool = False) -> CellResults:
    """Return the results of all finished cells, including stale ones if accepted."""
    results = CellResults(ablation, [], resolved)
    results.resolved = results.tuning.tuned
    for cell in results.tuning.cells:
        results.cells[cell.arm.name, cell.seed] = _result(cell, accept_stale)
    if ablation.tune:
        results.resolved = [_as_built(arm, results) for arm in results.resolved]
    return results


def _as_built(arm: Resolved, results: CellResults) -> Resolved:
    """Return a tuned arm with the network and the groups of its first finished cell: its probe has untuned ones."""
    for (name, _), run in results.runs.items():
        if name == arm.name and (model := run.read("model.json")):
            return replace(arm, model=model, groups=tuple(run.groups))
    return arm


def _result(cell: Cell, accept_stale: bool) -> CellResult:
    """Return what a cell has given."""
    state, ablation = cell.state(), cell.ablation
    if state == "done" and (text := unreadable(cell.run, ablation)):
        return CellResult(cell, "damaged", text)
    run = cell.stale() if state == "stale" and accept_stale else cell.run if state == "done" else None
    numbers = {**run.measured(ablation.evaluate), **metrics_of(run, ablation.analyses)} if run else {}
    return CellResult(cell, state, cell.damage() if state == "damaged" else cell.outlived(), run, numbers)


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
