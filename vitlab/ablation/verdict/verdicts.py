"""From numbers to words: each arm against its baseline, each claim of the file."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

from vitlab import stats
from vitlab.ablation.file.claims import Claim
from vitlab.ablation.file.spec import Arm
from vitlab.ablation.verdict.results import Results
from vitlab.stats import Difference

NAN = float("nan")


@dataclass(frozen=True)
class Verdict:
    """What the runs say of a claim in one combination of the other axes."""

    claim: Claim
    setting: str
    word: str  # supported, refuted, equivalent, inconclusive
    n: str
    difference: Difference
    p: float  # adjusted
    note: str = ""
    more: int | None = None  # seeds that the observed difference would take beside those that are there


def verdicts(results: Results) -> list[Verdict]:
    """Return a verdict for every claim; all of them are one Holm family."""
    tested = [
        (claim, setting, _test(results, claim, setting))
        for claim in results.ablation.claims
        for setting in claim.settings(results.ablation.axes)
    ]
    adjusted = stats.holm([found["p"] for _, _, found in tested])
    return [_verdict(results, c, s, f, p) for (c, s, f), p in zip(tested, adjusted, strict=True)]


def _arm(results: Results, **levels: str) -> Arm | None:
    return next((arm for arm in results.ablation.arms if dict(arm.levels) == levels), None)


def _test(results: Results, claim: Claim, setting: dict[str, str]) -> dict[str, Any]:
    """Return difference, raw p and values of a claim in one setting; p is NaN where nothing can be inferred."""
    metric, s = claim.metric or results.ablation.primary, results.ablation.stats
    sides = [(claim.a, "")] + ([(claim.b, "")] if isinstance(claim.b, str) else [])
    if claim.sign == "gap":
        sides = [(level, place) for place in (claim.under, claim.against) for level in (claim.a, str(claim.b))]
    arms = [
        _arm(results, **setting, **{claim.axis: level}, **({claim.gap_axis: at} if at else {})) for level, at in sides
    ]
    if None in arms:
        return {"p": NAN, "values": [], "note": "an arm of it is excluded"}
    values = [results.values(arm, metric) for arm in arms if arm]
    found: dict[str, Any] = {"p": NAN, "values": values}
    if min(map(len, values)) < 2:
        return {**found, "note": "fewer than two seeds: no inference"}
    if all(len(set(x)) == 1 for x in values):
        return {**found, "note": "no spread at all: no test applies"}
    pair = s["pair"] and len({len(x) for x in values}) == 1
    if claim.sign == "gap":
        d = stats.interaction(values, s["ci"])
    elif isinstance(claim.b, str):
        d = stats.two(values[0], values[1], s["ci"], pair)
    else:
        d = stats.against_number(values[0], claim.b, s["ci"])
    found |= {"d": d, "p": d.p}
    margin = claim.margin or s["margin"]
    if margin and claim.sign != "gap":
        other = values[1] if isinstance(claim.b, str) else claim.b
        found["tost"] = stats.equivalence(values[0], other, margin, pair)
        found["margin"] = margin
        if claim.sign == "~":
            found["p"] = found["tost"]
    return found


def _verdict(results: Results, claim: Claim, setting: dict[str, str], found: dict[str, Any], p: float) -> Verdict:
    alpha = 1 - results.ablation.stats["ci"]
    planned = len(results.ablation.seeds)
    counts = [len(x) for x in found["values"]] or [0]
    n = f"{min(counts)}/{planned}"
    where = ", ".join(f"{axis}={level}" for axis, level in setting.items())
    if "d" not in found or math.isnan(p):
        note = found.get("note", "no test applies")
        return Verdict(claim, where, "inconclusive", n, found.get("d", Difference(NAN, NAN, NAN, NAN, NAN)), p, note)
    word = _word(claim, found, p, alpha)
    note, more = "", None
    if word == "inconclusive" and claim.sign == ">" and isinstance(claim.b, str):
        k = stats.seeds_needed(found["d"].value, found["values"][0], found["values"][1], results.ablation.stats["ci"])
        more = max(0, k - min(counts)) if k else None
        note = f"about {more} more seeds for the observed difference" if more else "more seeds, or no difference"
    if min(counts) < planned:
        note = "; ".join(filter(None, (note, f"{planned - min(counts)} of {planned} seeds are missing")))
    return Verdict(claim, where, word, n, found["d"], p, note, more)


def _word(claim: Claim, found: dict[str, Any], p: float, alpha: float) -> str:
    d = found["d"]
    if claim.sign == "~":
        outside = d.low > claim.margin or d.high < -(claim.margin or 0)
        return "supported" if p < alpha else "refuted" if outside else "inconclusive"
    sign = -1 if claim.sign == "gap" else 1  # a gap is claimed to be smaller
    if p < alpha:
        return "supported" if sign * d.value > 0 else "refuted"
    return "equivalent" if found.get("tost", 1.0) < alpha else "inconclusive"


def summary(results: Results) -> list[dict[str, Any]]:
    """Return a row for each arm and metric: mean, interval, difference to the baseline, verdict."""
    return [
        row
        for metric in results.metrics()
        for family in _families(results)
        for row in _family_rows(results, metric, *family)
    ]


def _families(results: Results) -> list[tuple[Arm, list[Arm]]]:
    """Return each baseline with the arms that are compared with it; an arm without one stands alone."""
    families: dict[str, tuple[Arm, list[Arm]]] = {}
    for arm in results.ablation.arms:
        baseline = results.ablation.baseline_of(arm) or arm
        families.setdefault(baseline.name, (baseline, []))
        if baseline is not arm:
            families[baseline.name][1].append(arm)
    return list(families.values())


def _family_rows(results: Results, metric: str, baseline: Arm, arms: list[Arm]) -> list[dict[str, Any]]:
    s = results.ablation.stats
    control = results.values(baseline, metric)
    data = {arm.name: results.values(arm, metric) for arm in arms}
    testable = [arm for arm in arms if len(data[arm.name]) > 1]
    compared: dict[str, Difference] = {}
    other: dict[str, Difference] = {}
    test = stats.choose_test(s["test"], [len(control), *(len(data[a.name]) for a in testable)])
    if testable and len(control) > 1:
        values = [data[a.name] for a in testable]
        for kind, place in ((test, compared), ("dunnett" if test == "welch" else "welch", other)):
            found = stats.against(values, control, kind, s["ci"])
            place |= dict(zip([a.name for a in testable], found or [], strict=False))
    rows = [_row(results, metric, baseline, control, None, "baseline" if len(control) > 1 else "no inference")]
    for arm in arms:
        d = compared.get(arm.name)
        word = _arm_word(results, d, other.get(arm.name), data[arm.name], control, test)
        rows.append({**_row(results, metric, arm, data[arm.name], d, word), "test": test if d else ""})
    return rows


def _row(results: Results, metric: str, arm: Arm, x: list[float], d: Difference | None, word: str) -> dict[str, Any]:
    low, high = stats.interval(x, results.ablation.stats["ci"])
    mean, sd = statistics.fmean(x) if x else NAN, statistics.stdev(x) if len(x) > 1 else NAN
    row: dict[str, Any] = {"arm": arm.name, **arm.levels, "metric": metric, "n": len(x)}
    row |= {"planned": len(results.ablation.seeds), "mean": mean, "sd": sd, "low": low, "high": high}
    row |= {"difference": d.value if d else NAN, "difference_low": d.low if d else NAN}
    row |= {"difference_high": d.high if d else NAN, "p": d.p if d else NAN, "adjusted_p": d.adjusted if d else NAN}
    margin, baseline = results.ablation.stats["margin"], results.ablation.baseline_of(arm)
    control = results.values(baseline, metric) if baseline else []
    testable = d and margin and metric == results.ablation.primary and len(x) > 1 and len(control) > 1
    row["equivalence_p"] = stats.equivalence(x, control, margin) if testable else NAN
    facts = next((r for r in results.resolved if r.arm is arm), None)
    row |= {"verdict": word, "test": "", "parameters": facts.model.get("parameters") if facts else None}
    row |= {"flops": facts.model.get("flops") if facts else None, "images_per_second": _speed(results, arm)}
    return row


def _speed(results: Results, arm: Arm) -> float:
    rates = []
    for seed in results.ablation.seeds:
        run = results.runs.get((arm.name, seed))
        rates += [r["images_per_second"] for r in run.rows() if "images_per_second" in r] if run else []
    return sorted(rates)[len(rates) // 2] if rates else NAN


def _arm_word(
    results: Results, d: Difference | None, other: Difference | None, x: list[float], control: list[float], test: str
) -> str:
    n, alpha = min(len(x), len(control)), 1 - results.ablation.stats["ci"]
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
    margin = results.ablation.stats["margin"]
    if margin and stats.equivalence(x, control, margin) < alpha:
        return "equivalent"
    return f"not distinguishable at n = {n}"
