"""Mistakes that people make."""

from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader

from userpkg.data import Bars
from userpkg.net import Net


class NoStep(L.LightningModule):
    def configure_optimizers(self):
        return None


class SavesObject(Net):
    def __init__(self, width: int = 16):
        super().__init__(width)
        self.save_hyperparameters()
        self.hparams["loss"] = torch.nn.CrossEntropyLoss()


class SavesPath(Bars):
    def __init__(self, root: Path = Path("images")):
        super().__init__()
        self.save_hyperparameters()


class Counts(L.Callback):
    def state_dict(self):
        return {"seen": np.zeros(10)}


class Several(Net):
    img_size, in_chans = (8, 8), 1

    def forward(self, images):
        return self.layers(images), images


class Scores(Net):
    img_size, in_chans = (8, 8), 1

    def forward(self, images):
        return {"scores": self.layers(images), "images": images}


class TwoOutputs(torch.nn.Linear):
    img_size, in_chans = (8, 8), 1

    def forward(self, images):
        return super().forward(images.flatten(1)), images


class SeveralOfNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = TwoOutputs(64, 10)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0])[0].mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Dicts(Bars):
    def train_dataloader(self):
        samples = [{"image": image, "label": label} for image, label in self.bars(0)]
        return DataLoader(samples, batch_size=self.batch)

    val_dataloader = train_dataloader


class TwoLoaders(Bars):
    def val_dataloader(self):
        return [super().val_dataloader(), self.test_dataloader()]


class OtherTests(Bars):
    def test_dataloader(self):
        return Dicts.train_dataloader(self)
