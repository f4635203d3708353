"""Inference: every comparison of a file gets one p value, one equivalence test and their intervals.

Comparisons come from the main table (an arm against its baseline) and from claims; duplicates count once. Together they
are the family of Holm's adjustment. Arms of one seed share the order of batches and the initial values of the
parameters they have in common, so seeds are pairs by design, and the paired test is the declared one.
"""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vitlab import stats
from vitlab.ablation.execution.identity import effective, json_digest
from vitlab.ablation.inference.looks import Looks
from vitlab.ablation.inference.measured import CellResults
from vitlab.runs.records import bounds_of
from vitlab.stats import NAN, Estimate


@dataclass(frozen=True)
class Question:
    """A comparison: the weighted sum of arms' means, minus a number; with a margin, equivalence is tested too."""

    metric: str
    terms: tuple[tuple[str, float], ...]  # arm, weight
    number: float = 0.0
    margin: float | None = None

    @property
    def key(self) -> Hashable:
        """An identity that this comparison shares with its mirror image."""
        terms = tuple(sorted(self.terms))
        mirrored = tuple(sorted((arm, -weight) for arm, weight in self.terms))
        return (self.metric, self.number, terms if self.number else min(terms, mirrored))


@dataclass(frozen=True)
class Test:
    """A p value, alone and adjusted for its family, and its interval; NaN if no test was possible."""

    p: float = NAN
    adjusted: float = NAN
    low: float = NAN
    high: float = NAN
    factor: float = 1.0  # multiplier of p in Holm's adjustment


NOTHING = Test()


@dataclass(frozen=True)
class Answer:
    """The estimate and tests of a comparison.

    Args:
        estimate: The difference, by the declared test.
        is_paired: Whether the declared test is paired.
        correlation: Correlation of two arms over the seeds they share.
        note: Why no test was possible.
        difference: Test of no difference. Its interval excludes 0 if and only if the adjusted p is below alpha.
        unpaired: The same test without pairing.
        equivalence: Two one-sided tests against the margin. The interval is within the margin if and only if the
            adjusted p is below alpha; at alpha 5 % it is a 90 % interval before adjustment.
        excess: Test of the null hypothesis that the difference is within the margin.
        looks: The looks at this comparison; None if nothing was asked.
    """

    estimate: Estimate
    is_paired: bool = False
    correlation: float = NAN
    note: str = ""
    difference: Test = NOTHING
    unpaired: Test = NOTHING
    equivalence: Test = NOTHING
    excess: Test = NOTHING
    looks: Looks | None = None


class _Asked(NamedTuple):
    """A question before its family is tested."""

    answer: Answer  # without tests and looks
    unpaired: Estimate
    bounds: tuple[float, float]  # of each value
    looks: Looks


def answer(results: CellResults, looks: Looks, questions: Sequence[Question]) -> dict[Question, Answer]:
    """Return the answer to each question; together they are one family."""
    alpha = results.ablation.stats.alpha
    found = {q: _estimate(results, looks, q) for q in questions}
    estimates = {q: asked.answer.estimate for q, asked in found.items()}
    different = _family(found, alpha, {q: (q.key, e, e.p()) for q, e in estimates.items()})
    unpaired = _family(found, alpha, {q: (q.key, asked.unpaired, asked.unpaired.p()) for q, asked in found.items()})
    margins = {q: (e, q.margin) for q, e in estimates.items() if q.margin}
    equal = {q: ((q.key, m), e, e.p_equivalent(m)) for q, (e, m) in margins.items()}
    excess = {q: ((q.key, m), e, e.p_outside(m)) for q, (e, m) in margins.items()}
    equivalent, beyond = _family(found, 2 * alpha, equal, sides=1), _family(found, alpha, excess)
    return {
        q: replace(
            asked.answer,
            difference=different[q],
            unpaired=unpaired[q],
            equivalence=equivalent.get(q, NOTHING),
            excess=beyond.get(q, NOTHING),
            looks=asked.looks,
        )
        for q, asked in found.items()
    }


def _estimate(results: CellResults, looks: Looks, q: Question) -> _Asked:
    """Return the estimates for a question from the seeds that may be tested."""
    arms, weights = [arm for arm, _ in q.terms], [weight for _, weight in q.terms]
    settled = [seed for seed in looks.seeds if all(results.is_settled(arm, seed, q.metric) for arm in arms)]
    looks = looks.of(q.metric, arms, settled)
    by_seed = [{s: v for s, v in results.by_seed(arm, q.metric) if s in looks.seeds} for arm in arms]
    values = [list(x.values()) for x in by_seed]
    shared = [seed for seed in looks.seeds if all(seed in x for x in by_seed)]
    pairs = [[x[seed] for seed in shared] for x in by_seed]
    is_paired = len(q.terms) > 1 and are_pairs(results, arms)
    unpaired = stats.contrast(values, weights, q.number)
    declared = stats.contrast(pairs, weights, q.number, pair=True) if is_paired else unpaired
    note = ""
    if not declared.is_testable:
        note = "fewer than two seeds: no inference" if declared.n < 2 else "all seeds agree exactly: no test applies"
        if without := [arm for arm in dict.fromkeys(arms) if not results.by_seed(arm, q.metric)]:
            note = f"{', '.join(without)} without a result: no inference"
    r = stats.correlation(*pairs) if len(q.terms) == 2 else NAN
    bounds = bounds_of(q.metric, itertools.chain(*values))
    return _Asked(Answer(declared, is_paired, r, note), unpaired, bounds, looks)


def are_pairs(results: CellResults, arms: list[str]) -> bool:
    """Return whether seeds are pairs: as the file says, or because arms of one seed see the same batches."""
    if results.ablation.stats.test != "auto":
        return results.ablation.stats.test == "paired"
    return share_batches(results, arms)


def share_batches(results: CellResults, arms: list[str]) -> bool:
    """Return whether arms of one seed see the same batches: of the same images, whatever folder these lie in."""
    mine = [r for r in results.resolved if r.name in arms]
    data = [(effective({"data": r.config.get("data") or {}}), json_digest(r.data)) for r in mine]
    return all(each == data[0] for each in data)


def _family(
    found: Mapping[Question, _Asked],
    alpha: float,
    p_values: Mapping[Question, tuple[Hashable, Estimate, float]],
    sides: int = 2,
) -> dict[Question, Test]:
    """Adjust the p values of a family for interim looks and multiple comparisons; mirror images count once.

    Args:
        found: What was estimated.
        alpha: Error of the family.
        p_values: Of a question, what it shares with its mirror image, the estimate that is tested, and the p.
        sides: Of each test.
    """
    overall = {  # the first of mirror images; a one-sided p may be 1
        key: max(p, found[q].looks.overall(2 * p / sides) * sides / 2)
        for q, (key, _, p) in reversed([*p_values.items()])
    }
    adjusted = dict(zip(overall, stats.holm([*overall.values()]), strict=True))
    tests = {}
    for q, (key, estimate, p) in p_values.items():
        (total, factor), looks = adjusted[key], found[q].looks
        share = p / total if looks.times == (1.0,) and total and p else 1 / factor  # a total of 1 is capped
        level = looks.level(alpha * share) if estimate.is_testable else NAN  # so the interval agrees with total
        low, high = estimate.interval(1 - level) if estimate.is_testable else (NAN, NAN)
        tests[q] = Test(p, total, *stats.cut(low, high, _ends(q, found[q].bounds)), factor)
    return tests


def _ends(q: Question, bounds: tuple[float, float]) -> tuple[float, float]:
    """Return the least and the largest possible value of a sum, such as 1 of a difference in accuracy."""
    bottom, top = bounds
    positive = sum(w for _, w in q.terms if w > 0)
    negative = -sum(w for _, w in q.terms if w < 0)
    least = positive * bottom - (negative * top if negative else 0) - q.number
    most = positive * top - (negative * bottom if negative else 0) - q.number
    return least, most
