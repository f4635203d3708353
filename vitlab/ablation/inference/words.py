"""Numbers as a report writes them."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Table = list[list[str]]


class Section(NamedTuple):
    """A section of a report."""

    title: str
    sentences: list[str]
    tables: Sequence[Table] = ()


def short(value: Any) -> str:
    """Return a number of any size; a dash where there is none."""
    if value is None or value != value:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def decimals(values: Iterable[float], spreads: Iterable[float] = ()) -> int:
    """Return the decimals of a metric: 4 of shares, such as accuracies, and 4 significant digits in other units.

    >>> decimals([0.92, 0.05], [0.0003]), decimals([5e-6], [2e-7]), decimals([4.9e6], [2.4e5])
    (4, 9, 0)

    Args:
        values: The means of the metric.
        spreads: Their standard deviations and differences, the smallest of which keeps four digits if the means do.
    """
    sizes, small = ([abs(x) for x in found if x and math.isfinite(x)] for found in (values, spreads))
    if not sizes:
        return 4
    most = max(4, 3 - math.floor(math.log10(max(sizes))))
    least = min(small, default=max(sizes))
    return min(most, max(4 if max(sizes) < 1 else 0, 3 - math.floor(math.log10(least))))


def span(low: float, high: float, digits: int = 4) -> str:
    """Return an interval."""
    return "-" if math.isnan(low) else f"{low:z.{digits}f} to {high:z.{digits}f}"


def signed(value: float, digits: int = 4) -> str:
    """Return a difference."""
    return "-" if math.isnan(value) else f"{value:+z.{digits}f}"


def exploratory(n: int) -> str:
    """Return what few seeds are good for, in words; an empty text for four or more.

    Example:
        >>> exploratory(2)
        'n = 2 is exploratory: it only detects effects far above the spread of seeds'
    """
    return f"n = {n} is exploratory: it only detects effects far above the spread of seeds" if n < 4 else ""


def deviations(value: float) -> str:
    """Return a number of standard deviations, however huge: two seeds at an early look."""
    return f"{value:.1f} sd" if value < 1e4 else f"{value:.1g} sd"


def percent(value: float) -> str:
    """Return a share in percent, with as many digits as it has.

    >>> percent(0.95), percent(0.999)
    ('95%', '99.9%')
    """
    return f"{100 * value:.6g}%"


def chance(value: float) -> str:
    """Return a p value."""
    return "-" if math.isnan(value) else "< 0.0001" if value < 0.0001 else f"{value:.4f}"
