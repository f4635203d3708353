"""What this machine's CPU is fast at, measured: the two ways of attention, and half precision."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from vitlab.layers.kernels import prefers_sdpa, products, sdpa
from vitlab.layers.precision import EMULATED, half_precision

MOST_LOST = 1.5  # by the attention or precision taken, to the other one; below it a busy machine may be why


def measured_ways() -> Iterator[tuple[bool, str]]:
    """Measure both ways of attention in each precision; yield whether all is well, and a line that says it.

    Example:
        >>> next(measured_ways())[1][:54]
        'float32: speed of fused attention to products forward '
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        parts, losses = [], []
        for gradient, mode in ((False, "forward"), (True, "training")):
            speed, is_fused = speed_of_sdpa(dtype, gradient), prefers_sdpa("cpu", dtype, (1, 3, 197), gradient)
            parts.append(f"{mode} {speed:.2f} ({'fused' if is_fused else 'products'} taken)")
            losses.append(1 / speed if is_fused else speed)
        text = f"{_name(dtype)}: speed of fused attention to products {', '.join(parts)}"
        cost = None if dtype is torch.float32 else _cost_where_slower(dtype)
        if cost is not None:
            emulated = "emulated, " if dtype in EMULATED else ""
            text += f"; {emulated}products take {cost:.1f} times as long as in float32: train in 32-true"
        if max(losses) > MOST_LOST:
            text += "; the way taken is the slower one here"
        yield cost is None and max(losses) <= MOST_LOST, text


def slow_half(precision: str, device: str) -> str | None:
    """Return a line on half precision that is slower than float32 on this CPU, with its cost here; None if it is not.

    Some processors lack its products and emulate them, others have them and multiply float32 faster.

    Example:
        >>> slow_half("32-true", "cpu") is None
        True
    """
    dtype = half_precision(precision)
    if dtype is None or device != "cpu" or (cost := _cost_where_slower(dtype)) is None:
        return None
    if dtype in EMULATED:
        found = f"this CPU has no products of {_name(dtype)}, and one takes {cost:.1f} times as long as in float32"
    else:
        found = f"on this CPU a product of {_name(dtype)} takes {cost:.1f} times as long as one of float32"
    return f"precision {precision}: {found}; use --trainer.precision=32-true"


def speed_of_sdpa(dtype: torch.dtype, gradient: bool) -> float:
    """Measure how much faster than :func:`products` the fused kernel is on this CPU, for (1, 3, 197) queries.

    Example:
        >>> speed_of_sdpa(torch.float32, gradient=False) > 0
        True
    """
    x = torch.ones(1, 197, 3, 3, 64, dtype=dtype, requires_grad=gradient)  # as a layer has it

    def run(kernel: Callable[..., Tensor]) -> None:
        q, k, v = (part.transpose(1, 2) for part in x.unbind(2))
        y = kernel(q, k, v, None, 0.125)
        if gradient:
            torch.autograd.grad(y, x, torch.ones_like(y))

    slow, fast = shortest([lambda: run(products), lambda: run(sdpa)], rounds=3)
    return slow / fast


def _cost_where_slower(dtype: torch.dtype) -> float | None:
    """Return the cost of a half-precision product that this CPU emulates, or multiplies more slowly than float32."""
    cost = cost_of_half(dtype)
    return cost if dtype in EMULATED or cost > MOST_LOST else None


def cost_of_half(dtype: torch.dtype, rounds: int = 5) -> float:
    """Measure how many times longer a product of ``dtype`` takes on this CPU than one of float32.

    Example:
        >>> cost_of_half(torch.float32, rounds=1) > 0
        True
    """
    x, w = torch.ones(64, 384), torch.ones(384, 384)  # 9.4 million products, below a tenth of a second if emulated
    half = x.to(dtype), w.to(dtype)
    full, reduced = shortest([lambda: x @ w, lambda: half[0] @ half[1]], rounds)
    return reduced / full


def shortest(works: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the shortest time of each work in seconds; they take turns, and each runs once before.

    It is the time of this thread, so what else runs on the machine counts little.

    Example:
        >>> len(shortest([list, dict], rounds=2))
        2
    """
    for work in works:
        work()
    times = [float("inf")] * len(works)
    for _ in range(rounds):
        for i, work in enumerate(works):
            start = time.thread_time()
            work()
            times[i] = min(times[i], time.thread_time() - start)
    return times


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
