"""The file of an ablation: read and checked before anything starts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from vitlab.ablation.file.arms import Arm, check_level_name, find_configs, pick, read_arms, read_axes
from vitlab.ablation.file.claims import Claim, parse_claim, refuse_impossible
from vitlab.ablation.file.schema import File, are_seeds
from vitlab.ablation.file.settings import (
    KEYS,
    Execution,
    Match,
    Metric,
    Stats,
    Tune,
    WandB,
    read_match,
    read_stats,
    read_tune,
)
from vitlab.analysis import ANALYSES
from vitlab.ranges import MOST_SEED
from vitlab.runs.directory import RUNS
from vitlab.runs.manifest import file_digest
from vitlab.runs.records import MeasuredSplit

MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Ablation:
    """A comparison, as its file describes it."""

    file: File
    name: str
    base: tuple[str, ...]
    axes: Mapping[str, Mapping[str, Any]]  # axis: level: its settings
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    baseline: Mapping[str, str]
    primary: str
    mode: str
    secondary: tuple[str, ...]
    evaluate: MeasuredSplit
    analyses: tuple[str, ...]  # of `vitlab analyze`, for each cell
    checkpoint: str
    match: Match
    stats: Stats
    run: Execution
    wandb: WandB | None  # None: not used
    claims: tuple[Claim, ...] = ()
    tune: Tune | None = None
    trust_imports: tuple[str, ...] = ()  # packages of the user's; the command line must confirm them
    home: Path | None = None  # where its cells lie, if not in runs/ablations/NAME
    is_evidence: bool = False  # exported: sealed, without images and configs

    @property
    def directory(self) -> Path:
        """The folder of its cells and report."""
        return self.home or RUNS / "ablations" / self.name

    @property
    def digest(self) -> str:
        """The hash of the file, stored in every cell, so that a report can show whether the file has changed."""
        return file_digest(self.file.path)[:10]

    @property
    def sign(self) -> int:
        """1 if larger values of the primary metric are better, -1 if smaller ones are."""
        return -1 if self.mode == "min" else 1

    def best(self, values: Iterable[float]) -> float:
        """Return the best of values of the primary metric; NaN if there are none."""
        return max(values, key=lambda value: self.sign * value, default=math.nan)

    def is_analyzed(self, metric: str) -> bool:
        """Return whether a metric comes from an analysis, which reads the validation split."""
        name, slash, _ = metric.partition("/")
        return bool(slash) and name in self.analyses

    def split_of(self, metric: str) -> MeasuredSplit:
        """Return the split that a metric is measured on."""
        return "val" if self.is_analyzed(metric) else self.evaluate

    def baseline_of(self, arm: Arm) -> Arm | None:
        """Return the arm that ``arm`` is compared with: the baseline's levels, the others its own."""
        wanted = {**arm.levels, **self.baseline}
        return next((a for a in self.arms if dict(a.levels) == wanted), None)


def read_ablation(path: str | Path, is_evidence: bool = False) -> Ablation:
    """Read and check the file of an ablation; with ``is_evidence``, the configs that it names may be missing."""
    file = File(path, is_evidence)
    file.check_keys(KEYS)
    content = file.content
    for key in ("name", "base", "axes", "baseline", "metric"):
        if not content.get(key):
            raise file.mistake(key, f"`{key}` is missing")
    axes = read_axes(file)
    arms = read_arms(file, axes)
    baseline = pick(file, "baseline", axes, content["baseline"])
    if not any(baseline.items() <= dict(arm.levels).items() for arm in arms):
        raise file.mistake("baseline", f"the baseline {content['baseline']} is not an arm: `exclude` removes it")
    analyses, claims = file.texts("analyses", "[resolution, scramble]"), _claims(file, axes)
    metric, wandb = _metric(file, claims, analyses), file.section("wandb", WandB)
    seeds = _seeds(file, content.get("seeds", 3))
    stats, own = read_stats(file, len(seeds)), file.texts("trust_imports", "[my_package]")
    if not own:  # a module of one's own may log its accuracy in percent
        refuse_impossible(file, claims, axes, metric.primary, stats.margin)
    return Ablation(
        file=file,
        name=check_level_name(file, "name", content["name"]),
        base=find_configs(file, "base", content["base"]),
        axes=axes,
        arms=arms,
        seeds=seeds,
        baseline=baseline,
        primary=metric.primary,
        mode=metric.mode,
        secondary=metric.secondary,
        evaluate=file.choice("evaluate", get_args(MeasuredSplit), "val"),
        analyses=analyses,
        checkpoint=file.choice("checkpoint", ("last", "best"), "last"),
        match=read_match(file, axes),
        stats=stats,
        run=file.section("run", Execution),
        wandb=wandb if content.get("wandb") and wandb.mode != "disabled" else None,
        claims=claims,
        tune=read_tune(file, axes, seeds),
        trust_imports=own,
        is_evidence=is_evidence,
    )


def _claims(file: File, axes: Mapping[str, Mapping[str, Any]]) -> tuple[Claim, ...]:
    value = file.content.get("claims") or []
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list):
        raise file.wrong("claims", "must be a list, as in [learned > none]")
    return tuple(parse_claim(file, i, text, axes) for i, text in enumerate(found))


def _metric(file: File, claims: Sequence[Claim], analyses: tuple[str, ...]) -> Metric:
    """Return the primary metric and the others; refuse those of an analysis that the file does not ask for."""
    if not isinstance(file.value("metric.primary"), str):
        raise file.mistake("metric", "`metric.primary` is missing, as in {primary: acc1}")
    metric = file.section("metric", Metric)
    metric = replace(metric, secondary=tuple(name for name in metric.secondary if name != metric.primary))
    names = [("metric", name) for name in (metric.primary, *metric.secondary)]
    for where, name in names + [(f"claims/{i}", claim.metric) for i, claim in enumerate(claims)]:
        analysis, slash, _ = (name or "").partition("/")  # mae/height is a metric of a regression
        if slash and analysis in ANALYSES and analysis not in analyses:
            raise file.mistake(where, f"the metric `{name}` comes from an analysis: add {analysis} to `analyses`")
    return metric


def _seeds(file: File, value: Any) -> tuple[int, ...]:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value <= MOST_SEEDS
    seeds = list(range(value)) if is_count else value
    if not are_seeds(seeds):
        text = f"must be a number of seeds up to {MOST_SEEDS} or a list of different ones from 0 to {MOST_SEED}"
        raise file.wrong("seeds", text)
    return tuple(seeds)
