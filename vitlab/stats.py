"""The statistics of a comparison: one estimate with its error, from which every p value and interval follows.

Student's t throughout: its intervals keep their coverage at three seeds, where mean +- 1.96 standard errors does not.
Where statsmodels has the same test, it gives the same numbers (`tests/ablation/test_stats_peers.py`). It is not used:
its Holm knows no missing test and no factor for the interval, and the effect that two seeds detect at a level of 1e-6,
as early looks have, is 71,738 standard deviations by it where 576,907 is right.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special
from scipy.stats import binomtest

Values = Sequence[float]
NAN = float("nan")
ROUNDING = 2 * float(np.finfo(np.float32).eps)  # relative error of a difference of metrics, which are float32
POINTS = 257  # of the grid on which the densities of looks are integrated


@dataclass(frozen=True)
class Estimate:
    """A mean, a difference or a difference of differences; the error is NaN if the seeds allow no inference.

    Args:
        value: The estimate.
        error: Its standard error.
        freedom: Degrees of freedom of Student's t.
        n: Number of seeds; the least of a group.
        variances: Of each group, the variance of a seed's share in the sum; without them, all groups have n seeds.

    Example:
        >>> estimate = Estimate(value=0.02, error=0.005, freedom=4, n=3)
        >>> round(estimate.p(), 3), [round(bound, 3) for bound in estimate.interval(0.95)]
        (0.016, [0.006, 0.034])
    """

    value: float = NAN
    error: float = NAN
    freedom: float = NAN
    n: int = 0
    variances: tuple[float, ...] = ()

    @property
    def is_testable(self) -> bool:
        """Whether anything can be inferred."""
        return not math.isnan(self.error)

    def p(self) -> float:
        """Return the two-sided p of no difference."""
        return 2 * float(special.stdtr(self.freedom, -abs(self.value) / self.error))

    def p_equivalent(self, margin: float) -> float:
        """Return the p of two one-sided tests (Schuirmann 1987): small if the difference is within the margin."""
        return float(special.stdtr(self.freedom, -(margin - abs(self.value)) / self.error))

    def p_outside(self, margin: float) -> float:
        """Return a p that is small if the difference is beyond the margin, on either side."""
        return float(np.minimum(1.0, 2 * special.stdtr(self.freedom, -(abs(self.value) - margin) / self.error)))

    def at(self, n: NDArray[np.int64]) -> tuple[float, NDArray[np.floating[Any]]]:
        """Return the spread and the degrees of freedom with n seeds in each group, as :func:`power` takes them."""
        if not self.variances:
            return self.error * math.sqrt(self.n), self.freedom * (n - 1) / (self.n - 1)
        total = sum(self.variances)
        return math.sqrt(total), total**2 / sum(v**2 for v in self.variances) * (n - 1)

    def interval(self, level: float) -> tuple[float, float]:
        """Return the interval of the confidence ``level``."""
        tail = max((1 - level) / 2, 2**-54)  # a level is no finer, and of a tail of 0 scipy has no quantile
        half = -float(special.stdtrit(self.freedom, tail)) * self.error
        return self.value - half, self.value + half


def contrast(groups: Sequence[Values], weights: Sequence[float], number: float = 0.0, pair: bool = False) -> Estimate:
    """Estimate the weighted sum of the means of groups, minus a number.

    Args:
        groups: The values of each arm; with ``pair`` in the same order of seeds.
        weights: 1 and -1 for a difference; 1, -1, -1, 1 for a difference of differences.
        number: The number to subtract.
        pair: Whether seeds are pairs: then the sum is taken seed by seed. Otherwise the variances of the groups add
            up, with the degrees of freedom of Welch and Satterthwaite (Welch 1947).

    Example:
        >>> estimate = contrast([[0.90, 0.91, 0.92], [0.80, 0.81, 0.82]], [1.0, -1.0])
        >>> round(estimate.value, 3), estimate.p() < 0.01
        (0.1, True)
    """
    arrays = [np.asarray(x, float) for x in groups]
    if not arrays or min(map(len, arrays)) == 0:
        return Estimate()
    if pair:
        arrays, weights = [np.sum([w * x for w, x in zip(weights, arrays, strict=True)], axis=0)], [1.0]
    n = min(map(len, arrays))
    value = float(sum(w * x.mean() for w, x in zip(weights, arrays, strict=True))) - number
    if n < 2:
        return Estimate(value, n=n)
    variances = [w**2 * float(x.var(ddof=1)) for w, x in zip(weights, arrays, strict=True)]
    parts = [variance / len(x) for variance, x in zip(variances, arrays, strict=True)]
    scale = max(float(np.abs(x).max()) for x in map(np.asarray, groups))
    if math.sqrt(sum(parts)) <= ROUNDING * scale:  # there is no spread
        return Estimate(value, n=n)
    freedom = sum(parts) ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(parts, arrays, strict=True))
    return Estimate(value, math.sqrt(sum(parts)), freedom, n, tuple(variances))


def cut(low: float, high: float, within: tuple[float, float]) -> tuple[float, float]:
    """Return an interval that ends where possible values end, which leaves its coverage as it is; NaN stays NaN.

    Example:
        >>> cut(0.98, 1.03, within=(0.0, 1.0)), cut(NAN, NAN, within=(0.0, 1.0))
        ((0.98, 1.0), (nan, nan))
    """
    bottom, top = within
    return max(low, bottom), min(high, top)  # of NaN and another number, both return the first


def interval(
    values: Values, ci: float = 0.95, exact: bool = False, within: tuple[float, float] = (-math.inf, math.inf)
) -> tuple[float, float]:
    """Return the t interval of a mean; NaN for a single value and, as they show no spread, for values that all agree.

    Args:
        values: A number of each seed, fold or image.
        ci: Coverage.
        exact: Whether values that all agree are known without error, such as a change that is 0 in every image. Their
            interval is then that value.
        within: The least and the largest possible value, where the interval ends.

    Example:
        >>> [round(bound, 3) for bound in interval([0.90, 0.91, 0.92])]
        [0.885, 0.935]
    """
    if len(values) < 2:
        return NAN, NAN
    estimate = contrast([values], [1.0])
    if estimate.is_testable:
        return cut(*estimate.interval(ci), within)
    return (estimate.value, estimate.value) if exact else (NAN, NAN)


def correlation(a: Values, b: Values) -> float:
    """Return the correlation of two arms over the seeds they share; NaN below three seeds or without spread.

    Example:
        >>> correlation([0.90, 0.92, 0.91], [0.80, 0.82, 0.81])
        1.0
    """
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return NAN
    return float(np.corrcoef(a, b)[0, 1])


def holm(p: Sequence[float]) -> list[tuple[float, float]]:
    """Adjust p values for multiple comparisons (Holm 1979); NaN stays NaN and does not count.

    Returns:
        The adjusted p of each, and the factor by which its p was multiplied.

    Example:
        >>> [round(adjusted, 3) for adjusted, _ in holm([0.01, 0.04, 0.03])]
        [0.03, 0.06, 0.06]
    """
    order = sorted((i for i, x in enumerate(p) if not math.isnan(x)), key=lambda i: p[i])
    found = [(NAN, NAN)] * len(p)
    largest = 0.0
    for rank, i in enumerate(order):
        factor = len(order) - rank
        largest = max(largest, min(1.0, factor * p[i]))
        found[i] = (largest, max(float(factor), largest / p[i] if p[i] else 1.0))
    return found


def mcnemar(only_a: int, only_b: int) -> float:
    """Return the exact p for the images on which only one of two checkpoints is right (McNemar 1947).

    Example:
        >>> round(mcnemar(only_a=30, only_b=10), 4)
        0.0022
    """
    return float(binomtest(only_a, only_a + only_b).pvalue) if only_a + only_b else 1.0


def paired_interval(only_a: int, only_b: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a difference of two shares over the same n images, a minus b.

    That of Agresti and Min 2005 (doi:10.1002/sim.1781), who add half an image to each cell of the table of right and
    wrong: it has a width, and keeps its coverage, where the two differ on few images or on none.

    Args:
        only_a: Images on which only a is right.
        only_b: Images on which only b is right.
        n: All images.

    Example:
        >>> [round(bound, 3) for bound in paired_interval(only_a=30, only_b=10, n=1000)]
        [0.007, 0.032]
    """
    a, b, total = only_a + 0.5, only_b + 0.5, n + 2
    value = (a - b) / total
    half = float(special.ndtri(0.975)) * math.sqrt(a + b - (a - b) ** 2 / total) / total
    return cut(value - half, value + half, (-1.0, 1.0))


def seeds_and_images(values: NDArray[np.float64], ci: float = 0.95) -> tuple[float, float, float]:
    """Return the mean of a value of each seed and image, and its interval over other seeds and other images.

    The squared half widths over seeds and over images add up, each with its own t (Howe 1974); pooled degrees of
    freedom would have too little coverage at three seeds. The noise of an image in a seed, which is in the variances
    of both means, counts once: in the variance of the fewer, usually the seeds, whose few degrees of freedom cannot
    tell it from their own.

    Args:
        values: ``(seeds, images)``, at least two of each; such as right with one arm minus right with the other.
        ci: Coverage.

    Example:
        >>> right = np.random.default_rng(0).random((2, 3, 500)) < np.array([0.9, 0.8])[:, None, None]
        >>> value, low, high = seeds_and_images(right[0] * 1.0 - right[1])
        >>> low < 0.1 < high
        True
    """
    value, (seeds, images) = float(values.mean()), values.shape
    rows, columns = values.mean(axis=1), values.mean(axis=0)
    noise = np.square(values - rows[:, None] - columns + value).sum() / (seeds - 1) / (images - 1) / values.size
    spreads = [float(np.var(means, ddof=1)) / len(means) for means in (rows, columns)]
    more = int(images >= seeds)
    spreads[more] = max(spreads[more] - noise, 0.0)
    t, u = (float(special.stdtrit(n - 1, (1 + ci) / 2)) for n in (seeds, images))
    half = math.sqrt(t**2 * spreads[0] + u**2 * spreads[1])
    return value, value - half, value + half


def power(
    distance: float, spread: float, freedom: NDArray[np.floating[Any]] | float, n: Values, level: float
) -> NDArray[np.float64]:
    """Return the power of t tests at a two-sided ``level`` for a distance from the null hypothesis.

    Args:
        distance: The distance, in the unit of the values.
        spread: Standard error times the root of n.
        freedom: Degrees of freedom for each n.
        n: Numbers of seeds.
        level: Two-sided level.

    Example:
        >>> power(1.0, spread=1.0, freedom=9.0, n=[10], level=0.05).round(2)
        array([0.8])
    """
    sizes = np.asarray(n, float)
    shift, limit = abs(distance) / spread * np.sqrt(sizes), -special.stdtrit(freedom, level / 2)
    near = special.nctdtr(freedom, np.minimum(shift, 100), limit)
    far = special.chdtrc(freedom, freedom * (shift / limit) ** 2)  # beyond 100, only the sample's spread varies
    found: NDArray[np.float64] = 1 - np.where(shift > 100, far, near)
    return found


def seeds_needed(estimate: Estimate, distance: float, level: float, margin: float | None = None) -> int | None:
    """Return how many seeds per arm detect a distance with 80 % power, at an estimate's spread; None above a thousand.

    Args:
        estimate: What has been observed.
        distance: The difference to detect.
        level: Two-sided level.
        margin: If given, the aim is to show that the distance is within it: then both one-sided tests pass.

    Example:
        >>> estimate = contrast([[0.90, 0.92, 0.91], [0.89, 0.91, 0.90]], [1.0, -1.0])
        >>> seeds_needed(estimate, 0.01, level=0.05)
        17
    """
    size = abs(distance)
    distances = (size,) if margin is None else (margin - size, margin + size)
    if not estimate.is_testable or min(distances) <= 0:
        return None
    n = np.arange(2, 1001)
    spread, freedom = estimate.at(n)
    found = np.sum([power(each, spread, freedom, n.tolist(), level) for each in distances], axis=0)
    enough = found - (len(distances) - 1) >= 0.8  # of two tests, hardly ever does neither pass
    return int(n[enough.argmax()]) if enough.any() else None


def detectable(n: int, level: float, pair: bool = True) -> float:
    """Return the difference of two arms that n seeds detect with 80 % power.

    Args:
        n: Number of seeds.
        level: Two-sided level, that of Holm's first and strictest step.
        pair: Whether seeds are pairs: then in standard deviations of the paired differences, else in those of a run.

    Example:
        >>> round(detectable(5, level=0.05), 2)  # in standard deviations of the paired differences
        1.68
    """
    if n < 2:
        return float("inf")
    spread, freedom = (1.0, n - 1.0) if pair else (math.sqrt(2), 2.0 * (n - 1))
    low, high = 0.0, 1.0
    while power(high, spread, freedom, [n], level)[0] < 0.8:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        enough = power(middle, spread, freedom, [n], level)[0] >= 0.8
        low, high = (low, middle) if enough else (middle, high)
    return high


def spent(time: float, alpha: float) -> float:
    """Return the two-sided error that may be spent by ``time``, a share of the maximal number of seeds.

    It is spent after Lan and DeMets 1983, of O'Brien and Fleming's type.

    >>> round(spent(0.5, 0.05), 4), round(spent(1.0, 0.05), 4)
    (0.0031, 0.05)
    """
    return 4 * float(special.ndtr(special.ndtri(alpha / 4) / math.sqrt(min(time, 1.0))))


def _excess(bound: float, goal: float, start: NDArray[np.float64], mass: NDArray[np.float64], step: float) -> float:
    """Return the logarithm of how many times the ``goal`` the error is of a look that stops beyond ``bound``."""
    beyond = float((mass * (special.ndtr((-bound - start) / step) + special.ndtr((start - bound) / step))).sum())
    return math.log(max(beyond, 1e-320) / goal)


def levels(times: Sequence[float], alpha: float) -> list[float]:
    """Return the two-sided level of each look such that all looks together have error ``alpha``.

    Args:
        times: Increasing shares of the maximal number of seeds.
        alpha: Error of all looks together.

    Example:
        >>> [round(level, 4) for level in levels([0.5, 1.0], 0.05)]
        [0.0031, 0.049]
    """
    found: list[float] = []
    grid, weight = np.zeros(1), np.ones(1)  # the sum so far of trials that have not stopped, and its density
    before, used = 0.0, 0.0
    for time in times:
        step, goal = math.sqrt(time - before), max(spent(time, alpha) - used, 1e-300)
        start, mass = grid, weight
        limit = 40 * math.sqrt(time)
        bound = optimize.brentq(_excess, 0.0, limit, args=(goal, start, mass, step), xtol=1e-9)
        found.append(2 * float(special.ndtr(-bound / math.sqrt(time))))
        reach = min(bound, 9 * math.sqrt(time))
        grid = np.linspace(-reach, reach, POINTS)
        simpson = np.ones(POINTS)
        simpson[1:-1:2], simpson[2:-1:2] = 4, 2
        density = (
            (mass * np.exp(-(((grid[:, None] - start) / step) ** 2) / 2)).sum(axis=1) / step / math.sqrt(2 * math.pi)
        )
        weight = density * simpson * (grid[1] - grid[0]) / 3
        before, used = time, spent(time, alpha)
    return found


@functools.lru_cache(maxsize=64)
def _levels_and_errors(times: tuple[float, ...]) -> tuple[list[float], list[float]]:
    """Return logarithms of the last look's level and of the corresponding overall error."""
    alphas = np.exp(np.linspace(math.log(1e-8), math.log(0.999), 60))
    return [math.log(levels(times, float(a))[-1]) for a in alphas], [math.log(a) for a in alphas]


def overall(p: float, times: Sequence[float]) -> float:
    """Return the smallest overall error at which the present look, with ``p``, is significant.

    Args:
        p: Two-sided p of the last look.
        times: Shares of the seeds at all looks; a single look at all seeds returns ``p`` itself.

    Example:
        >>> round(overall(0.04, [0.5, 1.0]), 4)  # after a first look at half of the seeds
        0.0407
    """
    if math.isnan(p) or (len(times) == 1 and times[0] >= 1):
        return p
    known, alphas = _levels_and_errors(tuple(times))
    if math.log(max(p, 1e-320)) <= known[0]:
        return math.exp(alphas[0])
    return min(1.0, max(p, math.exp(float(np.interp(math.log(p), known, alphas))))) if p < 1 else 1.0


def level(error: float, times: Sequence[float]) -> float:
    """Return the two-sided level of the last look whose overall error is ``error``: the inverse of :func:`overall`.

    Args:
        error: Error of all looks together.
        times: Shares of the seeds at all looks.

    Example:
        >>> round(overall(level(0.05, [0.6]), [0.6]), 6)
        0.05
    """
    if len(times) == 1 and times[0] >= 1:
        return error
    known, alphas = _levels_and_errors(tuple(times))
    return min(error, math.exp(float(np.interp(math.log(error), alphas, known))))
