"""What the cells of posbench say: a verdict for each task, ranks, and the comparisons that were claimed."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats as distributions

from vitlab.position_bench.protocol import TASKS
from vitlab.stats import contrast, holm, interval

Scores = Mapping[str, Sequence[float]]  # of a method: each task, the score of each seed; a task may be missing


class TaskVerdict(NamedTuple):
    """How a method compares with another in a task.

    Args:
        task: Name of the task.
        against: The other method.
        word: ``better``, ``equal``, ``worse``, ``undecided``, ``both at chance`` or ``not applicable``.
        difference: Mean difference of the scores.
        low: Lower end of its 95 % interval, of this difference alone.
        high: Upper end.
        p: Two-sided p, adjusted over the family.
    """

    task: str
    against: str
    word: str
    difference: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    p: float = float("nan")


def judge(
    mine: Scores,
    others: Mapping[str, Scores],
    alpha: float = 0.05,
    margin: float = 0.01,
    paired: bool = True,
    guessing: Mapping[str, float] | None = None,
) -> list[TaskVerdict]:
    """Compare a method with others in every task; one family of Holm's of differences, and one of equivalences.

    Each of the two families errs with probability ``alpha / 2`` at most, and both together with ``alpha``. Seeds whose
    differences are the same to the last image leave no spread: then a difference above the margin counts as shown, and
    one below it as equal. Two methods at chance are not compared, since seeds share the test images: networks that
    always give one answer differ as the answers of these images do, with no spread.

    Args:
        mine: Scores of the method.
        others: Scores of each method that it is compared with, at the same seeds.
        alpha: Probability of a wrong verdict among all.
        margin: Difference below which two methods count as equal.
        paired: Whether equal seeds are pairs; else Welch's intervals.
        guessing: Of tasks, the mean score up to which a method is at chance.

    Example:
        >>> mine, other = {"place": [0.9, 0.91, 0.92]}, {"place": [0.1, 0.12, 0.11]}
        >>> [v.word for v in judge(mine, {"none": other}) if v.task == "place"]
        ['better']
    """
    pairs = [(task, name) for task in TASKS for name in others]
    known = [(task, name) for task, name in pairs if task in mine and task in others[name]]
    found = [contrast([mine[task], others[name][task]], [1.0, -1.0], pair=paired) for task, name in known]
    no_spread = [not each.is_testable and each.n > 1 for each in found]
    differs, equals = [each.p() for each in found], [each.p_equivalent(margin) for each in found]
    for i in np.flatnonzero(no_spread):
        is_equal = abs(found[i].value) < margin
        differs[i], equals[i] = float(is_equal), float(not is_equal)
    verdicts = {}
    for key, estimate, (p, _), (q, _) in zip(known, found, holm(differs), holm(equals), strict=True):
        low, high = estimate.interval(0.95) if estimate.is_testable else (estimate.value, estimate.value)
        word = "undecided"
        if q <= alpha / 2:
            word = "equal"
        elif p <= alpha / 2:
            word = "better" if estimate.value > 0 else "worse"
        task, name = key
        if guessing and max(np.mean(mine[task]), np.mean(others[name][task])) <= guessing[task]:
            word = "both at chance"
        verdicts[key] = TaskVerdict(*key, word, estimate.value, low, high, p)
    return [verdicts.get(key, TaskVerdict(*key, "not applicable")) for key in pairs]


def score_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % t interval of a mean share of right answers, cut at 0 and 1.

    NaN for a single seed, and for seeds that agree exactly, which show no spread.

    Example:
        >>> low, high = score_interval([0.7, 1.0, 1.0])
        >>> high
        1.0
    """
    return interval(values, within=(0.0, 1.0))


def score_text(values: Sequence[float] | None) -> str:
    """Return the mean score of the seeds and its interval in percent; ``n/a`` where there is none.

    Example:
        >>> score_text([0.5, 0.5]), score_text(None)
        ('50.0', 'n/a')
    """
    if not values:
        return "n/a"
    low, high = score_interval(values)
    return with_interval(100 * float(np.mean(values)), 100 * low, 100 * high)


def with_interval(mean: float, low: float, high: float) -> str:
    """Return a mean and its interval as text; the mean alone where there is no interval.

    Example:
        >>> with_interval(2.0, 1.5, 2.5), with_interval(2.0, float("nan"), float("nan"))
        ('2.0 [1.5, 2.5]', '2.0')
    """
    return f"{mean:.1f}" if math.isnan(low) else f"{mean:.1f} [{low:.1f}, {high:.1f}]"


def ranks(scores: Mapping[str, Scores], task: str) -> dict[str, tuple[float, float, float]]:
    """Return the mean rank of each method in a task over the seeds, 1 the best, with the 95 % interval of the mean.

    The interval is cut at the first and the last rank. It is NaN for a single seed and for ranks that all agree.

    Example:
        >>> ranks({"a": {"few": [0.4, 0.5]}, "b": {"few": [0.3, 0.3]}}, "few")["a"]
        (1.0, nan, nan)
    """
    names = [name for name in scores if task in scores[name]]
    if not names:
        return {}
    table: NDArray[np.float64] = distributions.rankdata([-np.asarray(scores[name][task]) for name in names], axis=0)
    within = (1.0, float(len(names)))
    return {
        name: (float(row.mean()), *interval(row.tolist(), within=within))
        for name, row in zip(names, table, strict=True)
    }


def best_of_families(
    families: Mapping[str, Sequence[str]], validation: Mapping[str, Sequence[float]], but: str = ""
) -> dict[str, str]:
    """Return the best measured method of each family by validation images, which no claim reads."""
    best = {}
    for family, names in families.items():
        measured = [name for name in names if name in validation and name != but]
        if measured:
            best[family] = max(measured, key=lambda name: float(np.mean(validation[name])))
    return best
