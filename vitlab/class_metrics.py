"""The confusion matrix, and recall, precision and F1 of classes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.int64]  # (K, K): rows are true classes, columns predicted ones


def confusion(targets: Sequence[int] | NDArray[Any], predictions: Sequence[int] | NDArray[Any], classes: int) -> Matrix:
    """Return the number of images by true class (rows) and predicted class (columns).

    >>> confusion([0, 0, 1], [0, 1, 1], 2).tolist()
    [[1, 1], [0, 1]]
    """
    pairs = np.asarray(targets, dtype=np.int64) * classes + np.asarray(predictions, dtype=np.int64)
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def classes_of_table(table: Any) -> int:
    """Return how many classes a table of predictions has probabilities of; 0 if that is not known.

    >>> import pandas as pd
    >>> classes_of_table(pd.DataFrame({"probabilities": [[0.5, 0.5]]})), classes_of_table(pd.DataFrame())
    (2, 0)
    """
    return len(table["probabilities"].iloc[0]) if "probabilities" in table and len(table) else 0


def by_class(matrix: Matrix) -> dict[str, NDArray[np.float64]]:
    """Return recall, precision and F1 of each class; recall is NaN for a class without images.

    >>> {name: values.round(2).tolist() for name, values in by_class(np.array([[1, 1], [0, 1]])).items()}
    {'recall': [0.5, 1.0], 'precision': [1.0, 0.5], 'f1': [0.67, 0.67]}
    """
    return of_counts(matrix.diagonal(), matrix.sum(1), matrix.sum(0))


def of_counts(right: NDArray[Any], images: NDArray[Any], given: NDArray[Any]) -> dict[str, NDArray[np.float64]]:
    """Return recall, precision and F1 of each class or label from its numbers of right, all and given images.

    >>> of_counts(np.array([1]), np.array([2]), np.array([1]))["precision"].tolist()
    [1.0]
    """
    with np.errstate(invalid="ignore"):
        recall, f1 = right / images, 2 * right / np.maximum(images + given, 1)
    return {"recall": recall, "precision": right / np.maximum(given, 1), "f1": f1}


def over_classes(matrix: Matrix) -> dict[str, float]:
    """Return the means over the classes that have images: of the recall, which is the balanced accuracy, and of F1.

    >>> {name: round(value, 2) for name, value in over_classes(np.array([[1, 1], [0, 1]])).items()}
    {'acc1_macro': 0.75, 'f1_macro': 0.67}
    """
    there, found = matrix.sum(1) > 0, by_class(matrix)
    return {"acc1_macro": float(found["recall"][there].mean()), "f1_macro": float(found["f1"][there].mean())}
