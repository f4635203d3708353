"""``vitlab bench attention``: the fused kernel against matrix products, and where the rule picks the slower one."""

from typing import Any

import torch

from bench.model import DTYPES
from bench.pairs import Work, compare, interleave
from vitlab.layers.kernels import prefers_sdpa, products, sdpa

SHAPES = [
    (64, 3, 17, 16),
    (64, 3, 65, 64),
    (8, 6, 197, 64),
    (32, 6, 197, 64),
    (8, 1, 784, 64),
    (2, 1, 784, 64),
    (4, 1, 3136, 64),
]


def measure(rounds: int, budget: float, device: str = "cpu") -> list[dict[str, Any]]:
    """Return a row for each shape, precision and mode: the speed of the fused kernel relative to products."""
    cells = [(shape, dtype, mode) for shape in SHAPES for dtype in DTYPES for mode in ("fwd", "train")]
    return [_cell(*cell, rounds, budget / len(cells), device) for cell in cells]


def _cell(
    shape: tuple[int, int, int, int], name: str, mode: str, rounds: int, budget: float, device: str
) -> dict[str, Any]:
    dtype, (B, A, L, d) = DTYPES[name], shape
    qkv = torch.randn(B, L, 3, A, d, device=device, dtype=dtype, requires_grad=mode == "train")  # as in a layer

    def run(kernel: Any) -> Work:
        def work() -> None:
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            y = kernel(q, k, v, None, d**-0.5).transpose(1, 2).flatten(2)
            if mode == "train":
                torch.autograd.grad(y, qkv, torch.ones_like(y))

        return work

    found = compare(interleave({"products": run(products), "sdpa": run(sdpa)}, rounds, budget), "products")["sdpa"]
    choice = prefers_sdpa(device, dtype, (B, A, L), mode == "train")
    loses = found["interval"][1] < 0.9 if choice else found["interval"][0] > 1 / 0.9
    rule = "sdpa" if choice else "products"
    return {"B": B, "A": A, "L": L, "dtype": name, "mode": mode, "rule": rule, "loses": loses, **found}
