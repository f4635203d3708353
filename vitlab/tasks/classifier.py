"""Supervised image classification: of all weights, or of a linear classifier on frozen features."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MultilabelAveragePrecision, MultilabelF1Score
from torchmetrics.functional.classification import binary_average_precision

from vitlab.errors import UsageError
from vitlab.tasks.arguments import ClassifierArgs, TaskArgs
from vitlab.tasks.base import Task
from vitlab.tasks.meter import in_32_bits
from vitlab.tasks.optimizer import check_recipe


class Classifier(Task):
    """Train a Vision Transformer to classify images, with one class or several labels each.

    Args:
        num_classes: Number of classes or labels K; comes from the data.
        label_smoothing: Share of the target spread over all classes in training; of several labels, towards 1/2.
        loss: Loss in training: cross-entropy over the classes (ce), or binary cross-entropy of each class (bce), which
            several labels need; Touvron et al. 2022 (arXiv:2204.07118) use it for one class.
        class_weights: Weight of each class in the training loss: a list, or balanced, N / (K n) for a class with n of N
            images. With `bce`, weight of its positives; balanced is (N - n) / n where images have several labels.
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
        self.net.predicts_labels = self.kind == "multilabel"
        if self.kind == "multilabel" and type(self).monitor is Classifier.monitor:
            self.monitor = ("max", "val/map")
        weights = None if class_weights in (None, "balanced") else torch.tensor(class_weights, dtype=torch.float32)
        self.register_buffer("loss_weights", weights, persistent=False)

    def setup(self, stage: str) -> None:
        """For training with balanced class weights, count the images of each class."""
        super().setup(stage)
        if stage != "fit" or self.hparams["class_weights"] != "balanced":
            return
        splits = getattr(getattr(self.trainer, "datamodule", None), "splits", None)
        split = splits.get("train") if isinstance(splits, Mapping) else None
        if split is None or not hasattr(split, "labels"):
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
            outputs = in_32_bits(outputs)  # and with them the targets, which bfloat16 rounds by up to 1 / 512
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
        if targets.ndim != 1:  # the loss takes class shares, and metrics would count each of them as a class
            numbers = "targets[:, 0]" if targets.shape[1:] == (1,) else "targets.argmax(1)"
            raise UsageError(
                "`model: Classifier` is measured on class numbers (B,), and the loaders for val and test give targets "
                f"{tuple(targets.shape)}: let them give `{numbers}`; only the one for train may give shares (B, K)"
            )
        if bool((targets < 0).any()):  # the loss leaves out -100, and metrics would count such an image as wrong
            raise UsageError(
                f"`model: Classifier` is measured on class numbers from 0 to {outputs.shape[1] - 1}, and the loaders "
                f"for val and test give {int(targets.min())}: let them leave out images without a class"
            )
        return F.cross_entropy(outputs, targets)

    def train_measures(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the number of images whose top class is right; for mixed images, the class with the largest share."""
        if self.kind == "multilabel":
            return {}
        labels = targets if targets.ndim == 1 else targets.argmax(dim=1)
        return {"acc1": (outputs.argmax(dim=1) == labels).sum()}


class LinearProbe(Classifier):
    """Train only the head; the rest of the network is frozen, without dropout or drop path.

    Args:
        **task: Passed to :class:`Classifier`.

    Example:
        >>> task = LinearProbe(num_classes=3, img_size=8, in_chans=1, patch_size=2, embed_dim=16, depth=2, num_heads=2)
        >>> [name for name, parameter in task.named_parameters() if parameter.requires_grad]
        ['net.head.weight', 'net.head.bias']
    """

    forward_passes = 1  # the backward pass ends at the head

    def __init__(self, **task: Unpack[ClassifierArgs]) -> None:
        super().__init__(**task)
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad &= name.startswith("head.")
        check_recipe(self)  # what `freeze` names stays frozen

    def on_train_start(self) -> None:  # not where an epoch starts: a resume within one would train with dropout
        self.net.eval()


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


class _MeanF1(MultilabelF1Score):
    def compute(self) -> Tensor:
        """Return the mean over labels with at least one positive image, as of classes; NaN if there is none."""
        found, _, _, missed = self._final_state()
        return super().compute()[found + missed > 0].mean()


def metrics(kind: str, num_classes: int) -> MetricCollection:
    """Return the metrics for one class (acc1, acc5) or several labels (map, f1) per image."""
    collected: dict[str, Metric | MetricCollection] = {
        f"acc{k}": MulticlassAccuracy(num_classes, top_k=k, average="micro") for k in (1, 5) if k < num_classes
    }
    if kind == "multilabel":
        collected = {
            "map": _MeanAveragePrecision(num_classes),
            "f1_macro": _MeanF1(num_classes, average="none"),
            "f1_micro": MultilabelF1Score(num_classes, average="micro"),
        }
    return MetricCollection(collected)
