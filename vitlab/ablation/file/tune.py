"""The section ``tune`` of an ablation's file: the search space of each arm, and its budget."""

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitlab.ablation.file.schema import File, as_number
from vitlab.errors import did_you_mean

OPTIONS = ("search", "budget", "seeds", "split", "per", "halving", "floor")
SEARCHES = ("grid", "random", "tpe")


@dataclass(frozen=True)
class Range:
    """A range of numbers from ``low`` to ``high``, on a logarithmic scale with ``log``."""

    low: float
    high: float
    log: bool = False

    def at(self, share: float) -> float:
        """Return the number at a share of the range, to three digits."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = low + share * (high - low)
        return self.rounded(math.exp(value) if self.log else value)

    def rounded(self, value: float) -> float:
        """Return a number of the range to three digits."""
        return min(self.high, max(self.low, float(f"{value:.3g}")))

    def is_border(self, value: float) -> bool:
        """Return whether a number is in the outer twentieth of the range, on either side."""
        return value <= self.at(0.05) or value >= self.at(0.95)


@dataclass(frozen=True)
class Tune:
    """The tuning of every arm before its measured seeds: the same number of candidates, on separate seeds.

    Args:
        search: How candidates are found: all of a grid, some at random, or by Optuna's TPE from those before.
        candidates: Dotted keys and values, each a candidate; empty for TPE.
        space: The values or the range of each key, in the order of the file.
        seeds: Seeds of the trials, none of which is measured.
        budget: Candidates of each arm.
        halving: The best 1 of so many go on after a quarter and after half of the epochs; None: all of them.
        floor: The number on validation data that the best candidate must reach, else its arm is not measured.
    """

    search: str
    candidates: tuple[Mapping[str, Any], ...]
    space: Mapping[str, tuple[Any, ...] | Range]
    seeds: tuple[int, ...]
    budget: int
    halving: int | None = None
    floor: float | None = None


def read_tune(file: File, axes: Mapping[str, Mapping[str, Any]], seeds: tuple[int, ...]) -> Tune | None:
    """Return the section; None if there is none. A budget below the size of the grid takes a random part of it."""
    content = file.content.get("tune")
    if content is None:
        return None
    if not isinstance(content, dict):
        raise file.mistake("tune", f"`tune` must have dotted keys with their values, and a budget, got {content!r}")
    space = {str(k): _values(file, axes, str(k), v) for k, v in content.items() if k not in OPTIONS}
    if not space:
        raise file.mistake("tune", "`tune` names nothing to tune, as in {model.lr: [1e-3, 2e-3, 4e-3]}")
    for name, only in (("split", "val"), ("per", "arm")):
        if content.get(name, only) != only:
            raise file.mistake(f"tune/{name}", f"`tune.{name}` must be {only}, got {content[name]!r}")
    primary = str((file.content.get("metric") or {}).get("primary"))
    if primary.partition("/")[0] in file.texts("analyses", "[resolution, scramble]"):
        raise file.mistake("tune", "`tune` chooses by `metric.primary` on the validation split; an analysis is not it")
    search, budget = _search(file, content, space)
    own = content.get("seeds", [max(seeds) + 100])
    if not isinstance(own, list) or not own or any(type(s) is not int or s < 0 for s in own) or len({*own}) < len(own):
        raise file.mistake("tune/seeds", f"`tune.seeds` must be a list of different seeds, got {own!r}")
    if shared := sorted(set(own) & set(seeds)):
        text = f"`tune.seeds` and `seeds` share {', '.join(map(str, shared))}: tuning needs seeds of its own"
        raise file.mistake("tune/seeds", text)
    candidates = () if search == "tpe" else _candidates(space, budget)
    budget = len(candidates) or budget
    halving = file.number("tune.halving", None, 2, 16, whole=True)
    return Tune(search, candidates, space, tuple(own), budget, halving, file.number("tune.floor", None, -math.inf))


def _search(file: File, content: Mapping[str, Any], space: Mapping[str, tuple[Any, ...] | Range]) -> tuple[str, int]:
    """Return how to search, and the budget."""
    ranges = [key for key, values in space.items() if isinstance(values, Range)]
    size = math.prod(len(values) for values in space.values() if not isinstance(values, Range))
    budget = file.number("tune.budget", None if ranges else size, 1, whole=True)
    search = content.get("search", "grid" if not ranges and budget >= size else "random")
    if search not in SEARCHES:
        hint = did_you_mean(str(search), SEARCHES) or f"; there are {', '.join(SEARCHES)}"
        raise file.mistake("tune/search", f"`tune.search` cannot be {search!r}{hint}")
    if ranges and search == "grid":
        raise file.mistake(
            f"tune/{ranges[0]}", f"`{ranges[0]}` is a range, which has no grid: set `search: random` or `tpe`"
        )
    if budget is None:
        raise file.mistake("tune", f"`{ranges[0]}` is a range: give the number of candidates per arm, as in budget: 16")
    if search == "grid" and budget < size:
        raise file.mistake(
            "tune/budget", f"the grid has {size} candidates, `tune.budget` is {budget}: set `search: random`"
        )
    return search, budget


def _candidates(space: Mapping[str, tuple[Any, ...] | Range], budget: int) -> tuple[Mapping[str, Any], ...]:
    """Return the grid, or a random part of it, the same for all arms."""
    draw = random.Random(0)
    if not any(isinstance(values, Range) for values in space.values()):
        grid = [dict(zip(space, found, strict=True)) for found in itertools.product(*space.values())]  # type: ignore[arg-type]
        return tuple(grid[i] for i in sorted(draw.sample(range(len(grid)), min(budget, len(grid)))))
    return tuple(
        {k: v.at(draw.random()) if isinstance(v, Range) else draw.choice(v) for k, v in space.items()}
        for _ in range(budget)
    )


def _values(file: File, axes: Mapping[str, Mapping[str, Any]], key: str, values: Any) -> tuple[Any, ...] | Range:
    """Return the values of a key, or their range."""
    place = f"tune/{key}"
    if key.split(".")[0] not in ("model", "data", "trainer") or "." not in key:
        hint = did_you_mean(key, OPTIONS) or "; write a dotted key of a config, such as model.lr"
        raise file.mistake(place, f"`tune` cannot tune `{key}`{hint}")
    for axis, levels in axes.items():
        if any(key in sets for sets in levels.values()):
            raise file.mistake(place, f"`tune` names `{key}`, which the axis `{axis}` sets")
    if isinstance(values, dict):
        return _range(file, place, key, values)
    if not isinstance(values, list) or len({str(v) for v in values}) < max(2, len(values)):
        text = f"`{key}` needs a list of two different values or more, or a range {{low: 1e-4, high: 1e-2, log: true}}"
        raise file.mistake(place, f"{text}, got {values!r}")
    return tuple(as_number(value) for value in values)


def _range(file: File, place: str, key: str, values: Mapping[str, Any]) -> Range:
    low, high = (as_number(values.get(name)) for name in ("low", "high"))
    log = values.get("log", False)
    is_right = values.keys() <= {"low", "high", "log"} and type(log) is bool and _is_number(low) and _is_number(high)
    if not is_right or not (0 if log else -math.inf) < low < high:
        example = "{low: 1e-4, high: 1e-2, log: true}"
        raise file.mistake(place, f"the range of `{key}` must be like {example}, got {dict(values)!r}")
    return Range(float(low), float(high), log)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
