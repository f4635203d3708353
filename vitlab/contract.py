"""What vitlab asks of a LightningModule and of data, all of it optional: docs/bring_your_own.md."""

import io
import pickle
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn


class Weighted(NamedTuple):
    """A training batch whose samples have a weight each in the loss, 1 in the mean of the training split."""

    images: Tensor
    targets: Tensor
    weights: Tensor  # (B,)


def path_of(value: Any) -> str:
    """Return where the class of an object comes from."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def network(task: Any) -> nn.Module:
    """Return what is trained: the ``net`` of a task, or the task as a whole."""
    net = getattr(task, "net", None)
    return net if isinstance(net, nn.Module) else task


def trained(task: Any) -> Any:
    """Return the network that the optimizer moves: the ``student`` where there is one, else :func:`network`."""
    return getattr(task, "student", None) or network(task)


def recipe(task: Any) -> Mapping[str, Any]:
    """Return the arguments that a task has saved as its hyper-parameters."""
    return getattr(task, "hparams", {})


def monitor(task: Any) -> tuple[Literal["min", "max"], str] | None:
    """Return how the best epoch of a task is told, ``min`` or ``max`` and a metric; None where it does not say."""
    return getattr(task, "monitor", None)


def better(task: Any, metric: str | None) -> Literal["min", "max"] | None:
    """Return whether a metric is best at its smallest or largest value; None where nothing says it."""
    mode, own = monitor(task) or (None, None)
    if metric is not None and metric == own:
        return mode
    if str(metric).endswith("loss"):
        return "min"
    known = getattr(getattr(task, "val_meter", None), "metrics", {})
    higher = known[name].higher_is_better if (name := str(metric).removeprefix("val/")) in known else None
    return None if higher is None else "max" if higher else "min"


def sums_its_steps(task: Any) -> bool:
    """Return whether a task keeps sums over its training steps, as those of vitlab do for exact means."""
    return hasattr(task, "read_train_sums")


def deals_samples(data: Any) -> bool:
    """Return whether the loaders of data give each process a share of its own."""
    return getattr(data, "deals_samples", False)


def image_fact(data: Any, name: str) -> Any:
    """Return what data say of their images, pairs as lists; None where they do not say it."""
    value = getattr(data, name, None)
    return list(value) if isinstance(value, tuple) else value


def is_plain(value: Any) -> bool:
    """Return whether a checkpoint that holds a value can be loaded again: numbers, words and tensors can."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError):
        return False
    return True


def fingerprint(data: Any) -> dict[str, Any]:
    """Return what identifies data; of a class without ``fingerprint`` its name and classes alone."""
    known = {"data": path_of(data), "class_names": list(getattr(data, "class_names", [])), "mean": [], "std": []}
    return known | (data.fingerprint() if hasattr(data, "fingerprint") else {})
