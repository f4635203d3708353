"""Seed each training step from counters only, so that a resumed run draws the same random numbers."""

import hashlib

import torch


def seed_step(seed: int, epoch: int, batch: int, rank: int, device: torch.device) -> None:
    """Make dropout and drop path depend only on (seed, epoch, batch, rank)."""
    key = f"{seed}:{epoch}:{batch}:{rank}".encode()
    step_seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())
    torch.default_generator.manual_seed(step_seed)  # without a GPU, torch.manual_seed queues a call at every step
    if device.type == "cuda":
        torch.cuda.manual_seed(step_seed)
