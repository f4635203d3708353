"""The worst mistakes, with their images."""

from typing import Any

import numpy as np
import pandas as pd

from vitlab.analysis.catalogue import Analysis
from vitlab.analysis.figures import GALLERY, gallery, grid_of_axes
from vitlab.analysis.intervals import share_interval
from vitlab.analysis.outcomes.outcome import Outcome, outcome_of
from vitlab.analysis.subject import Finding, Subject


@Analysis(
    reading="The worst mistakes on a split, lowest probability of the true class first: check for wrong labels.",
    limits="Typical behavior: these images were selected for being wrong.",
)
def analyze_errors(subject: Subject) -> Finding:
    """Show the images with the lowest probability of the true class, or the largest error in labels or numbers.

    Example:
        >>> finding = analyze_errors(subject)
        >>> list(finding.table.columns)
        ['image', 'target', 'prediction', 'probability', 'probability_of_target']
    """
    outcome = outcome_of(subject)
    image_errors, wrong = outcome.image_errors(), outcome.wrong()
    order = image_errors.nan_to_num(-1.0).argsort(descending=True, stable=True)  # an image without any target last
    order = order[wrong[order]]
    table = pd.DataFrame([_row(outcome, i, float(image_errors[i])) for i in order.tolist()], columns=_columns(outcome))
    shown = order[:GALLERY].numpy()
    if len(shown):
        places = shown if outcome.indices is None else outcome.indices[shown]
        chosen = np.sort(places)
        pixels = subject.pixels_of(subject.data.splits[subject.split].take(chosen))
        titles = [_title(outcome, i) for i in shown.tolist()]
        figure = gallery(pixels[np.searchsorted(chosen, places)], titles)
    else:
        figure, axes = grid_of_axes(1, 1, size=1.6)
        axes[0, 0].axis("off")
        axes[0, 0].text(0.5, 0.5, "no mistakes", ha="center", va="center", fontsize=8)
    n = len(outcome)
    low, high = share_interval(len(order) / n, n)
    wrong_ones = f"{len(order):,} of them wrong ({len(order) / n:.1%}, 95 % interval {low:.1%} to {high:.1%})"
    what = "worst first" if outcome.kind == "number" else wrong_ones
    return Finding(table, figure, f"{n:,} images of {subject.split}, {what}")


def _columns(outcome: Outcome) -> list[str]:
    match outcome.kind:
        case "class":
            return ["image", "target", "prediction", "probability", "probability_of_target"]
        case "multilabel":
            return ["image", "missed", "wrongly_found", "cross_entropy"]
    return ["image", *(f"{kind}/{name}" for name in outcome.names for kind in ("target", "prediction")), "error"]


def _row(outcome: Outcome, i: int, image_errors: float) -> list[Any]:
    target, output = outcome.targets[i], outcome.outputs[i]
    match outcome.kind:
        case "class":
            best = int(output.argmax())
            return [
                outcome.images[i],
                outcome.names[int(target)],
                outcome.names[best],
                float(output[best]),
                float(output[int(target)]),
            ]
        case "multilabel":
            return [outcome.images[i], *("; ".join(names) for names in _missed_and_found(outcome, i)), image_errors]
    return [outcome.images[i], *(float(v) for pair in zip(target, output, strict=True) for v in pair), image_errors]


def _missed_and_found(outcome: Outcome, i: int) -> tuple[list[str], list[str]]:
    there, said = outcome.targets[i] > 0, outcome.outputs[i] > 0.5
    missed, found = ((a & ~b).tolist() for a, b in ((there, said), (said, there)))
    return tuple([n for n, yes in zip(outcome.names, which, strict=True) if yes] for which in (missed, found))  # type: ignore[return-value]


def _title(outcome: Outcome, i: int) -> str:
    match outcome.kind:
        case "class":
            _, target, prediction, probability, _ = _row(outcome, i, 0.0)
            return f"{target[:14]}\nas {prediction[:14]} {probability:.2f}"
        case "multilabel":
            missed, found = _missed_and_found(outcome, i)
            return f"misses {', '.join(missed)[:14]}\nfinds {', '.join(found)[:14]}"
    return f"{float(outcome.targets[i, 0]):.4g}\nas {float(outcome.outputs[i, 0]):.4g}"
