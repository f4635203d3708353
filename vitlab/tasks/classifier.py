"""Supervised image classification."""

from typing import Any, Literal, Unpack

import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from vitlab.tasks.arguments import TaskArgs
from vitlab.tasks.base import Task


class Classifier(Task):
    """Train a Vision Transformer on labelled images.

    Args:
        num_classes: Number of classes K; comes from the data.
        label_smoothing: Share of the target spread over all classes, in training.
        loss: Cross-entropy over the classes, or binary cross-entropy of each, Touvron et al. 2022 (arXiv:2204.07118).
        targets: What the data's targets are; comes from the data.
        **task: Passed to :class:`Task`.

    Example:
        >>> task = Classifier(num_classes=3, img_size=8, in_chans=1, patch_size=2, embed_dim=16, depth=2, num_heads=2)
        >>> task(torch.randn(4, 1, 8, 8)).shape
        torch.Size([4, 3])
    """

    monitor = ("max", "val/acc1")

    def __init__(
        self,
        num_classes: int = 1000,
        label_smoothing: float = 0.1,
        loss: Literal["ce", "bce"] = "ce",
        targets: dict[str, Any] | None = None,
        **task: Unpack[TaskArgs],
    ) -> None:
        if targets and targets["kind"] != "class":
            raise ValueError(
                f"`model: Classifier` needs classes, and the data has numbers ({', '.join(targets['names'])}): "
                "use --model=Regressor, or --data.target_type=class for one column that holds classes"
            )
        if num_classes < 2:
            raise ValueError(f"`num_classes` must be at least 2, got {num_classes}")
        accuracy: dict[str, Metric | MetricCollection] = {
            f"acc{k}": MulticlassAccuracy(num_classes, top_k=k, average="micro") for k in (1, 5) if k < num_classes
        }
        super().__init__(num_outputs=num_classes, metrics=MetricCollection(accuracy), **task)

    def train_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss with label smoothing; targets are ``(B,)`` labels or ``(B, K)`` shares."""
        if self.hparams["loss"] == "bce":
            shares = F.one_hot(targets, outputs.shape[1]).to(outputs.dtype) if targets.ndim == 1 else targets
            smoothing = self.hparams["label_smoothing"]
            return F.binary_cross_entropy_with_logits(outputs, shares * (1 - smoothing) + smoothing / outputs.shape[1])
        return F.cross_entropy(outputs, targets, label_smoothing=self.hparams["label_smoothing"])

    def eval_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the plain cross-entropy."""
        return F.cross_entropy(outputs, targets)

    def train_measures(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the number of images whose first choice is the label, or the largest share of a mixed one."""
        labels = targets if targets.ndim == 1 else targets.argmax(dim=1)
        return {"acc1": (outputs.argmax(dim=1) == labels).sum()}
