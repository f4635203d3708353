"""The optional interface of LightningModules and data that vitlab uses: docs/bring_your_own.md."""

import io
import pickle
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

LINKED = ("img_size", "in_chans", "num_classes", "targets")  # arguments of a module that the data fill in


class Weighted(NamedTuple):
    """A training batch with a loss weight per sample; weights have mean 1 over the training split."""

    images: Tensor
    targets: Tensor
    weights: Tensor  # (B,)


def path_of(value: Any) -> str:
    """Return the class path of an object."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def network(task: Any) -> nn.Module:
    """Return the network of a task: its ``net``, or the task itself."""
    net = getattr(task, "net", None)
    return net if isinstance(net, nn.Module) else task


def trained(task: Any) -> Any:
    """Return the network that the optimizer trains: the ``student`` if there is one, else :func:`network`."""
    return getattr(task, "student", None) or network(task)


def recipe(task: Any) -> Mapping[str, Any]:
    """Return the saved hyper-parameters of a task."""
    return getattr(task, "hparams", {})


def monitor(task: Any) -> tuple[Literal["min", "max"], str] | None:
    """Return mode (``min`` or ``max``) and metric that decide a task's best epoch; None if it does not define them."""
    return getattr(task, "monitor", None)


def better(task: Any, metric: str | None) -> Literal["min", "max"] | None:
    """Return whether smaller or larger values of a metric are better; None if unknown."""
    mode, own = monitor(task) or (None, None)
    if metric is not None and metric == own:
        return mode
    if str(metric).endswith("loss"):
        return "min"
    known = getattr(getattr(task, "val_meter", None), "metrics", {})
    higher = known[name].higher_is_better if (name := str(metric).removeprefix("val/")) in known else None
    return None if higher is None else "max" if higher else "min"


def sums_its_steps(task: Any) -> bool:
    """Return whether a task accumulates sums over its training steps, as vitlab's do for exact means."""
    return hasattr(task, "read_train_sums")


def deals_samples(data: Any) -> bool:
    """Return whether the data's loaders give each process its own share."""
    return getattr(data, "deals_samples", False)


def image_fact(data: Any, name: str) -> Any:
    """Return a fact about the data's images, pairs as lists; None if unknown."""
    value = getattr(data, name, None)
    return list(value) if isinstance(value, tuple) else value


def is_plain(value: Any) -> bool:
    """Return whether a checkpoint with this value can be loaded again, as with numbers, strings and tensors."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError):
        return False
    return True


def fingerprint(data: Any) -> dict[str, Any]:
    """Return the fingerprint of data; for a class without one, only its name and classes."""
    known = {"data": path_of(data), "class_names": list(getattr(data, "class_names", [])), "mean": [], "std": []}
    return known | (data.fingerprint() if hasattr(data, "fingerprint") else {})
