"""The sections of an ablation's file on matching, statistics, execution and tuning, with their defaults."""

import math
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitlab.ablation.file.arms import owned_by_ablation
from vitlab.ablation.file.schema import File, as_number
from vitlab.config.keys import flatten_with_classes, key_as_typed, key_of
from vitlab.errors import did_you_mean
from vitlab.ranges import MOST_SEED

OPTIONS = ("search", "budget", "seeds", "split", "per", "halving", "floor")
SEARCHES = ("grid", "random", "tpe")


@dataclass(frozen=True)
class Match:
    """How closely the arms must match; a number is a relative difference to the arm to match."""

    within: tuple[str, ...] = ()  # axes across which arms need not match
    steps: float | str = "exact"
    params: float | str = 0.02
    flops: float | str = 0.02
    pos_to_content: float | None = None  # of all arms whose positions are added, to the first of them
    on_violation: str = "warn"


@dataclass(frozen=True)
class Stats:
    """How the numbers are compared."""

    test: str = "auto"  # paired where arms of one seed see the same batches, else welch
    ci: float = 0.95
    margin: float | None = None  # largest difference that does not matter
    sd: float | None = None  # expected spread, for the plan
    seeds_max: int | None = None  # maximal number of seeds; default: the number of seeds

    @property
    def alpha(self) -> float:
        """The level of significance."""
        return 1 - self.ci


@dataclass(frozen=True)
class Execution:
    """How the cells are run."""

    executor: str = "local"
    workers: int | str = "auto"
    per_gpu: int = 1
    timeout: float | None = None  # seconds
    retries: int = 1
    keep: str = "all"
    slurm: Mapping[str, Any] = field(default_factory=dict)
    command: Sequence[str] | None = None
    fork: bool = True  # from a process that has imported vitlab


@dataclass(frozen=True)
class WandB:
    """Where Weights & Biases takes the runs and the report of an ablation."""

    project: str = "vitlab"
    is_offline: bool = False  # even where it could be online

    @property
    def mode(self) -> str | None:
        """The mode that the environment or the file sets; None: online with an API key, offline without one."""
        return os.environ.get("WANDB_MODE") or ("offline" if self.is_offline else None)


def read_wandb(file: File) -> WandB | None:
    """Return where Weights & Biases takes the runs; None if it is not used."""
    given = file.content.get("wandb")
    if not given or given.get("mode") == "disabled":
        return None
    project = given.get("project", "vitlab")
    if not isinstance(project, str):
        raise file.mistake("wandb/project", f"`wandb.project` must be a name, got {project!r}")
    return WandB(project, given.get("mode") == "offline")


def read_match(file: File, axes: Mapping[str, Any]) -> Match:
    """Return how closely the arms must match."""
    given = dict(file.content.get("match") or {})
    within = file.texts("match.within", "[pos_embed]")
    for axis in within:
        if axis not in axes:
            hint = did_you_mean(str(axis), axes) or f"; there are {', '.join(axes)}"
            raise file.mistake("match/within", f"there is no axis `{axis}`{hint}")
    for key in ("steps", "params", "flops"):
        if given.get(key, "exact") != "exact":
            file.number(f"match.{key}", 0.0, 0, 1000)
    file.number("match.pos_to_content", None, 0, 1000)
    tolerances = {key: as_number(value) for key, value in given.items()}
    return Match(**{**tolerances, "within": within})


def read_stats(file: File, seeds: int) -> Stats:
    """Return how the numbers of so many seeds are compared."""
    given = file.content.get("stats") or {}
    most = file.number("stats.seeds_max", None, 2, 10_000, whole=True)
    if most and most < seeds:
        text = f"`stats.seeds_max` must be at least the number of `seeds`, got {most} and {seeds}"
        raise file.mistake("stats/seeds_max", text)
    return Stats(
        test=given.get("test", "auto"),
        ci=file.number("stats.ci", 0.95, 0.5, 0.9999),
        margin=file.number("stats.margin", None, 1e-12),
        sd=file.number("stats.sd", None, 1e-12),
        seeds_max=most,
    )


def read_run(file: File) -> Execution:
    """Return how the cells are run."""
    given = file.content.get("run") or {}
    workers = given.get("workers", "auto")
    if workers != "auto":
        workers = file.number("run.workers", "auto", 1, 4096, whole=True)
    return Execution(
        executor=given.get("executor", "local"),
        workers=workers,
        per_gpu=file.number("run.per_gpu", 1, 1, 64, whole=True),
        timeout=seconds(file, given.get("timeout")),
        retries=file.number("run.retries", 1, 0, 100, whole=True),
        keep=given.get("keep", "all"),
        slurm=_slurm(file, given.get("slurm") or {}),
        command=_command(file, given.get("command")),
        fork=given.get("fork", True),
    )


def _slurm(file: File, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise file.mistake("run/slurm", f'`run.slurm` must have keys, as in {{time: "04:00:00"}}, got {given!r}')
    return given


def _command(file: File, given: Any) -> Sequence[str] | None:
    if given is None or (given and isinstance(given, list)):
        return given and [str(word) for word in given]
    raise file.mistake("run/command", f"`run.command` must be a list of words, as in [python, train.py], got {given!r}")


def seconds(file: File, value: Any) -> float | None:
    """Return a duration such as 90, 90s, 20m, 2h or 1d in seconds."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)([smhd]?)", str(value))
    if not found or not float(found[1]):
        raise file.mistake("run/timeout", f"`run.timeout` must be a time such as 90s, 20m or 2h, got {value!r}")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


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

    def samples(self) -> list[dict[str, Any]]:
        """Return a few candidates that have each key, and each value that is no number.

        >>> space = {"model.lr": (0.1, 0.2), "model.opt": ("adamw", "sgd"), "model.decay": Range(0.0, 1.0)}
        >>> [list(one.values()) for one in Tune("random", (), space, (1,), 3).samples()]
        [[0.1, 'adamw', 0.0], [0.2, 'sgd', 0.0]]
        """
        lists = [values for values in self.space.values() if not isinstance(values, Range)]
        count = max((len(values) for values in lists if not all(map(_is_number, values))), default=1)
        return [
            {k: v.low if isinstance(v, Range) else v[i % len(v)] for k, v in self.space.items()} for i in range(count)
        ]


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
        raise file.mistake(
            "tune", "`tune` chooses by `metric.primary` on the validation split, where no analysis is measured"
        )
    search, budget = _search(file, content, space)
    own = content.get("seeds", [max(seeds) + 100])
    if (
        not isinstance(own, list)
        or not own
        or any(type(s) is not int or not 0 <= s <= MOST_SEED for s in own)
        or len({*own}) < len(own)
    ):
        raise file.mistake(
            "tune/seeds", f"`tune.seeds` must be a list of different seeds from 0 to {MOST_SEED}, got {own!r}"
        )
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
