"""The sections of an ablation's file on matching, statistics, execution and tuning, with their defaults."""

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from vitlab.ablation.file.arms import owned_by_ablation
from vitlab.ablation.file.schema import File, are_seeds, as_number, checked, meant, number
from vitlab.config.keys import flatten_with_classes, key_as_typed, key_of
from vitlab.errors import did_you_mean
from vitlab.ranges import MOST_SEED

SEARCHES = ("grid", "random", "tpe")


@dataclass(frozen=True)
class Metric:
    """What is compared."""

    primary: str = checked(lambda file, name: file.value(name), "")
    mode: Literal["max", "min"] = "max"
    secondary: tuple[str, ...] = checked(lambda file, name: file.texts(name, "[acc5]"), ())


@dataclass(frozen=True)
class Match:
    """How closely the arms must match; a number is a relative difference to the arm to match."""

    within: tuple[str, ...] = checked(lambda file, name: file.texts(name, "[pos_embed]"), ())  # axes that may differ
    steps: float | str = number("exact", 0, 1000, or_word="exact")
    params: float | str = number(0.02, 0, 1000, or_word="exact")
    flops: float | str = number(0.02, 0, 1000, or_word="exact")
    pos_to_content: float | None = number(None, 0, 1000)  # of arms whose positions are added, to the first of them
    on_violation: Literal["warn", "fail"] = "warn"


@dataclass(frozen=True)
class Stats:
    """How the numbers are compared."""

    test: Literal["auto", "paired", "welch"] = "auto"  # paired where arms of one seed see the same batches, else welch
    ci: float = number(0.95, 0.5, 0.9999)
    margin: float | None = number(None, 1e-12)  # largest difference that does not matter
    sd: float | None = number(None, 1e-12)  # expected spread, for the plan
    seeds_max: int | None = number(None, 2, 10_000, whole=True)  # None: the number of seeds

    @property
    def alpha(self) -> float:
        """The level of significance."""
        return 1 - self.ci


def _seconds(file: File, name: str) -> float | None:
    """Return a duration such as 90, 90s, 20m, 2h or 1d in seconds."""
    value = file.value(name)
    if value is None:
        return None
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)([smhd]?)", str(value))
    if not found or not float(found[1]):
        raise file.wrong(name, "must be a time such as 90s, 20m or 2h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def _words(file: File, name: str) -> Sequence[str] | None:
    value = file.value(name)
    if value is None or (value and isinstance(value, list)):
        return value and [str(word) for word in value]
    raise file.wrong(name, "must be a list of words, as in [python, train.py]")


def _mapping(file: File, name: str) -> Mapping[str, Any]:
    value = file.value(name) or {}
    if not isinstance(value, dict):
        raise file.wrong(name, 'must have keys, as in {time: "04:00:00"}')
    return value


def _name(file: File, name: str) -> str:
    if not isinstance(value := file.value(name), str):
        raise file.wrong(name, "must be a name")
    return value


@dataclass(frozen=True)
class Execution:
    """How the cells are run."""

    executor: Literal["local", "slurm"] = "local"
    workers: int | str = number("auto", 1, 4096, whole=True, or_word="auto")
    per_gpu: int = number(1, 1, 64, whole=True)
    timeout: float | None = checked(_seconds)
    retries: int = number(1, 0, 100, whole=True)
    keep: Literal["all", "weights", "none"] = "all"
    slurm: Mapping[str, Any] = field(default_factory=dict, metadata={"read": _mapping})
    command: Sequence[str] | None = checked(_words)
    fork: bool = True  # from a process that has imported vitlab


@dataclass(frozen=True)
class WandB:
    """Where Weights & Biases takes the runs and the report of an ablation."""

    project: str = checked(_name, "vitlab")
    mode: Literal["online", "offline", "disabled"] = "online"  # offline all the same where there is no API key


SECTIONS: dict[str, type] = {"metric": Metric, "match": Match, "stats": Stats, "run": Execution, "wandb": WandB}
KEYS: dict[str, tuple[str, ...]] = {  # "": the file itself; others: the section of that name
    "": (
        *("name", "base", "axes", "exclude", "adjust", "seeds", "baseline", "evaluate", "checkpoint", "metric"),
        *("match", "analyses", "stats", "claims", "run", "wandb", "tune", "trust_imports"),
    ),
    **{name: tuple(one.name for one in fields(kind)) for name, kind in SECTIONS.items()},
}


def read_match(file: File, axes: Mapping[str, Any]) -> Match:
    """Return how closely the arms must match."""
    match = file.section("match", Match)
    for axis in match.within:
        if axis not in axes:
            raise file.mistake("match/within", f"there is no axis `{axis}`{meant(axis, axes)}")
    return match


def read_stats(file: File, seeds: int) -> Stats:
    """Return how the numbers of so many seeds are compared."""
    stats = file.section("stats", Stats)
    if stats.seeds_max and stats.seeds_max < seeds:
        text = f"`stats.seeds_max` must be at least the number of `seeds`, got {stats.seeds_max} and {seeds}"
        raise file.mistake("stats/seeds_max", text)
    return stats


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


def _list_of_seeds(file: File, name: str) -> tuple[int, ...]:
    if not are_seeds(value := file.value(name)):
        raise file.wrong(name, f"must be a list of different seeds from 0 to {MOST_SEED}")
    return tuple(value)


@dataclass(frozen=True)
class Asked:
    """The keys of `tune` beside those that are tuned."""

    search: str | None = checked(lambda file, name: file.choice(name, SEARCHES))
    budget: int | None = number(None, 1, whole=True)  # None: the grid
    seeds: tuple[int, ...] = checked(_list_of_seeds, ())  # none: the largest measured one + 100
    split: Literal["val"] = "val"
    per: Literal["arm"] = "arm"
    halving: int | None = number(None, 2, 16, whole=True)
    floor: float | None = number(None, -math.inf)


OPTIONS = tuple(one.name for one in fields(Asked))


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

    def is_at_border(self, key: str, value: Any) -> bool:
        """Return whether a value is the least or largest number of its list, or in the outer twentieth of its range."""
        space = self.space[key]
        if isinstance(space, Range):
            return bool(value <= space.at(0.05) or value >= space.at(0.95))
        are_numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in space)
        return are_numbers and value in (min(space), max(space))

    def samples(self) -> list[dict[str, Any]]:
        """Return a few candidates that have each key, each value that is no number, and the ends of numbers.

        >>> space = {"model.lr": (0.1, 0.3, 0.2), "model.opt": ("adamw", "sgd"), "model.decay": Range(0.0, 1.0)}
        >>> [list(one.values()) for one in Tune("random", (), space, (1,), 3).samples()]
        [[0.1, 'adamw', 0.0], [0.3, 'sgd', 1.0]]
        """
        tried = {key: _ends(values) for key, values in self.space.items()}
        count = max(map(len, tried.values()))
        return [{key: values[i % len(values)] for key, values in tried.items()} for i in range(count)]


def _ends(values: tuple[Any, ...] | Range) -> tuple[Any, ...]:
    """Return the least and the largest of numbers; all values of a list that has others."""
    if isinstance(values, Range):
        return values.low, values.high
    return (min(values), max(values)) if len(values) > 1 and all(map(_is_number, values)) else values


def read_tune(file: File, axes: Mapping[str, Mapping[str, Any]], seeds: tuple[int, ...]) -> Tune | None:
    """Return the section; None if there is none. A budget below the size of the grid takes a random part of it."""
    content = file.value("tune")
    if content is None:
        return None
    if not isinstance(content, dict):
        raise file.wrong("tune", "must have dotted keys with their values, and a budget")
    space = {str(k): _values(file, axes, str(k), v) for k, v in content.items() if k not in OPTIONS}
    if not space:
        raise file.mistake("tune", "`tune` names nothing to tune, as in {model.lr: [1e-3, 2e-3, 4e-3]}")
    asked = file.section("tune", Asked)
    if str(file.value("metric.primary")).partition("/")[0] in file.texts("analyses", "[resolution, scramble]"):
        raise file.mistake(
            "tune", "`tune` chooses by `metric.primary` on the validation split, where no analysis is measured"
        )
    search, budget = _search(file, asked, space)
    own = asked.seeds or (max(seeds) + 100,)
    if shared := sorted(set(own) & set(seeds)):
        text = f"`tune.seeds` and `seeds` share {', '.join(map(str, shared))}: tuning needs seeds of its own"
        raise file.mistake("tune/seeds", text)
    candidates = () if search == "tpe" else _candidates(space, budget)
    return Tune(search, candidates, space, own, len(candidates) or budget, asked.halving, asked.floor)


def _search(file: File, asked: Asked, space: Mapping[str, tuple[Any, ...] | Range]) -> tuple[str, int]:
    """Return how to search, and the budget."""
    ranges = [key for key, values in space.items() if isinstance(values, Range)]
    size = math.prod(len(values) for values in space.values() if not isinstance(values, Range))
    budget = asked.budget or (None if ranges else size)
    search = asked.search or ("grid" if budget and not ranges and budget >= size else "random")
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
    lists = {key: values for key, values in space.items() if not isinstance(values, Range)}
    if len(lists) == len(space):
        size = math.prod(map(len, lists.values()))
        return tuple(_of_grid(lists, i) for i in sorted(draw.sample(range(size), min(budget, size))))
    return tuple(
        {k: v.at(draw.random()) if isinstance(v, Range) else draw.choice(v) for k, v in space.items()}
        for _ in range(budget)
    )


def _of_grid(lists: Mapping[str, tuple[Any, ...]], i: int) -> Mapping[str, Any]:
    """Return the candidate at a place of the grid, in the order of ``itertools.product``, without those before it.

    >>> _of_grid({"model.lr": (0.1, 0.2), "model.opt": ("adamw", "sgd", "lion")}, 4)
    {'model.lr': 0.2, 'model.opt': 'sgd'}
    """
    found = {}
    for key in reversed([*lists]):
        i, place = divmod(i, len(lists[key]))
        found[key] = lists[key][place]
    return {key: found[key] for key in lists}


def _values(file: File, axes: Mapping[str, Mapping[str, Any]], key: str, values: Any) -> tuple[Any, ...] | Range:
    """Return the values of a key, or their range."""
    place = f"tune/{key}"
    if key.split(".")[0] not in ("model", "data", "trainer") or "." not in key:
        hint = did_you_mean(key, OPTIONS) or "; write a dotted key of a config, such as model.lr"
        raise file.mistake(place, f"`tune` cannot tune `{key}`{hint}")
    if way_out := owned_by_ablation(key):
        file.refuse(place, f"`tune` names `{key}`, which the ablation sets: {way_out}")
    if not key_of(key).identity:
        file.refuse(place, f"`tune` names `{key}`, which changes no number: all candidates would be the same")
    owners = {f"the axis `{axis}`": list(levels.values()) for axis, levels in axes.items()}
    owners["`adjust`"] = [one["set"] for one in file.content.get("adjust") or []]
    name = key_as_typed(key)
    for owner, settings in owners.items():  # a candidate would replace what they set
        found = {own for sets in settings for own in flatten_with_classes(sets)}
        if any(own == name or own.startswith(f"{name}.") for own in found):
            file.refuse(place, f"`tune` names `{key}`, which {owner} sets: leave it out of one of them")
    if isinstance(values, dict):
        return _range(file, place, key, values)
    if not isinstance(values, list) or len({str(as_number(v)) for v in values}) < max(2, len(values)):
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
