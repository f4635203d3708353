"""Calibration of predicted probabilities."""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vitlab.analysis.figures import COLORS, finish, one_axes
from vitlab.analysis.intervals import over_images, share_interval
from vitlab.analysis.outcomes.outcome import outcome_of
from vitlab.analysis.subject import Finding, Subject
from vitlab.errors import UsageError

BINS = 15


def bins_of(confidence: NDArray[np.floating], bins: int = BINS) -> NDArray[np.int64]:
    """Return the bin of each confidence; a bin holds its upper edge, and the first one 0.

    >>> bins_of(np.array([0.0, 0.5, 0.51, 1.0]), 2).tolist()
    [0, 0, 1, 1]
    """
    return np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)


def reliability(confidence: NDArray[np.floating], right: NDArray[np.bool_], bins: int = BINS) -> pd.DataFrame:
    """Return number, mean confidence and share of right answers in bins of equal width, empty ones left out.

    >>> reliability(np.array([0.9, 0.7, 0.2]), np.array([True, False, False]), bins=2)
       low  high  n  confidence  accuracy
    0  0.0   0.5  1         0.2       0.0
    1  0.5   1.0  2         0.8       0.5
    """
    edges = np.linspace(0, 1, bins + 1)
    of = bins_of(confidence, bins)
    found = pd.DataFrame({"bin": of, "confidence": confidence.astype(float), "accuracy": right.astype(float)}).groupby(
        "bin"
    )
    means = found.mean().assign(n=found.size())
    table = means.assign(low=edges[means.index], high=edges[means.index + 1]).reset_index(drop=True)
    return table[["low", "high", "n", "confidence", "accuracy"]]


def expected_calibration_error(table: pd.DataFrame) -> float:
    """Return the distance of confidence and accuracy, in the mean over the samples, of :func:`reliability`.

    >>> round(expected_calibration_error(reliability(np.array([0.9, 0.7, 0.2]), np.array([True, False, False]), 2)), 4)
    0.2667
    """
    return float(np.average((table["confidence"] - table["accuracy"]).abs(), weights=table["n"]))


def ece_interval(confidence: NDArray[np.floating], right: NDArray[np.bool_]) -> tuple[float, float]:
    """Return a 95 % interval of the error over images: the middle of 200 bootstraps, less their upward bias."""
    rng, n = np.random.default_rng(0), len(right)
    bins, gap = bins_of(confidence), confidence - right
    draws = [rng.integers(n, size=n) for _ in range(200)]
    sums = np.array([np.bincount(bins[i], weights=gap[i], minlength=BINS) for i in [np.arange(n), *draws]])
    own, *found = np.abs(sums).sum(axis=1) / n
    low, high = np.quantile(np.array(found) - np.mean(found) + own, (0.025, 0.975))
    return max(0.0, float(low)), float(high)


def analyze_calibration(subject: Subject) -> Finding:
    """Compare the probability of the first choice, or of each label, with how often it is right: Guo et al. 2017
    (arXiv:1706.04599).

    Example:
        >>> finding = analyze_calibration(subject)
        >>> list(finding.table.columns)[:7]
        ['low', 'high', 'n', 'confidence', 'accuracy', 'confidence_low', 'confidence_high']
    """
    outcome = outcome_of(subject)
    if outcome.kind == "number":
        raise UsageError(f"calibration needs probabilities and {subject.name} predicts numbers; use errors instead")
    if outcome.kind == "class":
        confidence, right = outcome.outputs.max(dim=1).values, ~outcome.wrong()
    else:
        confidence, right = outcome.outputs.flatten(), outcome.targets.flatten() > 0
    said = confidence.double().numpy()
    table = reliability(said, right.numpy())
    of = bins_of(said)
    means = [over_images("confidence", said[of == i]) for i in np.unique(of)]
    table = table.assign(**pd.DataFrame(means)[["confidence_low", "confidence_high"]])
    ends = [share_interval(round(a * n), int(n)) for a, n in zip(table["accuracy"], table["n"], strict=True)]
    table["accuracy_low"], table["accuracy_high"] = zip(*ends, strict=True)
    figure, (axes,) = one_axes(3.6, 3.6)
    axes.plot([0, 1], [0, 1], color="gray", linestyle="--", linewidth=1)
    axes.bar(table["low"], table["accuracy"], width=1 / BINS, align="edge", color=COLORS[5], edgecolor="white")
    reach = np.abs(table[["accuracy_low", "accuracy_high"]].to_numpy().T - table["accuracy"].to_numpy())
    style = {"color": COLORS[0], "marker": "o", "markersize": 4, "linewidth": 1.2, "capsize": 2}
    axes.errorbar(table["confidence"], table["accuracy"], reach, **style)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    finish(axes, "probability", "share that is right", legend=False)
    what = "images" if outcome.kind == "class" else "labels of images"
    low, high = ece_interval(said, right.numpy())
    ece = f"ECE {expected_calibration_error(table):.4f} [{low:.4f}, {high:.4f}]"
    note = f"{ece} over {BINS} bins; {len(right):,} {what} of {subject.split}"
    return Finding(table, figure, note)
