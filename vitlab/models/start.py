"""The values that the parts of a network start from."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def own_numbers(root: int, part: str) -> Iterator[None]:
    """Draw random numbers that depend on ``root`` and the part's name alone, not on what other parts have drawn.

    So with one seed two networks share every part that both have, whatever else differs.
    """
    key = hashlib.blake2b(f"{root}:{part}".encode(), digest_size=7).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(key))
        yield


def init_token(count: int, embed_dim: int) -> Tensor:
    """Return ``(1, count, embed_dim)`` start values of prefix tokens."""
    return nn.init.trunc_normal_(torch.empty(1, count, embed_dim), std=0.02)


def init_weights(module: nn.Module, std: float) -> None:
    """Start a linear layer or convolution from a truncated normal distribution, its bias from zero."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.trunc_normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
