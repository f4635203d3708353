"""Regression from images to numbers."""

import copy
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from vitlab.models.vit import VisionTransformer
from vitlab.tasks.arguments import TaskArgs
from vitlab.tasks.base import Task


class Regressor(Task):
    """Train a Vision Transformer to predict one or several numbers with squared error.

    The network predicts targets less their mean in units of their standard deviation, both of the training split; what
    is measured and predicted is in the unit of the data.

    Args:
        num_targets: Numbers per image; come from the data where it has some.
        targets: Name, mean and standard deviation of each target; come from the data.
        **task: Passed to :class:`Task`.

    >>> targets = {"kind": "number", "names": ["age"], "mean": [40.0], "std": [20.0]}
    >>> net = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
    >>> Regressor(targets=targets, **net).in_units(torch.tensor([[0.5]]))
    tensor([[50.]])
    """

    monitor = ("min", "val/mae")
    target_mean: Tensor
    target_std: Tensor

    def __init__(
        self, num_targets: int | None = None, targets: dict[str, Any] | None = None, **task: Unpack[TaskArgs]
    ) -> None:
        facts = targets if targets and targets["kind"] == "number" else {}
        names = facts.get("names", [str(i + 1) for i in range(num_targets or 1)])
        if num_targets not in (None, len(names)):
            raise ValueError(f"`num_targets` is {num_targets}, the data has {len(names)}: {', '.join(names)}")
        self._kind = targets["kind"] if targets else "number"
        scale = facts.get("mean", [0.0] * len(names)), facts.get("std", [1.0] * len(names))
        metrics = MetricCollection({"errors": Errors(names, *scale)})
        super().__init__(num_outputs=len(names), measured=metrics, **task)
        for name, values in zip(("target_mean", "target_std"), scale, strict=True):
            self.register_buffer(name, torch.tensor(values), persistent=False)

    def check_targets(self) -> None:
        """Refuse classes."""
        if self._kind != "number":
            raise ValueError(
                "`model: Regressor` needs numbers, and the data has classes: name a column of numbers, "
                "--data=Table --data.path=FILE.csv --data.targets=COLUMN, or use --model=Classifier"
            )

    def as_targets(self, targets: Tensor) -> Tensor:
        """Map ``(B,)`` or ``(B, T)`` targets to ``(B, T)`` numbers."""
        return targets.view(len(targets), -1).float()

    def in_units(self, outputs: Tensor) -> Tensor:
        """Map the network's ``(B, T)`` outputs to the unit of the data."""
        return outputs * self.target_std + self.target_mean

    def network_in_units(self) -> VisionTransformer:
        """Return a copy of the network whose last layer holds the scale, for use without the task."""
        net = copy.deepcopy(self.net)
        last = [layer for layer in net.head.modules() if isinstance(layer, nn.Linear)][-1]
        with torch.no_grad():
            last.weight.mul_(self.target_std[:, None])
            last.bias.mul_(self.target_std).add_(self.target_mean)
        return net

    def train_loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean squared error, in standard deviations of the targets."""
        targets = (targets - self.target_mean) / self.target_std
        if weights is None:
            return F.mse_loss(outputs, targets)
        return (F.mse_loss(outputs, targets, reduction="none").mean(dim=1) * weights).mean()

    eval_loss = train_loss


class Errors(Metric):
    """Mean absolute error, root mean squared error and R2 (the share of variance explained), also of each target.

    Args:
        names: Name of each of T targets.
        mean: Mean of each; the sums are of what is left, so that little is lost to rounding.
        std: Standard deviation of each.

    >>> errors = Errors(["a"], [0.0], [1.0])
    >>> errors.update(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[1.0], [2.0], [3.0]]))
    >>> {name: round(float(value), 3) for name, value in errors.compute().items()}
    {'mae': 0.333, 'rmse': 0.577, 'r2': 0.5}
    """

    full_state_update = False
    mean: Tensor
    std: Tensor
    n: Tensor
    absolute: Tensor
    squared: Tensor
    first: Tensor
    second: Tensor

    def __init__(self, names: list[str], mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.names = names
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values), persistent=False)
        self.add_state("n", torch.zeros(()), dist_reduce_fx="sum")
        for name in ("absolute", "squared", "first", "second"):
            self.add_state(name, torch.zeros(len(names)), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add ``(B, T)`` predictions and targets."""
        error, rest = (outputs - targets) / self.std, (targets - self.mean) / self.std
        self.n += len(targets)
        self.absolute += error.abs().sum(0)
        self.squared += error.square().sum(0)
        self.first += rest.sum(0)
        self.second += rest.square().sum(0)

    def compute(self) -> dict[str, Tensor]:
        """Return the errors, averaged over the targets, and those of each target where there are several."""
        variance = self.second - self.first.square() / self.n
        values = {
            "mae": self.absolute / self.n * self.std,
            "rmse": (self.squared / self.n).sqrt() * self.std,
            "r2": 1 - self.squared / variance,
        }
        found = {name: value.mean() for name, value in values.items()}
        if len(self.names) > 1:
            found |= {f"{k}/{name}": value[i] for k, value in values.items() for i, name in enumerate(self.names)}
        return found
