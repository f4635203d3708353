"""Methods whose faults and scores are known, and a protocol of seconds."""

import copy
import json
import random
import shutil

import numpy as np
import torch

from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.position_bench.cells import Bench
from vitlab.position_bench.protocol import registered_protocol

HERE = __name__


class Alias(PosEmbed):
    """No position embedding, under another name."""


class Nan(PosEmbed):
    def forward(self, x):
        return x * float("nan")


class NanInTests(PosEmbed):
    def forward(self, x):
        return x if self.training else x * float("nan")


class NanElsewhere(PosEmbed):
    def forward(self, x):
        return x if self.grid_size == (8, 8) else x * float("nan")


class Longer(PosEmbed):
    def forward(self, x):
        return torch.cat([x, x[:, :1]], dim=1)


class Late(PosEmbed):
    def __init__(self, grid_size):
        super().__init__(grid_size)
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.nn.Parameter(torch.zeros_like(x[:1]))
        return x + self.table


class OneImageElsewhere(PosEmbed):
    def forward(self, x):
        return x if self.grid_size[0] == self.grid_size[1] == 8 else x[:1]


class NoBackward(PosEmbed):
    def forward(self, x):
        return x + Unturned.apply(x)


class Unturned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("my backward\nis broken")


class Square(PosEmbed):
    def forward(self, x):
        if self.grid_size[0] != self.grid_size[1]:
            raise ValueError("needs a square grid")
        return x


class Scaled(PosEmbed):
    def __init__(self, grid_size, embed_dim, by=1):
        super().__init__(grid_size)


class Jitter(PosEmbed):
    def __init__(self, grid_size, embed_dim):
        super().__init__(grid_size)
        self.by = random.random()

    def forward(self, x):
        return x * (1 + self.by * np.random.rand())


class Stacked(AddedPosEmbed):
    def __init__(self, grid_size, embed_dim):
        super().__init__(grid_size)
        self.shape = (1, grid_size[0] * grid_size[1], embed_dim)  # as timm stores it

    def table(self, layer=0):
        return torch.zeros(self.shape)


class Wrong:
    pass


def tiny():
    protocol = copy.deepcopy(registered_protocol())
    protocol["network"] |= {"embed_dim": 8, "depth": 1, "num_heads": 2}
    protocol["recipe"] |= {"batch_size": 20, "opt": "adamw"}
    protocol["trainings"] = {
        "photos": {"images": 40, "epochs": 1},
        "few": {"images": 20, "epochs": 1},
        "glyphs": {"images": 40, "epochs": 1},
    }
    protocol |= {"validation": 20, "digests": {}, "seeds": [0, 1]}
    protocol["test"] = {
        "photos": 20, "glyphs": 20, "sizes": {"images": 10, "sizes": [[40, 40], [32, 48]]},
        "shift": {"images": 10, "pixels": [2], "fill": "reflect"},
    }  # fmt: skip
    protocol["tuning"] = {"seed": 100, "rates": {"photos": [0.01, 0.02], "glyphs": [0.01, 0.02]}, "most": 2}
    return protocol


class Needs(PosEmbed):
    def __init__(self, grid_size, base):
        super().__init__(grid_size)


def copied(small, tmp_path):
    shutil.copytree(small.folder / "none", tmp_path / "none")
    return Bench(tmp_path, None, small.protocol, say=lambda line: None)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut_record(folder):
    path = folder / "photos-0.json"
    path.write_text(path.read_text()[:40])
