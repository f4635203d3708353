"""The optional interface of LightningModules and data that vitlab uses: docs/bring_your_own.md."""

import hashlib
import inspect
import io
import math
import pickle
from collections.abc import Callable, Mapping, Set
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.objects import changes_since_built, given_to, unsharded_class

PAGE = "see docs/bring_your_own.md"
SMALL = 100  # values of an array that a fingerprint holds as they are
_BESIDE_OUTPUTS = {"__init__", "__repr__", "extra_repr", "stages", "no_weight_decay", "start_step"}  # of a network
_BESIDE_VALUES = {"requires_grad", "num_classes", "grad_checkpoint", "init_std"}  # decide no function of a part
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")  # in this order
LINKS = {  # arguments of a module that the data fill in, and what the data have of each
    "img_size": "an image size of",
    "in_chans": "a channel count of",
    "num_classes": "a class count of",
    "targets": "targets",
}


class Weighted(NamedTuple):
    """A training batch with a loss weight per sample; weights have mean 1 over the training split."""

    images: Tensor
    targets: Tensor
    weights: Tensor  # (B,)


def path_of(value: Any) -> str:
    """Return the class path of an object."""
    return f"{(cls := unsharded_class(value)).__module__}.{cls.__qualname__}"


def own_parts(net: nn.Module) -> list[nn.Module]:
    """Return the modules of a network whose classes are of neither vitlab, torch nor timm.

    Example:
        >>> own_parts(nn.Sequential(nn.Linear(3, 2)))
        []
    """
    known = ("vitlab.", "torch.", "timm.")
    return [part for part in net.modules() if not type(part).__module__.startswith(known)]


def network(task: Any) -> nn.Module:
    """Return the network of a task: its ``net``, of a compiled one what was compiled, or the task itself."""
    net = getattr(task, "net", None)
    return getattr(net, "_orig_mod", net) if isinstance(net, nn.Module) else task


def has_grid(task: Any) -> bool:
    """Return whether a task trains a network of vitlab, whose tokens lie on a grid."""
    return hasattr(network(task), "run_block")  # a grid_size, networks of others have, too


def trained(task: Any) -> Any:
    """Return the network that the optimizer trains: the ``student`` if there is one, else :func:`network`."""
    return getattr(task, "student", None) or network(task)


def answering(task: Any) -> nn.Module:
    """Return what maps images ``(B, C, H, W)`` to outputs: the task if it defines ``forward``, else its ``net``.

    Raises:
        UsageError: It has neither.
    """
    import lightning as L

    for module in (task, network(task)):
        forward = getattr(type(module), "forward", None)
        if forward not in (None, nn.Module.forward, L.LightningModule.forward) or "forward" in vars(module):
            return module
    raise UsageError(f"{path_of(task)} has neither `forward(images)` nor a `net` with one; {PAGE}")


@cache  # asked at each batch of a validation
def _redefined(cls: type) -> Set[str]:
    """Return which methods of a class's base of vitlab, else of Lightning, classes of the user's define anew."""
    static = inspect.getattr_static
    known = [base for name in ("vitlab.", "lightning.") for base in cls.__mro__ if base.__module__.startswith(name)]
    own = cls.__mro__[: cls.__mro__.index(known[0])] if known else ()
    names = {name for one in own for name in vars(one) if hasattr(known[0], name)}
    changed = {name: static(cls, name) for name in names if static(cls, name) is not static(known[0], name)}
    return {name for name, value in changed.items() if inspect.isroutine(value) or isinstance(value, property)}


def answers_itself(task: Any) -> bool:
    """Return whether a task's own ``forward``, or ``in_units`` of one of vitlab's, decides its outputs beside ``net``.

    Example:
        >>> from vitlab import Classifier
        >>> class Sharp(Classifier):
        ...     __module__ = "mine"
        ...     def in_units(self, outputs):
        ...         return 4 * outputs
        >>> size = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
        >>> answers_itself(Sharp(num_classes=3, **size)), answers_itself(Classifier(num_classes=3, **size))
        (True, False)
    """
    cls: Any = type(task)
    return network(task) is not task and bool({"forward", "in_units"} & _redefined(cls))


def own_network(net: nn.Module) -> str:
    """Return what computes another function than the network that its arguments build; empty if it does not.

    That is a class of the user's that changes a method of vitlab's, or a network whose parts were exchanged or set
    otherwise after it was built. What acts in training alone does not count, nor does another number of outputs.

    Example:
        >>> from vitlab import VisionTransformer
        >>> net = VisionTransformer(img_size=8, in_chans=1, patch_size=4, embed_dim=8, depth=1, num_heads=2)
        >>> net.blocks[0].mlp.act = nn.ReLU()
        >>> own_network(net)
        'a network with ReLU in place of GELU as blocks.0.mlp.act'
    """
    if _redefined(unsharded_class(net)) - _BESIDE_OUTPUTS:
        return path_of(net)
    found = changes_since_built(net)
    others = ["head"] if "num_classes" in found else []  # parts that were exchanged, whose own parts are not compared
    told = []
    for key, (was, now) in found.items():
        place, _, name = key.rpartition(".")
        if name in _BESIDE_VALUES or any(f"{place}.".startswith(f"{other}.") for other in others):
            continue
        if is_other := name == "__class__":
            others.append(place)
        kinds = {was, now} if is_other else {type(net.get_submodule(place)).__name__}
        if not all("Drop" in str(kind) or kind == "Identity" for kind in kinds):
            told.append(f"{now} in place of {was} as {place if is_other else key}")
    more = f", and {len(told) - 1} more" if len(told) > 1 else ""
    return f"a network with {told[0]}{more}" if told else ""


def own_answer(task: Any) -> dict[str, str]:
    """Return what is the user's and weights alone do not give: the ``network``, or the task that ``answers``.

    They are told by :func:`own_network` and :func:`answers_itself`.
    """
    theirs = own_network(network(task)) if has_grid(task) else ""
    return ({"network": theirs} if theirs else {}) | ({"answers": path_of(task)} if answers_itself(task) else {})


def arguments_of_net(task: Any) -> dict[str, Any]:
    """Return the arguments that a user's module built its network of vitlab with, which it may not save itself."""
    return given_to(network(task)) if has_grid(task) else {}


def transform_of(data: Any) -> Callable[[Any], Tensor]:
    """Return what maps a PIL image to a normalized ``(C, H, W)``; without one, calling it says what is missing."""
    if callable(own := getattr(data, "eval_transform", None)):
        return own

    def missing(image: Any) -> Tensor:
        raise UsageError(
            f"{path_of(data)} has no `eval_transform(image)`, which maps a PIL image to a tensor (C, H, W); {PAGE}"
        )

    return missing


def embedder(task: Any) -> nn.Module | Callable[[Tensor], Tensor]:
    """Return what maps images to features ``(B, D)``: ``embed`` of the task, or its network without its head.

    Raises:
        UsageError: It has neither ``embed`` nor a network that can lose its head.
    """
    if callable(own := getattr(task, "embed", None)):
        return own
    net: Any = network(task)
    if has_grid(task):
        net.reset_head(0)
        return net
    if hasattr(net, "reset_classifier"):  # of timm
        net.reset_classifier(0)
        return net
    raise UsageError(f"{path_of(task)} has no `embed(images)`, which returns features (B, D); {PAGE}")


def logits_of(value: Any) -> Any:
    """Return what a network returns, or of a mapping or object with ``logits``, as of Hugging Face, these.

    Example:
        >>> logits_of({"logits": 1}), logits_of(1), logits_of({"scores": 1})
        (1, 1, None)
    """
    return value.get("logits") if isinstance(value, Mapping) else getattr(value, "logits", value)


def as_outputs(value: Any, of: Any) -> Tensor:
    """Return the outputs of a network, see :func:`logits_of`; refuse what is not a tensor ``(B, ...)``."""
    if isinstance(outputs := logits_of(value), Tensor) and outputs.ndim:
        return outputs
    kind = f"a {type(value).__name__}" if not isinstance(outputs, Tensor) else "a single number"
    name, way_out = "forward", "return the outputs alone, or as `logits`"
    if answering(of) is not of:
        name, way_out = "net", "give the module a `forward(images)` that returns the outputs alone"
    raise UsageError(f"`{name}` of {path_of(of)} must return a tensor (B, K), got {kind}: {way_out}")


def hparams_of(task: Any) -> Mapping[str, Any]:
    """Return the saved hyper-parameters of a task."""
    return getattr(task, "hparams", {})


def take_sizes_early(task: Any, trainer: Any) -> None:
    """Let a task take its sizes and targets from the data now: Lightning calls its `setup` after the callbacks'."""
    data, take = getattr(trainer, "datamodule", None), getattr(task, "take_sizes", None)
    if data is not None and callable(take):
        take(data)


def monitor(task: Any) -> tuple[Literal["min", "max"], str] | None:
    """Return mode (``min`` or ``max``) and metric that decide a task's best epoch; None if it does not define them."""
    return getattr(task, "monitor", None)


def mode_of(task: Any, metric: str | None) -> Literal["min", "max"] | None:
    """Return ``min`` if smaller values of a metric are better, ``max`` if larger ones are; None if unknown."""
    mode, own = monitor(task) or (None, None)
    if metric is not None and metric == own:
        return mode
    loss = getattr(getattr(task, "val_meter", None), "loss_name", "loss")  # another where it is no criterion
    if str(metric).endswith("loss") or metric == f"val/{loss}":
        return "min"
    known = getattr(getattr(task, "val_meter", None), "metrics", {})
    higher = known[name].higher_is_better if (name := str(metric).removeprefix("val/")) in known else None
    return None if higher is None else "max" if higher else "min"


def loss_and_sums(task: Any, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return what the ``step_loss`` of a task returns for a batch: the mean loss, and a dict of sums over its samples.

    Raises:
        UsageError: It returns anything else, such as None where a subclass forgets to return.
    """
    match found := task.step_loss(batch):
        case (Tensor() as loss, Mapping() as sums):
            return loss, sums
    what = f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    raise UsageError(
        f"`{type(task).__name__}.step_loss` returned {'None' if found is None else what}: return the mean loss of the "
        "batch and a dict of sums over its samples, as in `return loss, {}`"
    )


def log_alike(module: Any, values: Mapping[str, Any], **how: Any) -> None:
    """Log values that all processes have alike, for which Lightning need not advise to average them."""
    from lightning.pytorch.trainer.connectors.logger_connector.result import warning_cache

    for name in values:
        warning_cache.add(
            f"It is recommended to use `self.log({name!r}, ..., sync_dist=True)` when logging on epoch level in "
            "distributed setting to accumulate the metric across devices."
        )
    module.log_dict(values, **how)


def measured_with(outputs: Any) -> Tensor | None:
    """Return the targets that a task of vitlab measured outputs ``(B, K)`` with; None of others.

    Only these belong to the outputs: a step may pass on another part of its batch than the first two.
    """
    return getattr(outputs, "measured_with", None)


def is_task(module: Any) -> bool:
    """Return whether a module is a task of vitlab, whose training steps add up exact sums over their images."""
    return hasattr(module, "train_sums")


def redefines(task: Any, method: str) -> bool:
    """Return whether a task of vitlab has a method of the user's, which may call vitlab's.

    Example:
        >>> from vitlab import Classifier
        >>> class Mine(Classifier):
        ...     __module__ = "mine"
        ...     def training_step(self, batch, batch_idx):
        ...         return 2 * super().training_step(batch, batch_idx)
        >>> size = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
        >>> [redefines(Mine(num_classes=3, **size), name) for name in ("training_step", "configure_optimizers")]
        [True, False]
    """
    cls: Any = type(task)
    return method in _redefined(cls) or method in vars(task)


def batches_of_a_step(trainer: Any, batch: int = 0) -> int:
    """Return how many batches the step of a batch of the epoch accumulates: fewer where the epoch ends, with a step.

    Those of the first step are the most. Before its images are set up, a trainer does not know the batches of an epoch.
    """
    asked: int = trainer.accumulate_grad_batches
    return int(min(asked, (trainer.num_training_batches or math.inf) - batch // asked * asked))


def check_asked_once(trainer: Any, asked_before: bool) -> None:
    """Refuse an optimizer that asks again for the gradient of several batches: it would get that of the last, added.

    Lightning has only this batch, and sets gradients to zero at the first of a step alone.

    Args:
        trainer: The trainer, within a step of its optimizer.
        asked_before: Whether the optimizer has had the gradient of this step.
    """
    batches, batch = trainer.accumulate_grad_batches, trainer.fit_loop.epoch_loop.batch_idx
    if asked_before and batch % batches:
        name = type(trainer.optimizers[0]).__name__
        raise UsageError(
            f"`trainer.accumulate_grad_batches` must be 1 for {name}, got {batches}: it asks for the gradient of a "
            "step again, and by then only the last batch is there: set it to 1, and raise `data.batch_size` instead"
        )


def deals_samples(data: Any) -> bool:
    """Return whether the data's loaders give each process its own share."""
    return getattr(data, "deals_samples", False)


def own_ratio_of(data: Any) -> Any:
    """Return how data keep the aspect ratio of each image (`data.native_patch`); None if all images have one size."""
    return getattr(getattr(data, "pipeline", None), "own_ratio", None)


def images_of_batch(data: Any, trainer: Any) -> int | None:
    """Return the images of a batch over all processes; None if data of the user's own do not state a ``batch_size``.

    Their loader has it in each of several processes, unless they divide it.
    """
    size: int | None = getattr(data, "batch_size", None)
    if size is None or trainer.world_size == 1 or deals_samples(data):
        return size
    own = getattr(trainer.train_dataloader, "batch_size", None)  # none before it is set up, or of several loaders
    return trainer.world_size * (own or size)


def image_fact(place: Any, name: str) -> Any:
    """Return a fact about images that data, a network or a mapping states, pairs as lists; None if unknown."""
    value = place.get(name) if isinstance(place, Mapping) else getattr(place, name, None)
    return list(value) if isinstance(value, tuple) else value


def image_sizes(task: Any, data: Any, *records: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``img_size``, height and width, and ``in_chans`` of the images that a network takes; None if unknown.

    The first that states one is believed: the network, the task, the data, records such as what a run has noted, and
    the patch embedding of a network of timm.

    Example:
        >>> net = nn.Conv2d(3, 8, kernel_size=3)
        >>> net.img_size = 32
        >>> image_sizes(net, None, {"img_size": [8, 8], "in_chans": 3})
        {'img_size': [32, 32], 'in_chans': 3}
    """
    net = network(task)
    first = getattr(net, "patch_embed", None)
    of_timm = {
        "img_size": getattr(first, "img_size", None),
        "in_chans": getattr(getattr(first, "proj", None), "in_channels", None),
    }
    found = dict[str, Any]()
    for name in of_timm:
        facts = (image_fact(place, name) for place in (net, task, data, *records, of_timm))
        found[name] = next((fact for fact in facts if fact), None)  # 0 and () are unknown, too
    side = found["img_size"]
    return {**found, "img_size": [side, side]} if isinstance(side, int) else found


def targets_of(data: Any) -> Mapping[str, Any]:
    """Return what data state of their targets, such as their kind and names; empty if they state nothing."""
    facts = getattr(data, "targets", None)
    return facts if isinstance(facts, Mapping) else {}


def class_names(data: Any) -> list[str]:
    """Return the names of the data's classes or labels; none if it does not state them.

    Names of labels may stand in the ``targets`` of data of a user's own.
    """
    facts = targets_of(data)
    labels = facts.get("names") if facts.get("kind") == "multilabel" else None
    return list(getattr(data, "class_names", None) or labels or [])


def is_loadable(value: Any) -> bool:
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
    """Return the fingerprint of data as JSON has it; for a class without one, only its name and classes."""
    names = list(getattr(data, "class_names", None) or [])
    known = {"data": path_of(data), "class_names": names, "mean": [], "std": []}
    return known | (_as_json(data.fingerprint()) if hasattr(data, "fingerprint") else {})


def _as_json(value: Any) -> Any:
    """Return a value in types of JSON: a small array as a list, and of a large one, whose text is cut, the digest."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.size > SMALL and value.dtype != object:
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return f"{value.dtype} {value.shape} sha256 {digest[:16]}"
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def skipped_unless(finite: Tensor, sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return sums over the ``n`` images of a batch; of a loss that is not finite, its images alone, as skipped.

    >>> skipped_unless(torch.tensor(False), {"loss": torch.tensor(torch.nan), "n": 4})
    {'loss': tensor(0.), 'n': tensor(0), 'skipped': tensor(4)}
    """
    return {name: torch.where(finite, value, 0) for name, value in sums.items()} | {"skipped": ~finite * sums["n"]}
