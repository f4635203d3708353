"""A plain LightningDataModule: bars, horizontal or vertical, in one of five places."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Bars(L.LightningDataModule):
    def __init__(self, n: int = 64, batch: int = 16):
        super().__init__()
        self.n, self.batch = n, batch

    def bars(self, seed):
        rng = torch.Generator().manual_seed(seed)
        labels = torch.randint(10, (self.n,), generator=rng)
        images = torch.rand(self.n, 1, 8, 8, generator=rng)
        for image, label in zip(images, labels.tolist(), strict=True):
            rows = image[0] if label < 5 else image[0].T
            rows[label % 5] += 2
        return TensorDataset(images, labels)

    def train_dataloader(self):
        return DataLoader(self.bars(0), batch_size=self.batch, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.bars(1), batch_size=self.batch)

    def test_dataloader(self):
        return DataLoader(self.bars(2), batch_size=self.batch)

    def predict_dataloader(self):
        return self.test_dataloader()
