"""Several targets of different kinds: classes and numbers of one image."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from vitlab.tasks.arguments import TaskArgs
from vitlab.tasks.regressor import Errors, Standardized


class Head(NamedTuple):
    """A target and its outputs.

    Args:
        name: Column of the target.
        classes: Name of each class; empty for a number.
        at: The outputs of the network that belong to it.
        present: Share of the training images that have a value.
    """

    name: str
    classes: list[str]
    at: slice
    present: float = 1.0


class MultiTask(Standardized):
    """Train a Vision Transformer to predict classes and numbers of an image together, one linear head for each.

    The loss is the sum over targets of cross-entropy, for classes, and of the squared error of standardized numbers,
    each times its weight. Targets that are NaN do not count: the loss of a target is divided by the share of training
    images that have a value, so that batches add up whatever they lack.

    Args:
        label_smoothing: Share of a class target spread over all classes in training.
        target_weights: Weight of each target in the loss, by its name; default: 1.
        targets: Name, classes, mean and standard deviation of each target; come from the data.
        **task: Passed to :class:`~vitlab.tasks.base.Task`.

    >>> targets = {"kind": "mixed", "names": ["pet", "age"], "classes": [["cat", "dog"], []]}
    >>> targets |= {"mean": [0.0, 40.0], "std": [1.0, 20.0]}
    >>> net = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
    >>> task = MultiTask(targets=targets, **net)
    >>> task.output_names, task.in_units(torch.tensor([[3.0, -3.0, 0.5]]))
    (['pet/cat', 'pet/dog', 'age'], tensor([[ 3., -3., 50.]]))
    """

    kind = "mixed"
    monitor = ("min", "val/loss")

    def __init__(
        self,
        label_smoothing: float = 0.1,
        target_weights: dict[str, float] | None = None,
        targets: dict[str, Any] | None = None,
        **task: Unpack[TaskArgs],
    ) -> None:
        facts = targets if targets and targets["kind"] == "mixed" else _NOTHING
        self._kind = targets["kind"] if targets else "mixed"
        self.heads = target_heads(facts)
        self.weights = _weights(target_weights or {}, [head.name for head in self.heads], known=facts is not _NOTHING)
        if task.get("metrics"):
            raise ValueError("`metrics` are of one kind of targets, and MultiTask has several: leave them out")
        measured: dict[str, Metric | MetricCollection] = {"hits": Hits(self.heads)}
        if any(not head.classes for head in self.heads):
            measured["errors"] = NumberErrors(self.heads, facts["mean"], facts["std"])
        super().__init__(num_outputs=self.heads[-1].at.stop, measured=MetricCollection(measured), **task)
        self.keep_scale(*(values.tolist() for values in self.scale_of(facts)))

    def scale_of(self, targets: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of each of the K outputs, by facts about the targets."""
        heads = target_heads(targets)
        mean, std = (torch.tensor(_of_outputs(heads, targets[name])) for name in ("mean", "std"))
        return mean, std

    @property
    def output_names(self) -> list[str]:
        """The name of each output: target and class, or the target of a number."""
        return [name for h in self.heads for name in ([f"{h.name}/{c}" for c in h.classes] or [h.name])]

    def check_targets(self) -> None:
        """Refuse data without columns of several kinds."""
        if self._kind != "mixed":
            model = "Regressor" if self._kind == "number" else "Classifier"
            raise ValueError(
                f"`model: MultiTask` needs several columns with classes among them, and the data has one kind: use "
                f"--model={model}, or name them, --data=Table --data.path=FILE.csv --data.targets='[A, B]'"
            )

    def answers(self, outputs: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Return the ``(B,)`` answer to each target, number or number of a class, and the latter's probability.

        Args:
            outputs: ``(B, K)`` outputs of :meth:`in_units`.
        """
        return answers_of_heads(self.heads, outputs)

    def train_loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the loss with label smoothing, over the targets that have a value."""
        return self._loss(outputs, targets, weights, self.hparams["label_smoothing"])

    def eval_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss without label smoothing."""
        return self._loss(outputs, targets, None, 0.0)

    def _loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, smoothing: float) -> Tensor:
        total = outputs.new_zeros(len(outputs))
        for k, (head, weight) in enumerate(zip(self.heads, self.weights, strict=True)):
            mine, target, known = outputs[:, head.at], targets[:, k].nan_to_num(), ~targets[:, k].isnan()
            if head.classes:
                loss = F.cross_entropy(mine, target.long(), label_smoothing=smoothing, reduction="none")
            else:
                mean, std = self.target_mean[head.at], self.target_std[head.at]
                loss = (mine[:, 0] - (target - mean) / std).square()
            total = total + weight / head.present * torch.where(known, loss, 0.0)
        return (total if weights is None else total * weights).mean()


def answers_of_heads(heads: Sequence[Head], outputs: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """Return the ``(B,)`` answer to each target, number or number of a class, and the latter's probability.

    >>> heads = [Head("age", [], slice(0, 1)), Head("pet", ["cat", "dog"], slice(1, 3))]
    >>> answers_of_heads(heads, torch.tensor([[9.0, 0.0, 0.0]]))
    [(tensor([9.]), None), (tensor([0]), tensor([0.5000]))]
    """
    found: list[tuple[Tensor, Tensor | None]] = []
    for head in heads:
        mine = outputs[:, head.at].float()
        if head.classes:
            probability, first = mine.softmax(dim=1).max(dim=1)
            found.append((first, probability))
        else:
            found.append((mine[:, 0], None))
    return found


class Hits(Metric):
    """Share of right classes, in the mean over the targets that are classes, and for each.

    Args:
        heads: All targets; numbers are left out.

    >>> hits = Hits([Head("age", [], slice(0, 1)), Head("pet", ["cat", "dog"], slice(1, 3))])
    >>> hits.update(torch.tensor([[9.0, 1, 2], [8.0, 1, 2]]), torch.tensor([[9.0, 1.0], [8.0, torch.nan]]))
    >>> hits.compute()
    {'acc1': tensor(1.), 'acc1/pet': tensor(1.)}
    """

    full_state_update = False
    n: Tensor
    right: Tensor

    def __init__(self, heads: list[Head]) -> None:
        super().__init__()
        self.heads = [(k, head) for k, head in enumerate(heads) if head.classes]
        for name in ("n", "right"):
            self.add_state(name, torch.zeros(len(self.heads)), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add ``(B, K)`` outputs and ``(B, T)`` targets; outputs that are not finite are wrong."""
        pairs = [(targets[:, k], outputs[:, head.at]) for k, head in self.heads]
        self.n += torch.stack([(~target.isnan()).sum() for target, _ in pairs])
        hits = [(target == mine.argmax(dim=1)) & mine.isfinite().all(dim=1) for target, mine in pairs]
        self.right += torch.stack(hits).sum(dim=1)

    def compute(self) -> dict[str, Tensor]:
        """Return the accuracy in the mean over targets with any value, and of each."""
        shares = self.right / self.n
        each = {f"acc1/{head.name}": share for (_, head), share in zip(self.heads, shares, strict=True)}
        return {"acc1": shares[self.n > 0].mean(), **each}


class NumberErrors(Errors):
    """The metrics of :class:`Errors` for the targets that are numbers, in the mean and for each.

    Args:
        heads: All targets; classes are left out.
        mean: Mean of each of all targets.
        std: Standard deviation of each of all targets.

    >>> errors = NumberErrors([Head("pet", ["cat", "dog"], slice(0, 2)), Head("age", [], slice(2, 3))], [0, 4], [1, 2])
    >>> errors.update(torch.tensor([[9.0, 1, 2], [8.0, 1, 2]]), torch.tensor([[1.0, 3.0], [0.0, 2.0]]))
    >>> sorted(errors.compute())
    ['mae', 'mae/age', 'r2', 'r2/age', 'rmse', 'rmse/age']
    """

    def __init__(self, heads: list[Head], mean: list[float], std: list[float]) -> None:
        columns = [k for k, head in enumerate(heads) if not head.classes]
        names = [heads[k].name for k in columns]
        super().__init__(names, [float(mean[k]) for k in columns], [float(std[k]) for k in columns])
        self.columns, self.outputs = columns, [heads[k].at.start for k in columns]

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add ``(B, K)`` outputs and ``(B, T)`` targets."""
        super().update(outputs[:, self.outputs], targets[:, self.columns])

    def compute(self) -> dict[str, Tensor]:
        """Return the metrics averaged over the numbers, and those of each."""
        found = super().compute()
        return found | ({f"{k}/{self.names[0]}": v for k, v in found.items()} if len(self.names) == 1 else {})


_NOTHING: dict[str, Any] = {"names": ["1"], "classes": [["0", "1"]], "mean": [0.0], "std": [1.0]}  # before the data


def target_heads(targets: Mapping[str, Any]) -> list[Head]:
    """Return the heads for facts about targets, in order.

    >>> [head.at for head in target_heads({"names": ["age", "pet"], "classes": [[], ["cat", "dog"]]})]
    [slice(0, 1, None), slice(1, 3, None)]
    """
    heads: list[Head] = []
    shares = targets.get("present", [1.0] * len(targets["names"]))
    for name, classes, present in zip(targets["names"], targets["classes"], shares, strict=True):
        start = heads[-1].at.stop if heads else 0
        heads.append(Head(name, list(classes), slice(start, start + (len(classes) or 1)), present))
    return heads


def _of_outputs(heads: list[Head], values: list[float]) -> list[float]:
    """Return the value of its target for each output."""
    return [value for head, value in zip(heads, values, strict=True) for _ in range(head.at.start, head.at.stop)]


def _weights(given: Mapping[str, float], names: list[str], known: bool) -> list[float]:
    """Return the weight of each target; refuse unknown names and weights that are not above 0."""
    if known and (wrong := [name for name in given if name not in names]):
        raise ValueError(f"`target_weights` has {wrong[0]}, and the targets are {', '.join(names)}")
    if wrong := [f"{name}: {weight}" for name, weight in given.items() if not 0 < weight < float("inf")]:
        raise ValueError(f"`target_weights` must be above 0, got {wrong[0]}")
    return [float(given.get(name, 1.0)) for name in names]
