"""A LightningModule whose ``net`` is a Vision Transformer, of vitlab or of timm."""

import lightning as L
import torch
import torch.nn.functional as F

import vitlab

ARGUMENTS = {"img_size": 8, "in_chans": 1, "num_classes": 10, "patch_size": 2, "embed_dim": 16, "depth": 2}


class Wrapped(L.LightningModule):
    def __init__(self, of_timm: bool = False):
        super().__init__()
        if of_timm:
            from timm.models import VisionTransformer

            self.net = VisionTransformer(**ARGUMENTS, num_heads=2)
        else:
            self.net = vitlab.VisionTransformer(**ARGUMENTS, num_heads=2)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
