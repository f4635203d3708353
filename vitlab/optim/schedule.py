"""Learning-rate schedules, as multipliers of each group's own rate."""

import math


def warmup_cosine(step: float, warmup: float, total: float, start: float = 0.0, final: float = 0.0) -> float:
    """Rise linearly from ``start`` to 1 over ``warmup``, then follow a half cosine to ``final`` at ``total``.

    The warm-up replaces the beginning of the cosine, it does not shift it (as in timm's ``CosineLRScheduler``). After
    ``total`` the value stays at ``final``: steps beyond it are the cool-down. Any unit of time does, the same for all.

    Example:
        >>> [round(warmup_cosine(epoch, warmup=5, total=10), 2) for epoch in range(11)]
        [0.0, 0.2, 0.4, 0.6, 0.8, 0.5, 0.35, 0.21, 0.1, 0.02, 0.0]
    """
    if step < warmup:
        return start + (1 - start) * step / warmup
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
