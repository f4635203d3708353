"""One engine of inference: every comparison of a file has one p, one equivalence test and the intervals of these.

A comparison is asked for by the main table (an arm against its baseline) or by a claim; where both ask for the same, it
is one. All together are the family that Holm's adjustment counts. Arms of one seed share the order of the batches and
the starting values of what they have in common, so seeds are pairs by design, and the paired test is the declared one.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from vitlab import stats
from vitlab.ablation.verdict.looks import Looks
from vitlab.ablation.verdict.measured import Results, bounds_of
from vitlab.ablation.work.identity import effective
from vitlab.stats import NAN, Estimate


@dataclass(frozen=True)
class Question:
    """A comparison: the weighted sum of the means of arms, less a number; a margin asks whether it would not matter."""

    metric: str
    terms: tuple[tuple[str, float], ...]  # arm, weight
    number: float = 0.0
    margin: float | None = None

    @property
    def key(self) -> Hashable:
        """What this comparison has in common with its mirror image."""
        terms = tuple(sorted(self.terms))
        mirrored = tuple(sorted((arm, -weight) for arm, weight in self.terms))
        return (self.metric, self.number, terms if self.number else min(terms, mirrored))


@dataclass(frozen=True)
class Test:
    """A p value, alone and as one of its family, and its interval; NaN where nothing could be tested."""

    p: float = NAN
    adjusted: float = NAN
    low: float = NAN
    high: float = NAN
    factor: float = 1.0  # by which Holm's adjustment multiplies the p


NOTHING = Test()


@dataclass(frozen=True)
class Answer:
    """What the seeds say of a comparison.

    Args:
        estimate: The difference by the declared test.
        is_paired: Whether that is the paired one.
        correlation: Of two arms over the seeds they share.
        note: Why nothing was tested.
        difference: Test of no difference. Its interval excludes 0 if and only if the adjusted p is below alpha.
        unpaired: The same, had seeds not been taken for pairs.
        equivalence: Two one-sided tests against the margin; the interval lies within it if and only if the adjusted p
            is below alpha: of 90 %, less the adjustment, where alpha is 5 %.
        excess: Test of a difference within the margin: small where it is larger.
    """

    estimate: Estimate
    is_paired: bool = False
    correlation: float = NAN
    note: str = ""
    difference: Test = NOTHING
    unpaired: Test = NOTHING
    equivalence: Test = NOTHING
    excess: Test = NOTHING


@dataclass(frozen=True)
class _Seen:
    """The estimates of a question."""

    declared: Estimate
    unpaired: Estimate
    is_paired: bool = False
    correlation: float = NAN
    note: str = ""


def answer(results: Results, looks: Looks, questions: Sequence[Question]) -> dict[Question, Answer]:
    """Return the answer to each question; together they are one family."""
    alpha = results.ablation.stats.alpha
    seen = {q: _see(results, looks.seeds, q) for q in questions}
    different = _family(seen, looks, alpha, {q: (q.key, s.declared.p()) for q, s in seen.items()})
    unpaired = _family(seen, looks, alpha, {q: (q.key, s.unpaired.p()) for q, s in seen.items()}, is_declared=False)
    margins = {q: (seen[q].declared, q.margin) for q in seen if q.margin}
    equal = {q: ((q.key, m), e.p_equivalent(m)) for q, (e, m) in margins.items()}
    excess = {q: ((q.key, m), e.p_outside(m)) for q, (e, m) in margins.items()}
    equivalent, beyond = _family(seen, looks, 2 * alpha, equal, sides=1), _family(seen, looks, alpha, excess)
    return {
        q: Answer(
            s.declared,
            s.is_paired,
            s.correlation,
            s.note,
            different[q],
            unpaired[q],
            equivalent.get(q, NOTHING),
            beyond.get(q, NOTHING),
        )
        for q, s in seen.items()
    }


def _see(results: Results, seeds: Sequence[int], q: Question) -> _Seen:
    """Return the estimates of a question from the seeds that may be tested."""
    by_seed = [{s: v for s, v in results.by_seed(arm, q.metric) if s in seeds} for arm, _ in q.terms]
    weights = [weight for _, weight in q.terms]
    values = [list(x.values()) for x in by_seed]
    shared = [seed for seed in seeds if all(seed in x for x in by_seed)]
    pairs = [[x[seed] for seed in shared] for x in by_seed]
    is_paired = len(q.terms) > 1 and _is_paired(results, [arm for arm, _ in q.terms])
    unpaired = stats.contrast(values, weights, q.number)
    declared = stats.contrast(pairs, weights, q.number, pair=True) if is_paired else unpaired
    note = ""
    if not declared.is_testable:
        note = "fewer than two seeds: no inference" if declared.n < 2 else "no spread at all: no test applies"
    r = stats.correlation(*pairs) if len(q.terms) == 2 else NAN
    return _Seen(declared, unpaired, is_paired, r, note)


def _is_paired(results: Results, arms: list[str]) -> bool:
    """Return whether seeds are pairs: as the file says, or by design, where arms of one seed see the same batches."""
    if results.ablation.stats.test != "auto":
        return results.ablation.stats.test == "paired"
    configs = [r.config.get("data") or {} for r in results.resolved if r.arm.name in arms]
    data = [effective({"data": config}) for config in configs]
    return all(config == data[0] for config in data)


def _family(
    seen: Mapping[Question, _Seen],
    looks: Looks,
    alpha: float,
    found: Mapping[Question, tuple[Hashable, float]],
    sides: int = 2,
    is_declared: bool = True,
) -> dict[Question, Test]:
    """Adjust the p values of a family for interim looks and multiple comparisons; mirror images count once."""
    unique = dict(reversed(list(found.values())))
    whole = [looks.overall(2 * p / sides) * sides / 2 for p in unique.values()]
    adjusted = dict(zip(unique, stats.holm(whole), strict=True))
    tests = {}
    for q, (key, p) in found.items():
        (total, factor), estimate = adjusted[key], seen[q].declared if is_declared else seen[q].unpaired
        share = p / total if total and p else 1 / factor  # the interval is that of the p which would be just enough
        low, high = estimate.interval(1 - alpha * share) if estimate.is_testable else (NAN, NAN)
        tests[q] = Test(p, total, *_cut(q, low, high), factor)
    return tests


def _cut(q: Question, low: float, high: float) -> tuple[float, float]:
    """Cut off what cannot be, such as a difference in accuracy of more than 1; that costs no coverage."""
    bottom, top = bounds_of(q.metric)
    positive = sum(w for _, w in q.terms if w > 0)
    negative = -sum(w for _, w in q.terms if w < 0)
    least = positive * bottom - (negative * top if negative else 0) - q.number
    most = positive * top - (negative * bottom if negative else 0) - q.number
    return (max(low, least), min(high, most)) if not math.isnan(low) else (low, high)
