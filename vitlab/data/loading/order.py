"""Which samples a process takes at each step."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.data.files.splits import Indices
from vitlab.data.loading.own_ratio import Tokens
from vitlab.data.loading.streams import (
    AUGMENT,
    MASK,
    MIX,
    ORDER,
    REPLACE,
    Seeds,
    generator,
    shuffled_indices,
    stream,
    uniforms,
)

Sampling = Literal["natural", "balanced", "sqrt"]
_POWERS: dict[Sampling, float] = {"natural": 1.0, "sqrt": 0.5, "balanced": 0.0}
_KINDS = {"number": "numbers", "mixed": "of several kinds"}


def kind_text(kind: str) -> str:
    """Return what targets are that are not one class of an image, for the lines that refuse them.

    Example:
        >>> kind_text("mixed"), kind_text("multilabel")
        ('of several kinds', 'labels')
    """
    return _KINDS.get(kind, "labels")


class Step(NamedTuple):
    """The part of a batch for one process: ``(b,)`` sample indices and a seed for each sample."""

    indices: Indices
    seeds: Seeds
    mix_seed: int | None  # seed for the whole batch; None in evaluation
    epoch: int = 0
    partners: Indices | None = None  # (b,) the sample that mixup and cutmix mix with each; None in evaluation

    def shuffled(self, grid_size: tuple[int, int], block: int = 1) -> Indices:
        """Return ``(b, N)`` token indices in a random order for each sample, the same in every evaluation."""
        seeds = self.indices if self.mix_seed is None else self.seeds.astype(np.int64)
        return shuffled_indices(stream(seeds, MASK), grid_size, block)

    def hidden(self, grid_size: tuple[int, int], block: int, view: int, least: float, most: float) -> NDArray[np.bool_]:
        """Return a ``(b, N)`` mask of hidden tokens: a random share for half of the samples, none for the others."""
        seeds = self.seeds.astype(np.int64)
        draws = uniforms(stream(seeds, MASK, view, 1), 2)
        shares = np.where(draws[:, :1] < 0.5, least + (most - least) * draws[:, 1:], 0)
        order = shuffled_indices(stream(seeds, MASK, view), grid_size, block)
        return order.argsort(axis=1) < np.floor(shares * order.shape[1] + 1e-6)


class Draw:
    """Draw the samples of an epoch: each once, or each class of m samples in proportion to ``m ** power``.

    The length of an epoch does not change. Samples of one class are drawn equally often, give or take one.

    Args:
        labels: ``(N,)`` classes; natural sampling only uses N.
        sampling: natural is power 1, sqrt 1/2, balanced 0.
        kind: Kind of the targets.

    >>> indices, copies = Draw(torch.tensor([0, 0, 0, 1]), "balanced")(torch.Generator())
    >>> sorted(zip(indices.tolist(), copies.tolist()))[-2:]
    [(3, 0), (3, 1)]
    """

    def __init__(self, labels: Tensor, sampling: Sampling = "natural", kind: str = "class") -> None:
        self.n, self.power = len(labels), _POWERS[sampling]
        if sampling == "natural":
            return
        if kind != "class":
            way = "rows can have a `weight`" if kind in _KINDS else "see `model.class_weights`"
            raise ValueError(f"`data.sampling: {sampling}` draws classes, and the targets are {kind_text(kind)}: {way}")
        self.classes = [np.flatnonzero(labels.numpy() == k) for k in np.unique(labels.numpy())]

    def __call__(self, rng: torch.Generator) -> tuple[Indices, Indices]:
        """Return the samples of an epoch in order, and how often each was drawn before."""
        if self.power == 1:
            return torch.randperm(self.n, generator=rng).numpy(), np.zeros(self.n, dtype=np.int64)
        shares = np.array([len(members) ** self.power for members in self.classes])
        start = torch.rand((), generator=rng, dtype=torch.float64).item()  # so that counts are exact on average
        edges = np.floor(np.cumsum(shares / shares.sum()) * self.n + start).astype(int)
        edges[-1] = self.n
        draws = []
        for members, count in zip(self.classes, np.diff(edges, prepend=0).tolist(), strict=True):
            for copy, left in enumerate(range(count, 0, -len(members))):
                chosen = members[torch.randperm(len(members), generator=rng).numpy()[:left]]
                draws.append(np.stack([chosen, np.full_like(chosen, copy)]))
        indices, copies = np.concatenate(draws, axis=1)[:, torch.randperm(self.n, generator=rng).numpy()]
        return indices, copies


_STAND_INS = 16  # samples tried in place of an unreadable one
_MATCHES = np.array([[0, 1, 2, 3], [0, 2, 1, 3], [0, 3, 1, 2]])  # the ways to make two pairs of four


def spread_copies(samples: Indices) -> Indices:
    """Return an order of a batch in which copies of a sample lie far apart, and neighbors 2i and 2i + 1 differ.

    Copies of a sample are about equally far from each other, so that slices hold as many different samples as they can,
    and have different neighbors. A batch of different samples keeps its order. Neighbors are equal only where one
    sample fills more than half of the batch.

    Args:
        samples: ``(B,)`` sample indices.

    >>> batch = np.array([7, 7, 7, 4, 4, 4, 5, 5, 5, 9, 9, 9])
    >>> batch[spread_copies(batch)].reshape(3, 2, 2).tolist()
    [[[7, 4], [5, 9]], [[7, 5], [4, 9]], [[7, 9], [4, 5]]]
    """
    _, first, sample, counts = np.unique(samples, return_index=True, return_inverse=True, return_counts=True)
    n, kinds = len(samples), len(counts)
    if kinds == n:
        return np.arange(n)
    copy = np.empty(n, dtype=np.int64)  # how many copies of the same sample stand before it
    copy[sample.argsort(kind="stable")] = np.arange(n) - np.repeat(counts.cumsum() - counts, counts)
    appearance = first.argsort().argsort()[sample]
    order: Indices = ((copy * kinds + appearance) / (counts[sample] * kinds)).argsort(kind="stable")
    fours = order[: n // 4 * 4].reshape(-1, 4)  # a view; each copy of a sample is matched in another way
    # a process's slice that begins within a four may get a second copy of one sample; resumed runs rely on this order
    fours[:] = np.take_along_axis(fours, _MATCHES[copy[fours[:, 0]] % len(_MATCHES)], axis=1)
    pairs = order[: n // 2 * 2].reshape(-1, 2)
    for i in np.flatnonzero(samples[pairs[:, 0]] == samples[pairs[:, 1]]):  # rare: many more copies of some samples
        own, other = samples[pairs[i]]
        others = np.flatnonzero((samples[pairs] != own).all(axis=1))
        if own == other and len(others):
            nearest = others[abs(others - i).argmin()]
            pairs[[i, nearest], 1] = pairs[[nearest, i], 1]
    return order


def check_shares(batch_size: int, world: int) -> None:
    """Refuse a global batch that the processes cannot share evenly."""
    if batch_size % world:
        raise ValueError(
            f"`data.batch_size` is the global batch and must be divisible by the number of processes, "
            f"got batch_size={batch_size} and {world} processes"
        )


class TrainOrder:
    """The order of training, a function of (seed, epoch): every process takes its slice of each global batch.

    The samples of the last, incomplete batch are dropped; they differ between epochs. A global batch holds the copies
    of a sample, as in timm's ``RepeatAugSampler``, and :func:`spread_copies` divides them among processes.

    Args:
        draw: Draws the samples of an epoch; a number n draws each of n samples once.
        batch_size: Samples per step, over all processes.
        seed: Seed of the run.
        rank: Rank of this process, in 0..world-1.
        world: Number of processes.
        repeats: Copies of each sample in a global batch, each augmented differently (repeated augmentation, Hoffer et
            al. 2020, arXiv:1901.09335), one for each process if there are as many and each has a multiple of 4 samples;
            with other shares, at most one sample comes twice to a process. The length of an epoch does not change, so
            that it shows one in ``repeats`` samples.
        tokens: Numbers of tokens, if they differ: a batch has at most the tokens of ``batch_size`` largest samples,
            and an epoch has as many steps as every order fills.
        same: Whether every epoch has the batches of the first, augmented anew, as ``trainer.overfit_batches`` asks.
    """

    def __init__(
        self,
        draw: Draw | int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        repeats: int = 1,
        tokens: Tokens | None = None,
        same: bool = False,
    ) -> None:
        self.draw = Draw(torch.empty(draw)) if isinstance(draw, int) else draw
        n = self.draw.n
        check_shares(batch_size, world)
        if n < batch_size:
            raise ValueError(
                f"`data.batch_size` must not exceed the number of training images, got batch_size={batch_size} "
                f"and {n} images"
            )
        self.n, self.batch_size, self.seed, self.repeats = n, batch_size, seed, repeats
        self.rank, self.world, self.tokens, self.same = rank, world, tokens, same
        self.epoch, self.share = 0, batch_size // world
        if tokens and not len(self):
            raise ValueError(f"`data.batch_size` {batch_size} is too large: not each of {world} processes has a batch")

    def __len__(self) -> int:
        return self.tokens.steps(self.share) // self.world if self.tokens else self.n // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; Lightning calls this."""
        self.epoch = epoch

    def steps(self, start: int = 0) -> Iterator[Step]:
        """Yield this process's part of every batch from number ``start`` on."""
        epoch = self.epoch
        rng = generator(int(stream(self.seed, ORDER, 0 if self.same else epoch)[0]))
        indices, copies = self.draw(rng)
        copies = (np.repeat(copies, self.repeats) * self.repeats)[: self.n] + np.arange(self.n) % self.repeats
        indices = np.repeat(indices, self.repeats)[: self.n]
        seeds = stream(self.seed, AUGMENT, epoch, indices, copies)
        ends = self.tokens.starts(indices, self.share) if self.tokens else range(0, self.n + 1, self.share)
        for step in range(start, len(self)):
            bounds = np.array(ends[step * self.world : (step + 1) * self.world + 1])  # of each process, in this batch
            rows = bounds[0] + spread_copies(indices[bounds[0] : bounds[-1]])
            begin, end = bounds[self.rank : self.rank + 2] - bounds[0]
            mine = np.arange(begin, end)
            pairs = np.minimum(mine ^ 1, len(rows) - 1)  # the neighbor, 0 with 1, 2 with 3; an odd last one has itself
            partners = indices[rows[pairs]]
            mine = rows[mine]
            yield Step(indices[mine], seeds[mine], int(stream(self.seed, MIX, epoch, step)[0]), epoch, partners)

    def stand_ins(self, index: int, seed: int, partner: int) -> list[int]:
        """Return the samples that are tried in place of an unreadable one, the same in any process.

        They are neither the sample itself nor the one that it is mixed with, and have at most its tokens.

        Args:
            index: The unreadable sample.
            seed: Its seed.
            partner: The sample that it is mixed with.

        >>> 3 in TrainOrder(4, batch_size=4, seed=0).stand_ins(3, seed=7, partner=2)
        False
        """
        pool = np.arange(self.n)
        if self.tokens:
            pool = pool[self.tokens.counts <= self.tokens.counts[index]]
        pool = pool[(pool != index) & (pool != partner)]
        if not len(pool):
            return []
        drawn = pool[(stream(seed, REPLACE, np.arange(_STAND_INS)) % np.uint64(len(pool))).astype(np.int64)]
        return list(dict.fromkeys(drawn.tolist()))


def fixed_order(count: int) -> Indices:
    """Return the fixed random order in which analyses and pages sample ``count`` images: their first ones are the same.

    >>> sorted(fixed_order(3).tolist())
    [0, 1, 2]
    """
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).numpy()


class EvalOrder:
    """The order of evaluation: every sample once, for any number of processes.

    All processes have the same number of batches, so that none waits for another.

    Args:
        n: Number of samples.
        batch_size: Samples per step, over all processes; rounded down to a multiple of ``world``, but at least two for
            each of several processes, as single ones could not be divided evenly.
        rank: Rank of this process, in 0..world-1.
        world: Number of processes.
        tokens: Numbers of tokens, if they differ, as in :class:`TrainOrder`.
    """

    def __init__(self, n: int, batch_size: int, rank: int = 0, world: int = 1, tokens: Tokens | None = None) -> None:
        self.epoch, self.tokens = 0, tokens
        self.indices = np.arange(rank, n, world)
        share = max(batch_size // world, min(world, 2))
        if tokens:
            ends = [tokens.starts(np.arange(r, n, world), share) for r in range(world)]
            self.cuts = ends[rank][1:-1]
            while len(self.cuts) + 1 < min(max(map(len, ends)) - 1, len(self.indices)):  # as many batches as others
                widths = np.diff([0, *self.cuts, len(self.indices)])
                self.cuts = sorted([*self.cuts, int([0, *self.cuts][widths.argmax()] + widths.max() // 2)])
            return
        cuts = list(range(share, len(self.indices), share))
        most = -(-n // world)  # samples of rank 0
        if len(self.indices) and len(cuts) + 1 < -(-most // share):
            cuts.append(len(self.indices) - 1)  # one sample fewer than rank 0, yet as many batches
        self.cuts = cuts

    def __len__(self) -> int:
        return len(self.cuts) + 1 if len(self.indices) else 0

    def steps(self, start: int = 0) -> Iterator[Step]:
        """Yield this process's part of every batch from number ``start`` on."""
        for indices in np.split(self.indices, self.cuts)[start : len(self)]:
            yield Step(indices, np.zeros(len(indices), dtype=np.uint64), None)
