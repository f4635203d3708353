"""From numbers to words: each arm against its baseline, each claim of the file."""

import math
from dataclasses import dataclass
from typing import Any

from vitlab import stats
from vitlab.ablation.file.claims import Claim
from vitlab.ablation.file.spec import Arm
from vitlab.ablation.verdict.measured import Results
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
    pair = s.pair and len({len(x) for x in values}) == 1
    if claim.sign == "gap":
        d = stats.interaction(values, s.ci)
    elif isinstance(claim.b, str):
        d = stats.two(values[0], values[1], s.ci, pair)
    else:
        d = stats.against_number(values[0], claim.b, s.ci)
    found |= {"d": d, "p": d.p}
    margin = claim.margin or s.margin
    if margin and claim.sign != "gap":
        other = values[1] if isinstance(claim.b, str) else claim.b
        found["tost"] = stats.equivalence(values[0], other, margin, pair)
        found["margin"] = margin
        if claim.sign == "~":
            found["p"] = found["tost"]
    return found


def _verdict(results: Results, claim: Claim, setting: dict[str, str], found: dict[str, Any], p: float) -> Verdict:
    alpha = results.ablation.stats.alpha
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
        k = stats.seeds_needed(found["d"].value, found["values"][0], found["values"][1], results.ablation.stats.ci)
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
