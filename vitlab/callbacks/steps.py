"""Collect losses, gradient norms and metrics of training steps until they are logged."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitlab.interface import sums_its_steps


class Steps:
    """Losses, gradient norms and sums of the steps since the last :meth:`read`; they stay on the device.

    Tasks of vitlab keep exact sums over samples themselves. For any other module the returned loss is summed.
    """

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.norms: list[Tensor | None] = [None]  # gradient norms before each of these losses, if known
        self.grad_norm: Tensor | None = None
        self._sums: dict[str, Any] = {}

    def measure_gradient(self, task: Any) -> None:
        """Measure the norm of the gradient of all weights."""
        if sums_its_steps(task):
            task.grad_norm = task.gradient_norm()
        else:
            self.grad_norm = torch.nn.utils.get_total_norm([p.grad for p in task.parameters() if p.grad is not None])

    def add(self, trainer: Any, task: Any, outputs: Any, batch: Any) -> None:
        """Add a step."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if sums_its_steps(task):
            self.grad_norm = task.grad_norm
        else:
            n = samples(batch)
            self._sums["n"] = self._sums.get("n", 0) + n
            if isinstance(loss, Tensor):  # Lightning has divided it by the accumulated batches
                undivided = loss.detach() * trainer.accumulate_grad_batches
                self._sums["loss"] = self._sums.get("loss", 0) + undivided * n
        if isinstance(loss, Tensor):
            self.losses.append(loss.detach())
        self.norms.append(self.grad_norm)

    def read(self, trainer: Any, task: Any) -> dict[str, float]:
        """Return sums over all processes, with ``n`` samples, and reset them; every process must call it."""
        self.norms = self.norms[-1:]
        self.losses = []
        if sums_its_steps(task):
            return task.read_train_sums()
        sums, self._sums = self._sums, {}
        local = torch.stack([torch.as_tensor(v, dtype=torch.float32, device=task.device) for v in sums.values()])
        return dict(zip(sums, trainer.strategy.reduce(local, reduce_op="sum").tolist(), strict=True))


def samples(batch: Any) -> int:
    """Return the length of the first tensor in a batch of any form.

    >>> samples({"names": ["a", "b"], "images": torch.zeros(2, 3, 8, 8)})
    2
    """
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((n for part in parts if (n := samples(part))), 0)


def logged(trainer: Any, on_step: bool = False) -> dict[str, float]:
    """Return the metrics that the current loop has logged, without those of other loops."""
    metrics = trainer._results.metrics(on_step)["callback"] if trainer._results else {}
    return {name: float(value) for name, value in metrics.items()}
