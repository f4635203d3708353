"""The outputs of a network for every image of a split."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.analysis.subject import Subject
from vitlab.interface import answers_itself, is_task
from vitlab.models.walk import all_finite


@dataclass
class Outcome:
    """Targets and outputs of a split, in its order, without images that cannot be read any more.

    Args:
        kind: class, multilabel or number.
        targets: ``(N,)`` classes, ``(N, K)`` labels or ``(N, T)`` numbers.
        outputs: ``(N, K)`` probabilities of classes or labels, ``(N, T)`` numbers in the unit of the data.
        names: Name of each class, label or number.
        images: What each image is called.
        spread: ``(T,)`` standard deviations of the training targets; None takes those of ``targets``.
        indices: ``(N,)`` the number of each image in the split; None if it is its place here.
    """

    kind: str
    targets: Tensor
    outputs: Tensor
    names: list[str]
    images: list[str]
    spread: Tensor | None = None
    indices: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def image_errors(self) -> Tensor:
        """Return ``(N,)`` how wrong each image is: the cross-entropy of the class or the labels, or the mean absolute
        error in standard deviations of the targets (in their unit if all are equal), over those that have a value."""
        if self.kind == "class":
            return -self.outputs.gather(1, self.targets[:, None])[:, 0].log()
        if self.kind == "multilabel":
            there = torch.where(self.targets > 0, self.outputs, 1 - self.outputs)
            return -there.clamp(min=1e-12).log().mean(dim=1)
        squares = (self.targets - self.targets.nanmean(dim=0)).square().nansum(dim=0)
        own = (squares / ((~self.targets.isnan()).sum(dim=0) - 1).clamp(min=1)).sqrt()
        spread = own if self.spread is None else self.spread
        return ((self.outputs - self.targets).abs() / torch.where(spread > 0, spread, 1.0)).nanmean(dim=1)

    def wrong(self) -> Tensor:
        """Return ``(N,)`` whether the class or a label is wrong; numbers are never right."""
        if self.kind == "class":
            return self.outputs.argmax(dim=1) != self.targets
        if self.kind == "multilabel":
            return ((self.outputs > 0.5) != (self.targets > 0)).any(dim=1)
        return torch.ones(len(self.targets), dtype=torch.bool)


def outcome_of(subject: Subject) -> Outcome:
    """Return the outputs of the network for all images of the subject's split."""
    return subject.once(f"outcome of {subject.split}", lambda: _outcome_of(subject))


def _outcome_of(subject: Subject) -> Outcome:
    subject.check_classes()
    kind, data, parts = subject.data.targets["kind"], subject.data, []
    own = subject.task.eval() if is_task(subject.task) and answers_itself(subject.task) else None
    split = subject.images(subject.split)
    for images, targets, indices in subject.numbered(split):
        with torch.no_grad():
            outputs = (own or subject.net)(images).float()
        match kind:
            case "class":
                outputs = outputs.double().softmax(dim=1)  # in float32 small ones are 0
            case "multilabel" if own is None:
                outputs = outputs.sigmoid()
            case _ if own is None:
                outputs = _in_units(outputs, subject)
        parts.append((targets.cpu(), outputs.cpu(), torch.from_numpy(indices)))
    targets, outputs, numbers = (torch.cat(part) for part in zip(*parts, strict=True))
    all_finite(outputs)
    names = data.targets.get("names", data.class_names)
    files = [split.names[i] if split.names else f"image {i}" for i in numbers.tolist()]
    spread = torch.tensor(data.targets["std"]) if "std" in data.targets else None
    return Outcome(kind, targets, outputs, names, files, spread, numbers.numpy())


def _in_units(outputs: Tensor, subject: Subject) -> Tensor:
    """Return ``(B, T)`` outputs of a network in the unit of the targets.

    A task of vitlab knows their scale, and what a user's own module returns is in their unit. A network alone was
    trained on targets of mean 0 and spread 1, if the data tell what they were before.
    """
    if subject.task is not None:
        return subject.task.in_units(outputs) if hasattr(subject.task, "in_units") else outputs
    if "mean" not in subject.data.targets:
        return outputs
    mean, std = (torch.tensor(subject.data.targets[name]).to(outputs) for name in ("mean", "std"))
    return outputs * std + mean
