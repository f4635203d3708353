"""A metric: the share of images whose label is among the first two."""

import torch
from torchmetrics import Metric


class Second(Metric):
    higher_is_better = True

    def __init__(self, first: int = 2):
        super().__init__()
        self.first = first
        self.add_state("hits", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("n", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, outputs, targets):
        self.hits += (outputs.topk(self.first).indices == targets[:, None]).sum()
        self.n += len(outputs)

    def compute(self):
        return self.hits / self.n
