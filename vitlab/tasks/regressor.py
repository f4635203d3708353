"""Regression: predict numbers from images."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from vitlab.errors import UsageError
from vitlab.layers.plain import is_plain
from vitlab.models.vit import VisionTransformer
from vitlab.tasks.arguments import TaskArgs
from vitlab.tasks.base import Task


class Standardized(Task):
    """A task whose network learns numbers of mean 0 and spread 1, and whose outputs are in the units of the data."""

    target_mean: Tensor
    target_std: Tensor

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move the task; mean and std, in the units of the data, are not rounded to 16 bits."""
        mean, std = self.target_mean, self.target_std
        super()._apply(*args, **kwargs)
        if self.target_mean.dtype.itemsize < 4:
            self.target_mean, self.target_std = (value.to(self.target_mean.device) for value in (mean, std))
        return self

    def keep_scale(self, mean: list[float], std: list[float]) -> None:
        """Keep mean and standard deviation of each of the K outputs; they are not part of the state dict."""
        for name, values in (("target_mean", mean), ("target_std", std)):
            self.register_buffer(name, torch.tensor(values), persistent=False)

    def as_targets(self, targets: Tensor) -> Tensor:
        """Map ``(B,)`` or ``(B, T)`` targets to ``(B, T)`` numbers; NaN is no value."""
        return targets.view(len(targets), -1).float()

    def in_units(self, outputs: Tensor) -> Tensor:
        """Map the ``(B, K)`` outputs of the network to the original units of the targets."""
        return outputs * self.target_std + self.target_mean

    def network_in_units(self) -> VisionTransformer:
        """Return a copy of the network that predicts in the original units: its last layer includes mean and std."""
        net = copy.deepcopy(self.net)
        last = [layer for layer in net.head.modules() if isinstance(layer, nn.Linear)][-1]
        _scale(last, self.target_std, self.target_mean)
        return net

    def scale_of(self, targets: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of each of the K outputs, by facts about the targets."""
        return torch.tensor(targets["mean"]), torch.tensor(targets["std"])

    def convert_head(self, mean: Tensor, std: Tensor) -> bool:
        """Let a head that was trained on targets of another scale predict the same numbers here.

        Args:
            mean: Mean of each of the K outputs in its training.
            std: Their standard deviation.

        Returns:
            Whether the last layer is a plain linear one, which can be converted.
        """
        head: Any = self.net.head
        last = head[-1] if type(head) is nn.Sequential else head
        if not is_plain(last, nn.Linear) or last.bias is None:
            return False
        _scale(last, std / self.target_std, (mean - self.target_mean) / self.target_std)
        return True


def _scale(last: Any, factor: Tensor, shift: Tensor) -> None:
    """Let a linear layer return ``factor`` times its K outputs, plus ``shift``."""
    with torch.no_grad():
        last.weight.mul_(factor[:, None])
        last.bias.mul_(factor).add_(shift)


def refuse_own_units(task: Any, weights: Path, card: Mapping[str, Any]) -> None:
    """Refuse an exported network whose last layer has the scale of its targets, which a task would apply again.

    Args:
        task: The task that loads the network.
        weights: The file of the network.
        card: What its export says of it; empty without one.

    Example:
        >>> refuse_own_units(None, Path("best.safetensors"), {"outputs": ["cat", "dog"]})
    """
    is_mixed = isinstance(task, Standardized) and (card.get("targets") or {}).get("kind") == "mixed"
    if is_mixed or card.get("outputs") == "numbers":
        raise UsageError(
            f"{weights} is an export, whose outputs are in the units of the targets already: `vitlab predict` and "
            "`vitlab.load` take it; give its run instead"
        )


class Regressor(Standardized):
    """Train a Vision Transformer to predict one or several numbers, with the mean squared error as loss.

    The network is trained on standardized targets: minus the mean of the training split, divided by its standard
    deviation. Metrics and predictions are in the original units. Targets that are NaN do not count: the loss is divided
    by the share of the others in the training split, so that batches add up whatever they lack.

    Args:
        num_targets: Number of targets T per image; by default that of the data.
        targets: Name, mean and standard deviation of each target; come from the data.
        **task: Passed to :class:`Task`.

    >>> targets = {"kind": "number", "names": ["age"], "mean": [40.0], "std": [20.0]}
    >>> net = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
    >>> Regressor(targets=targets, **net).in_units(torch.tensor([[0.5]]))
    tensor([[50.]])
    """

    monitor = ("min", "val/mae")

    def __init__(
        self, num_targets: int | None = None, targets: dict[str, Any] | None = None, **task: Unpack[TaskArgs]
    ) -> None:
        facts = targets if targets and targets["kind"] == "number" else {}
        self.present: float | None = facts.get("present")  # share of the training targets with a value; None: all have
        if self.present is not None and task.get("metrics"):
            raise ValueError("`metrics` cannot leave out empty targets: leave them out, or set --data.missing=drop")
        names = facts.get("names", [str(i + 1) for i in range(num_targets or 1)])
        if num_targets not in (None, len(names)):
            raise ValueError(f"`num_targets` is {num_targets}, the data has {len(names)}: {', '.join(names)}")
        self._kind = targets["kind"] if targets else "number"
        scale = facts.get("mean", [0.0] * len(names)), facts.get("std", [1.0] * len(names))
        metrics = MetricCollection({"errors": Errors(names, *scale)})
        super().__init__(num_outputs=len(names), measured=metrics, **task)
        self.keep_scale(*scale)

    def as_targets(self, targets: Tensor) -> Tensor:
        """Map ``(B,)`` or ``(B, T)`` targets to ``(B, T)`` numbers; NaN is no value.

        Raises:
            UsageError: They are not as many numbers as the network predicts.
        """
        found, expected = super().as_targets(targets), len(self.target_mean)
        if found.shape[1] != expected:
            given = f"{found.shape[1]} number{'s' * (found.shape[1] > 1)}"
            raise UsageError(
                f"the data have {given} for each image, and the network predicts {expected}: set "
                f"--model.num_targets={found.shape[1]}, or the `targets` of the data"
            )
        return found

    def check_targets(self) -> None:
        """Refuse data whose targets are classes."""
        if self._kind == "mixed":
            raise ValueError(
                "`model: Regressor` needs numbers, and the data has classes, too: use --model=MultiTask, or leave the "
                "columns of classes out of --data.targets"
            )
        if self._kind != "number":
            raise ValueError(
                "`model: Regressor` needs numbers, and the data has classes: name a column of numbers, "
                "--data=Table --data.path=FILE.csv --data.targets=COLUMN, where --data.target_type=number shows a cell "
                "that is none, or use --model=Classifier"
            )

    def train_loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean squared error of standardized targets, of those that have a value."""
        targets = (targets - self.target_mean) / self.target_std
        if self.present is not None:
            known = ~targets.isnan()
            error = torch.where(known, outputs - targets.nan_to_num(), 0.0).square().mean(dim=1) / self.present
            return (error if weights is None else error * weights).mean()
        if weights is None:
            return F.mse_loss(outputs, targets)
        return (F.mse_loss(outputs, targets, reduction="none").mean(dim=1) * weights).mean()

    eval_loss = train_loss


class Errors(Metric):
    """Mean absolute error, root mean squared error and R2 (explained share of the variance), also for each target.

    Targets that are NaN do not count, and a target without any value is left out of the averages. R2 of a target that
    has one value alone is NaN, and left out, too.

    Args:
        names: Names of the T targets.
        mean: Mean of each target; sums are taken of standardized values, to keep rounding errors small.
        std: Standard deviation of each target.

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
        for name in ("n", "absolute", "squared", "first", "second"):
            self.add_state(name, torch.zeros(len(names)), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add ``(B, T)`` predictions and targets."""
        known = ~targets.isnan()
        error, standardized = (outputs - targets) / self.std, (targets - self.mean) / self.std
        error, standardized = (torch.where(known, x, 0.0) for x in (error, standardized))
        self.n += known.sum(0)
        self.absolute += error.abs().sum(0)
        self.squared += error.square().sum(0)
        self.first += standardized.sum(0)
        self.second += standardized.square().sum(0)

    def compute(self) -> dict[str, Tensor]:
        """Return the metrics averaged over the targets, and those of each target if there are several."""
        variance = self.second - self.first.square() / self.n
        values = {
            "mae": self.absolute / self.n * self.std,
            "rmse": (self.squared / self.n).sqrt() * self.std,
            "r2": torch.where(variance > 1e-6 * self.second, 1 - self.squared / variance, torch.nan),
        }
        metrics = {name: value[self.n > 0].mean() for name, value in values.items() if name != "r2"}
        metrics["r2"] = values["r2"].nanmean()
        if len(self.names) > 1:
            metrics |= {f"{k}/{name}": value[i] for k, value in values.items() for i, name in enumerate(self.names)}
        return metrics
