"""Loss and metrics of an evaluation."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, SumMetric

from vitlab.class_paths import ClassSpec, build, choice_text, find_class, name_and_args
from vitlab.errors import one_line

HALF = (torch.bfloat16, torch.float16)
FACTS: dict[str, Any] = {
    "class": lambda K: {"task": "multiclass", "num_classes": K},
    "multilabel": lambda K: {"task": "multilabel", "num_labels": K},
    "number": lambda K: {"num_outputs": K},
    "mixed": lambda K: {},
}


def add_metrics(measured: MetricCollection, metrics: Sequence[str | ClassSpec], kind: str, K: int) -> MetricCollection:
    """Return the metrics of a task together with those of the user, by name in torchmetrics or by class path.

    Args:
        measured: Metrics of the task.
        metrics: Metrics to add; each is named after its class, and its arguments if two have the same class.
        kind: Kind of the targets: class, multilabel or number; it sets ``task`` and the number of classes of metrics.
        K: Number of outputs of the network.

    Raises:
        ValueError: A class is not a metric, or does not accept the outputs and targets of the task.
    """
    if not isinstance(metrics, Sequence) or isinstance(metrics, str):
        raise ValueError(f"`metrics` must be a list of classes, as in [F1Score], got {metrics!r}")
    facts = FACTS[kind](K)
    collected: dict[str, Any] = dict(measured.items(keep_base=True))
    names = [name_and_args("metrics", spec)[0].rpartition(".")[2] for spec in metrics]
    for name, spec in zip(names, metrics, strict=True):
        path, args = name_and_args("metrics", spec)
        metric = build("metrics", find_class("metrics", path, Metric, home="torchmetrics"), args, facts)
        own = _check(metric, path, K, kind)
        name += str(choice_text(spec)).removeprefix(path) if names.count(name) > 1 else ""
        if name in {*collected, "loss", "n"}:
            raise ValueError(f"`metrics`: {name} is measured already; leave it out, or give it other arguments")
        if taken := {"loss", "n"} & {*own}:  # torchmetrics tells equal names of metrics apart
            raise ValueError(f"`metrics`: {path} returns `{taken.pop()}`, which is measured already; call it otherwise")
        collected[name] = metric
    return MetricCollection(collected, compute_groups=False)  # torchmetrics guesses groups from equal values


def _check(metric: Metric, path: str, K: int, kind: str) -> list[str]:
    """Return the names in the dictionary of a metric that returns one.

    Raises:
        ValueError: It does not accept outputs and targets of the task, or does not return numbers.
    """
    shares = torch.linspace(0, 1, 4 * K).view(4, K)
    outputs = shares.flip(0)
    targets = {"class": torch.arange(4) % K, "multilabel": (shares > 0.5).long()}.get(kind, shares)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            metric.update(outputs, targets)
            value = metric.compute()
            metric.reset()
    except Exception as error:  # foreign code can raise anything
        raise ValueError(
            f"`metrics`: {path} does not take outputs (B, {K}) and {kind} targets: {one_line(error)}"
        ) from error
    for one in value.values() if isinstance(value, Mapping) else [value]:
        if torch.as_tensor(one).numel() != 1:
            shape = tuple(torch.as_tensor(one).shape)
            raise ValueError(f"`metrics`: {path} must return one number, or a dictionary of them, got shape {shape}")
    return [*value] if isinstance(value, Mapping) else []


def in_32_bits(value: Any) -> Any:
    """Return a number that can be added up: a sum of thousands in 16 bits no longer grows.

    Example:
        >>> in_32_bits(torch.ones((), dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


class Meter(nn.Module):
    """Loss, metrics and number of samples of one evaluation, summed over all processes.

    Its sums have at least 32 bits, also where a Trainer turns the weights of the task into numbers of 16.

    Args:
        metrics: Metrics of outputs and targets, in addition to the loss.

    Example:
        >>> Meter(MetricCollection({})).to(torch.bfloat16).n.sum_value.dtype
        torch.float32
    """

    def __init__(self, metrics: MetricCollection) -> None:
        super().__init__()
        self.metrics = metrics.clone()
        self.loss_name = "loss"
        self.loss = SumMetric(nan_strategy="disable")  # MeanMetric loses its weights when NaN is allowed
        self.n = SumMetric(nan_strategy="disable")

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        def moved(value: Tensor) -> Tensor:
            new = fn(value)
            return value.to(new.device) if new.dtype in HALF and value.dtype not in HALF else new

        return super()._apply(moved, *args, **kwargs)  # torchmetrics ignores `.half()`, not Lightning's `.to(dtype)`

    def update(self, outputs: Tensor, targets: Tensor, loss: Tensor) -> None:
        """Add a batch; an image whose outputs are not finite counts as wrong, not as one of the first class."""
        self.metrics.update(_wrong_unless_finite(outputs, targets), targets)
        outputs.measured_with = targets  # type: ignore[attr-defined]  # for callbacks, which get a step's outputs alone
        self.loss.update(in_32_bits(loss) * len(outputs))
        self.n.update(len(outputs))

    def read(self, prefix: str) -> dict[str, Tensor]:
        """Return every value, with ``prefix`` before its name, and reset; nothing where no batch was added.

        So a task's metrics leave the names to a subclass that measures in an evaluation step of its own.
        """
        if not (n := self.n.compute()):
            return {}
        values = {self.loss_name: self.loss.compute() / n, **self.metrics.compute(), "n": n}
        with torch.inference_mode(False):  # else sums that `trainer.validate` reset could not grow in a training
            for metric in (self.loss, self.metrics, self.n):
                metric.reset()
        return {prefix + name: value for name, value in values.items()}


def _wrong_unless_finite(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return ``(B, K)`` outputs of ``(B,)`` classes or ``(B, K)`` labels, not finite ones as a wrong answer.

    Errors of numbers are not finite by themselves.
    """
    if outputs.ndim != 2 or targets.is_floating_point() or targets.shape not in (outputs.shape, outputs.shape[:1]):
        return outputs
    classes = torch.arange(outputs.shape[1], device=outputs.device)
    wrong = ~targets.bool() if targets.ndim == 2 else classes != targets[:, None]
    return torch.where(outputs.isfinite().all(dim=1, keepdim=True), outputs, wrong.to(outputs.dtype))
