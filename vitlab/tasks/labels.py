"""Metrics, class weights and argument checks for one class or several labels per image."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MultilabelAveragePrecision, MultilabelF1Score
from torchmetrics.functional.classification import binary_average_precision


def refuse(targets: dict[str, Any], num_classes: int, loss: str, weights: Any) -> None:
    """Refuse targets, loss and class weights that do not fit together."""
    kind = targets.get("kind", "class")
    if kind == "number":
        raise ValueError(
            f"`model: Classifier` needs classes, and the data has numbers ({', '.join(targets['names'])}): "
            "use --model=Regressor, or --data.target_type=class for one column that holds classes"
        )
    if kind == "mixed":
        raise ValueError(
            f"`model: Classifier` needs one column of classes, and the data has {', '.join(targets['names'])}: use "
            "--model=MultiTask, or name one column by --data.targets"
        )
    if kind == "multilabel" and loss == "ce":
        raise ValueError(
            "`loss: ce` is for one class per image, and images of the data may have several labels: use "
            "--model.loss=bce, or --data.target_type=class for one column that holds classes"
        )
    if num_classes == 1:
        raise ValueError("`model: Classifier` needs two classes, and the data has one; --model=MAE or DINO need none")
    if num_classes < 2:
        raise ValueError(f"`num_classes` must be at least 2, got {num_classes}")
    if weights not in (None, "balanced") and (len(weights) != num_classes or min(weights) < 0 or not max(weights) > 0):
        raise ValueError(f"`class_weights` must be balanced or {num_classes} numbers from 0, not all 0, got {weights}")


def balanced(labels: Tensor, num_classes: int) -> Tensor:
    """Return weights that balance the classes in ``(N,)``, or positives and negatives of each of ``(N, K)`` labels.

    >>> balanced(torch.tensor([0, 0, 0, 1]), 2)
    tensor([0.6667, 2.0000])
    """
    if labels.ndim == 2:
        counts = labels.long().sum(dim=0)
        return torch.where(counts > 0, (len(labels) - counts) / counts.clamp(min=1), 1.0)
    counts = torch.bincount(labels, minlength=num_classes)
    return torch.where(counts > 0, len(labels) / ((counts > 0).sum() * counts.clamp(min=1)), 0.0)


class _MeanAveragePrecision(MultilabelAveragePrecision):
    def compute(self) -> Tensor:  # type: ignore[override]
        """Return the mean over labels with at least one positive image; others have no average precision."""
        scores, targets = (
            torch.cat(state) if isinstance(state, list) else state for state in (self.preds, self.target)
        )
        pairs = [(score, target) for score, target in zip(scores.T, targets.T, strict=True) if target.any()]
        return torch.stack([binary_average_precision(*pair) for pair in pairs] or [scores.new_tensor(torch.nan)]).mean()


def metrics(kind: str, num_classes: int) -> MetricCollection:
    """Return the metrics for one class (acc1, acc5) or several labels (map, f1) per image."""
    collected: dict[str, Metric | MetricCollection] = {
        f"acc{k}": MulticlassAccuracy(num_classes, top_k=k, average="micro") for k in (1, 5) if k < num_classes
    }
    if kind == "multilabel":
        collected = {
            "map": _MeanAveragePrecision(num_classes),
            "f1_macro": MultilabelF1Score(num_classes),
            "f1_micro": MultilabelF1Score(num_classes, average="micro"),
        }
    return MetricCollection(collected)
