"""Measure an untrained network: the spread of its tokens on real images, and how much positions add to them."""

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from vitlab.models.vit import VisionTransformer
from vitlab.runs.directory import RunDir


class Tokens(Callback):
    """Writes the spread of tokens and the ratio of positions to content into ``start.json`` of a run directory."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure on a batch of validation images, or of training images if there are none."""
        net, data = getattr(pl_module, "net", None), getattr(trainer, "datamodule", None)
        if data is None or not hasattr(data, "iterate_batches") or not isinstance(net, VisionTransformer):
            return
        loader = data.val_dataloader() or data.train_dataloader()
        images, _ = next(iter(data.iterate_batches(loader)))
        found = token_spread(net, images.to(pl_module.device))
        RunDir(trainer.default_root_dir).write("start.json", found)


def token_spread(net: VisionTransformer, images: torch.Tensor) -> dict[str, float]:
    """Return the standard deviation of the tokens of ``(B, C, H, W)`` images, and positions by content.

    The ratio is the root mean square of what the position embedding adds to the tokens, divided by that deviation; it
    is 0 for embeddings that rotate or bias.
    """
    was_training = net.training
    with torch.no_grad():
        content = net.eval().tokenizer(images)
        added = net.pos_embed(content) - content
    net.train(was_training)
    deviation = float(content.float().std())
    return {"token_sd": deviation, "pos_to_content": float(added.float().square().mean().sqrt()) / deviation}
