"""The worst mistakes, with their images."""

from typing import Any

import numpy as np
import pandas as pd

from vitlab.analysis.catalogue import Analysis
from vitlab.analysis.figures import GALLERY, gallery, grid_of_axes
from vitlab.analysis.intervals import share_interval
from vitlab.analysis.outcomes.outcome import Outcome, outcome_of
from vitlab.analysis.subject import Finding, Subject

KINDS = ("target", "prediction")  # of numbers


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
    described = [_described(outcome, i, float(image_errors[i])) for i in order.tolist()]
    columns = list(_described(outcome, 0, 0.0)[0])  # where nothing is wrong, too
    table = pd.DataFrame([row for row, _ in described], columns=columns)
    shown = order[:GALLERY].numpy()
    if len(shown):
        places = shown if outcome.indices is None else outcome.indices[shown]
        chosen = np.sort(places)
        pixels = subject.pixels_of(subject.data.splits[subject.split].take(chosen))
        figure = gallery(pixels[np.searchsorted(chosen, places)], [title for _, title in described[:GALLERY]])
    else:
        figure, axes = grid_of_axes(1, 1, size=1.6)
        axes[0, 0].axis("off")
        axes[0, 0].text(0.5, 0.5, "no mistakes", ha="center", va="center", fontsize=8)
    n = len(outcome)
    low, high = share_interval(len(order) / n, n)
    wrong_ones = f"{len(order):,} of them wrong ({len(order) / n:.1%}, 95 % interval {low:.1%} to {high:.1%})"
    what = "worst first" if outcome.kind == "number" else wrong_ones
    return Finding(table, figure, f"{n:,} images of {subject.split}, {what}")


def _described(outcome: Outcome, i: int, error: float) -> tuple[dict[str, Any], str]:
    """Return the row of an image in the table, and its title in the figure."""
    image, target, output = {"image": outcome.images[i]}, outcome.targets[i], outcome.outputs[i]
    match outcome.kind:
        case "class":
            best, true = int(output.argmax()), int(target)
            named = {"target": outcome.names[true], "prediction": outcome.names[best]}
            shares = {"probability": float(output[best]), "probability_of_target": float(output[true])}
            title = f"{named['target'][:14]}\nas {named['prediction'][:14]} {shares['probability']:.2f}"
            return {**image, **named, **shares}, title
        case "multilabel":
            there, said = target > 0, output > 0.5
            missed = [name for name, yes in zip(outcome.names, (there & ~said).tolist(), strict=True) if yes]
            found = [name for name, yes in zip(outcome.names, (said & ~there).tolist(), strict=True) if yes]
            title = f"misses {', '.join(missed)[:14]}\nfinds {', '.join(found)[:14]}"
            row = {"missed": "; ".join(missed), "wrongly_found": "; ".join(found), "cross_entropy": error}
            return {**image, **row}, title
    numbers = zip(outcome.names, target.tolist(), output.tolist(), strict=True)
    values = {f"{kind}/{name}": value for name, *both in numbers for kind, value in zip(KINDS, both, strict=True)}
    return {**image, **values, "error": error}, f"{float(target[0]):.4g}\nas {float(output[0]):.4g}"
