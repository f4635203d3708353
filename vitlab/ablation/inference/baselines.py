"""Compare each arm with its baseline."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vitlab import stats
from vitlab.ablation.file.arms import Arm
from vitlab.ablation.inference.answers import Answer, Question
from vitlab.ablation.inference.measured import CellResults
from vitlab.runs.records import bounds_of
from vitlab.stats import NAN, Estimate

NOT_COMPARED = Answer(Estimate())


@dataclass(frozen=True)
class ArmRow:
    """The results of an arm in one metric."""

    arm: str
    levels: dict[str, str]  # axis: level
    metric: str
    n: int
    planned: int
    mean: float
    sd: float
    low: float
    high: float
    answer: Answer  # difference to the baseline; all NaN without one
    verdict: str
    test: str  # paired or welch; empty if nothing is tested
    is_claimed: bool  # whether a claim makes the same comparison
    parameters: int | None
    flops: int | None
    images_per_second: float

    def record(self) -> dict[str, Any]:
        """Return it as a flat row of a table."""
        row = asdict(self)
        levels, _ = row.pop("levels"), row.pop("answer")
        head = ("metric", "n", "planned", "mean", "sd", "low", "high")
        return {
            "arm": row.pop("arm"),
            **levels,
            **{key: row.pop(key) for key in head},
            **answer_columns(self.answer),
            **row,
        }


def answer_columns(answer: Answer) -> dict[str, Any]:
    """Return the numbers of an answer as columns of a table."""
    d, e, u = answer.difference, answer.equivalence, answer.unpaired
    return {
        "pairs": answer.estimate.n,
        "difference": answer.estimate.value,
        "difference_low": d.low,
        "difference_high": d.high,
        "p": d.p,
        "adjusted_p": d.adjusted,
        "equivalence_low": e.low,
        "equivalence_high": e.high,
        "equivalence_p": e.adjusted,
        "correlation": answer.correlation,
        "unpaired_low": u.low,
        "unpaired_high": u.high,
        "unpaired_p": u.adjusted,
    }


def arms_by_baseline(results: CellResults) -> list[tuple[Arm, list[Arm]]]:
    """Return each baseline with the arms that are compared with it; an arm without one stands alone."""
    found: dict[str, tuple[Arm, list[Arm]]] = {}
    for arm in results.ablation.arms:
        baseline = results.ablation.baseline_of(arm) or arm
        found.setdefault(baseline.name, (baseline, []))
        if baseline is not arm:
            found[baseline.name][1].append(arm)
    return list(found.values())


def arm_questions(results: CellResults, metric: str) -> dict[str, Question]:
    """Return the comparison of each arm with its baseline; the margin is in the unit of the primary metric."""
    margin = results.ablation.stats.margin if metric == results.ablation.primary else None
    return {
        arm.name: Question(metric, ((arm.name, 1.0), (baseline.name, -1.0)), 0.0, margin)
        for baseline, arms in arms_by_baseline(results)
        for arm in arms
    }


def arm_rows(results: CellResults, metric: str, answers: Mapping[Question, Answer], claimed: set[Any]) -> list[ArmRow]:
    """Return a row for each arm: mean, interval, difference to the baseline, verdict."""
    asked = arm_questions(results, metric)
    rows = []
    for baseline, arms in arms_by_baseline(results):
        control = results.values(baseline, metric)
        word = "baseline" if len(control) > 1 else "n = 1: no inference" if control else "no result"
        if results.ablation.baseline_of(baseline) is None:  # `exclude` removes it
            word = "no baseline: not compared"
        rows.append(_row(results, metric, baseline, word))
        for arm in arms:
            q = asked[arm.name]
            word = _word(results, answers[q], len(results.values(arm, metric)), len(control))
            rows.append(_row(results, metric, arm, word, answers[q], q.key in claimed))
    return rows


def _row(
    results: CellResults, metric: str, arm: Arm, word: str, answer: Answer = NOT_COMPARED, is_claimed: bool = False
) -> ArmRow:
    x = results.values(arm, metric)
    low, high = stats.interval(x, results.ablation.stats.ci, within=bounds_of(metric, x))
    facts = results.arm(arm.name)
    return ArmRow(
        arm=arm.name,
        levels=dict(arm.levels),
        metric=metric,
        n=len(x),
        planned=len(results.ablation.seeds),
        mean=statistics.fmean(x) if x else NAN,
        sd=statistics.stdev(x) if len(x) > 1 else NAN,
        low=low,
        high=high,
        answer=answer,
        verdict=word,
        test="" if not answer.estimate.is_testable else "paired" if answer.is_paired else "welch",
        is_claimed=is_claimed,
        parameters=facts.model.get("parameters") if facts else None,
        flops=facts.model.get("flops") if facts else None,
        images_per_second=_speed(results, arm),
    )


def _speed(results: CellResults, arm: Arm) -> float:
    rows = [row for seed in results.ablation.seeds for row in results.rows(arm.name, seed)]
    rates = [row["images_per_second"] for row in rows if "images_per_second" in row]
    return sorted(rates)[len(rates) // 2] if rates else NAN


def _word(results: CellResults, answer: Answer, n: int, of_baseline: int) -> str:
    alpha = results.ablation.stats.alpha
    if n == 0:
        return "no result"
    if of_baseline == 0:
        return "its baseline has no result: not compared"
    if answer.estimate.n < 2:
        return "n = 1: no inference" if answer.estimate.n else "no seed in common with its baseline: no inference"
    if not answer.estimate.is_testable:
        return "all seeds agree exactly: no test"
    is_equal = answer.equivalence.adjusted < alpha
    if answer.difference.adjusted < alpha:
        return ("higher" if answer.estimate.value > 0 else "lower") + (", within the margin" if is_equal else "")
    return "equivalent" if is_equal else f"not distinguishable at n = {answer.estimate.n}"
