"""Regression from images to numbers."""

from typing import Unpack

import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.regression import MeanAbsoluteError

from vitlab.tasks.arguments import TaskArgs
from vitlab.tasks.base import Task


class Regressor(Task):
    """Train a Vision Transformer to predict one or several numbers with squared error.

    Class labels count as numbers, so that every data set of images can be regressed.

    Args:
        num_targets: Numbers per image.
        **task: Passed to :class:`Task`.

    Example:
        >>> task = Regressor(num_targets=2, img_size=8, in_chans=1, patch_size=2, embed_dim=16, depth=2, num_heads=2)
        >>> task(torch.randn(4, 1, 8, 8)).shape
        torch.Size([4, 2])
    """

    monitor = ("min", "val/mae")

    def __init__(self, num_targets: int = 1, **task: Unpack[TaskArgs]) -> None:
        metrics = MetricCollection({"mae": MeanAbsoluteError()})
        super().__init__(num_outputs=num_targets, metrics=metrics, **task)

    def as_targets(self, targets: Tensor) -> Tensor:
        """Map ``(B,)`` or ``(B, T)`` targets to ``(B, T)`` numbers."""
        return targets.view(len(targets), -1).float()

    def train_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error."""
        return F.mse_loss(outputs, targets)

    eval_loss = train_loss
