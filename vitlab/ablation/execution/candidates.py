"""The candidates of an arm: how they are found, under which names they lie, and which of them go on.

A trial is a cell of a separate ablation in ``tune/``, and can be killed and continued like any other. The next
candidates and those to stop follow from the files of the trials, so every process decides the same.

Optuna proposes candidates, by a tree-structured Parzen estimator (Bergstra et al. 2011). Its studies are not used:
they need a storage beside the files, its pruners decide by who reports first, and a trial killed half-way would be
another trial, not the same cell continued.
"""

import copy
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vitlab.ablation.execution.cells import TRY, Cell, Resolved, State, images_per_step
from vitlab.ablation.execution.identity import json_digest
from vitlab.ablation.file.settings import Range, Tune
from vitlab.ablation.file.spec import Ablation
from vitlab.errors import UsageError
from vitlab.runs.atomic import write_json
from vitlab.runs.matching import matching
from vitlab.runs.records import read_json

Past = Sequence[tuple[Mapping[str, Any], float, int]]  # values, score (NaN: it diverged), epoch if it was stopped
AT_RANDOM = 4  # candidates before the first that learns from others, the same for all arms
AT_START = {"pos_embed", "tokenizer", "patch_size", "embed_dim", "init_std", "pre_norm"}  # decide tokens and positions


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

    def last_score(self) -> float:
        """Return its score where it was stopped, or else at its end."""
        return self.score_at(self.stopped) if self.stopped else self.score()

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


@dataclass(frozen=True)
class Candidates:
    """The candidates of an arm, by the files of their cells.

    Args:
        ablation: Whose file has a section `tune`.
        arm: The arm, untuned.
    """

    ablation: Ablation
    arm: Resolved

    @property
    def tune(self) -> Tune:
        """How the arm is tuned."""
        assert self.ablation.tune
        return self.ablation.tune

    @cached_property
    def inner(self) -> Ablation:
        """The ablation whose cells are the trials."""
        home, seeds = self.ablation.directory / "tune", self.tune.seeds
        return replace(self.ablation, home=home, evaluate="val", analyses=(), seeds=seeds, claims=(), tune=None)

    @cached_property
    def rungs(self) -> list[int]:
        """The epochs after which halving compares: the first that validate from a quarter and half of all on.

        A candidate of a recipe that validates only at its end is trained whole.
        """
        every = int(self.arm.trainer.get("check_val_every_n_epoch") or 1)
        parts = (4, 2) if self.tune.halving else ()
        asked = {math.ceil(self.arm.epochs / part / every) * every for part in parts}
        return sorted(epoch for epoch in asked if 0 < epoch < self.arm.epochs)

    def trials(self) -> list[Trial]:
        """Return the candidates so far, each with the epoch at which it waits or stops."""
        if self.tune.search == "tpe":
            return self._searched()[0]
        return halved(self._numbered(), self.rungs, self.tune.halving or 1, self.ablation.sign)

    def suggest(self) -> None:
        """Store the next candidate, where a search that learns has come to one.

        Raises:
            UsageError: Optuna is not installed, and is needed.
        """
        tried, place = self._searched()
        while place:
            write_json(place, _suggest(self.tune, self.ablation.sign, _past(tried)))
            tried, place = self._searched()

    def _searched(self) -> tuple[list[Trial], Path | None]:
        """Return the candidates of a search that learns, and the file of the next; None if none is due."""
        tune, sign = self.tune, self.ablation.sign
        mine: list[Trial] = []
        space = {key: vars(v) if isinstance(v, Range) else list(v) for key, v in tune.space.items()}
        while len(mine) < tune.budget and (not mine or mine[-1].is_over):  # each depends on all before it
            digest = json_digest([space, sign, [list(p) for p in _past(mine)]])
            place = self.inner.directory / self.arm.name / f"try{len(mine)}-{digest}.json"
            if not place.is_file():
                return mine, place
            trial = self._trial(len(mine), read_json(place))
            mine = _in_turn([*mine, trial], self.rungs, tune.halving or 1, sign)
        return mine, None

    def _numbered(self) -> list[Trial]:
        """Return the trials of a list; one that has begun keeps its number where a longer list moves its place.

        The others get the free numbers in order, so that each has the same one before and after others begin.
        """
        arm, begun = self.arm.name, dict[str, set[int]]()  # numbers under which a cell lies
        for path in matching(self.inner.directory, f"{arm}-try*/s*-*"):
            if (number := path.parent.name.removeprefix(f"{arm}-try")).isdigit():
                begun.setdefault(path.name.partition(".")[0], set()).add(int(number))
        placed = [self._trial(i, values) for i, values in enumerate(self.tune.candidates)]
        there = [set[int]().union(*(begun.get(cell.run.path.name, ()) for cell in trial.cells)) for trial in placed]
        known = [place if place in found else min(found, default=None) for place, found in enumerate(there)]
        free = (number for number in itertools.count() if number not in known)
        numbers = [next(free) if number is None else number for number in known]
        return [
            trial if number == place else self._trial(number, trial.values)
            for place, (trial, number) in enumerate(zip(placed, numbers, strict=True))
        ]

    def _trial(self, number: int, values: Mapping[str, Any]) -> Trial:
        tried = with_values(self.inner, self.arm, values)
        named = replace(tried, arm=replace(tried.arm, levels={**self.arm.arm.levels, TRY: f"try{number}"}))
        return Trial(self.arm.name, values, tuple(Cell(self.inner, named, seed) for seed in self.inner.seeds))


def _past(tried: Sequence[Trial]) -> Past:
    return [(trial.values, trial.last_score(), trial.stopped) for trial in tried]


def halved(tried: list[Trial], epochs: list[int], share: int, sign: int) -> list[Trial]:
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


def _in_turn(tried: list[Trial], epochs: list[int], share: int, sign: int) -> list[Trial]:
    """Apply halving to the last trial of an arm: at each rung it must be among the best so far."""
    *before, last = tried
    for epoch in epochs if not last.has_diverged else []:
        score = sign * last.score_at(epoch)
        if score != score:
            return [*before, replace(last, until=epoch)]
        others = [sign * t.score_at(epoch) for t in before if not t.stopped or t.stopped >= epoch]
        better = sum(other > score for other in others)  # of those that diverged before, none
        there = 1 + sum(other == other for other in others)
        if better >= math.ceil(there / share):
            return [*before, replace(last, stopped=epoch)]
    return tried


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
    is_other = any({*key.split(".")} & AT_START or key.startswith("data.") for key in values)
    start = {**arm.start, "token_sd": None, "pos_to_content": None} if is_other else arm.start  # not measured again
    return replace(arm, config=config, arm=named, start=start, length=length if values else arm.length)


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
