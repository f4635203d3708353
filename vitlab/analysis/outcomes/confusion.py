"""The confusion matrix as an analysis."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitlab.analysis.catalogue import Analysis, Curve
from vitlab.analysis.figures import COLORS, finish
from vitlab.analysis.intervals import share_interval
from vitlab.analysis.outcomes.outcome import Outcome, outcome_of
from vitlab.analysis.subject import Finding, Subject
from vitlab.class_metrics import Matrix, confusion, of_counts, over_classes
from vitlab.errors import UsageError

_NAMED, _COUNTED = 40, 12  # classes whose names, and whose counts, a matrix has room for
_ADDED = 1.96**2  # images, see `macro_intervals`


@Analysis(
    reading="Images by true class (rows) and predicted class (columns), with recall and precision of each class.",
    limits="Rates for other class frequencies; the recall of a class with few images is uncertain.",
    curve=Curve(
        measures={"recall": "recall", "precision": "precision", "f1": "f1"},
        lines=("class",),
        words="Recall, precision and F1 of each class.",
        summary=lambda table: table.rename(columns={"label": "class"}),
    ),
)
def analyze_confusion(subject: Subject) -> Finding:
    """Count the images of each class by predicted class; for labels, hits and misses at a probability of 1/2.

    Example:
        >>> finding = analyze_confusion(subject)
        >>> list(finding.table.columns)[:5]
        ['class', 'images', 'recall', 'precision', 'f1']
    """
    outcome = outcome_of(subject)
    if outcome.kind == "number":
        raise UsageError(f"confusion needs classes and {subject.name} predicts numbers; use errors instead")
    on = f"{len(outcome):,} images of {subject.split}"
    if outcome.kind == "multilabel":
        table = _of_labels(outcome)
        figure = Figure(figsize=(5, 1 + 0.25 * min(len(table), _NAMED)), layout="constrained")
        _bars(figure.subplots(), table, "label")
        return Finding(table, figure, f"{on}, labels above a probability of 1/2")
    matrix = confusion(outcome.targets.numpy(), outcome.outputs.argmax(dim=1).numpy(), len(outcome.names))
    table = _table("class", outcome.names, matrix.diagonal(), matrix.sum(1), matrix.sum(0))
    shown = min(len(table), _NAMED)
    figure = Figure(figsize=(4 + 0.45 * shown, 1.5 + 0.22 * shown), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    _draw(left, matrix, outcome.names)
    _bars(right, table, "class")
    means, ends = over_classes(matrix), macro_intervals(matrix)
    words = [f"{means[name]:.4f} [{low:.4f}, {high:.4f}]" for name, (low, high) in ends.items()]
    note = f"{on}; recall {words[0]} and F1 {words[1]}, averaged over classes"
    return Finding(
        pd.concat([table, pd.DataFrame(matrix, columns=outcome.names).add_prefix("as ")], axis=1), figure, note
    )


def _of_labels(outcome: Outcome) -> pd.DataFrame:
    there, said = outcome.targets.numpy() > 0, outcome.outputs.numpy() > 0.5
    return _table("label", outcome.names, (there & said).sum(0), there.sum(0), said.sum(0))


def _table(what: str, names: list[str], right: np.ndarray, images: np.ndarray, given: np.ndarray) -> pd.DataFrame:
    """Return one row per class, with intervals over the images that each share refers to.

    F1 is 2 J / (1 + J) of the share J that is right among the images that are of a class or given it; so are its ends.
    """
    found = {what: names, "images": images, **of_counts(right, images, given)}
    for name, of in (("recall", images), ("precision", given), ("f1", images + given - right)):
        ends = [share_interval(r / n, n) if n else (np.nan, np.nan) for r, n in zip(right, of, strict=True)]
        for end, values in zip(("low", "high"), np.array(ends).T, strict=True):
            found[f"{name}_{end}"] = 2 * values / (1 + values) if name == "f1" else values
    return pd.DataFrame(found)


def _draw(axes: Axes, matrix: Matrix, names: list[str]) -> None:
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap="viridis", vmin=0, vmax=1)
    if len(names) <= _NAMED:
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        axes.set_yticks(range(len(names)), names, fontsize=7)
    if len(names) <= _COUNTED:
        for row, column in np.ndindex(*matrix.shape):
            color = "black" if shares[row, column] > 0.5 else "white"
            axes.text(column, row, f"{matrix[row, column]}", ha="center", va="center", fontsize=7, color=color)
    axes.set_xlabel("predicted")
    axes.set_ylabel("class")


def _bars(axes: Axes, table: pd.DataFrame, what: str) -> None:
    """Draw recall and precision of each class, or of those with the lowest recall."""
    worst = table.dropna(subset="recall").nsmallest(_NAMED, "recall") if len(table) > _NAMED else table
    places = np.arange(len(worst))
    for i, name in enumerate(("recall", "precision")):
        at = places + 0.4 * i - 0.2
        axes.barh(at, worst[name], height=0.38, color=COLORS[i], label=name)
        axes.hlines(at, worst[f"{name}_low"], worst[f"{name}_high"], color="black", linewidth=0.8)
    axes.set_yticks(places, worst[what], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=7, frameon=False)
    finish(axes, "share", "" if len(worst) == len(table) else f"{len(worst)} of {len(table):,}", legend=False)


def macro_intervals(matrix: Matrix, draws: int = 200) -> dict[str, tuple[float, float]]:
    """Return 95 % intervals of :func:`over_classes` over images: Wilson's, for the number of images whose share would
    vary as much as bootstraps within each class do.

    A class that is all right or all wrong, as one with a single image always is, would not vary at all: bootstraps also
    draw from shares with :data:`_ADDED` images more in each class, half of them right (Agresti and Coull 1998), and the
    fewer images count.

    >>> {name: np.round(ends, 2).tolist() for name, ends in macro_intervals(np.array([[2, 0], [0, 1]])).items()}
    {'acc1_macro': [0.44, 1.0], 'f1_macro': [0.42, 1.0]}
    """
    images = matrix.sum(1)
    there = images[images > 0]
    fewest = len(there) ** 2 / float((1 / there).sum())  # of a single class, whose images have no other answer
    sizes: dict[str, list[float]] = {name: [] for name in over_classes(matrix)}
    for shares in (matrix / np.maximum(images, 1)[:, None], _smoothed(matrix)):
        rng, expected = np.random.default_rng(0), over_classes(shares * images[:, None])
        drawn = [over_classes(rng.multinomial(images, shares)) for _ in range(draws)]
        for name, share in expected.items():
            variance = float(np.var([each[name] for each in drawn], ddof=1))
            sizes[name] += [share * (1 - share) / variance] if variance > 0 else []
    return {
        name: share_interval(value, min(sizes[name], default=fewest)) for name, value in over_classes(matrix).items()
    }


def _smoothed(matrix: Matrix) -> NDArray[np.float64]:
    """Return the share of each answer in each class, wrong ones added as they are given to the other classes."""
    right = np.eye(len(matrix))
    wrong = (matrix.sum(0) - matrix.diagonal() + 1) * (1 - right)
    wrong = wrong / np.maximum(wrong.sum(1, keepdims=True), 1)
    return (matrix + _ADDED * (right + wrong) / 2) / (matrix.sum(1, keepdims=True) + _ADDED)
