"""Each arm against its baseline, as numbers and a word."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from vitlab import stats
from vitlab.ablation.file.spec import Arm
from vitlab.ablation.verdict.measured import Results
from vitlab.stats import Difference

NAN = float("nan")
NOT_COMPARED = Difference(NAN, NAN, NAN, NAN, NAN)


@dataclass(frozen=True)
class ArmRow:
    """What the seeds of an arm say in one metric."""

    arm: str
    levels: dict[str, str]  # axis: level
    metric: str
    n: int
    planned: int
    mean: float
    sd: float
    low: float
    high: float
    difference: Difference  # to the baseline; NaN where there is none to compare with
    equivalence_p: float
    verdict: str
    test: str  # empty where nothing is tested
    parameters: int | None
    flops: int | None
    images_per_second: float

    def record(self) -> dict[str, Any]:
        """Return it as a flat row of a table."""
        row = asdict(self)
        levels, d = row.pop("levels"), row.pop("difference")
        numbers = {"difference": d["value"], "difference_low": d["low"], "difference_high": d["high"]}
        numbers |= {"p": d["p"], "adjusted_p": d["adjusted"]}
        head = ("metric", "n", "planned", "mean", "sd", "low", "high")
        return {"arm": row.pop("arm"), **levels, **{key: row.pop(key) for key in head}, **numbers, **row}


def arm_rows(results: Results) -> list[ArmRow]:
    """Return a row for each metric and arm: mean, interval, difference to the baseline, verdict."""
    return [
        row
        for metric in results.metrics()
        for family in families(results)
        for row in _family_rows(results, metric, *family)
    ]


def families(results: Results) -> list[tuple[Arm, list[Arm]]]:
    """Return each baseline with the arms that are compared with it; an arm without one stands alone."""
    found: dict[str, tuple[Arm, list[Arm]]] = {}
    for arm in results.ablation.arms:
        baseline = results.ablation.baseline_of(arm) or arm
        found.setdefault(baseline.name, (baseline, []))
        if baseline is not arm:
            found[baseline.name][1].append(arm)
    return list(found.values())


def _family_rows(results: Results, metric: str, baseline: Arm, arms: list[Arm]) -> list[ArmRow]:
    s = results.ablation.stats
    control = results.values(baseline, metric)
    data = {arm.name: results.values(arm, metric) for arm in arms}
    testable = [arm for arm in arms if len(data[arm.name]) > 1]
    compared: dict[str, Difference] = {}
    other: dict[str, Difference] = {}
    test = stats.choose_test(s.test, [len(control), *(len(data[a.name]) for a in testable)])
    if testable and len(control) > 1:
        values = [data[a.name] for a in testable]
        for kind, place in ((test, compared), ("dunnett" if test == "welch" else "welch", other)):
            found = stats.against(values, control, kind, s.ci)
            place |= dict(zip([a.name for a in testable], found or [], strict=False))
    rows = [_row(results, metric, baseline, None, "baseline" if len(control) > 1 else "no inference", "")]
    for arm in arms:
        d = compared.get(arm.name)
        word = _word(results, d, other.get(arm.name), data[arm.name], control, test)
        rows.append(_row(results, metric, arm, d, word, test if d else ""))
    return rows


def _row(results: Results, metric: str, arm: Arm, d: Difference | None, word: str, test: str) -> ArmRow:
    x, margin = results.values(arm, metric), results.ablation.stats.margin
    low, high = stats.interval(x, results.ablation.stats.ci)
    baseline = results.ablation.baseline_of(arm)
    control = results.values(baseline, metric) if baseline else []
    testable = d and margin and metric == results.ablation.primary and len(x) > 1 and len(control) > 1
    facts = next((r for r in results.resolved if r.arm is arm), None)
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
        difference=d or NOT_COMPARED,
        equivalence_p=stats.equivalence(x, control, margin) if testable and margin else NAN,
        verdict=word,
        test=test,
        parameters=facts.model.get("parameters") if facts else None,
        flops=facts.model.get("flops") if facts else None,
        images_per_second=_speed(results, arm),
    )


def _speed(results: Results, arm: Arm) -> float:
    rates = []
    for seed in results.ablation.seeds:
        run = results.runs.get((arm.name, seed))
        rates += [r["images_per_second"] for r in run.rows() if "images_per_second" in r] if run else []
    return sorted(rates)[len(rates) // 2] if rates else NAN


def _word(
    results: Results, d: Difference | None, other: Difference | None, x: list[float], control: list[float], test: str
) -> str:
    n, alpha = min(len(x), len(control)), results.ablation.stats.alpha
    if n == 0:
        return "no result"
    if n == 1:
        return "n = 1: no inference"
    if d is None:
        return "no spread: no test"
    if test == "welch" and other and (d.adjusted < alpha) != (other.adjusted < alpha):
        return "depends on equal spread"
    if d.adjusted < alpha:
        return "higher" if d.value > 0 else "lower"
    margin = results.ablation.stats.margin
    if margin and stats.equivalence(x, control, margin) < alpha:
        return "equivalent"
    return f"not distinguishable at n = {n}"
