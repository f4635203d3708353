"""Supervised image classification."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from vitlab.tasks.base import Task


class Classifier(Task):
    """Train a Vision Transformer on labelled images with cross-entropy.

    Args:
        num_classes: Number of classes K; comes from the data.
        label_smoothing: Share of the target spread over all classes, in training.
        **task: Passed to :class:`Task`.
    """

    monitor = ("max", "val/acc1")

    def __init__(self, num_classes: int = 1000, label_smoothing: float = 0.1, **task: Any) -> None:
        if num_classes < 2:
            raise ValueError(f"`num_classes` must be at least 2, got {num_classes}")
        accuracy: dict[str, Metric | MetricCollection] = {
            f"acc{k}": MulticlassAccuracy(num_classes, top_k=k, average="micro") for k in (1, 5) if k < num_classes
        }
        super().__init__(num_outputs=num_classes, metrics=MetricCollection(accuracy), **task)

    def train_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy with label smoothing; targets are ``(B,)`` labels or ``(B, K)`` shares."""
        return F.cross_entropy(outputs, targets, label_smoothing=self.hparams["label_smoothing"])

    def eval_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the plain cross-entropy."""
        return F.cross_entropy(outputs, targets)

    def train_measures(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the number of images whose first choice is the label, or the largest share of a mixed one."""
        labels = targets if targets.ndim == 1 else targets.argmax(dim=1)
        return {"acc1": (outputs.argmax(dim=1) == labels).sum()}
