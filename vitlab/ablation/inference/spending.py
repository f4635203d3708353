"""Interim looks: alpha spending after Lan and DeMets 1983, of O'Brien and Fleming's type.

Levels are computed for normal means and applied to the p values of t tests (Jennison and Turnbull 2000).
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

POINTS = 257  # of the grid on which the densities are integrated


def spent(time: float, alpha: float) -> float:
    """Return the two-sided error that may be spent by ``time``, a share of the maximal number of seeds."""
    return 4 * float(ndtr(ndtri(alpha / 4) / math.sqrt(min(time, 1.0))))


def levels(times: Sequence[float], alpha: float) -> list[float]:
    """Return the two-sided level of each look such that all looks together have error ``alpha``.

    Args:
        times: Increasing shares of the maximal number of seeds.
        alpha: Error of all looks together.
    """
    found: list[float] = []
    grid, weight = np.zeros(1), np.ones(1)  # the sum so far of trials that have not stopped, and its density
    before, used = 0.0, 0.0
    for time in times:
        step, goal = math.sqrt(time - before), spent(time, alpha) - used
        start, mass = grid, weight

        def beyond(bound: float, start=start, mass=mass, step=step) -> float:  # type: ignore[no-untyped-def]
            return float((mass * (ndtr((-bound - start) / step) + ndtr((start - bound) / step))).sum())

        goal = max(goal, 1e-300)
        limit = 40 * math.sqrt(time)
        bound = brentq(lambda b, f=beyond, g=goal: math.log(max(f(b), 1e-320) / g), 0.0, limit, xtol=1e-9)
        found.append(2 * float(ndtr(-bound / math.sqrt(time))))
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
def _table(times: tuple[float, ...]) -> tuple[list[float], list[float]]:
    """Return logarithms of the last look's level and of the corresponding overall error."""
    alphas = np.exp(np.linspace(math.log(1e-8), math.log(0.999), 60))
    return [math.log(levels(times, float(a))[-1]) for a in alphas], [math.log(a) for a in alphas]


def overall(p: float, times: Sequence[float]) -> float:
    """Return the smallest overall error at which the present look, with ``p``, is significant.

    Args:
        p: Two-sided p of the last look.
        times: Shares of the seeds at all looks; a single look at all seeds returns ``p`` itself.
    """
    if math.isnan(p) or (len(times) == 1 and times[0] >= 1):
        return p
    known, alphas = _table(tuple(times))
    if math.log(max(p, 1e-320)) <= known[0]:
        return math.exp(alphas[0])
    return min(1.0, max(p, math.exp(float(np.interp(math.log(p), known, alphas))))) if p < 1 else 1.0
