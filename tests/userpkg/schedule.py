"""A scheduler: the learning rate is divided by the number of epochs."""

from torch.optim.lr_scheduler import LRScheduler


class Harmonic(LRScheduler):
    def __init__(self, optimizer, slow: float = 1.0):
        self.slow = slow
        super().__init__(optimizer)

    def get_lr(self):
        return [lr / (1 + self.last_epoch / self.slow) for lr in self.base_lrs]
