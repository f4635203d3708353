"""Learning-rate schedules, as factors on the rate of each group."""

import math
from typing import Literal

ScheduleName = Literal["cosine", "linear", "constant", "step", "wsd"]


def warmed_up(
    step: float,
    warmup: float,
    total: float,
    start: float = 0.0,
    final: float = 0.0,
    shape: ScheduleName = "cosine",
    epoch: float = 1.0,
    *,
    every: float = 30.0,
    gamma: float = 0.1,
    decay: float = 0.2,
) -> float:
    """Rise linearly from ``start`` to 1 over ``warmup``, then follow ``shape`` until ``total``, and stay at ``final``.

    Shapes: half a cosine to ``final`` (Loshchilov and Hutter 2017, arXiv:1608.03983); a line to it; constant 1; a
    factor ``gamma`` after every ``every`` epochs (step); 1, then a line to ``final`` over the last share ``decay``
    (wsd, Hu et al. 2024, arXiv:2404.06395). The warm-up replaces the start of the shape without shifting it, as timm's
    ``CosineLRScheduler``. Times can be in any unit; ``epoch`` is the length of an epoch in that unit.

    Example:
        >>> [round(warmed_up(epoch, warmup=5, total=10), 2) for epoch in range(11)]
        [0.0, 0.2, 0.4, 0.6, 0.8, 0.5, 0.35, 0.21, 0.1, 0.02, 0.0]
    """
    if step < warmup:
        return start + (1 - start) * step / warmup
    if step >= total:
        return final
    match shape:
        case "cosine":
            return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * step / total))
        case "linear":
            return 1 - (1 - final) * step / total
        case "step":
            return gamma ** math.floor(step / epoch / every)
        case "wsd":
            return 1 - (1 - final) * max(0.0, step / total - (1 - decay)) / decay
    return 1.0
