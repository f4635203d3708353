"""Calibration of predicted probabilities."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import binom

from vitlab.analysis.catalogue import Analysis, Curve
from vitlab.analysis.figures import COLORS, finish, one_axes
from vitlab.analysis.intervals import over_images, share_interval
from vitlab.analysis.outcomes.outcome import outcome_of
from vitlab.analysis.subject import Finding, Subject
from vitlab.errors import UsageError

BINS = 15
_ROUNDING = 1e-9  # a smaller distance of two shares is none


def bins_of(confidence: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the bin of each confidence; a bin holds its upper edge, and the first one 0.

    >>> bins_of(np.array([0.0, 0.2, 0.21, 1.0])).tolist()
    [0, 2, 3, 14]
    """
    return np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)


def reliability(confidence: NDArray[np.floating], right: NDArray[np.bool_]) -> pd.DataFrame:
    """Return count, mean confidence and accuracy in bins of equal width, without empty bins.

    >>> reliability(np.array([1.0, 0.96, 0.2]), np.array([True, False, False])).round(2)
        low  high  n  confidence  accuracy
    0  0.13   0.2  1        0.20       0.0
    1  0.93   1.0  2        0.98       0.5
    """
    edges = np.linspace(0, 1, BINS + 1)
    of = bins_of(confidence)
    found = pd.DataFrame({"bin": of, "confidence": confidence.astype(float), "accuracy": right.astype(float)}).groupby(
        "bin"
    )
    means = found.mean().assign(n=found.size())
    table = means.assign(low=edges[means.index], high=edges[means.index + 1]).reset_index(drop=True)
    return table[["low", "high", "n", "confidence", "accuracy"]]


def expected_calibration_error(table: pd.DataFrame) -> float:
    """Return the distance of confidence and accuracy, in the mean over the samples, of :func:`reliability`.

    This is the plain estimate, as torchmetrics has it; noise raises it: see :func:`calibration_error`.

    >>> round(expected_calibration_error(reliability(np.array([1.0, 0.96, 0.2]), np.array([True, False, False]))), 4)
    0.3867
    """
    return float(np.average((table["confidence"] - table["accuracy"]).abs(), weights=table["n"]))


@dataclass(frozen=True)
class CalibrationError:
    """The error of calibration, free of the bias of its plain estimate.

    Args:
        rms: Root of the mean squared distance of confidence and accuracy, debiased; 0 where the estimate is negative.
        low: Lower end of its 95 % interval over images; above 0 if and only if calibration is rejected at 5 %.
        high: Upper end.
        plain: The ECE of Guo et al. 2017, :func:`expected_calibration_error`, which noise alone makes positive.
        by_chance: The plain ECE that calibrated probabilities of as many images have in the mean.
    """

    rms: float
    low: float
    high: float
    plain: float
    by_chance: float

    def __str__(self) -> str:
        found = f"calibration error {self.rms:.4f} [{self.low:.4f}, {self.high:.4f}]"
        told = "" if self.low > 0 else ", not distinguishable from 0"
        return f"{found} (root mean square, debiased){told}; plain ECE {self.plain:.4f}, by chance {self.by_chance:.4f}"


def calibration_error(
    confidence: NDArray[np.floating],
    right: NDArray[np.bool_],
    images: NDArray[np.integer] | None = None,
    draws: int = 400,
) -> CalibrationError:
    """Estimate the calibration error over :data:`BINS` bins of equal width.

    The plain ECE is a mean of absolute values, which noise makes positive: calibrated probabilities of 440 images show
    0.05. Of the squared error the noise can be subtracted (Bröcker 2012, doi:10.1007/s00382-011-1191-1; Kumar et al.
    2019, arXiv:1909.10155), so the root of that is estimated. Its interval holds each error whose simulated estimates
    surround the found one: labels are drawn from the predicted probabilities, moved in the direction that was found, or
    in the opposite one, until they have that error. An estimate has the sign of its direction, and 2.5 % lie outside
    at each end; half of those that equal the found one count as below it (mid-p, Lancaster 1961,
    doi:10.1080/01621459.1961.10482105).

    Args:
        confidence: ``(n,)`` probabilities.
        right: ``(n,)`` whether that came true.
        images: ``(n,)`` which image each belongs to, if one has several labels: they count for less if they go
            together. Default: one each.
        draws: Simulated estimates for each of 121 errors.

    Example:
        >>> rng = np.random.default_rng(1)
        >>> p = rng.uniform(0.5, 1, 1000)
        >>> calibration_error(p, rng.random(1000) < p).low, calibration_error(p, rng.random(1000) < p - 0.2).low > 0.1
        (0.0, True)
    """
    table, rng = reliability(confidence, right), np.random.default_rng(0)
    said, share = (table[name].to_numpy() for name in ("confidence", "accuracy"))
    n = table["n"].to_numpy() / _going_together(confidence, right, images)
    weight, found = n / n.sum(), _square(n, share * n, said)
    variance = said * (1 - said)
    noise = float(np.sqrt(2 * np.square(variance).sum())) / n.sum()  # of the square, of calibrated probabilities
    rms, reach = float(np.sqrt(max(found, 0.0))), np.sqrt(4 * noise) + 2 / np.sqrt(n.sum())
    errors = np.sort(np.append(np.linspace(max(rms - reach, -1.0), min(rms + reach, 1.0), 120), 0.0))
    gap = np.where(np.abs(share - said) < _ROUNDING, 0.0, share - said)
    toward = gap / np.abs(gap).max() if gap.any() else np.where(said > 0.5, -1.0, 1.0)
    moved = np.array([_moved(said, toward, weight, error) for error in errors])
    counts = rng.multinomial(max(1, round(n.sum())), weight, size=(len(errors), draws))
    hits = rng.binomial(counts, moved[:, None])
    sides = _sign(((hits - counts * said) * toward).sum(axis=-1)) - float(gap.any())  # 0 for that of the found one
    order = np.where(sides == 0, _sign(_square(counts, hits, said) - found), sides)
    below = (order < 0).mean(axis=1) + (order == 0).mean(axis=1) / 2
    held = np.flatnonzero((below >= 0.025) & (below <= 0.975))
    first, last = (held[0], held[-1]) if len(held) else (nearest := np.abs(below - 0.5).argmin(), nearest)
    reached = np.sqrt((weight * np.square(moved - said)).sum(axis=1))  # less than the error where probabilities end
    high = max(rms, *reached[[max(first - 1, 0), min(last + 1, len(errors) - 1)]].tolist())
    zero = errors.searchsorted(0.0)
    chance = np.abs(hits[zero] - counts[zero] * said).sum(axis=1).mean() / max(1, round(n.sum()))
    low = min(rms, max(0.0, float(errors[first])))
    return CalibrationError(rms, low, high, expected_calibration_error(table), float(chance))


def _sign(distance: NDArray[Any]) -> NDArray[Any]:
    return np.sign(np.where(np.abs(distance) < _ROUNDING, 0.0, distance))


def _square(n: NDArray[Any], hits: NDArray[Any], said: NDArray[Any]) -> NDArray[np.float64] | Any:
    """Return the mean squared distance of ``(..., bins)`` shares of hits from what was said, less its noise."""
    share = hits / np.maximum(n, 1e-12)
    noise = np.where(n > 1.5, share * (1 - share) / np.maximum(n - 1, 0.5), said * (1 - said) / np.maximum(n, 1))
    return (n * (np.square(share - said) - noise)).sum(axis=-1) / n.sum(axis=-1)


def _moved(said: NDArray[Any], toward: NDArray[Any], weight: NDArray[Any], error: float) -> NDArray[np.float64]:
    """Return probabilities of the bins moved ``toward`` by this root mean square error, or away if it is negative."""
    scale = error / float(np.sqrt(np.sum(weight * np.square(toward))))
    for _ in range(8):  # probabilities end at 0 and 1
        reached = float(np.sqrt(np.sum(weight * np.square(np.clip(said + scale * toward, 0, 1) - said))))
        scale *= abs(error) / reached if reached > 0 else 1.0
    return np.clip(said + scale * toward, 0, 1)


def _going_together(
    confidence: NDArray[np.floating], right: NDArray[np.bool_], images: NDArray[np.integer] | None
) -> float:
    """Return by how much the labels of an image, as they go together, raise the variance of a sum over all."""
    if images is None:
        return 1.0
    of = bins_of(confidence)
    gap = right - confidence
    gap = gap - (np.bincount(of, gap, BINS) / np.maximum(np.bincount(of, minlength=BINS), 1))[of]
    return max(1.0, float(np.square(np.bincount(images, gap)).sum() / max(np.square(gap).sum(), 1e-12)))


@Analysis(
    reading="Accuracy against predicted probability: below the dashed line the network is overconfident. Inside the "
    "gray bars calibrated probabilities would lie in 95 % of draws.",
    limits="Accuracy: a network that always predicts the class frequencies is calibrated.",
    curve=Curve(
        x="high",
        measures={"accuracy": "accuracy", "confidence": "confidence"},
        words="Share that is right in bins of the probability, by the upper end of the bin.",
    ),
)
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
    means = [over_images("confidence", said[of == i], (0, 1)) for i in np.unique(of)]
    # labels of one image may go together
    images = None if outcome.kind == "class" else np.repeat(np.arange(len(outcome)), outcome.outputs.shape[1])
    table = table.assign(**pd.DataFrame(means)[["confidence_low", "confidence_high"]])
    ends = [share_interval(round(a * n) / n, n) for a, n in zip(table["accuracy"], table["n"], strict=True)]
    table["accuracy_low"], table["accuracy_high"] = zip(*ends, strict=True)
    enough = np.maximum(1, (table["n"] / _going_together(said, right.numpy(), images)).round())
    for end, level in (("low", 0.025), ("high", 0.975)):  # what calibrated probabilities show: Bröcker and Smith 2007
        table[f"consistent_{end}"] = binom.ppf(level, enough, table["confidence"]) / enough
    figure, (axes,) = one_axes(3.6, 3.6)
    axes.plot([0, 1], [0, 1], color="gray", linestyle="--", linewidth=1)
    bars = {"width": 1 / BINS, "align": "edge", "color": COLORS[5], "edgecolor": "white"}
    axes.bar(table["low"], table["accuracy"], label="right, by bin", **bars)
    band = table["consistent_high"] - table["consistent_low"]
    place = {"width": 0.6 / BINS, "bottom": table["consistent_low"], "color": "0.3", "alpha": 0.35}
    axes.bar(table["confidence"], band, label="calibrated, 95 %", **place)
    reach = np.abs(table[["accuracy_low", "accuracy_high"]].to_numpy().T - table["accuracy"].to_numpy())
    style = {"color": COLORS[0], "marker": "o", "markersize": 4, "linewidth": 1.2, "capsize": 2}
    axes.errorbar(table["confidence"], table["accuracy"], reach, label="with 95 % interval", **style)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))  # markers at 0 and 1 are whole
    finish(axes, "probability", "share that is right")
    what = "images" if outcome.kind == "class" else "labels of images"
    error = calibration_error(said, right.numpy(), images)
    return Finding(table, figure, f"{error}; {BINS} bins; {len(right):,} {what} of {subject.split}")
