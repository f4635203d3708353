"""``vitlab bench linear``: float32 linear layers by oneDNN against torch's own, and where the slower one is taken."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.pairs import Work, compare, interleave
from vitlab.layers import linear

SHAPES = [  # tokens, width, new width
    (272, 64, 192),
    (4160, 192, 576),
    (1576, 384, 1152),
    (1576, 1152, 384),
    (3152, 768, 3072),
    (6272, 147, 192),
]


def measure(rounds: int, budget: float) -> list[dict[str, Any]]:
    """Return a row for each shape and mode: the speed of oneDNN's layer relative to torch's."""
    cells = [(shape, mode) for shape in SHAPES for mode in ("fwd", "train")]
    return [_cell(*cell, rounds, budget / len(cells)) for cell in cells]


def _cell(shape: tuple[int, int, int], mode: str, rounds: int, budget: float) -> dict[str, Any]:
    N, D, out = shape
    is_training = mode == "train"
    x, weight, bias = (torch.randn(*s, requires_grad=is_training) for s in ((N, D), (out, D), (out,)))

    def run(layer: Callable[..., Tensor]) -> Work:
        def work() -> None:
            y = layer(x, weight, bias)
            if is_training:
                torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))

        return work

    times = interleave({"torch": run(F.linear), "oneDNN": run(linear.onednn_linear)}, rounds, budget)
    found = compare(times, "torch")["oneDNN"]
    is_ours = linear.MKL_LEAVES_HALF and linear.prefers_onednn(x, weight, bias)
    loses = found["interval"][1] < 0.9 if is_ours else found["interval"][0] > 1 / 0.9
    rule = "oneDNN" if is_ours else "torch"
    return {"N": N, "D": D, "out": out, "mode": mode, "rule": rule, "loses": loses, **found}
