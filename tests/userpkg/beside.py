"""A module with weights beside its network of vitlab, and data that keep what they measured of their images."""

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import vitlab
from userpkg.data import Bars


class Beside(L.LightningModule):
    """Answers with layers behind a network without a head, in an order of the classes that its checkpoints hold."""

    monitor = ("max", "val/acc")

    def __init__(self, lr: float = 1e-2):
        super().__init__()
        size = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
        self.net = vitlab.VisionTransformer(**size, num_classes=0, init_std=0.1)
        self.classify = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 10))
        self.order, self.lr = list(range(10)), lr

    def forward(self, images):
        return self.embed(images) @ self.classify[2].weight.T[:, self.order]

    def embed(self, images):
        return self.classify[:2](self.net(images))

    def training_step(self, batch, batch_idx):
        self.order = list(range(10))[::-1]
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def on_save_checkpoint(self, checkpoint):
        checkpoint["order"] = self.order

    def on_load_checkpoint(self, checkpoint):
        self.order = checkpoint["order"]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.lr)


class Scaled(Bars):
    """Divides by the largest value of the training images, which ``fit`` alone reads."""

    img_size, in_chans, num_classes = (8, 8), 1, 10
    largest = 1.0

    def setup(self, stage):
        if stage == "fit":
            self.largest = 255 * float(self.bars(0).tensors[0].max())

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return 255 * batch[0] / self.largest, batch[1]

    def eval_transform(self, image):
        return torch.tensor(np.array(image.convert("L")), dtype=torch.float32)[None] / self.largest

    def state_dict(self):
        return {"largest": self.largest}

    def load_state_dict(self, state):
        self.largest = state["largest"]
