"""The random numbers of a training step, which depend on counters alone: a resumed run draws the same."""

import hashlib

import torch


def seed_step(seed: int, epoch: int, batch: int, rank: int, device: torch.device) -> None:
    """Let dropout and drop path depend on (seed, epoch, batch, rank) alone."""
    key = f"{seed}:{epoch}:{batch}:{rank}".encode()
    drawn = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())
    torch.default_generator.manual_seed(drawn)  # torch.manual_seed keeps a call and its stack for every absent GPU
    if device.type == "cuda":
        torch.cuda.manual_seed(drawn)
