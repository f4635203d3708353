"""Intervals over images: every number of an analysis has one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from vitlab.stats import interval


def share_interval(right: int, n: int, ci: float = 0.95) -> tuple[float, float]:
    """Return the interval of a share, Wilson's (1927), which holds its coverage near 0 and 1 and at few images.

    Example:
        >>> [round(bound, 3) for bound in share_interval(9, 10)]
        [0.596, 0.982]
    """
    low, high = binomtest(right, n).proportion_ci(ci, "wilson")
    return float(low), float(high)


def over_images(name: str, values: Sequence[float] | NDArray[Any]) -> dict[str, float]:
    """Return the mean of a value of each image under its name, and its 95 % interval as ``_low`` and ``_high``.

    Example:
        >>> over_images("acc1", np.array([True] * 9 + [False]))
        {'acc1': 0.9, 'acc1_low': 0.5958499732047615, 'acc1_high': 0.9821237869049271}
    """
    x = np.asarray(values)
    low, high = share_interval(int(x.sum()), len(x)) if x.dtype == bool else interval(x.tolist())
    return {name: float(x.mean()), f"{name}_low": low, f"{name}_high": high}
