"""A plain LightningModule, which saves no hyper-parameters."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


class Net(L.LightningModule):
    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(width), nn.ReLU(), nn.Linear(width, 10))
        self.layers(torch.zeros(1, 1, 8, 8))
        self.lr = lr

    def forward(self, images):
        return self.layers(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        outputs = self(images)
        self.log("val_loss", F.cross_entropy(outputs, labels))
        self.log("val_acc", (outputs.argmax(1) == labels).float().mean())

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.log("test_acc", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
