"""Supervised image classification."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.tasks.arguments import TaskArgs
from vitlab.tasks.base import Task
from vitlab.tasks.labels import balanced, metrics, refuse


class Classifier(Task):
    """Train a Vision Transformer to classify images, with one class or several labels each.

    Args:
        num_classes: Number of classes or labels K; comes from the data.
        label_smoothing: Share of the target spread over all classes in training; of several labels, towards 1/2.
        loss: Cross-entropy over the classes (ce), or binary cross-entropy of each class (bce), which several labels
            need; Touvron et al. 2022 (arXiv:2204.07118) use it for one class.
        class_weights: Weight of each class in the training loss; with `bce`, weight of its positives; balanced: N / (K
            n) for a class with n of N images, (N - n) / n for a label.
        targets: Kind and names of the targets; comes from the data.
        **task: Passed to :class:`Task`.

    Example:
        >>> task = Classifier(num_classes=3, img_size=8, in_chans=1, patch_size=2, embed_dim=16, depth=2, num_heads=2)
        >>> task(torch.randn(4, 1, 8, 8)).shape
        torch.Size([4, 3])
    """

    monitor: tuple[Literal["min", "max"], str] = ("max", "val/acc1")
    loss_weights: Tensor | None

    def __init__(
        self,
        num_classes: int = 1000,
        label_smoothing: float = 0.1,
        loss: Literal["ce", "bce"] = "ce",
        class_weights: Sequence[float] | Literal["balanced"] | None = None,
        targets: dict[str, Any] | None = None,
        **task: Unpack[TaskArgs],
    ) -> None:
        refuse(targets or {}, num_classes, loss, class_weights)
        self.kind = targets["kind"] if targets else "class"
        super().__init__(num_outputs=num_classes, measured=metrics(self.kind, num_classes), **task)
        self.monitor = ("max", "val/map" if self.kind == "multilabel" else "val/acc1")
        weights = None if class_weights in (None, "balanced") else torch.tensor(class_weights, dtype=torch.float32)
        self.register_buffer("loss_weights", weights, persistent=False)

    def setup(self, stage: str) -> None:
        """For training with balanced class weights, count the images of each class."""
        super().setup(stage)
        if stage != "fit" or self.hparams["class_weights"] != "balanced":
            return
        split = getattr(getattr(self.trainer, "datamodule", None), "splits", {}).get("train")
        if split is None:
            raise ValueError(
                "`class_weights: balanced` needs a data set of vitlab, to count images: give a list instead"
            )
        self.loss_weights = balanced(split.labels, self.hparams["num_classes"]).to(self.device)

    def as_targets(self, targets: Tensor) -> Tensor:
        """Return ``(B,)`` classes or ``(B, K)`` class shares unchanged, ``(B, K)`` labels as integers 0 and 1."""
        return targets.long() if self.kind == "multilabel" else targets

    def in_units(self, outputs: Tensor) -> Tensor:
        """Return ``(B, K)`` logits of classes, or probabilities of labels."""
        return outputs.sigmoid() if self.kind == "multilabel" else outputs

    def train_loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the loss with label smoothing; targets are ``(B,)`` classes, ``(B, K)`` class shares or labels."""
        smoothing, class_weights = self.hparams["label_smoothing"], self.loss_weights
        plain = weights is None and (class_weights is None or self.hparams["loss"] == "bce")
        reduction = "mean" if plain else "none"
        if self.hparams["loss"] == "bce":
            shares = F.one_hot(targets, outputs.shape[1]) if targets.ndim == 1 else targets
            spread = smoothing / (2 if self.kind == "multilabel" else outputs.shape[1])
            shares = shares.to(outputs.dtype) * (1 - smoothing) + spread
            loss = F.binary_cross_entropy_with_logits(outputs, shares, pos_weight=class_weights, reduction=reduction)
            loss = loss if plain else loss.mean(dim=1)
        else:
            loss = F.cross_entropy(outputs, targets, class_weights, label_smoothing=smoothing, reduction=reduction)
        return (loss if weights is None else loss * weights).mean()

    def eval_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy without smoothing or weights; for several labels, the binary one."""
        if self.kind == "multilabel":
            return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype))
        return F.cross_entropy(outputs, targets)

    def train_measures(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the number of images whose top class is right; for mixed images, the class with the largest share."""
        if self.kind == "multilabel":
            return {}
        labels = targets if targets.ndim == 1 else targets.argmax(dim=1)
        return {"acc1": (outputs.argmax(dim=1) == labels).sum()}
