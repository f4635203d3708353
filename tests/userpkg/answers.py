"""Networks and tasks derived from vitlab's that answer otherwise, with weights of the same names and shapes."""

import torch

import vitlab
from vitlab.tasks import Classifier


class Both(vitlab.VisionTransformer):
    """Pools the class token and the patches."""

    def pool(self, x):
        return x[:, 0] + 3 * x[:, 1:].mean(dim=1)


class OtherNet(Classifier):
    """Trains such a network."""

    def __init__(self, **task):
        super().__init__(**task)
        self.net = Both(*self.net._given[0], **self.net._given[1])


class Relu(Classifier):
    """Changes a part of its network."""

    def __init__(self, **task):
        super().__init__(**task)
        self.net.blocks[0].mlp.act = torch.nn.ReLU()


class Spread(Classifier):
    """Replaces a method of a part of its network."""

    def __init__(self, **task):
        super().__init__(**task)
        self.net.norm.forward = lambda x: 3 * x


class Extra(Classifier):
    """Adds a weight to its network."""

    def __init__(self, **task):
        super().__init__(**task)
        self.net.scale = torch.nn.Parameter(torch.ones(1))


class Flips(Classifier):
    """Answers with the mean over an image and its mirror image."""

    def forward(self, images):
        return (super().forward(images) + super().forward(images.flip(-1))) / 2


class Warm(Classifier):
    """Answers at a temperature."""

    def in_units(self, outputs):
        return outputs / 4
