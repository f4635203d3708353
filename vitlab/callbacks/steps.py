"""What training steps accumulate until they are logged: losses, gradient norms, metrics and speed."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vitlab.interface import batches_of_a_step, check_asked_once, hparams_of, is_task, network, own_ratio_of, redefines
from vitlab.layers.precision import full_tensor, norm_of_gradients
from vitlab.runs.launch import of_all

# Dense 16-bit tensor-core rates in TFLOP/s with float32 accumulation, from NVIDIA's data sheets; the first name that
# matches counts. Lightning's table mixes these with sparse and scalar rates.
PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "A40": 149.7,
    "L40S": 362.0,
    "L4": 121.0,
    "V100": 125.0,
    "T4": 65.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


class Steps:
    """Losses, gradient norms and sums of the steps since the last :meth:`read`; they stay on the device.

    The step of a vitlab task adds up exact sums over its images. For any other module, and a task whose subclass has a
    ``training_step`` of its own, the returned loss is summed, beside the metrics of vitlab's step if it calls that. The
    images of a step that ``nan_loss: skip`` skips count as skipped. So do those of a batch for which a
    ``training_step`` returns None, Lightning's way to skip it, unless the module optimizes by itself: then they are
    trained on, and no part of the mean of the losses.
    """

    def __init__(self) -> None:
        # by batch: loss, and gradient norm before it if known
        self.losses: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._norm_before: Tensor | None = None
        self.grad_norm: Tensor | None = None  # of the last step, if measured
        self.sums: dict[str, Any] = {}
        self._before: dict[str, Any] = {}  # of the batches before those of the present step
        self._has_stepped = False  # since the batch before
        self.gave_loss = False  # whether any step has

    def measure_gradient(self, task: Any) -> None:
        """Measure the norm of the gradient of all weights."""
        self.grad_norm = full_tensor(norm_of_gradients(task))
        if is_task(task):
            task.grad_norm = self.grad_norm

    def forget_gradient(self, task: Any) -> None:
        """Forget the norm of the step before, which is not that of the one that is made now."""
        check_asked_once(task.trainer, self._has_stepped)
        self.grad_norm, self._has_stepped = None, True
        if is_task(task):
            task.grad_norm = None

    def add(self, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Add a step."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        added: Mapping[str, Any] = {}
        if is_task(task):
            self.grad_norm, added, task.train_sums = task.grad_norm, task.train_sums, {}
        if not is_task(task) or redefines(task, "training_step"):
            added = _returned(task, loss, samples(batch) or 1, batch_idx, added)
        before = self.sums
        self.sums = before | {name: before.get(name, 0) + value for name, value in added.items()}
        if loss is None and task.automatic_optimization:
            self.sums = as_skipped(self.sums, before)
        if self._has_stepped and hparams_of(task).get("nan_loss") == "skip":
            was_skipped = self.grad_norm is not None and not self.grad_norm.isfinite()  # over all processes
            self.sums = as_skipped(self.sums, self._before if was_skipped else self.sums)
            self._before = self.sums
        self._has_stepped = False
        if isinstance(loss, Tensor):
            self.losses[batch_idx], self.gave_loss = (loss.detach(), self._norm_before), True
        self._norm_before = self.grad_norm

    def read(self, task: Any) -> dict[str, float]:
        """Return sums over all processes, with ``n`` samples, and reset them; every process must call it."""
        sums, self.losses, self.sums, self._before = self.state(task), {}, {}, {}
        return sums

    def state(self, task: Any) -> dict[str, float]:
        """Return sums over all processes, for a checkpoint; every process must call it."""
        strategy, sums = task.trainer.strategy, self.sums
        if redefines(task, "step_loss") and task.trainer.world_size > 1:  # other batches may give other names
            sums = {name: sums.get(name, 0.0) for name in dict.fromkeys(chain.from_iterable(of_all([*sums])))}
        numbers = [torch.as_tensor(value, dtype=torch.float32, device=task.device) for value in sums.values()]
        total = strategy.reduce(torch.stack(numbers), reduce_op="sum") if numbers else torch.zeros(0)
        return dict(zip(sums, total.tolist(), strict=True))

    def restore(self, sums: Mapping[str, float], is_first: bool) -> None:
        """Go on from the sums of a checkpoint: the first process from those of all, the others from nothing."""
        self.sums = self._before = {name: value if is_first else 0.0 for name, value in sums.items()}


def _returned(task: Any, loss: Any, n: int, batch_idx: int, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sums of a batch of ``n`` images by the loss that a ``training_step`` of the user's returns for it.

    Args:
        task: The module.
        loss: What its step returns; None skips the batch.
        n: Number of images, 1 for a batch in a form of the user's own.
        batch_idx: Place of the batch in the epoch.
        measured: Sums of vitlab's step, if theirs calls it, maybe for a part of the images or for two views.
    """
    sums: dict[str, Any] = {"n": n}
    if is_task(task):
        sums["unmeasured"] = n - measured.get("n", 0)
    if not task.automatic_optimization:  # of processes, some may return a loss and some none
        sums |= {"loss": 0, "without_loss": 0 if isinstance(loss, Tensor) else n}
    if isinstance(loss, Tensor):  # Lightning has divided it, vitlab's step by the batches that there are
        trainer = task.trainer
        batches = batches_of_a_step(trainer, batch_idx) if measured else trainer.accumulate_grad_batches
        sums["loss"] = loss.detach() * batches * n
    return sums | {name: value for name, value in measured.items() if name not in ("loss", "n", "skipped")}


def as_skipped(sums: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return sums over steps as they were ``before`` the last step, whose images count as skipped.

    >>> as_skipped({"loss": 9.0, "n": 8, "skipped": 0}, {"loss": 2.0, "n": 4, "skipped": 0})
    {'loss': 2.0, 'n': 4, 'skipped': 4}
    """
    images = sum(sums.get(name, 0) - before.get(name, 0) for name in ("n", "skipped"))
    return {name: before.get(name, 0) for name in sums} | {"skipped": before.get("skipped", 0) + images}


def means(sums: Mapping[str, float]) -> dict[str, float]:
    """Return means over the ``n`` images that were trained on, and of all images the share that was ``skipped``.

    >>> means({"loss": 6.0, "n": 3, "skipped": 1})
    {'loss': 2.0, 'skipped': 0.25}
    >>> means({"loss": 6.0, "n": 3, "without_loss": 1, "acc1": 2.0, "unmeasured": -1})
    {'loss': 3.0, 'acc1': 0.5}
    """
    n = sums.get("n", 0.0)
    without = {"loss": sums.get("without_loss", 0.0)}  # images that a mean is not of
    named = (name for name in sums if name not in ("n", "skipped", "without_loss", "unmeasured"))
    counts = {name: n - without.get(name, sums.get("unmeasured", 0.0)) for name in named}
    found = {name: sums[name] / count for name, count in counts.items() if count}
    return found | ({"skipped": sums["skipped"] / images(sums)} if "skipped" in sums else {})


def images(sums: Mapping[str, float]) -> float:
    """Return the number of images in sums over steps, skipped ones included.

    >>> images({"loss": 6.0, "n": 3, "skipped": 1})
    4
    """
    return sums.get("n", 0.0) + sums.get("skipped", 0.0)


def samples(batch: Any) -> int:
    """Return the length of the first tensor in a batch of any form, or of its list of images.

    Such a list has an image ``(C, H, W)`` for each of as many targets; other lists may be views of the same images.

    >>> samples({"names": ["a", "b"], "images": torch.zeros(2, 3, 8, 8)})
    2
    >>> samples(([torch.zeros(3, 8, 8), torch.zeros(3, 4, 4)], torch.zeros(2)))
    2
    >>> samples(([torch.zeros(5, 3, 8, 8), torch.zeros(5, 3, 4, 4)], torch.zeros(5)))
    5
    """
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    parts = [*batch.values()] if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else []
    lengths = [len(x) for x in parts if isinstance(x, list | tuple) or (isinstance(x, Tensor) and x.ndim)]
    for part in parts:
        is_listed = isinstance(part, list | tuple) and all(isinstance(x, Tensor) and x.ndim == 3 for x in part)
        if is_listed and lengths.count(len(part)) > 1:
            return len(part)
        if n := samples(part):
            return n
    return 0


def peak_flops(device: torch.device) -> float | None:
    """Return the dense 16-bit peak of a GPU in FLOP/s; None for other devices and unknown names."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    words = f" {name.replace('-', ' ')} "
    return next((1e12 * peak for key, peak in PEAKS.items() if f" {key} " in words), None)


class Speed:
    """Model FLOPs utilization, Chowdhery et al. 2022 (arXiv:2204.02311): useful operations as a share of the peak.

    Useful are those of one forward and one backward pass of the network, three times the forward pass. Recomputation by
    gradient checkpointing and a teacher do not count. The peak is that of 16 bits, whatever the precision. A task whose
    step costs something else states its ``forward_passes`` per image; with None, or with frozen parts, there is no MFU.

    Args:
        facts: ``flops`` of a forward pass of one image, or ``flops_from``, pairs of first epoch and FLOPs.
        trainer: The trainer.
    """

    def __init__(self, facts: dict[str, Any], trainer: Any) -> None:
        self.devices, task = trainer.world_size, trainer.lightning_module
        self.passes = None if hparams_of(task).get("freeze") else getattr(task, "forward_passes", 3)
        self.flops_from = facts.get("flops_from", [[0, facts.get("flops", 0)]])
        varies = own_ratio_of(getattr(trainer, "datamodule", None))  # then the FLOPs are those of one image
        varies = varies or getattr(getattr(network(task), "tokenizer", None), "flexi_patch", None)
        self.peak = None if varies else peak_flops(trainer.strategy.root_device)

    def utilization(self, images_per_second: float, epoch: int = 0) -> dict[str, float]:
        """Return the utilization at the total speed of all devices; empty if the peak or the cost is unknown."""
        if not self.peak or self.passes is None:
            return {}
        flops = [flops for start, flops in self.flops_from if start <= epoch][-1]
        return {"mfu": self.passes * flops * images_per_second / (self.peak * self.devices)}
