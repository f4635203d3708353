"""The sections of an ablation's file on matching, statistics and execution, with their defaults."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitlab.ablation.file.schema import File, as_number
from vitlab.errors import did_you_mean


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
    return WandB(given.get("project", "vitlab"), given.get("mode") == "offline")


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
        workers = file.number("run.workers", None, 1, 4096, whole=True)
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
