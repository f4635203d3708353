"""Turn the answer to each claim of the file into a verdict."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vitlab import stats
from vitlab.ablation.file.claims import Claim
from vitlab.ablation.inference.answers import Answer, Question, Test
from vitlab.ablation.inference.looks import Looks
from vitlab.ablation.inference.measured import CellResults
from vitlab.errors import preview
from vitlab.stats import Estimate, levels


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim at one combination of levels of the other axes."""

    claim: Claim
    setting: str
    word: str  # supported, refuted, equivalent, inconclusive
    planned: int
    answer: Answer
    note: str = ""
    more: int | None = None  # additional seeds needed to detect the observed difference, or to show it within a margin

    @property
    def shown(self) -> Test:
        """The test that decided the verdict."""
        if self.claim.sign == "~":
            return self.answer.excess if self.word == "refuted" else self.answer.equivalence
        return self.answer.equivalence if self.word == "equivalent" else self.answer.difference


class ClaimQuestion(NamedTuple):
    """What a claim asks at one combination of levels of the other axes."""

    claim: Claim
    setting: str
    question: Question | None  # None if an arm of it is excluded


def claim_questions(results: CellResults) -> list[ClaimQuestion]:
    """Return the question of each claim in each of its settings."""
    return [
        ClaimQuestion(claim, ", ".join("=".join(pair) for pair in setting.items()), _question(results, claim, setting))
        for claim in results.ablation.claims
        for setting in claim.settings(results.ablation.axes)
    ]


def _question(results: CellResults, claim: Claim, setting: dict[str, str]) -> Question | None:
    sides = _sides(claim)
    of = {frozenset(arm.levels.items()): arm.name for arm in results.ablation.arms}
    averaged = [{**setting, **levels_} for levels_ in claim.averaged(results.ablation.axes)]
    keys = [[frozenset({**place, **side}.items()) for side, _ in sides] for place in averaged]
    whole = [place for place in keys if all(key in of for key in place)]  # `exclude` leaves nothing of it out
    if not whole:
        return None
    weights = [weight / len(whole) for _, weight in sides]
    terms = [(of[key], weight) for place in whole for key, weight in zip(place, weights, strict=True)]
    metric, margin = claim.metric or results.ablation.primary, claim.margin
    if claim.sign == ">" and not claim.is_gap and metric == results.ablation.primary:
        margin = results.ablation.stats.margin
    number = claim.b if isinstance(claim.b, float) else 0.0
    return Question(metric, tuple(terms), number, margin)


def _sides(claim: Claim) -> list[tuple[dict[str, str], float]]:
    """Return the levels and the weight of each arm that a claim compares: two, four for gaps, or one with a number."""
    sides = [({claim.axis: claim.a}, 1.0)]
    if isinstance(claim.b, str):
        sides.append(({claim.axis: claim.b}, -1.0))
    if claim.is_gap:
        places = ((claim.first, 1.0), (claim.second, -1.0))
        sides = [({**side, claim.gap_axis: place}, w * sign) for place, sign in places for side, w in sides]
    return sides


def verdicts(results: CellResults, looks: Looks, answers: Mapping[Question, Answer]) -> list[Verdict]:
    """Return a verdict for every claim and setting."""
    return [_verdict(results, looks, answers, asked) for asked in claim_questions(results)]


def _verdict(results: CellResults, looks: Looks, answers: Mapping[Question, Answer], asked: ClaimQuestion) -> Verdict:
    claim, setting, question = asked
    planned, alpha, added = len(results.ablation.seeds), results.ablation.stats.alpha, looks.added
    if question is None:
        return Verdict(claim, setting, "inconclusive", planned, Answer(Estimate()), "an arm of it is excluded")
    answer = answers[question]
    if answer.note:
        note = "; ".join([answer.note, *_no_numbers(results, question)])
        return Verdict(claim, setting, "inconclusive", planned, answer, note)
    word, looks = _word(claim, answer, alpha), answer.looks or looks
    notes, more = [], None
    if word == "inconclusive":
        more = additional_seeds(answer, looks, alpha, claim.margin)
        notes.append(_advice(claim, answer.estimate.value, more, looks))
    if word == "supported" and claim.sign != "~" and answer.equivalence.adjusted < alpha:
        notes.append("the difference is within the margin")
    whole, of = len(question.terms) // len(_sides(claim)), len(claim.averaged(results.ablation.axes))
    if whole < of:
        notes.append(f"it is the mean of {whole} of {of} combinations, as `exclude` leaves out arms of the others")
    if answer.estimate.n < planned and not added:
        notes += _lost(results, question, planned - answer.estimate.n)
    return Verdict(claim, setting, word, planned, answer, "; ".join(notes), more)


def _lost(results: CellResults, question: Question, count: int) -> list[str]:
    """Return why a question lacks seeds: they diverged in an arm of it, have no number, or are missing."""
    arms, seeds = [arm for arm, _ in question.terms], results.ablation.seeds
    diverged = {seed for seed in seeds if any(results.has_diverged(arm, seed) for arm in arms)}
    strange = {seed for arm in arms for seed in results.no_numbers(arm, question.metric)} - diverged
    missing = max(0, count - len(diverged) - len(strange))
    words = [f"{len(diverged)} of {len(seeds)} seeds diverged"] if diverged else []
    words += _no_numbers(results, question)
    return words + ([f"{missing} of {len(seeds)} seeds {'are' if missing > 1 else 'is'} missing"] if missing else [])


def _no_numbers(results: CellResults, question: Question) -> list[str]:
    """Return which values of a question are no numbers, such as NaN, and in which cells."""
    cells: dict[str, list[str]] = {}
    for arm in dict.fromkeys(arm for arm, _ in question.terms):
        for seed, value in results.no_numbers(arm, question.metric).items():
            cells.setdefault(str(value), []).append(f"{arm}/s{seed}")
    return [f"{question.metric} is {value} in {preview(names)}" for value, names in cells.items()]


def _word(claim: Claim, answer: Answer, alpha: float) -> str:
    if claim.sign == "~":
        if answer.equivalence.adjusted < alpha:
            return "supported"
        return "refuted" if answer.excess.adjusted < alpha else "inconclusive"
    if answer.difference.adjusted < alpha:
        return "supported" if claim.direction * answer.estimate.value > 0 else "refuted"
    return "equivalent" if answer.equivalence.adjusted < alpha else "inconclusive"


def additional_seeds(answer: Answer, looks: Looks, alpha: float, margin: float | None = None) -> int | None:
    """Return how many more seeds it takes, with 80 % power at the level after Holm and looks, to detect the difference.

    As many of them are taken to be lost as so far, such as by divergence.

    Args:
        answer: The observed difference.
        looks: The looks so far; one more is assumed.
        alpha: Error of the family.
        margin: If given, the aim is to show on which side of it the difference lies that was observed.
    """
    n, seen = answer.estimate.n, len(looks.seeds)  # some of them may have diverged, as may some of those to come
    distance, level = abs(answer.estimate.value), alpha / answer.difference.factor
    if margin and distance < margin:
        level = 2 * alpha / answer.equivalence.factor
    elif margin:
        distance, level, margin = distance - margin, alpha / answer.excess.factor, None
    needed = stats.seeds_needed(answer.estimate, distance, level, margin)
    for count in range(max(needed or n, n + 1), looks.most + 1):  # the first future look that suffices
        more = math.ceil((count - n) * seen / n)
        if seen + more > looks.most:
            break
        later = [(seen + more) / looks.most] if seen + more > looks.counts[-1] else []  # else seeds that were missing
        left = levels([*looks.times, *later], level)[-1]
        if (stats.seeds_needed(answer.estimate, distance, left, margin) or count + 1) <= count:
            return more
    return max(1, math.ceil((needed - n) * seen / n)) if needed is not None else None


def _advice(claim: Claim, value: float, more: int | None, looks: Looks) -> str:
    """Return what so many more seeds would show, if the difference stays as it is."""
    aim = "detecting the observed difference"
    if claim.margin is not None:
        aim = "to show it within the margin"
        if abs(value) >= claim.margin:
            aim = "the estimate is beyond the margin: to show that the difference is"
    elif claim.direction * value < 0:
        aim = "the difference points against the claim: if it stays as large, refuting it"
    if more is None:
        return f"{aim} would take more than a thousand seeds"
    seen = looks.counts[-1]  # more than are compared if some diverged, which are spent, too
    place = "" if seen + more <= looks.most else f", in a new ablation, as this one allows at most {looks.most}"
    return f"{aim} would take about {more} more seed{'s' * (more > 1)}{place}"
