"""What a probe measures before its first step: a callback of its own process, imported there by its class path."""

import math
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from vitlab.models.hooks import modes_kept
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import token_steps
from vitlab.runs.directory import RunDir
from vitlab.tasks.base import Task


class Start(Callback):
    """Writes the length of the whole training, of which a probe trains the first steps, and facts of its start.

    Steps and the sum of their learning rates go into ``length.json`` of the run directory; the spread of tokens, the
    ratio of positions to content and the pixels from one token to the next into ``start.json``.

    Args:
        max_steps: ``trainer.max_steps`` of the whole training.
    """

    def __init__(self, max_steps: int = -1) -> None:
        self.max_steps = max_steps

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write both; tokens are those of a batch of validation images, or of training images if there are none."""
        RunDir(trainer.default_root_dir).write("length.json", whole_length(trainer, pl_module, self.max_steps))
        data: Any = getattr(trainer, "datamodule", None)
        if data is not None and hasattr(data, "iterate_batches"):
            loader = data.val_dataloader() or data.train_dataloader()
            self._measure(trainer, pl_module, next(iter(data.iterate_batches(loader)))[0])

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure data of one's own, by the first training batch as the task receives it."""
        if trainer.global_step or batch_idx or hasattr(getattr(trainer, "datamodule", None), "iterate_batches"):
            return
        images = batch[0] if isinstance(batch, list | tuple) and batch else None
        if isinstance(images, torch.Tensor) and images.ndim == 4 and images.is_floating_point():
            self._measure(trainer, pl_module, images)

    def _measure(self, trainer: L.Trainer, pl_module: L.LightningModule, images: torch.Tensor) -> None:
        if isinstance(net := getattr(pl_module, "net", None), VisionTransformer):
            found = {**token_spread(net, images.to(pl_module.device)), "token_steps": list(token_steps(net))}
            RunDir(trainer.default_root_dir).write("start.json", found)


def whole_length(trainer: L.Trainer, task: L.LightningModule, max_steps: int) -> dict[str, float]:
    """Return the steps of a training that ends at ``max_steps`` instead, and the sum of their learning rates, if known.

    The trainer counts the steps and the task's schedule gives the rates, as for ``run.json`` of the whole training.
    """
    loop, short = trainer.fit_loop.epoch_loop, trainer.max_steps
    loop.max_steps = max_steps
    try:
        steps = float(trainer.estimated_stepping_batches)
        if not 0 < steps < math.inf:  # without an end
            return {}
        rates = task.sum_of_learning_rates() if isinstance(task, Task) else None
    finally:
        loop.max_steps = short
    return {"steps": int(steps), **({} if rates is None else {"sum_of_learning_rates": rates})}


def token_spread(net: VisionTransformer, images: torch.Tensor) -> dict[str, float]:
    """Return the standard deviation of the tokens of ``(B, C, H, W)`` images, and positions by content.

    The ratio is the root mean square of what the position embedding adds to the patch tokens, divided by the deviation
    of the patch tokens that it is added to: those of the tokenizer, or those that enter the first block. Where a list
    adds at both places, it is the root of the sum of both squares. It is 0 for embeddings that rotate or bias, and
    where the tokens are all alike, as those of a tokenizer that starts at zero.
    """
    with modes_kept(net), torch.no_grad():
        content, positions = net.eval().tokenizer(images), net.pos_embed.for_batch()
        added = positions(content) - content
        tokens = net.embed(images, positions)
        entering = tokens[:, net.num_prefix_tokens :].contiguous()
        added_before_block = (positions.enter(tokens, 0) - tokens)[:, net.num_prefix_tokens :]
    deviation = _sd(content)
    ratios = [_rms(added) / (deviation or math.inf), _rms(added_before_block) / (_sd(entering) or math.inf)]
    return {"token_sd": deviation, "pos_to_content": math.hypot(*ratios)}


def _rms(x: torch.Tensor) -> float:
    return float(x.float().square().mean().sqrt())


def _sd(x: torch.Tensor) -> float:
    return float(x.float().std())
