"""Classification with frozen features: few-shot ridge regression and nearest neighbors."""

from collections.abc import Iterable

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from vitlab.analysis.catalogue import Analysis, Curve
from vitlab.analysis.figures import COLORS, curves, dashed, finish, one_axes
from vitlab.analysis.intervals import over_draws, over_images
from vitlab.analysis.probes import ridge
from vitlab.analysis.subject import Finding, Subject
from vitlab.errors import UsageError
from vitlab.interface import network
from vitlab.models.features import knn
from vitlab.models.walk import Asked, all_finite, pooled_features

SHOTS = (1, 5, 10, 25)
DRAWS = 5  # of the labeled images
NEIGHBORS = (1, 5, 20)
UNLABELED = "on images that the network was trained on, without their labels"
SEEN = "on classes whose labels the network was trained with: nothing of few labels is shown (see --data, --root)"
FROZEN = "of a network frozen below the head: its features know labels only if the weights that it began with did"


@torch.no_grad()
def features(net: Asked, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the pooled features ``(n, D)`` that the head reads, and the classes ``(n,)``."""
    found = [(pooled_features(net, images).cpu(), labels.cpu()) for images, labels in batches]
    x, y = zip(*found, strict=True)
    return all_finite(torch.cat(x), "features").double(), torch.cat(y)


def few_shot_right(train: Tensor, labels: Tensor, test: Tensor, test_labels: Tensor, num_classes: int) -> Tensor:
    """Return which of ``test`` a ridge regression to {-1, 1} on whitened features and a constant of 100 classifies
    right, ``(n,)``.

    The few-shot evaluation of Dosovitskiy et al. 2021 (arXiv:2010.11929), as google-research/big_vision has it, with
    its penalty of 2^10.

    Example:
        >>> labels = torch.arange(40) % 2
        >>> features = torch.randn(40, 4) + 10 * labels[:, None]
        >>> bool(few_shot_right(features, labels, features, labels, num_classes=2).all())
        True
    """
    mean, std = train.mean(dim=0), train.std(dim=0, correction=0) + 1e-5
    train, test = (F.pad((x - mean) / std, (0, 1), value=100.0) for x in (train, test))
    weights = ridge(train, 2 * F.one_hot(labels, num_classes).to(train) - 1, l2=2.0**10)
    return (test @ weights).argmax(dim=1) == test_labels


def few_shot_accuracy(train: Tensor, labels: Tensor, test: Tensor, test_labels: Tensor, num_classes: int) -> float:
    """Return the accuracy of :func:`few_shot_right`.

    Example:
        >>> labels = torch.arange(40) % 2
        >>> features = torch.randn(40, 4) + 10 * labels[:, None]
        >>> few_shot_accuracy(features, labels, features, labels, num_classes=2)
        1.0
    """
    return float(few_shot_right(train, labels, test, test_labels, num_classes).double().mean())


def knn_accuracy(train: Tensor, labels: Tensor, test: Tensor, test_labels: Tensor, k: int, num_classes: int) -> float:
    """Return the accuracy of :func:`vitlab.models.features.knn`.

    Example:
        >>> features, labels = torch.eye(4).repeat(5, 1), torch.arange(20) % 4
        >>> knn_accuracy(features, labels, features, labels, k=3, num_classes=4)
        1.0
    """
    return float((knn(train, labels, test, k, num_classes) == test_labels).double().mean())


def draw_shots(labels: Tensor, shots: int, seed: int) -> Tensor:
    """Return the indices of ``shots`` random samples of each class, or of all where a class has fewer."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return torch.cat([order[labels[order] == k][:shots] for k in labels.unique()])


@Analysis(
    reading="Accuracy of a ridge regression on frozen features with few labels: how separable the classes are.",
    limits="Learning from few labels, if the network was trained on all labels of the same classes (--data, --root).",
    curve=Curve(
        x="shots",
        log2=True,
        measures={"acc1": "accuracy"},
        words="Ridge regression on frozen features from a few labels per class.",
    ),
)
def analyze_fewshot(subject: Subject) -> Finding:
    """Classify with a few labeled images of each class; ``spread`` is the standard deviation over their draws.

    Example:
        >>> finding = analyze_fewshot(subject)
        >>> list(finding.table.columns)
        ['shots', 'acc1', 'acc1_low', 'acc1_high', 'draws', 'spread', 'n', 'n_train', 'classes']
    """
    _need_labels(subject, "fewshot")
    data = subject.data
    data.build("train")
    images, num_classes = data.splits["train"], data.num_classes
    test, test_labels = subject.once("features", lambda: features(subject.net, subject.batches()))
    rows, dots = [], []
    of_class = torch.bincount(images.labels, minlength=num_classes)
    most = int(of_class.max())
    for shots in SHOTS:
        if shots > 1 and (shots * num_classes > max(subject.num_images, 25 * 20) or shots > most):
            break  # beyond --num_images, or beyond what the largest class has
        drawn = []
        for seed in range(DRAWS):
            chosen = images.take(draw_shots(images.labels, shots, seed).numpy())
            train, labels = features(subject.net, subject.prepared(chosen))
            drawn.append(few_shot_right(train, labels, test, test_labels, num_classes))
        right = torch.stack(drawn)  # (draws, n)
        each = right.double().mean(dim=1)
        dots += [(shots, accuracy) for accuracy in each.tolist()]
        counts = {"draws": DRAWS, "spread": float(each.std()), "n": len(test), "n_train": len(train)}
        rows.append({"shots": shots, **over_draws("acc1", right.numpy()), **counts})
    table = pd.DataFrame(rows).assign(classes=_classes(subject))
    figure, (axes,) = one_axes()
    curves(axes, table, "shots", "acc1")
    axes.scatter(*zip(*dots, strict=True), s=8, color=COLORS[0], alpha=0.5)
    dashed(axes, 1 / num_classes)
    axes.set_ylim(0, 1.05)
    axes.set_xticks(table["shots"].unique())
    finish(axes, "labeled images of each class", "accuracy")
    over = f"{DRAWS} draws of training images (dots), scored on {len(test)} validation images; intervals over both"
    least, last = int(of_class.min()), int(table["shots"].max())
    fewer = f"; all of a class that has fewer than {last}, the smallest {least}" if least < last else ""
    note = f"{over}{fewer}; {_classes(subject)}"
    return Finding(table, figure, note)


def of_each_k(table: pd.DataFrame) -> dict[str, float]:
    """Return the accuracy of each number of neighbors as metrics of an ablation: ``acc1@20``."""
    return {f"acc1@{k}": float(acc1) for k, acc1 in zip(table["k"], table["acc1"], strict=True)}


@Analysis(
    reading="Accuracy of nearest neighbors among training images: how classes cluster without any fitting.",
    limits="Transfer to new classes, if the network was trained on these classes (--data, --root).",
    curve=Curve(
        x="k",
        measures={"acc1": "accuracy"},
        words="The vote of the most similar training images.",
    ),
    metrics=of_each_k,
    metric_names=tuple(f"acc1@{k}" for k in NEIGHBORS),
)
def analyze_knn(subject: Subject) -> Finding:
    """Classify by the labels of the most similar training images.

    Example:
        >>> finding = analyze_knn(subject)
        >>> list(finding.table.columns)
        ['k', 'acc1', 'acc1_low', 'acc1_high', 'n', 'n_train', 'classes']
    """
    _need_labels(subject, "knn")
    train, labels = features(subject.net, subject.batches("train"))
    test, test_labels = subject.once("features", lambda: features(subject.net, subject.batches()))
    num_classes = subject.data.num_classes
    neighbors = [k for k in NEIGHBORS if k <= len(train)]
    rows = []
    for k in neighbors:
        right = knn(train, labels, test, k, num_classes) == test_labels
        rows.append({"k": k, **over_images("acc1", right.numpy()), "n": len(test)})
    table = pd.DataFrame(rows).assign(n_train=len(train), classes=_classes(subject))
    figure, (axes,) = one_axes()
    curves(axes, table, "k", "acc1")
    dashed(axes, 1 / num_classes)
    axes.set_ylim(0, 1.05)
    axes.set_xticks(neighbors)
    finish(axes, "neighbors", "accuracy")
    note = f"{len(train)} training and {len(test)} validation images; the head's input; {_classes(subject)}"
    return Finding(table, figure, note)


def _need_labels(subject: Subject, name: str) -> None:
    """Refuse images without class labels, or of one class, of which all are right."""
    data = subject.data
    if subject.has_no_data or data.targets["kind"] != "class":
        raise UsageError(f"{name} needs class labels, and the images of {subject.name} have none")
    if data.num_classes < 2:
        only = ", ".join(data.class_names)
        raise UsageError(f"{name} needs two classes or more, and all images of {subject.name} are of one, {only}")


def _classes(subject: Subject) -> str:
    """Return whether these are the classes of the training, and whether their labels were used already."""
    if subject.is_elsewhere:
        return "classes that the network was not trained on"
    if not getattr(subject.task, "reads_labels", True):
        return UNLABELED
    named = network(subject.task).named_parameters() if isinstance(subject.task, Module) else ()
    below = [p.requires_grad for name, p in named if not name.startswith("head.")]
    return FROZEN if below and not any(below) else SEEN
