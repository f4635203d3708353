"""Interleaved measurement: every round runs every contender once, so that other load affects all alike."""

import math
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vitlab.layers.linear import linear_layer
from vitlab.runs.processes import proc_stat
from vitlab.stats import interval as student

Work = Callable[[], object]

IN_A_ROW = {"cuda": 8, "cpu": 1}  # runs of a timing: the host prepares one while a GPU takes another, as in training
_NOISY = 0.15  # spread of the canary above which absolute numbers are meaningless


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its multiprocessing children, including those that ended."""
    ended, ticks = os.times()[2:4], os.sysconf("SC_CLK_TCK")
    stats = [stat for child in multiprocessing.active_children() if child.pid and (stat := proc_stat(child.pid))]
    return time.process_time() + sum(ended) + sum(int(stat[11]) + int(stat[12]) for stat in stats) / ticks


def interleave(
    contenders: dict[str, Work],
    rounds: int = 9,
    budget: float = float("inf"),
    warmups: int = 2,
    in_a_row: int = 1,
) -> dict[str, list[float]]:
    """Return the seconds of a run of every contender in every round; the order is reversed every other round.

    Args:
        contenders: What to run, by name.
        rounds: Number of rounds.
        budget: Seconds after which no further round begins, once there are three.
        warmups: Runs of each contender that are not counted.
        in_a_row: Runs of a timing, see :data:`IN_A_ROW`.
    """
    start = time.perf_counter()
    for work in contenders.values():
        for _ in range(warmups):
            timed(work)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds):
        if i >= 3 and time.perf_counter() - start > budget:
            break
        for name in list(contenders)[:: -1 if i % 2 else 1]:
            times[name].append(timed(contenders[name], in_a_row))
    return times


def timed(work: Work, in_a_row: int = 1) -> float:
    """Return the seconds that a run of ``work`` takes, including the accelerator, the mean of so many in a row."""
    _wait()
    start = time.perf_counter()
    for _ in range(in_a_row):
        work()
    _wait()
    return (time.perf_counter() - start) / in_a_row


def compare(times: dict[str, list[float]], base: str) -> dict[str, dict[str, Any]]:
    """Return the speed of each contender relative to ``base``, round by round: above 1 is faster."""
    found = {}
    for name, seconds in times.items():
        ratios = [b / s for b, s in zip(times[base], seconds, strict=True)]
        found[name] = {
            "ratio": statistics.median(ratios),
            "min": min(ratios),
            "max": max(ratios),
            "interval": interval(ratios),
            "seconds": statistics.median(seconds),
            "best_seconds": min(seconds),
            "rounds": len(ratios),
        }
    return found


def interval(values: Sequence[float], resamples: int = 1000) -> tuple[float, float]:
    """Return the bootstrapped 95 % interval of the median, Efron 1979 (doi:10.1214/aos/1176344552).

    Below six values, of which not even the extremes hold the median in 95 % of cases, it is Student's t of the mean of
    their logarithms, as they are ratios.
    """
    if 1 < len(values) < 6:
        low, high = student([math.log(value) for value in values], exact=True)
        return math.exp(low), math.exp(high)
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1]


def canary(dtype: torch.dtype, device: str = "cpu", side: int = 1024) -> tuple[Work, int]:
    """Return a square matrix product and its FLOPs; the spread of its time shows other load on the machine."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return lambda: linear_layer(a, b), 2 * side**3


def is_noisy(seconds: Sequence[float]) -> bool:
    """Return whether the canary's time spread by more than 15 % of its median, without extremes."""
    ordered = sorted(seconds)[1:-1] if len(seconds) > 4 else sorted(seconds)
    return (ordered[-1] - ordered[0]) / statistics.median(ordered) > _NOISY


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
