"""A training of a second, of one process, for the callbacks alone: no command, no configuration."""

import lightning as L
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.tasks import Classifier

NETWORK = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 8, "depth": 1, "num_heads": 2, "num_classes": 3}
IMAGES = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def task(**options):
    """Return a classifier of few weights."""
    torch.manual_seed(1)
    return Classifier(**NETWORK, **options)


def loader(images=IMAGES, batch=4):
    """Return a loader in a fixed order: three batches."""
    return DataLoader(TensorDataset(images, torch.arange(len(images)) % 3), batch_size=batch)


class Stream(IterableDataset):
    """The same images, without a length."""

    def __iter__(self):
        yield from loader().dataset


class Continued(DataLoader):
    """A loader that goes on after the batches that it has delivered, as those of vitlab do."""

    done = start = 0

    def __iter__(self):
        self.done, self.start = self.start, 0
        for batch in list(super().__iter__())[self.done :]:
            self.done += 1
            yield batch

    def state_dict(self):
        return {"done": self.done % len(self)}

    def load_state_dict(self, state):
        self.start = state["done"]


def batches(size=4):
    """Return such a loader that a resume within an epoch continues."""
    return Continued(loader().dataset, batch_size=size)


def trainer(folder, *callbacks, **options):
    """Return a trainer of two epochs whose root is ``folder``."""
    usual = {"max_epochs": 2, "log_every_n_steps": 2, "accelerator": "cpu", "logger": False}
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    quiet = {"enable_checkpointing": saves, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(**{**usual, **quiet, "default_root_dir": str(folder), "callbacks": list(callbacks), **options})


def fit(folder, *callbacks, model=None, train=None, **options):
    """Train, and return the trainer."""
    at_work = trainer(folder, *callbacks, **options)
    at_work.fit(model or task(), loader() if train is None else train, loader(batch=6))
    return at_work
