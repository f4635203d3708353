"""Random numbers that depend only on counters, so that any process can draw them in any order."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

ORDER, AUGMENT, MIX, ERASE, MASK, VIEW, REPLACE = range(7)  # a stream for each purpose
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, the step of SplitMix64 (Steele et al. 2014)

Seeds = NDArray[np.uint64]


def _scramble(x: Seeds) -> Seeds:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stream(*counters: int | NDArray[np.int64]) -> Seeds:
    """Return one 64-bit seed for each combination of counters, which are broadcast against each other."""
    state = np.zeros(1, dtype=np.uint64)
    for counter in counters:
        number = np.uint64(counter % 2**64) if isinstance(counter, int) else counter.astype(np.uint64)
        state = _scramble((state ^ number) + _GOLDEN)
    return state


def uniforms(seeds: Seeds, n: int) -> NDArray[np.float64]:
    """Map ``(B,)`` seeds to ``(B, n)`` numbers in [0, 1)."""
    steps = np.arange(1, n + 1, dtype=np.uint64) * _GOLDEN
    return np.ldexp((_scramble(seeds[:, None] + steps) >> np.uint64(11)).astype(np.float64), -53)


def generator(seed: int) -> torch.Generator:
    """Return a new torch generator for a seed."""
    return torch.Generator().manual_seed(int(seed) & (2**63 - 1))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators on the CPU, for others that draw from them; restore them, but in worker processes."""
    states = None if get_worker_info() else (random.getstate(), np.random.get_state(), torch.get_rng_state())
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)
    try:
        yield
    finally:
        if states is not None:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])


def shuffled_indices(seeds: Seeds, grid_size: tuple[int, int], block: int = 1) -> NDArray[np.int64]:
    """Return ``(B, N)`` token indices of an ``(h, w)`` grid in random order, tokens of a square together.

    Args:
        seeds: ``(B,)``, one for each image.
        grid_size: Rows and columns of the tokens.
        block: Side of the squares, in tokens, counted from the upper left; 1 shuffles single tokens.

    Example:
        >>> order = shuffled_indices(np.arange(3, dtype=np.uint64), (2, 4), block=2)
        >>> np.unique(np.sort(order[:, :4]) % 4 // 2 == order[:, :1] % 4 // 2)
        array([ True])
    """
    h, w = grid_size
    rows, cols = -(-h // block), -(-w // block)
    noise = uniforms(seeds, h * w + rows * cols)
    squares = noise[:, h * w :].reshape(-1, rows, cols).repeat(block, 1).repeat(block, 2)[:, :h, :w]
    return np.lexsort((noise[:, : h * w], squares.reshape(-1, h * w)))
