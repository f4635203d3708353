"""Tuning per arm: every arm tries the same candidates on the validation split, and is measured with its best.

A trial is a cell of an ablation of its own, in ``tune/`` beside the measured cells, killed and continued like any.
"""

import copy
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.work.cells import Cell, Resolved
from vitlab.ablation.work.pool import Pool, Say


@dataclass(frozen=True)
class Trial:
    """A candidate of an arm.

    Args:
        arm: Name of the arm.
        values: Dotted keys and values.
        cells: One for each seed of the tuning.
    """

    arm: str
    values: Mapping[str, Any]
    cells: tuple[Cell, ...]

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do; a candidate that diverged is over, too."""
        return all(cell.state() in ("done", "diverged") for cell in self.cells)

    def score(self) -> float:
        """Return its mean over the seeds; NaN where one has diverged or is not done."""
        found = [(c.result() or {}).get(c.ablation.primary) if c.state() == "done" else None for c in self.cells]
        return statistics.fmean(map(float, found)) if all(x is not None for x in found) else math.nan  # type: ignore[arg-type]


def trials(ablation: Ablation, resolved: Sequence[Resolved]) -> list[Trial]:
    """Return every candidate of every arm."""
    tune = ablation.tune
    if tune is None:
        return []
    home = ablation.directory / "tune"
    inner = replace(ablation, home=home, evaluate="val", analyses=(), seeds=tune.seeds, claims=(), tune=None)
    found = []
    for arm in resolved:
        for i, values in enumerate(tune.candidates):
            tried = with_values(arm, values)
            named = replace(tried, arm=replace(tried.arm, levels={**arm.arm.levels, "tune": f"try{i}"}))
            found.append(Trial(arm.arm.name, values, tuple(Cell(inner, named, seed) for seed in tune.seeds)))
    return found


def work_off(tried: Sequence[Trial], workers: int, say: Say | None, fail_fast: bool) -> tuple[list[str], bool]:
    """Work off the trials, with whoever else is at it; return those that failed, and whether it was interrupted."""
    todo = [cell for trial in tried for cell in trial.cells]
    while True:
        pool = Pool(todo, workers, say, fail_fast)
        pool.work_off()
        if pool.interrupted or not any(cell.state() == "running" for cell in todo):
            failed = [f"tune/{cell.name}" for cell in todo if cell.state() not in ("done", "diverged")]
            return failed, pool.interrupted
        time.sleep(1)  # another `run` is at it


def choices(ablation: Ablation, tried: Sequence[Trial]) -> dict[str, Trial]:
    """Return the best candidate of every arm whose trials are over; the first of equals."""
    sign, found = (-1 if ablation.mode == "min" else 1), {}
    for arm in dict.fromkeys(trial.arm for trial in tried):
        mine = [trial for trial in tried if trial.arm == arm]
        known = [trial for trial in mine if not math.isnan(trial.score())]
        if known and all(trial.is_over for trial in mine):
            found[arm] = max(known, key=lambda trial: sign * trial.score())
    return found


def tuned(ablation: Ablation, resolved: Sequence[Resolved | None]) -> list[Resolved | None]:
    """Return the arms with what they have chosen, None where that is not known yet; as they are without tuning."""
    if ablation.tune is None:
        return list(resolved)
    chosen = choices(ablation, trials(ablation, [arm for arm in resolved if arm]))
    return [with_values(a, chosen[a.arm.name].values) if a and a.arm.name in chosen else None for a in resolved]


def at_border(ablation: Ablation, values: Mapping[str, Any]) -> list[str]:
    """Return the keys whose chosen value is the smallest or the largest of its numbers."""
    assert ablation.tune
    found = []
    for key, value in values.items():
        numbers = [x for x in ablation.tune.space[key] if isinstance(x, int | float) and not isinstance(x, bool)]
        if len(numbers) == len(ablation.tune.space[key]) and value in (min(numbers), max(numbers)):
            found.append(key)
    return found


def with_values(arm: Resolved, values: Mapping[str, Any]) -> Resolved:
    """Return an arm as its probe would have left it with other values of some keys."""
    config = copy.deepcopy(dict(arm.config))
    for key, value in values.items():
        section, *path, name = key.split(".")
        place = config.setdefault(section, {})
        place = place["init_args"] if "init_args" in place and path[:1] != ["init_args"] else place
        for part in path:
            place = place.setdefault(part, {})
        place[name] = value
    return replace(arm, config=config, arm=replace(arm.arm, overrides={**arm.arm.overrides, **values}))
