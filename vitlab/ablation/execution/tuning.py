"""Tuning per arm: every arm tries the same number of candidates on the validation split, and uses its best."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from vitlab.ablation.execution.candidates import Candidates, Trial, with_values
from vitlab.ablation.execution.cells import Cell, Resolved, cells_of
from vitlab.ablation.execution.pool import Pool
from vitlab.ablation.file.spec import Ablation
from vitlab.runs.matching import matching
from vitlab.tables import in_short


@dataclass(frozen=True)
class Tuning:
    """How far the tuning of the arms is, by the files of its trials, each read once.

    Without `tune` there are no trials, and arms are measured as they are.

    Args:
        ablation: Whose arms are tuned.
        arms: Those of them that are resolved so far, untuned.
    """

    ablation: Ablation
    arms: Sequence[Resolved]

    @cached_property
    def trials(self) -> list[Trial]:
        """The candidates so far, each with the epoch at which it waits or stops."""
        arms = self.arms if self.ablation.tune else ()
        return [trial for arm in arms for trial in Candidates(self.ablation, arm).trials()]

    @property
    def candidates(self) -> list[Cell]:
        """The cells of the candidates."""
        return [cell for trial in self.trials for cell in trial.cells]

    @property
    def due(self) -> list[Cell]:
        """The cells of candidates that are not over, each with the epoch at which it waits for others."""
        left = [trial for trial in self.trials if not trial.is_over]
        return [replace(cell, until=trial.until) for trial in left for cell in trial.cells]

    @cached_property
    def by_arm(self) -> dict[str, list[Trial]]:
        """The candidates of each arm that has any."""
        found: dict[str, list[Trial]] = {}
        for trial in self.trials:
            found.setdefault(trial.arm, []).append(trial)
        return found

    @cached_property
    def over(self) -> set[str]:
        """The arms that have used their budget of candidates."""
        budget = self.ablation.tune.budget if self.ablation.tune else 0
        return {arm for arm, mine in self.by_arm.items() if len(mine) == budget and all(t.is_over for t in mine)}

    @cached_property
    def best(self) -> dict[str, Trial]:
        """The best candidate of each arm whose tuning is over, the first in a tie; none where all lost."""
        sign, found = self.ablation.sign, {}
        for arm in self.by_arm:
            known = [trial for trial in self.by_arm[arm] if not math.isnan(trial.score())]
            if known and arm in self.over:
                found[arm] = max(known, key=lambda trial: sign * trial.score())
        return found

    @cached_property
    def chosen(self) -> dict[str, Trial]:
        """The candidate that each arm is measured with: the best one, if it reaches the floor."""
        return {arm: trial for arm, trial in self.best.items() if arm not in self.given_up}

    @cached_property
    def given_up(self) -> dict[str, str]:
        """The arms that are not measured, and why: no candidate has a number, or none reached the floor."""
        found, floor = {}, self.ablation.tune.floor if self.ablation.tune else None
        for arm, mine in self.by_arm.items():
            if arm in self.best:
                score = self.best[arm].score()
                if floor is not None and self.ablation.sign * score < self.ablation.sign * floor:
                    found[arm] = f"its best candidate has {in_short(score)} on validation data, `tune.floor` is {floor}"
            elif arm in self.over and all(trial.has_diverged for trial in mine):
                found[arm] = "all of its candidates diverged"
            elif arm in self.over:
                found[arm] = f"no candidate that was trained to its end has a number as its `{self.ablation.primary}`"
        return found

    @cached_property
    def tuned(self) -> list[Resolved]:
        """The arms that are measured, with their tuned values: not those that are not tuned yet, or are given up."""
        if self.ablation.tune is None:
            return list(self.arms)
        values = {arm: trial.values for arm, trial in self.chosen.items()}
        return [with_values(self.ablation, arm, values[arm.name]) for arm in self.arms if arm.name in values]

    @property
    def cells(self) -> list[Cell]:
        """The cells of the arms that are measured."""
        return cells_of(self.ablation, self.tuned)

    def border_words(self) -> list[str]:
        """Return a sentence for each chosen value at the border of the search space, without its stop."""
        tune = self.ablation.tune
        return [
            f"{arm}: the best `{key}`, {value}, is at the border"
            for arm, trial in self.chosen.items()
            for key, value in trial.values.items()
            if tune and tune.is_at_border(key, value)
        ]


def suggest(ablation: Ablation, arms: Sequence[Resolved]) -> None:
    """Store the next candidate of every arm whose search has come to one: `run` does, and what only reads does not.

    Raises:
        UsageError: Optuna is not installed, and is needed.
    """
    if ablation.tune and ablation.tune.search == "tpe":
        for arm in arms:
            Candidates(ablation, arm).suggest()


def run_trials(ablation: Ablation, arms: Sequence[Resolved], pool_of: Callable[[list[Cell]], Pool]) -> list[str]:
    """Train the trials, in parallel with other processes, until a signal; return those that failed."""
    while True:
        suggest(ablation, arms)
        if not (todo := Tuning(ablation, arms).due):
            return []
        pool = pool_of(todo)
        pool.run_all()
        states = [cell.state() for cell in todo]
        ended = zip(todo, states, strict=True)
        failed = [f"tune/{cell.name}" for cell, state in ended if cell.failure() and state != "diverged"]
        if failed or pool.interrupts.count:
            return failed
        if "running" in states:
            time.sleep(1)  # another `run` trains them


def seeds_left_behind(ablation: Ablation, resolved: Sequence[Resolved]) -> list[int]:
    """Return the seeds of candidates from which a larger default of ``tune.seeds`` has moved away; mostly none.

    The default follows from the measured seeds, so that one seed more would tune every arm again. Candidates that other
    code has trained do not count: they are trained again whatever the seeds.
    """
    tune = ablation.tune
    if tune is None or "seeds" in ablation.file.content["tune"]:
        return []
    folders = matching(ablation.directory / "tune", "*-try*/s*-*")
    names = {path.name.partition("-")[0].removeprefix("s") for path in folders}
    seeds = {int(name) for name in names if name.isdigit()}
    if not seeds or seeds & {*tune.seeds}:
        return []
    before = replace(ablation, tune=replace(tune, seeds=tuple(sorted(seeds))))
    return sorted({cell.seed for cell in Tuning(before, resolved).candidates if cell.run.exists()})
