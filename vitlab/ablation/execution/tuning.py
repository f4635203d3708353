"""Tuning per arm: every arm tries the same number of candidates on the validation split, and uses its best.

A trial is a cell of a separate ablation in ``tune/``, and can be killed and continued like any other. The next
candidates and those to stop follow from the files of the trials, so every process decides the same.

Optuna proposes candidates (:func:`suggest`), by a tree-structured Parzen estimator (Bergstra et al. 2011). Its
studies are not used: they need a storage beside the files, its pruners decide by who reports first, and a trial killed
half-way would be another trial, not the same cell continued.
"""

import copy
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vitlab.ablation.execution.cells import TRY, Cell, Resolved, State, cells_of, images_per_step
from vitlab.ablation.execution.identity import json_digest
from vitlab.ablation.execution.pool import Pool
from vitlab.ablation.file.settings import Range, Tune
from vitlab.ablation.file.spec import Ablation
from vitlab.errors import UsageError
from vitlab.runs.directory import RunDir
from vitlab.runs.matching import matching
from vitlab.tables import in_short

Past = Sequence[tuple[Mapping[str, Any], float, int]]  # values, score (NaN: it diverged), epoch if it was stopped
AT_RANDOM = 4  # candidates before the first that learns from others, the same for all arms


@dataclass(frozen=True)
class Trial:
    """A candidate of an arm.

    Args:
        arm: Name of the arm.
        values: Dotted keys and values.
        cells: One for each seed of the tuning.
        until: Epoch at which it waits for the others; 0: train to the end.
        stopped: Epoch at which halving stopped it; 0: not stopped.
    """

    arm: str
    values: Mapping[str, Any]
    cells: tuple[Cell, ...]
    until: int = 0
    stopped: int = 0

    @cached_property
    def states(self) -> list[State]:
        """The state of each of its cells, read once."""
        return [cell.state() for cell in self.cells]

    @property
    def is_over(self) -> bool:
        """Whether it is done, has diverged, or was stopped."""
        return bool(self.stopped) or {*self.states} <= {"done", "diverged"}

    @property
    def has_diverged(self) -> bool:
        """Whether one of its seeds has diverged."""
        return "diverged" in self.states

    def score(self) -> float:
        """Return its mean over the seeds; NaN if one has diverged, was stopped or is not done."""
        whole = not self.stopped and {*self.states} == {"done"}
        return _mean([(c.result() or {}).get(c.ablation.primary) if whole else None for c in self.cells])

    def score_at(self, epoch: int) -> float:
        """Return its mean at the first validation after an epoch; NaN if one of its seeds is not there yet.

        A seed whose training has ended before, such as by early stopping, counts with its last validation.
        """
        values = [_value_at(cell, epoch) for cell in self.cells]
        worst = -math.inf * self.cells[0].ablation.sign
        return _mean([worst if value is not None and math.isnan(value) else value for value in values])


def _value_at(cell: Cell, epoch: int) -> float | None:
    value = cell.value_at(epoch)
    if value is None and cell.state() == "done":
        value = next((last for _, last in reversed(cell.validations())), None)
    return value


def _mean(values: list[Any]) -> float:
    return math.nan if any(value is None for value in values) else statistics.fmean(map(float, values))


def suggest(ablation: Ablation, resolved: Sequence[Resolved]) -> None:
    """Store the next candidate of every arm whose search has come to one: `run` does, and what only reads does not.

    Raises:
        UsageError: Optuna is not installed, and is needed.
    """
    tune = ablation.tune
    if tune is None or tune.search != "tpe":
        return
    for arm in resolved:
        tried, place = _searched(ablation, tune, arm)
        while place:
            RunDir(place.parent).write(place.name, _suggest(tune, ablation.sign, _past(tried)))
            tried, place = _searched(ablation, tune, arm)


def _searched(ablation: Ablation, tune: Tune, arm: Resolved) -> tuple[list[Trial], Path | None]:
    """Return the candidates of an arm by a search that learns, and the file of the next; None if none is due."""
    mine: list[Trial] = []
    space = {key: vars(v) if isinstance(v, Range) else list(v) for key, v in tune.space.items()}
    inner = _inner(ablation, tune)
    while len(mine) < tune.budget and (not mine or mine[-1].is_over):  # each depends on all before it
        digest = json_digest([space, ablation.sign, [list(p) for p in _past(mine)]])
        place = inner.directory / arm.name / f"try{len(mine)}-{digest}.json"
        if not place.is_file():
            return mine, place
        trial = _trial(inner, arm, len(mine), RunDir(place.parent).read(place.name))
        mine = _in_turn([*mine, trial], rungs(ablation, arm), tune.halving, ablation.sign)
    return mine, None


def _past(tried: Sequence[Trial]) -> Past:
    return [(t.values, t.score_at(t.stopped) if t.stopped else t.score(), t.stopped) for t in tried]


def _inner(ablation: Ablation, tune: Tune) -> Ablation:
    """Return the ablation whose cells are the trials."""
    home = ablation.directory / "tune"
    return replace(ablation, home=home, evaluate="val", analyses=(), seeds=tune.seeds, claims=(), tune=None)


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


def _numbered(inner: Ablation, arm: Resolved, candidates: Sequence[Mapping[str, Any]]) -> list[Trial]:
    """Return the trials of an arm; one that has begun keeps its number where a longer list moves its place in the grid.

    The others get the free numbers in order, so that each has the same one before and after others begin.
    """
    begun: dict[str, set[int]] = {}  # numbers under which a cell lies
    for path in matching(inner.directory, f"{arm.name}-try*/s*-*"):
        if (number := path.parent.name.removeprefix(f"{arm.name}-try")).isdigit():
            begun.setdefault(path.name.partition(".")[0], set()).add(int(number))
    placed = [_trial(inner, arm, i, values) for i, values in enumerate(candidates)]
    there = [set[int]().union(*(begun.get(cell.run.path.name, ()) for cell in trial.cells)) for trial in placed]
    known = [place if place in found else min(found, default=None) for place, found in enumerate(there)]
    free = (number for number in itertools.count() if number not in known)
    numbers = [next(free) if number is None else number for number in known]
    return [
        trial if number == place else _trial(inner, arm, number, trial.values)
        for place, (trial, number) in enumerate(zip(placed, numbers, strict=True))
    ]


def _trial(inner: Ablation, arm: Resolved, i: int, values: Mapping[str, Any]) -> Trial:
    tried = with_values(inner, arm, values)
    named = replace(tried, arm=replace(tried.arm, levels={**arm.arm.levels, TRY: f"try{i}"}))
    return Trial(arm.name, values, tuple(Cell(inner, named, seed) for seed in inner.seeds))


def rungs(ablation: Ablation, arm: Resolved) -> list[int]:
    """Return the epochs after which halving compares: the first that validate from a quarter and half of all on.

    A candidate of a recipe that validates only at its end is trained whole.
    """
    every = int(arm.trainer.get("check_val_every_n_epoch") or 1)
    parts = (4, 2) if ablation.tune and ablation.tune.halving else ()
    asked = {math.ceil(arm.epochs / part / every) * every for part in parts}
    return sorted(epoch for epoch in asked if 0 < epoch < arm.epochs)


def _halved(tried: list[Trial], epochs: list[int], share: int, sign: int) -> list[Trial]:
    """Apply halving to the trials of an arm: at each rung, the remaining ones wait for each other."""
    fates = {id(trial): trial for trial in tried}
    left = [trial for trial in tried if not trial.has_diverged]
    for epoch in epochs:
        scores = {id(trial): sign * trial.score_at(epoch) for trial in left}
        if any(score != score for score in scores.values()):
            fates |= {id(trial): replace(trial, until=epoch) for trial in left}
            break
        best = sorted(left, key=lambda trial: -scores[id(trial)])
        kept = math.ceil(len(best) / share)
        fates |= {id(trial): replace(trial, stopped=epoch) for trial in best[kept:]}
        left = best[:kept]
    return list(fates.values())


def _in_turn(tried: list[Trial], epochs: list[int], share: int | None, sign: int) -> list[Trial]:
    """Apply halving to the last trial of an arm: at each rung it must be among the best so far."""
    *before, last = tried
    for epoch in epochs if not last.has_diverged else []:
        score = sign * last.score_at(epoch)
        if score != score:
            return [*before, replace(last, until=epoch)]
        others = [sign * t.score_at(epoch) for t in before if not t.stopped or t.stopped >= epoch]
        better = sum(other > score for other in others)  # of those that diverged before, none
        there = 1 + sum(other == other for other in others)
        if better >= math.ceil(there / (share or 1)):
            return [*before, replace(last, stopped=epoch)]
    return tried


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
        ablation, tune = self.ablation, self.ablation.tune
        if tune is None:
            return []
        if tune.search == "tpe":
            return [trial for arm in self.arms for trial in _searched(ablation, tune, arm)[0]]
        inner, found = _inner(ablation, tune), []
        for arm in self.arms:
            tried = _numbered(inner, arm, tune.candidates)
            found += _halved(tried, rungs(ablation, arm), tune.halving or 1, ablation.sign)
        return found

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
        return [
            f"{arm}: the best `{key}`, {trial.values[key]}, is at the border"
            for arm, trial in self.chosen.items()
            for key in trial.values
            if self.ablation.tune and self.ablation.tune.is_at_border(key, trial.values[key])
        ]


def with_values(ablation: Ablation, arm: Resolved, values: Mapping[str, Any]) -> Resolved:
    """Return a resolved arm with other values for some keys; a part that is a word becomes a class with arguments.

    Raises:
        UsageError: A key is below what has no arguments in this arm.
    """
    config = copy.deepcopy(dict(arm.config))
    for key, value in values.items():
        section, *path, name = key.split(".")
        place = config.setdefault(section, {})
        place = place["init_args"] if "init_args" in place and path[:1] != ["init_args"] else place
        for part, below in itertools.pairwise((*path, name)):
            inner = place.setdefault(part, {})
            if isinstance(inner, str):
                place[part] = inner = {"class_path": inner, "init_args": {}}
                inner = inner if below == "init_args" else inner["init_args"]
            elif not isinstance(inner, dict):
                text = f"`{key}`: `{part}` is {inner!r} in the arm {arm.name}, and has no arguments"
                raise ablation.file.mistake(f"tune/{key}", text)
            place = inner
        place[name] = value
    sizes = images_per_step(arm.config) / images_per_step(config)
    length = {"steps": round(arm.length.get("steps", 0) * sizes)}  # about; the sum of rates is another one
    named = replace(arm.arm, overrides={**arm.arm.overrides, **values})
    return replace(arm, config=config, arm=named, length=length if values else arm.length)


def _suggest(tune: Tune, sign: int, past: Past) -> dict[str, Any]:
    try:
        import optuna
    except ImportError as error:
        raise UsageError("`tune.search: tpe` needs Optuna: pip install 'vitlab[tune]'") from error
    from optuna.distributions import CategoricalDistribution, FloatDistribution
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    choices = {k: list(v) for k, v in tune.space.items() if not isinstance(v, Range)}
    space: dict[str, Any] = {k: CategoricalDistribution(range(len(v))) for k, v in choices.items()}
    space |= {k: FloatDistribution(r.low, r.high, log=r.log) for k, r in tune.space.items() if isinstance(r, Range)}
    for again in range(20):  # a small space may yield values that were tried already
        sampler = optuna.samplers.TPESampler(seed=1000 * again + len(past), n_startup_trials=AT_RANDOM)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for values, score, stopped in past:
            params = {k: choices[k].index(v) if k in choices else v for k, v in values.items()}
            given: dict[str, Any] = {"value": sign * score}
            if stopped or score != score:
                seen = {stopped: sign * score} if score == score else {}
                given = {"state": TrialState.PRUNED, "intermediate_values": seen}
            study.add_trial(create_trial(params=params, distributions=space, **given))
        asked = study.ask(space).params
        found = {k: choices[k][v] if k in choices else tune.space[k].rounded(v) for k, v in asked.items()}  # type: ignore[union-attr]
        if found not in [dict(values) for values, _, _ in past]:
            break
    return {key: found[key] for key in tune.space}
