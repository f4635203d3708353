"""Numbers as a report writes them."""

import math
from typing import Any

Table = list[list[str]]
Section = tuple[str, list[str], list[Table]]  # title, sentences, tables


def short(value: Any) -> str:
    """Return a number of any size."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def span(low: float, high: float) -> str:
    """Return an interval."""
    return "-" if math.isnan(low) else f"{low:.4f} to {high:.4f}"


def signed(value: float) -> str:
    """Return a difference."""
    return "-" if math.isnan(value) else f"{value:+.4f}"


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
