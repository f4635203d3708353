"""Log attention maps to Weights & Biases during training."""

import logging
from typing import Any

import lightning as L
import matplotlib
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor
from torchvision.utils import make_grid

from vitlab.callbacks.loops import is_due, step_of_loggers
from vitlab.errors import UsageError
from vitlab.interface import own_ratio_of
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import attention_maps

LOG = logging.getLogger("vitlab")
TILE = 96  # smallest shorter side of an image in the picture, in pixels


class AttentionMaps(Callback):
    """Log the attention of the class token, in each head of one block, to Weights & Biases.

    The picture has a row for each of the first validation images, which are always the same: the image, then a map per
    head. The maps are those of the validated weights, so of the average under EMA. Training is not affected: no random
    numbers are drawn, and no gradients are computed. Without a ``WandbLogger`` nothing is logged::

        trainer:
          logger: {class_path: WandbLogger, init_args: {project: vitlab}}
          callbacks:
            - {class_path: AttentionMaps, init_args: {every_n_epochs: 5}}

    Args:
        every_n_epochs: Epochs between two pictures; the first validation at or after each multiple draws one.
        num_images: Number of images to show, at most a validation batch.
        layer: Index of the block, from 0; -1 is the last.

    Example:
        >>> trainer = L.Trainer(callbacks=[AttentionMaps(every_n_epochs=5)], logger=False, enable_checkpointing=False)
        >>> trainer.callbacks[0].layer
        -1
    """

    needs_whole_weights = True  # in the first process, which alone asks parts of the network

    def __init__(self, every_n_epochs: int = 1, num_images: int = 4, layer: int = -1) -> None:
        for name, value in (("every_n_epochs", every_n_epochs), ("num_images", num_images)):
            if value < 1:
                raise ValueError(f"`{name}` of AttentionMaps must be at least 1, got {value}")
        self.every_n_epochs, self.num_images, self.layer = every_n_epochs, num_images, layer

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Refuse foreign networks, a network without a class token, and images of different sizes."""
        if stage != "fit":
            return
        if not isinstance(getattr(pl_module, "net", None), VisionTransformer):
            raise ValueError(f"AttentionMaps shows a network of vitlab, and {type(pl_module).__name__} has none")
        if own_ratio_of(getattr(trainer, "datamodule", None)):
            raise ValueError("AttentionMaps needs images of one size, without `data.native_patch`: leave it out")
        if pl_module.net.cls_token is None:
            raise ValueError(
                "AttentionMaps shows attention of the class token, but `model.class_token` is false: leave it out, and "
                "look at a patch with `vitlab analyze attention RUN --query ROW,COLUMN`"
            )
        depth = len(pl_module.net.blocks)
        if not -depth <= self.layer < depth:
            raise ValueError(f"`layer` of AttentionMaps must lie in {-depth}..{depth - 1}, got {self.layer}")
        if trainer.is_global_zero and not _wandb(trainer):
            LOG.info("AttentionMaps logs nothing: there is no WandbLogger in `trainer.logger`")

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Log the picture with the first validation batch, every ``every_n_epochs``."""
        if batch_idx or dataloader_idx or trainer.sanity_checking or not trainer.is_global_zero:
            return
        loggers = _wandb(trainer)
        if trainer.state.fn != "fit" or not loggers or not is_due(trainer, self.every_n_epochs):
            return
        if not isinstance(batch, list | tuple):
            kind = type(batch).__name__
            raise UsageError(f"AttentionMaps needs batches that begin with images, got a {kind}: leave it out")
        images = batch[0][: self.num_images]
        net, layer = pl_module.net, self.layer % len(pl_module.net.blocks)
        maps = attention_maps(net, images, layer)[:, :, 0, net.num_prefix_tokens :]  # (B, A, N) of the class token
        picture = draw_maps(images, maps.unflatten(2, net.grid_size)).permute(1, 2, 0).numpy()
        caption = f"class token, layer {layer}, epoch {trainer.current_epoch + 1}; each map has its own range"
        for logger in loggers:
            logger.log_image("attention", [picture], step=step_of_loggers(trainer), caption=[caption])


def draw_maps(images: Tensor, maps: Tensor) -> Tensor:
    """Draw ``(B, C, H, W)`` images, each beside its ``(B, A, h, w)`` maps: ``(3, height, width)`` uint8."""
    images, maps = images.detach().float().cpu(), maps.detach().float().cpu()
    low, high = images.amin(dim=(1, 2, 3), keepdim=True), images.amax(dim=(1, 2, 3), keepdim=True)
    images = ((images - low) / (high - low).clamp_min(1e-12)).expand(-1, 3, -1, -1)
    H, W = images.shape[2:]
    size = [round(side * max(1.0, TILE / min(H, W))) for side in (H, W)]
    relative = maps / maps.amax(dim=(2, 3), keepdim=True)
    colors = torch.from_numpy(matplotlib.colormaps["viridis"](relative.numpy())[..., :3])
    colors = colors.permute(0, 1, 4, 2, 3).float()  # (B, A, 3, h, w)
    rows = [
        torch.cat([F.interpolate(image[None], size), F.interpolate(heads, size)])
        for image, heads in zip(images, colors, strict=True)
    ]  # (1 + A, 3, height, width) each
    return make_grid(torch.cat(rows), nrow=len(rows[0]), pad_value=1.0).mul(255).round().to(torch.uint8)


def _wandb(trainer: L.Trainer) -> list[WandbLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
