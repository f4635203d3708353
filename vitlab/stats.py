"""The statistics of a comparison, by scipy and statsmodels.

Intervals of means are Student's, which hold their coverage at three seeds, where mean +- 1.96 standard errors does not.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from statsmodels.stats import contingency_tables
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestIndPower
from statsmodels.stats.weightstats import DescrStatsW, ttost_ind, ttost_paired

Test = Literal["dunnett", "welch"]
Values = Sequence[float]


@dataclass(frozen=True)
class Difference:
    """An arm against its baseline."""

    value: float
    low: float
    high: float
    p: float
    adjusted: float


def interval(values: Values, ci: float = 0.95) -> tuple[float, float]:
    """Return the t interval of a mean; NaN for a single value, from which nothing follows."""
    if len(values) < 2:
        return float("nan"), float("nan")
    x = np.asarray(values)
    if x.std() == 0:
        return float(x.mean()), float(x.mean())
    low, high = stats.t.interval(ci, len(x) - 1, loc=x.mean(), scale=stats.sem(x))
    return float(low), float(high)


def choose_test(test: str, sizes: Sequence[int]) -> Test:
    """Return the test of many arms against one: Dunnett up to four seeds, Welch with Holm from five.

    With few seeds Welch's test has no power; with many there is no need to assume that all arms spread equally.
    """
    if test in ("dunnett", "welch"):
        return test  # type: ignore[return-value]
    return "dunnett" if min(sizes) <= 4 else "welch"


def against(arms: Sequence[Values], control: Values, test: Test, ci: float = 0.95) -> list[Difference] | None:
    """Compare each arm with the control; None where nothing can be inferred: a single seed, or no spread at all."""
    if min(len(x) for x in (*arms, control)) < 2 or all(np.ptp(x) == 0 for x in (*arms, control)):
        return None
    values = [float(np.mean(x) - np.mean(control)) for x in arms]
    if test == "dunnett":
        found = stats.dunnett(*map(np.asarray, arms), control=np.asarray(control), rng=0)
        bounds = found.confidence_interval(ci)
        zipped = zip(values, bounds.low, bounds.high, found.pvalue, strict=True)
        return [Difference(v, float(low), float(high), float(p), float(p)) for v, low, high, p in zipped]
    welch = [two(x, control, ci) for x in arms]
    adjusted = holm([d.p for d in welch])
    return [Difference(v, d.low, d.high, d.p, p) for v, d, p in zip(values, welch, adjusted, strict=True)]


def two(a: Values, b: Values, ci: float = 0.95, pair: bool = False) -> Difference:
    """Compare two arms by Welch's t test, or by the paired one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of values that hardly spread: their p is what it is
        found = stats.ttest_rel(a, b) if pair else stats.ttest_ind(a, b, equal_var=False)
        bounds = found.confidence_interval(ci)
    p = float(found.pvalue)
    return Difference(float(np.mean(a) - np.mean(b)), float(bounds.low), float(bounds.high), p, p)


def against_number(a: Values, number: float, ci: float = 0.95) -> Difference:
    """Compare the mean of an arm with a number that is known."""
    found = stats.ttest_1samp(a, number)
    bounds = found.confidence_interval(ci)
    p = float(found.pvalue)
    return Difference(float(np.mean(a)) - number, float(bounds.low) - number, float(bounds.high) - number, p, p)


def equivalence(a: Values, b: Values | float, margin: float, pair: bool = False) -> float:
    """Return the p value of two one-sided tests: small means that the difference lies within the margin."""
    x = np.asarray(a)
    if isinstance(b, int | float):
        return float(DescrStatsW(x).ttost_mean(b - margin, b + margin)[0])
    if pair:
        return float(ttost_paired(x, np.asarray(b), -margin, margin)[0])
    return float(ttost_ind(x, np.asarray(b), -margin, margin, usevar="unequal")[0])


def interaction(cells: Sequence[Values], ci: float = 0.95) -> Difference:
    """Compare the difference of the first two with that of the last two: a, b under s; a, b under t."""
    import pandas as pd
    from statsmodels.formula.api import ols

    rows = [(v, int(i % 2 == 0), int(i >= 2)) for i, values in enumerate(cells) for v in values]
    table = pd.DataFrame(rows, columns=["value", "is_a", "is_t"])
    fitted = ols("value ~ is_a * is_t", table).fit(
        cov_type="HC3", use_t=True
    )  # t: the normal has false alarms at n = 3
    test = fitted.t_test("is_a:is_t = 0")
    low, high = test.conf_int(1 - ci)[0]
    p = float(test.pvalue)
    return Difference(-float(test.effect[0]), -float(high), -float(low), p, p)


def mcnemar(only_a: int, only_b: int) -> float:
    """Return the exact p of the images on which one alone of two checkpoints is right."""
    return float(contingency_tables.mcnemar([[0, only_a], [only_b, 0]], exact=True).pvalue) if only_a + only_b else 1.0


def seeds_and_images(a: NDArray[np.float64], b: NDArray[np.float64], ci: float = 0.95) -> Difference:
    """Compare two arms over other seeds and other images, from ``(seeds, images)`` of right (1) and wrong (0).

    The variances of both add up; the degrees of freedom are Welch's and Satterthwaite's.
    """
    rows = [np.var(x.mean(axis=1), ddof=1) / len(x) for x in (a, b)]
    images = a.mean(axis=0) - b.mean(axis=0)
    parts = [*rows, np.var(images, ddof=1) / len(images)]
    value, error = float(images.mean()), float(np.sqrt(sum(parts)))
    if error == 0:
        return Difference(value, value, value, float("nan"), float("nan"))
    sizes = (len(a), len(b), len(images))
    freedom = sum(parts) ** 2 / sum(v**2 / (n - 1) for v, n in zip(parts, sizes, strict=True))
    low, high = stats.t.interval(ci, freedom, loc=value, scale=error)
    p = float(2 * stats.t.sf(abs(value) / error, freedom))
    return Difference(value, float(low), float(high), p, p)


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p values for being many; what could not be tested stays NaN and does not count."""
    found = [x for x in p if not np.isnan(x)]
    adjusted = iter(multipletests(found, method="holm")[1] if found else [])
    return [float("nan") if np.isnan(x) else float(next(adjusted)) for x in p]


def detectable(n: int, comparisons: int, test: Test, ci: float = 0.95) -> float:
    """Return the smallest difference that n seeds find in 80 % of cases, in standard deviations of a run.

    Simulated with a fixed generator, for one arm of several that differs from the control.
    """
    if n < 2:
        return float("inf")
    rng = np.random.default_rng(0)
    means = rng.standard_normal((comparisons + 1, 20_000)) / np.sqrt(n)
    variances = rng.chisquare(n - 1, means.shape) / (n - 1)
    if test == "dunnett":
        error = np.sqrt(variances.mean(axis=0) * 2 / n)
        limit = np.quantile(np.abs((means[1:] - means[0]) / error).max(axis=0), ci)
        needed = limit * error - (means[1] - means[0])
    else:  # Welch, at the first and strictest step of Holm
        a, b = variances[0] / n, variances[1] / n
        freedom = (a + b) ** 2 / ((a**2 + b**2) / (n - 1))
        needed = stats.t.isf((1 - ci) / comparisons / 2, freedom) * np.sqrt(a + b) - (means[1] - means[0])
    return float(np.quantile(needed, 0.8))


def seeds_needed(difference: float, a: Values, b: Values, ci: float = 0.95) -> int | None:
    """Return how many seeds an arm would need for the observed difference; None if more than a thousand."""
    spread = float(np.sqrt((np.var(a, ddof=1) + np.var(b, ddof=1)) / 2))
    if not difference or not spread:
        return None
    n = np.arange(2, 1001)
    effect = min(abs(difference) / spread, 10.0)  # which two seeds find; the power of larger ones cannot be computed
    enough = TTestIndPower().power(effect, n, alpha=1 - ci) >= 0.8
    return int(n[enough.argmax()]) if enough.any() else None
