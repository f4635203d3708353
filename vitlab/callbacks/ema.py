"""Exponential moving average of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch.distributed.fsdp import FSDPModule

from vitlab.errors import UsageError
from vitlab.interface import path_of, take_sizes_early
from vitlab.layers.plain import local_part
from vitlab.layers.precision import check_average

Matched = tuple[list[torch.Tensor], list[torch.Tensor]]  # of the average, of the task
_OF_SHARDS = ("configure_model", "_device_mesh")  # set on a task by a strategy that shards; they cannot be copied


class EMA(WeightAveraging):
    """Keep an exponential moving average of the weights, which is validated, tested, saved and exported.

    Buffers, such as the statistics of a batch normalization, are those of the network in training. A checkpoint that is
    written at any moment has the average as ``state_dict``, and the weights in training as ``current_model_state``.

    The decay warms up as (1 + t) / (10 + t) at step t, as in TensorFlow's ExponentialMovingAverage: without
    warm-up, a decay of .9999 gives chance accuracy for epochs. One kernel updates all weights.

    Args:
        decay: Share of the average that a step keeps, after the warm-up; at least 0 and below 1.

    Example:
        >>> EMA(decay=0.999).decay
        0.999
        >>> EMA(decay=1.0)
        Traceback (most recent call last):
        ValueError: `decay` of EMA must be at least 0 and below 1, got 1.0
    """

    def __init__(self, decay: float = 0.9999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"`decay` of EMA must be at least 0 and below 1, got {decay}")
        super().__init__(use_buffers=False)
        self.decay = decay
        self.is_swapped = False  # whether the network holds the average, and the copy the weights in training
        self._is_new = False  # whether the training has no checkpoint to go on from
        self._weights: Matched | None = None
        self._holders: list[tuple[Any, Any]] = []  # modules with buffers, of the average and of the task

    @property
    def average(self) -> Any:
        """The copy of the task whose weights are the average while it trains; None outside of a training."""
        return self._average_model and self._average_model.module

    def check_training(self, trainer: L.Trainer) -> None:
        """Refuse weights of 16 bits, in which the average would hardly move."""
        check_average("EMA", str(trainer.precision))

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Copy the task before a training, while its weights are whole, and drop the copy before anything else.

        A strategy that shards the weights later shards the copy, too.

        Raises:
            UsageError: The weights have 16 bits, in which the average would hardly move.
        """
        self.check_training(trainer)
        take_sizes_early(pl_module, trainer)
        later = {name: pl_module.__dict__.pop(name) for name in _OF_SHARDS if name in pl_module.__dict__}
        super().setup(trainer, pl_module, stage)
        self.is_swapped, self._is_new = False, True
        if stage == "fit":  # perhaps the second training of this object
            self._latest_update_step = 0
        else:  # the network of a training has its average since the end of it, and another one is to have its own
            self._average_model = self._weights = None
        pl_module.__dict__.update(later)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the average the device and type of the network, which Lightning has moved after the copy was made."""
        if self._average_model is not None:
            self._average_model.to(pl_module.device)
            self._double(trainer)

    def _double(self, trainer: L.Trainer) -> None:
        if trainer.precision == "64-true" and self._average_model is not None:
            self._average_model.double()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin the average with the weights that the training begins with: tasks may set them until now."""
        super().on_train_start(trainer, pl_module)
        self._weights = None
        if self._is_new:
            self._begin_with(pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the network the average, and keep its weights for a checkpoint that is written after this."""
        self._swap_models(pl_module)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the average and the weights in training, as strictly as the task asks for."""
        self._double(trainer)  # or what is loaded now would be rounded
        if self._average_model is not None and "averaging_state" in checkpoint:
            for module, state in (self.average, "state_dict"), (pl_module, "current_model_state"):
                module.load_state_dict(checkpoint[state], strict=pl_module.strict_loading)
            self._average_model.load_state_dict(checkpoint["averaging_state"], strict=False)
        else:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
        self._is_new = False

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the average and the weights in training where they belong, also while the network holds the average."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._average_model is None:
            return
        average, current = self.average.state_dict(), checkpoint["current_model_state"]
        average |= {name: value for name, value in current.items() if name.endswith("_extra_state")}
        checkpoint["state_dict"] = average  # a class may leave a frozen teacher out of its own
        if self.is_swapped:
            for name in average.keys() & current.keys():
                average[name], current[name] = current[name], average[name]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the average once per step of the optimizer."""
        step = trainer.global_step
        if step > self._latest_update_step and self._average_model is not None:
            weight = 1 - min(self.decay, (1 + step) / (10 + step))
            if not self._weights:  # listing the weights is slower than updating them
                self._weights = _without_infinite(*self._matched_weights(pl_module))
                self._holders = self._matched_holders(pl_module)
            with torch.no_grad():
                torch._foreach_lerp_(*self._weights, weight)
            _copy_buffers(self._holders)
            self._latest_update_step = step

    def _swap_models(self, pl_module: L.LightningModule) -> None:
        _reshard(pl_module)
        for matched in self._matched_weights(pl_module), _buffers(self._matched_holders(pl_module)):
            for average, current in zip(*matched, strict=True):
                if average.shape == current.shape:
                    kept = average.data.clone()
                    average.data.copy_(current.data)
                    current.data.copy_(kept)
                else:  # a buffer that has grown since the last step
                    average.data, current.data = current.data, average.data
        self.is_swapped = not self.is_swapped

    def _begin_with(self, pl_module: L.LightningModule) -> None:
        _reshard(pl_module)
        for average, current in zip(*self._matched_weights(pl_module), strict=True):
            average.data.copy_(current.data)
        _copy_buffers(self._matched_holders(pl_module))

    def _matched_holders(self, pl_module: L.LightningModule) -> list[tuple[Any, Any]]:
        parts = dict(pl_module.named_modules())
        return [(part, parts[name]) for name, part in self.average.named_modules() if part._buffers and name in parts]

    def _matched_weights(self, pl_module: L.LightningModule) -> Matched:
        weights: Matched = list(self.average.parameters()), list(pl_module.parameters())
        if len(weights[0]) != len(weights[1]):
            raise UsageError(
                f"EMA copies {path_of(pl_module)} before its `setup`, which adds weights: build them in `__init__`"
            )
        return weights


def _without_infinite(averages: list[torch.Tensor], currents: list[torch.Tensor]) -> Matched:
    """Leave out what is frozen and infinite, as a mask is: the mean of two infinite values is no number."""
    pairs = zip(averages, currents, strict=True)
    kept = [(a, b) for a, b in pairs if b.requires_grad or local_part(b).isfinite().all()]
    return [average for average, _ in kept], [current for _, current in kept]


def _buffers(holders: list[tuple[Any, Any]]) -> Matched:
    """Return the present buffers of modules: a task may assign them anew, or get some after the copy was made."""
    pairs = [(a._buffers[name], b._buffers.get(name)) for a, b in holders for name in a._buffers]
    known = {id(b): (a, b) for a, b in pairs if a is not None and b is not None}.values()  # a shared one once
    return [average for average, _ in known], [current for _, current in known]


def _copy_buffers(holders: list[tuple[Any, Any]]) -> None:
    averages, currents = _buffers(holders)
    for average, current in zip(averages, currents, strict=True):
        if average.shape != current.shape:
            average.data = torch.empty_like(current)
    if averages:
        with torch.no_grad():
            torch._foreach_copy_(averages, currents)


def _reshard(module: L.LightningModule) -> None:
    """Free the whole weights that a forward pass has gathered, so that each process has its shards alone."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@contextmanager
def validated_weights(trainer: L.Trainer, pl_module: L.LightningModule) -> Iterator[None]:
    """Give a module in training, in a ``with`` block, the weights that are validated: the average, if one is kept.

    Example:
        >>> trainer = L.Trainer(callbacks=[EMA()], logger=False, enable_checkpointing=False)
        >>> with validated_weights(trainer, module := L.LightningModule()):  # nothing was averaged yet
        ...     list(module.parameters())
        []
    """
    for callback in _averaging(trainer):
        callback.on_validation_epoch_start(trainer, pl_module)
    try:
        yield
    finally:
        for callback in _averaging(trainer):
            callback.on_validation_epoch_end(trainer, pl_module)


def follow_swaps(trainer: L.Trainer) -> None:
    """Let Lightning's callbacks that average weights note whether the network holds the average, as EMA does itself."""
    for callback in _averaging(trainer):
        if not isinstance(callback, EMA):
            callback.is_swapped = False
            callback._swap_models = partial(_swap, callback)


def swap_back(trainer: L.Trainer, pl_module: L.LightningModule) -> None:
    """Give the network its own weights where :func:`follow_swaps` has noted that it holds an average.

    It holds one in a part of a validation only: not yet when the first batch is made, and no longer when metrics are.
    """
    for callback in _averaging(trainer):
        if callback.is_swapped:
            callback._swap_models(pl_module)


def _swap(callback: Any, pl_module: L.LightningModule) -> None:
    type(callback)._swap_models(callback, pl_module)
    callback.is_swapped = not callback.is_swapped


def _averaging(trainer: Any) -> list[Any]:
    return [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]
