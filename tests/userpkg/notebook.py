"""What somebody types into the cells of a notebook: every part is their own; run as a script, it is ``__main__``."""

import functools

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import Metric

import vitlab
from vitlab.layers.pos_embed import PosEmbed

SCALE = 2.0


def scaled(x):
    return x * SCALE


class Trained(L.LightningModule):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MyNet(Trained):
    def __init__(self, img_size, in_chans, num_classes, width=32):
        super().__init__()
        self.save_hyperparameters()
        pixels = in_chans * img_size[0] * img_size[1]
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, num_classes))

    def forward(self, images):
        return scaled(self.net(images))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test/acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())


class Shifts(PosEmbed):
    joins = ("stem",)
    trains = True

    def __init__(self, grid_size, embed_dim, factor=1.0):
        super().__init__(grid_size)
        self.factor, self.shifts = factor, nn.Parameter(torch.zeros(grid_size[0] * grid_size[1], embed_dim))

    def forward(self, x):
        return x + self.factor * self.shifts


class Among(Metric):
    higher_is_better = True

    def __init__(self, first=1):
        super().__init__()
        self.first = first
        self.add_state("hits", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("n", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, outputs, targets):
        self.hits += (outputs.topk(self.first).indices == targets[:, None]).sum()
        self.n += len(outputs)

    def compute(self):
        return self.hits / self.n


SHORT = {"trainer.max_epochs": 1, "trainer.accelerator": "cpu", "trainer.logger": False}

if __name__ == "__main__":
    parts = {"model.pos_embed": functools.partial(Shifts, factor=2.0), "model.metrics": [Among(first=3)]}
    run = vitlab.fit("t2t", {**SHORT, "data.subset": 0.2, **parts}, name="parts", quiet=True)
    assert run.config["model"]["init_args"]["pos_embed"]["class_path"] == "__main__.Shifts"
    assert run.load()[0].pos_embed.factor == 2.0
    assert "Among" in run.validate()
    net = MyNet([8, 8], 1, 10, width=16)
    before = net.net[1].weight.clone()
    slow = {**SHORT, "trainer.max_steps": 1}
    run = vitlab.fit(None, slow, model=net, data=vitlab.Digits(subset=0.2, batch_size=32), name="own", quiet=True)
    assert run.config["model"] == {"class_path": "__main__.MyNet", "init_args": {"width": 16}}
    assert run.config["data"]["init_args"]["batch_size"] == 32
    kept = torch.load(run.path / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]["net.1.weight"]
    assert 0 < (kept - before).abs().max() < 0.1  # one step away from the object's weights
    assert torch.equal(before, net.net[1].weight)  # which are its own still
    assert "acc" in run.test()
