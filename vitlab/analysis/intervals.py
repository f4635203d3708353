"""Intervals over images, which every number of an analysis has."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from vitlab.stats import cut, interval, seeds_and_images


def share_interval(share: float, n: float) -> tuple[float, float]:
    """Return the 95 % interval of a share of n images, Wilson's (1927), which holds its coverage near 0 and 1.

    Args:
        share: The share.
        n: How many images; or how many would have the variance of the share, where that is not theirs.

    Example:
        >>> [round(bound, 3) for bound in share_interval(9 / 10, 10)]
        [0.596, 0.982]
    """
    z = float(special.ndtri(0.975)) ** 2
    middle, half = share + z / (2 * n), math.sqrt(z * share * (1 - share) / n + (z / (2 * n)) ** 2)
    return max(0.0, (middle - half) / (1 + z / n)), min(1.0, (middle + half) / (1 + z / n))


def over_images(
    name: str, values: Sequence[float] | NDArray[Any], within: tuple[float, float] = (-math.inf, math.inf)
) -> dict[str, float]:
    """Return the mean of a value of each image under its name, and its 95 % interval as ``_low`` and ``_high``.

    Args:
        name: Name of the value.
        values: ``(images,)``; booleans for a share.
        within: The least and the largest possible value, where the interval ends.

    Example:
        >>> found = over_images("acc1", np.array([True] * 9 + [False]))
        >>> {name: round(value, 3) for name, value in found.items()}
        {'acc1': 0.9, 'acc1_low': 0.596, 'acc1_high': 0.982}
    """
    x = np.asarray(values)
    ends = share_interval(int(x.sum()) / len(x), len(x)) if x.dtype == bool else interval(x.tolist(), exact=True)
    low, high = cut(*ends, within)
    return {name: float(x.mean()), f"{name}_low": low, f"{name}_high": high}


def over_several(
    name: str, values: NDArray[Any], within: tuple[float, float] = (-math.inf, math.inf)
) -> dict[str, float]:
    """Return the mean of a value that each image has several times, as under several changes, with its interval.

    The changes are those that were asked for, not a sample: the interval is over other images. A share has Wilson's
    interval, at the number of images that would have its variance.

    Args:
        name: Name of the value.
        values: ``(changes, images)``; booleans for a share.
        within: The least and the largest possible value.

    Example:
        >>> found = over_several("acc1", np.array([[True] * 9 + [False]] * 4))
        >>> {name: round(value, 3) for name, value in found.items()}  # that of 10 images, not of 40
        {'acc1': 0.9, 'acc1_low': 0.596, 'acc1_high': 0.982}
    """
    x = np.asarray(values)
    means = x.mean(axis=0)
    if x.dtype != bool:
        return over_images(name, means, within)
    share, n = float(means.mean()), len(means)
    variance = float(np.var(means)) / n  # of a share of n images: p (1 - p) / n
    low, high = share_interval(share, share * (1 - share) / variance if variance > 0 else n)
    return {name: share, f"{name}_low": low, f"{name}_high": high}


def over_draws(
    name: str, values: NDArray[Any], within: tuple[float, float] = (-math.inf, math.inf)
) -> dict[str, float]:
    """Return the mean of a value of each random draw and image, with its 95 % interval over other draws and images.

    The interval is that of :func:`vitlab.stats.seeds_and_images`. A share has Wilson's interval, at the number of
    images that would have that width.

    Args:
        name: Name of the value.
        values: ``(draws, images)``; booleans for a share.
        within: The least and the largest possible value.

    Example:
        >>> right = np.random.default_rng(0).random((5, 400)) < np.array([0.7, 0.8, 0.75, 0.78, 0.72])[:, None]
        >>> found = over_draws("acc1", right)
        >>> found["acc1_low"] < 0.75 < found["acc1_high"], found["acc1_high"] - found["acc1_low"] > 0.05
        (True, True)
    """
    x = np.asarray(values, float)
    draws, images = x.shape
    if min(draws, images) < 2:
        return over_several(name, np.asarray(values), within)
    mean, low, high = seeds_and_images(x)
    if np.asarray(values).dtype == bool:
        variance = ((high - low) / 2 / float(special.ndtri(0.975))) ** 2
        low, high = share_interval(mean, mean * (1 - mean) / variance if variance > 0 else images)
    low, high = cut(low, high, within)
    return {name: mean, f"{name}_low": low, f"{name}_high": high}
