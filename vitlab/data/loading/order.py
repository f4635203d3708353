"""Which samples a process takes at each step."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from vitlab.data.files.splits import Indices
from vitlab.data.loading.streams import AUGMENT, MIX, ORDER, Seeds, generator, stream


class Step(NamedTuple):
    """The part of one batch that one process takes: ``(b,)`` sample indices and a seed for each of them."""

    indices: Indices
    seeds: Seeds
    mix_seed: int | None  # for what happens to the whole batch; None in evaluation


class TrainOrder:
    """The order of training, a function of (seed, epoch): every process takes its slice of each global batch.

    The samples left over at the end of an epoch, fewer than a batch, are dropped; they are others in each epoch.

    Args:
        n: Number of samples.
        batch_size: Samples per step, over all processes.
        seed: Seed of the run.
        rank: Which process this is, in 0..world-1.
        world: Number of processes.
        repeats: Copies of each sample in a row, each augmented by itself (repeated augmentation, Hoffer et al. 2020,
            arXiv:1901.09335); an epoch still has ``n`` samples.
    """

    def __init__(self, n: int, batch_size: int, seed: int, rank: int = 0, world: int = 1, repeats: int = 1) -> None:
        if batch_size % world:
            raise ValueError(
                f"`data.batch_size` is the global batch and must be divisible by the number of processes, "
                f"got batch_size={batch_size} and {world} processes"
            )
        if n < batch_size:
            raise ValueError(
                f"`data.batch_size` must not exceed the number of training images, got batch_size={batch_size} "
                f"and {n} images"
            )
        self.n, self.batch_size, self.seed, self.repeats = n, batch_size, seed, repeats
        self.rank, self.world = rank, world
        self.epoch = 0

    def __len__(self) -> int:
        return self.n // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration goes through; Lightning calls this."""
        self.epoch = epoch

    def steps(self, start: int = 0) -> Iterator[Step]:
        """Yield this process's part of every batch from number ``start`` on."""
        epoch = self.epoch
        rng = generator(int(stream(self.seed, ORDER, epoch)[0]))
        indices = torch.randperm(self.n, generator=rng).numpy()
        copies = np.arange(self.n) % self.repeats
        indices = np.repeat(indices, self.repeats)[: self.n]
        seeds = stream(self.seed, AUGMENT, epoch, indices, copies)
        share = self.batch_size // self.world
        for step in range(start, len(self)):
            mine = slice(step * self.batch_size + self.rank * share, step * self.batch_size + (self.rank + 1) * share)
            yield Step(indices[mine], seeds[mine], int(stream(self.seed, MIX, epoch, step)[0]))


class EvalOrder:
    """The order of evaluation: every sample once, whatever the number of processes.

    All processes take the same number of batches, so that none waits for another, unless they take single images.

    Args:
        n: Number of samples.
        batch_size: Samples per step, over all processes; rounded down to a multiple of ``world``.
        rank: Which process this is, in 0..world-1.
        world: Number of processes.
    """

    def __init__(self, n: int, batch_size: int, rank: int = 0, world: int = 1) -> None:
        self.epoch = 0
        self.indices = np.arange(rank, n, world)
        share = max(batch_size // world, 1)
        cuts = list(range(share, len(self.indices), share))
        most = -(-n // world)  # samples of rank 0
        if share > 1 and len(self.indices) and len(cuts) + 1 < -(-most // share):
            cuts.append(len(self.indices) - 1)  # one sample fewer than rank 0, yet as many batches
        self.cuts = cuts

    def __len__(self) -> int:
        return len(self.cuts) + 1 if len(self.indices) else 0

    def steps(self, start: int = 0) -> Iterator[Step]:
        """Yield this process's part of every batch from number ``start`` on."""
        for indices in np.split(self.indices, self.cuts)[start : len(self)]:
            yield Step(indices, np.zeros(len(indices), dtype=np.uint64), None)
